"""A small Serve application with our request router, run as a program: prints what happened as one JSON object.

One replica takes one request at a time. While it is held up more programs come than may wait, in no order; the oldest
of them are the tenant `many`'s, as is the one that holds it up, the others `one`'s. That happens twice: where tenants
do not share, and where they do (`fair`). Its argument is an empty folder, through which the processes tell each other
how far they are.
"""

import asyncio
import json
import logging
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


def main(folder: Path) -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    serve.start(proxy_location="Disabled")  # nothing listens: its usual port may be somebody's
    print(json.dumps({name: happened(name, folder / name) for name in ("programs", "fair")}), flush=True)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
