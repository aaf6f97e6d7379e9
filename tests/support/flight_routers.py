"""Router processes over one real Redis that are asked the same at the same time: how often it is computed.

    python tests/support/flight_routers.py --routers 4 --requests 25 --prompts 20

Each router has a backend that takes `SECONDS` for an answer and signs it, so that one answer is told from another.
Prints how many requests came, how many were computed, and how many different answers were told to each prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
from fake_backend import DONE, FakeBackend, World, chat_body, config_of
from redis_server import RedisServer
from waiting import until_async

from holdfast.replicas.requests import GenerateRequest, TextDelta
from holdfast.router.backend import ANYWHERE, Batch, RoutingHint
from holdfast.router.records import Records, RedisAddress
from holdfast.router.store import MemoryStore, RedisStore

SECONDS = 0.3
LEASE_S = 60.0  # longer than a test; who wants one to end takes it out of the store


class Signing(FakeBackend):
    """Takes its time, and signs each answer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seconds = SECONDS

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        seconds = self.seconds
        self.requests.append(request)
        yield Batch("r1", (TextDelta(f"{self.name}-{len(self.requests)}"),))
        await asyncio.sleep(seconds)
        yield Batch("r1", (DONE,))


class RouterProcess:
    """One router; `ask` lets it send itself requests, `told` waits for what became of them."""

    def __init__(self, url: str, name: str) -> None:
        command = [sys.executable, __file__, "--url", url, "--name", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, prompts: list[str], n: int = 1, seconds: float = SECONDS) -> None:
        """`n` requests for each prompt, half of them streamed, all at once."""
        self._write({"prompts": prompts, "n": n, "seconds": seconds, "held": False})

    def hold(self, prompt: str, n: int = 1) -> None:
        """`n` requests for a prompt, which take for ever; returns once they compute or wait for who does."""
        self._write({"prompts": [prompt], "n": n, "seconds": 3600.0, "held": True})
        assert self.told() == {"under way": n}

    def leave(self) -> None:
        """The clients of `hold` leave."""
        self._write({})

    def stay(self) -> None:
        """The clients of `hold` wait for their answers, which take `SECONDS` where this router is to compute now."""
        self._write({"stay": True})

    def _write(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def told(self) -> dict[str, Any]:
        """`computed`: how many; `answers`: text and `x-holdfast-cache` of each request, by prompt; `outcomes`."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


async def route(url: str, name: str) -> None:
    store = RedisStore(Records(RedisAddress(url, namespace="flights"), 5.0), MemoryStore(1000, 2**20))
    backend = Signing(name)
    world = World(backend, config=config_of(cache_lease_s=LEASE_S), store=store)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(world.app, client=("127.0.0.1", 50000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def request(prompt: str, stream: bool) -> tuple[str, str, str]:
            body = chat_body(messages=[{"role": "user", "content": prompt}], stream=stream)
            answer = await client.post("/v1/chat/completions", json=body, timeout=60.0)
            if not stream:
                text = answer.json()["choices"][0]["message"]["content"]
            else:
                chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
                text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
            return prompt, text, answer.headers["x-holdfast-cache"]

        async def under_way(n: int, before: int) -> None:
            """One of `n` requests is computed or looks for who computes; the others wait for it."""
            flights = world.cache.flights
            await until_async(lambda: len(flights) and flights.waiting == n - 1)
            await until_async(lambda: len(backend.requests) > before or n > 1)

        await store.info()
        print(json.dumps({"up": name}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            backend.seconds = order["seconds"]
            tasks = [
                asyncio.create_task(request(prompt, i % 2 == 1))
                for prompt in order["prompts"]
                for i in range(order["n"])
            ]
            if order["held"]:
                await under_way(order["n"], len(backend.requests))
                print(json.dumps({"under way": order["n"]}), flush=True)
                backend.seconds = SECONDS
                if not json.loads(await asyncio.to_thread(sys.stdin.readline)).get("stay"):
                    for task in tasks:
                        task.cancel()
            answers: dict[str, list[tuple[str, str]]] = defaultdict(list)
            for told in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(told, BaseException):
                    answers[told[0]].append(told[1:])
            await world.cache.drain()
            print(
                json.dumps({"computed": len(backend.requests), "answers": answers, "outcomes": world.outcomes()}),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name is not None:
        asyncio.run(route(options.url, options.name))
        return
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        routers = [RouterProcess(redis.url, f"r{i}") for i in range(options.routers)]
        for each in routers:
            each.told()
        prompts = [f"prompt {i}" for i in range(options.prompts)]
        for each in routers:
            each.ask(prompts, options.requests)
        told = [each.told() for each in routers]
        texts: dict[str, set[str]] = defaultdict(set)
        results: dict[str, int] = defaultdict(int)
        for each in told:
            for prompt, answers in each["answers"].items():
                for text, result in answers:
                    texts[prompt].add(text)
                    results[result] += 1
        for each in routers:
            each.kill()
        redis.kill()
    print(f"{options.routers} routers, {options.prompts} prompts, {sum(results.values())} requests")
    print(f"computed: {sum(each['computed'] for each in told)}; by what the cache said: {dict(results)}")
    print(f"different answers to a prompt, at most: {max(map(len, texts.values()))}")


if __name__ == "__main__":
    main()
