"""Three replicas that Serve scales down to one by our policy, run as a program: prints how many are left each time.

Each replica reports that it keeps one program, until the file `2` or `1` in the folder says for how many replicas there
is work. The argument is an empty folder.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

REPLICAS = 3


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record_autoscaling_stats(self) -> dict[str, float]:
        wanted = next((n for n in (1, 2) if (self.folder / str(n)).exists()), REPLICAS)
        left = REPLICAS if wanted >= REPLICAS - 1 else REPLICAS - 1  # replicas that share the work before this step
        return {
            "requests": 0,
            "waiting_tokens": 0,
            "cell_pressure": 0,
            "pinned_programs": (wanted - 0.1) / left,
        }

    async def who(self) -> int:
        return os.getpid()


def main(folder: Path) -> None:
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"
    import ray
    from ray import serve

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    policy = {
        "policy_function": "holdfast.cluster.autoscaling:Demand",
        "policy_kwargs": {"ongoing_requests": 0, "waiting_tokens": 0, "cell_pressure": 0, "pinned_programs": 1},
    }
    scaling = {
        "min_replicas": 1,
        "max_replicas": REPLICAS,
        "initial_replicas": REPLICAS,
        "upscale_delay_s": 3600,
        "downscale_delay_s": 0,
        "look_back_period_s": 0.5,
        "metrics_interval_s": 0.2,
        "policy": policy,
    }
    options = {"ray_actor_options": {"num_cpus": 0}, "autoscaling_config": scaling, "graceful_shutdown_timeout_s": 1}
    serve.start(proxy_location="Disabled")  # nobody calls over HTTP, and its port may be somebody's
    handle = serve.run(serve.deployment(Keeper).options(**options).bind(folder), route_prefix=None)
    told = []
    for count in range(REPLICAS, 0, -1):
        if count < REPLICAS:
            (folder / str(count)).touch()
        while running() != count:
            time.sleep(0.1)
        told.append(len(set(handle.broadcast("who").results(timeout_s=30.0))))
    print(json.dumps(told), flush=True)
    ray.shutdown()


def running() -> int:
    from ray import serve

    (application,) = serve.status().applications.values()
    (deployment,) = application.deployments.values()
    states = {state: n for state, n in deployment.replica_states.items() if n}
    return states.get("RUNNING", 0) if states.keys() == {"RUNNING"} else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
