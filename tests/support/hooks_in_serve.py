"""Small Serve applications with our request router and our scaling policy, run as a program: prints one JSON object.

`programs` and `fair`: one replica takes one request at a time. While it is held up more programs come than may wait, in
no order. The oldest of them belong to the tenant `many`, and so does the one that holds the replica up; the others
belong to `one`. Tenants share the replica in `fair` only.

`scaled`: three replicas that the policy scales down to one. Each reports that it keeps one program, until the file `2`
or `1` in the folder says for how many replicas there is work.

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

SCALED = "scaled"
REPLICAS = 3
WAITING = 20
FIRST = 99.0
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
    """Where requests wait: each deployment that calls another has a router of its own."""

    def __init__(self, replica, folder: Path) -> None:
        self.replica = replica
        self.folder = folder

    async def call(self, arrival: float) -> list[float] | str:
        tenant = "one" if NEW <= arrival < FIRST else "many"
        request = GenerateRequest(f"r{arrival}", RawPrompt("x"), Sampling(), scope=tenant, program_arrival=arrival)
        with own_request():
            answer = self.replica.generate.options(session_id=f"p{arrival}").remote(request)
        try:
            return await answer
        except OverloadedError as error:
            return error.message

    async def run(self) -> dict[str, object]:
        first = asyncio.create_task(self.call(FIRST))
        await asyncio.to_thread(wait_for, self.folder / "begun")
        arrivals = [float(i) for i in range(WAITING + 1)]
        random.Random(1).shuffle(arrivals)
        calls = [asyncio.create_task(self.call(arrival)) for arrival in arrivals]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        (self.folder / "released").touch()
        answers = await asyncio.gather(first, *calls)
        refused = [arrival for arrival, answer in zip(arrivals, answers[1:], strict=True) if isinstance(answer, str)]
        served = max((answer for answer in answers if isinstance(answer, list)), key=len)
        return {"sent": arrivals, "served": served, "refused": refused}


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
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"  # for Serve's processes
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    serve.start(proxy_location="Disabled")  # nothing listens: its usual port may be somebody's
    results = {name: happened(name, folder / name) for name in ("programs", "fair")}
    print(json.dumps({**results, SCALED: scaled(folder / SCALED)}), flush=True)
    ray.shutdown()


def happened(name: str, folder: Path) -> dict[str, object]:
    folder.mkdir()
    router = RequestRouterConfig(
        request_router_class="holdfast.router.dispatch.affinity:AffinityRouter",
        request_router_kwargs={"max_waiting": WAITING, "fair": name == "fair"},
    )
    bare = {"ray_actor_options": {"num_cpus": 0}}
    replica = serve.deployment(Held).options(max_ongoing_requests=1, request_router_config=router, **bare).bind(folder)
    front = serve.run(serve.deployment(Front).options(**bare).bind(replica, folder), name=name, route_prefix=None)
    return front.run.remote().result(timeout_s=60.0)


def scaled(folder: Path) -> list[int]:
    """How many replicas run at first, and after each step of scaling down."""
    folder.mkdir()
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
    handle = serve.run(serve.deployment(Keeper).options(**options).bind(folder), name=SCALED, route_prefix=None)
    counts = []
    for count in range(REPLICAS, 0, -1):
        if count < REPLICAS:
            (folder / str(count)).touch()
        while running() != count:
            time.sleep(0.1)
        counts.append(len(set(handle.broadcast("who").results(timeout_s=30.0))))
    return counts


def running() -> int:
    application = serve.status().applications[SCALED]
    (deployment,) = application.deployments.values()
    states = {state: n for state, n in deployment.replica_states.items() if n}
    return states.get("RUNNING", 0) if states.keys() == {"RUNNING"} else 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
