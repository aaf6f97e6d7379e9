"""A small Serve application with our request router and our scaling policy, run as a program: prints one JSON object.

One application has all deployments, so that their processes start at the same time.

`programs` and `fair`: the only replica of each takes one request at a time. While it is held up more programs come than
may wait, in no order. The oldest of them belong to the tenant `many`, and so does the one that holds the replica up;
the others belong to `one`. Tenants share the replica in `fair` only.

`scaled`: three replicas that the policy scales down to two. Each reports that it keeps one program, until the file
`less` in the folder says that there is work for two replicas.

The argument is an empty folder, through which the processes tell each other how far they are.
"""

import asyncio
import json
import logging
import os
import random
import sys
import time
from pathlib import Path

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.router.dispatch.serve_private import own_request

APPLICATION = "hooks"
ORDERS = ("programs", "fair")
SCALED = "scaled"
REPLICAS = 3
WAITING = 20
FIRST = 99.0
BARE = {"ray_actor_options": {"num_cpus": 0}}
NEW = 18  # arrivals from here on are of `one`


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


class Held:
    """The first request ends when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served: list[float] = []

    async def generate(self, request: GenerateRequest) -> list[float]:
        if request.program_arrival == FIRST:
            (self.folder / "begun").touch()
            await asyncio.to_thread(wait_for, self.folder / "released")
        self.served.append(request.program_arrival)
        return self.served


class Front:
    """Where requests wait: a deployment that calls others has a router for each of them.

    It never calls `keeper`, which is here because Serve deploys what an application's first deployment is bound to.
    """

    def __init__(self, replicas, keeper, folder: Path) -> None:
        self.replicas = replicas
        self.folder = folder

    async def call(self, name: str, arrival: float) -> list[float] | str:
        tenant = "one" if NEW <= arrival < FIRST else "many"
        request = GenerateRequest(f"r{arrival}", RawPrompt("x"), Sampling(), scope=tenant, program_arrival=arrival)
        with own_request():
            answer = self.replicas[name].generate.options(session_id=f"p{arrival}").remote(request)
        try:
            return await answer
        except OverloadedError as error:
            return error.message

    async def run(self, name: str) -> dict[str, object]:
        first = asyncio.create_task(self.call(name, FIRST))
        await asyncio.to_thread(wait_for, self.folder / name / "begun")
        arrivals = [float(i) for i in range(WAITING + 1)]
        random.Random(1).shuffle(arrivals)
        calls = [asyncio.create_task(self.call(name, arrival)) for arrival in arrivals]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        (self.folder / name / "released").touch()
        answers = await asyncio.gather(first, *calls)
        refused = [arrival for arrival, answer in zip(arrivals, answers[1:], strict=True) if isinstance(answer, str)]
        served = max((answer for answer in answers if isinstance(answer, list)), key=len)
        return {"sent": arrivals, "served": served, "refused": refused}


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record_autoscaling_stats(self) -> dict[str, float]:
        wanted = REPLICAS - 1 if (self.folder / "less").exists() else REPLICAS
        told = {"requests": 0, "waiting_tokens": 0, "cell_pressure": 0}
        return {**told, "pinned_programs": (wanted - 0.1) / REPLICAS}

    async def who(self) -> int:
        return os.getpid()


def main(folder: Path) -> None:
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"  # for Serve's processes
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray starts as many processes at a time as it counts CPUs. The actors ask for none.
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    serve.start(proxy_location="Disabled")  # nothing listens: its usual port may be somebody's
    for name in (*ORDERS, SCALED):
        (folder / name).mkdir()
    bound = {name: held(name, folder / name) for name in ORDERS}
    front = serve.deployment(Front).options(**BARE).bind(bound, keeper(folder / SCALED), folder)
    handle = serve.run(front, name=APPLICATION, route_prefix=None)
    results = {name: handle.run.remote(name).result(timeout_s=60.0) for name in ORDERS}
    print(json.dumps({**results, SCALED: scaled(folder / SCALED)}), flush=True)
    ray.shutdown()


def held(name: str, folder: Path) -> serve.Application:
    router = RequestRouterConfig(
        request_router_class="holdfast.router.dispatch.affinity:AffinityRouter",
        request_router_kwargs={"max_waiting": WAITING, "fair": name == "fair"},
    )
    options = {"name": name, "max_ongoing_requests": 1, "request_router_config": router, **BARE}
    return serve.deployment(Held).options(**options).bind(folder)


def keeper(folder: Path) -> serve.Application:
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
    options = {"name": SCALED, "autoscaling_config": scaling, "graceful_shutdown_timeout_s": 1, **BARE}
    return serve.deployment(Keeper).options(**options).bind(folder)


def scaled(folder: Path) -> list[int]:
    """How many replicas run at first, and once there is less work."""
    handle = serve.get_deployment_handle(SCALED, APPLICATION)
    counts = []
    for count in (REPLICAS, REPLICAS - 1):
        while running() != count:
            time.sleep(0.1)
        counts.append(len(set(handle.broadcast("who").results(timeout_s=30.0))))
        (folder / "less").touch()
    return counts


def running() -> int:
    deployment = serve.status().applications[APPLICATION].deployments[SCALED]
    states = {state: n for state, n in deployment.replica_states.items() if n}
    return states.get("RUNNING", 0) if states.keys() == {"RUNNING"} else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
