"""The cost of the page for a router: its CPU with one `/v1/live` request a second, less its CPU without.

    .venv/bin/holdfast serve --port 8123 &
    .venv/bin/python tools/live_cost.py http://127.0.0.1:8123 --programs 1000

Each program has had one turn that called a tool, so every answer of the replicas lists all of them as pinned. Blocks
with and without requests alternate.

Without a URL the router runs in this process, with a fake replica. All programs are in flight and pinned, and a tenth
of them end a turn each second. The cost is then that of the answers.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import httpx
from fake_backend import FakeBackend, World, begun

from holdfast.replicas.requests import Usage
from holdfast.replicas.stats import EngineStats, Occupancy, replica_status
from holdfast.router.entry import Call, Outcome
from holdfast.router.tenants import Tenant

CPU = re.compile(r"^holdfast_router_cpu_seconds_total\{[^}]*\} (\S+)$", re.MULTILINE)


async def run_first_turns(client: httpx.AsyncClient, programs: int) -> None:
    """Run one turn of each program, which calls a tool."""
    tool = {"name": "wait", "parameters": {"type": "object", "properties": {}}}
    at_once = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        body = {
            "model": "pocket",
            "program_id": f"cost-{time.time_ns()}-{number}",
            "messages": [{"role": "user", "content": f"Wait for {number}."}],
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
            "max_tokens": 32,
        }
        async with at_once:
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()

    await asyncio.gather(*(one(number) for number in range(programs)))


async def cpu(client: httpx.AsyncClient) -> float:
    """Seconds of CPU that all routers have used."""
    return sum(float(value) for value in CPU.findall((await client.get("/metrics")).text))


async def block(client: httpx.AsyncClient, seconds: int, poll: bool) -> tuple[float, int, int]:
    """The routers' CPU seconds a second, the bytes of an answer, and its number of pins."""
    before, start, since, size, pins = await cpu(client), time.monotonic(), "", 0, 0
    for second in range(seconds):
        if poll:
            answer = await client.get("/v1/live", params={"since": since})
            status = answer.raise_for_status().json()
            since, size = f"{status['router']}:{status['number']}", len(answer.content)
            pins = sum(len(each["pins"]) for each in status["replicas"])
        await asyncio.sleep(max(0.0, start + second + 1 - time.monotonic()))
    return (await cpu(client) - before) / (time.monotonic() - start), size, pins


async def measure_server(url: str, programs: int, blocks: int, seconds: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as client:
        await run_first_turns(client, programs)
        await block(client, 2, poll=True)
        polled, idle, size, pins = [], [], 0, 0
        for _ in range(blocks):
            share, size, pins = await block(client, seconds, poll=True)
            polled.append(share)
            idle.append((await block(client, seconds, poll=False))[0])
    differences = [100 * (with_polls - without) for with_polls, without in zip(polled, idle, strict=True)]
    print(f"{pins} pinned programs, an answer of {size} bytes a second")
    print(f"CPU of the router, % of a core: with the page {percent(polled)}, without {percent(idle)}")
    print(
        f"difference: {statistics.median(differences):.2f} (of {[round(difference, 2) for difference in differences]})"
    )


def percent(shares: Sequence[float]) -> str:
    return f"{100 * statistics.median(shares):.2f}"


class PinnedBackend(FakeBackend):
    def __init__(self, programs: int) -> None:
        super().__init__()
        now = Occupancy(3, 1, 4, 65536, 32768, 22000, 10768, pins=programs, cells_pinned=16000)
        status = replica_status("r1", "pocket", "cpu", EngineStats(), now)
        turns = [(f"request-{number:024}", "decode", 200, 150, 200, 7) for number in range(programs)]
        pins = [(f"default/agent-{number}", 217, 3.0, 20.0, 40.0) for number in range(programs)]
        self._activity = json.dumps({"replica": "r1", "status": status, "turns": turns, "pins": pins}).encode()

    async def activity(self, scope: str | None) -> list[bytes]:
        return [self._activity]


class BusyRouter:
    """A router with `programs` in flight, all pinned at its one replica."""

    def __init__(self, programs: int) -> None:
        self.world = World(PinnedBackend(programs))
        self._turns = [self._new_turn(number) for number in range(programs)]

    def _new_turn(self, number: int) -> Call:
        turn = begun(tenant=Tenant("default"), turns=self.world.turns)
        turn.id = f"request-{number:024}"
        turn.asks("pocket", stream=True, program=f"default/agent-{number}")
        turn.facts.usage, turn.facts.stages_ms = Usage(200, 150, 20), {"queue": 1.0, "prefill": 5.0, "decode": 9.0}
        return turn

    def end(self, numbers: range) -> None:
        """End the turns of these programs and begin their next ones."""
        for number in numbers:
            self._turns[number].end(Outcome.COMPLETED)
            self._turns[number] = self._new_turn(number)


async def measure_answers(programs: int, seconds: int) -> None:
    busy = BusyRouter(programs)
    transport = httpx.ASGITransport(busy.world.app, client=("127.0.0.1", 50000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        cpu_times, since, size = [], "", 0
        for second in range(seconds):
            busy.end(range(second % 10, programs, 10))
            before = time.process_time()
            answer = await client.get("/v1/live", params={"since": since})
            cpu_times.append(time.process_time() - before)
            head = json.loads(answer.content)
            since, size = f"{head['router']}:{head['number']}", len(answer.content)
            await asyncio.sleep(0.1)
    print(f"{programs} programs in flight and pinned, {programs // 10} ended turns in each answer: {size} bytes")
    print(f"an answer takes {1e3 * statistics.median(cpu_times):.2f} ms of CPU, the client in this process included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args()
    if options.url:
        asyncio.run(measure_server(options.url, options.programs, options.blocks, options.seconds))
    else:
        asyncio.run(measure_answers(options.programs, options.seconds))


if __name__ == "__main__":
    main()
