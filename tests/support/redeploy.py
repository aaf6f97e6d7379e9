"""Deploys the application again to the Serve of a running server, from a process of its own, as an operator's tool may.

    python tests/support/redeploy.py GCS_ADDRESS CONFIG PORT ENGINES REPORT_S

`ENGINES` is how many there are to be; Serve stops or starts as many. Where `REPORT_S`, the `placement.report_s`, is
another one than before it replaces every engine and router, one after the other. Returns when Serve has been told.
"""

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve

from holdfast.cluster import application, sources
from holdfast.cluster.config import Overrides
from holdfast.router.store import RedisAddress


def main(address: str, config: str, port: str, engines: str, report_s: str) -> None:
    settings = sources.load(Path(config), {}, Overrides(None, int(port), "pocket", 2, 2)).settings
    settings = replace(settings, placement=replace(settings.placement, report_s=float(report_s)))
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="serve")
    built: Any = application.build(settings, RedisAddress(settings.redis.url), 0.0)
    # The count alone: in the settings it would be another version of the routers, which have those.
    built._bound_deployment.init_args[0]._bound_deployment._deployment_config.num_replicas = int(engines)
    quiet = {"encoding": "TEXT", "log_level": "WARNING", "enable_access_log": False}
    target = serve.RunTarget(built, name=application.APPLICATION, logging_config=quiet)
    serve.run_many([target], wait_for_applications_running=False)
    sys.stdout.flush()
    os._exit(0)  # `ray.shutdown` would take its time


if __name__ == "__main__":
    main(*sys.argv[1:])
