"""Serves a rendered serveConfigV2 on this machine as the operator would: `serve_rendered.py FILE RESOURCES`.

RESOURCES is what a worker pod has, as JSON. Prints `serving` when every application runs, and ends with its standard
input. The environment is the caller's.
"""

import json
import sys
import time
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema


def main(file: str, resources: str) -> None:
    schema = ServeDeploySchema(**yaml.safe_load(Path(file).read_text()))
    cpus = json.loads(resources).pop("CPU", 2)
    own = {name: amount for name, amount in json.loads(resources).items() if name != "CPU"}
    ray.init(
        address="local",
        num_cpus=cpus,
        resources=own,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(Path(file).parent / "ray"),
    )
    client = serve_start(http_options=schema.http_options.model_dump(), global_logging_config=schema.logging_config)
    client.deploy_apps(schema, _blocking=False)
    while any(app.status.value not in ("RUNNING", "DEPLOY_FAILED") for app in serve.status().applications.values()):
        time.sleep(0.1)
    for name, app in serve.status().applications.items():
        print(f"{name}: {app.status.value} {app.message}", flush=True)
    print("serving", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
