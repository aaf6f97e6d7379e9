"""Deploy the application again to the Serve of a running server, from a process of its own.

    python tools/redeploy.py GCS_ADDRESS CONFIG PORT ENGINES USAGE_DAYS

`ENGINES` is the new number of engines. `USAGE_DAYS` is `router.usage_days`: if it changes, Serve replaces every engine
and router, one after the other. The program returns when Serve has the new target.
"""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve

from holdfast.cluster import application, config_file
from holdfast.router.records import RedisAddress


def main(address: str, config: str, port: str, engines: str, usage_days: str) -> None:
    flags = {"server.port": int(port), "engine.model": "pocket", "replicas.count": 2, "server.routers": 2}
    settings = config_file.load(Path(config), {}, flags).settings
    settings = replace(settings, router=replace(settings.router, usage_days=int(usage_days)))
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="serve")
    routers: Any = application.build(settings, RedisAddress(settings.redis.url), 0.0)._bound_deployment
    replicas = routers.init_args[0]._bound_deployment
    # Change the count here alone: in the settings it would make a new version of the routers.
    replicas._deployment_config.num_replicas = int(engines)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR")
    before = {
        deployment.name: info
        for deployment, (info, _) in ray.get(controller.list_deployments_internal.remote()).items()
    }
    if before[replicas.name].replica_config.init_args[2] == settings.router:
        for deployment in (routers, replicas):  # Trap: a deployment without a version counts as a new one each time
            deployment._version = before[deployment.name].version
    quiet = {"encoding": "TEXT", "log_level": "WARNING", "enable_access_log": False}
    app = serve.Application(routers)
    target = serve.RunTarget(app, name=application.APPLICATION, logging_config=quiet)
    serve.run_many([target], wait_for_applications_running=False)
    os._exit(0)  # `ray.shutdown` is slow


if __name__ == "__main__":
    main(*sys.argv[1:])
