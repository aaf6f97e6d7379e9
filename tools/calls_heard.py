"""From the draw of the token that closes a call to the callback of the Python client, through all of `holdfast serve`.

    python tools/calls_heard.py [--calls 200]

Runs of `holdfast.loadgen.orchestrator`, one at a time over loopback, whose questions ask for two calls. All ends read
the machine's monotonic clock: the engine when it has drawn a step's tokens, the replica when it hands on the piece with
which a call is whole, the client when it has read the bytes and when its callback is called. So what the replica takes,
what router, proxy and the kernel take, and the client's own share can be told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from aiohttp.client_proto import ResponseHandler
from replicas_in_serve import note, noting

from holdfast.cluster.engine_replica import EngineReplica
from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.orchestrator import CallClosed, Orchestrator, Run, StreamEvent
from holdfast.loadgen.toolbox import Toolbox
from holdfast.loadgen.workloads.words import KINDS
from holdfast.replicas.requests import Event, Piece, Tokens, ToolCallDelta
from holdfast.replicas.service import Service

ENGINE = {"threads": 1, "kv_memory": 0.1}
WARM = 20  # calls before those that are measured


@dataclass(frozen=True, slots=True)
class Closed:
    """A call has closed, in seconds of the monotonic clock: its last token was `drawn`, its last piece `handed` on."""

    call_id: str
    drawn: float
    handed: float


@dataclass(frozen=True, slots=True)
class Heard:
    """The client has heard of a call's end: the bytes were `read`, the callback was `told`."""

    read: float
    told: float


def watch(service: Service, tell: Callable[[Closed], None]) -> None:
    """`tell` of each call that closes in the service's streams, of which there is one at a time."""
    landed, closing, drawn = 0.0, 0.0, dict[int, float]()  # by the event, which lives until it is read
    engine, read, stream = service.engine, service._read, service.stream
    commit, step = engine.scheduler.commit, engine.step

    def committed(planned: Any, output: Any, now: float) -> Any:
        nonlocal landed
        landed = now
        return commit(planned, output, now)

    def stepped(*told: Any) -> list[Event]:
        events = step(*told)
        drawn.update((id(event), landed) for event in events if isinstance(event, Tokens))
        return events

    def reading(attempt: Any, event: Tokens) -> Sequence[Piece]:
        nonlocal closing
        at, pieces = drawn.pop(id(event)), read(attempt, event)
        if any(isinstance(piece, ToolCallDelta) and piece.closed for piece in pieces):
            closing = at
        return pieces

    async def streaming(*told: Any) -> AsyncIterator[tuple[Piece, ...]]:
        ids: dict[int, str] = {}
        async with aclosing(stream(*told)) as batches:
            async for pieces in batches:
                calls, now = [piece for piece in pieces if isinstance(piece, ToolCallDelta)], time.monotonic()
                ids |= {call.index: call.call_id for call in calls if call.call_id}
                closed = [Closed(ids[call.index], closing, now) for call in calls if call.closed]
                try:
                    yield pieces
                finally:  # behind, so that it holds nothing up, and where nobody reads on
                    for each in closed:
                        tell(each)

    patched: Any = service
    patched.engine.scheduler.commit, patched.engine.step = committed, stepped
    patched._read, patched.stream = reading, streaming


class NotingReplica(EngineReplica):
    """Writes a line for each call that closes."""

    async def __init__(self, *told: Any) -> None:  # type: ignore[misc]
        await super().__init__(*told)
        watch(self._service, lambda closed: note(astuple(closed)))


def noted(notes: Path) -> dict[str, Closed]:
    return {each[0]: Closed(*each) for each in map(json.loads, notes.read_text().splitlines())}


def weather() -> Toolbox:
    tools = Toolbox()

    @tools.tool
    async def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        return f"sunny in {city}"

    return tools


class Listening:
    """When the client had read the bytes of each call's end, and when its callback was told."""

    def __init__(self) -> None:
        self.calls: dict[str, Heard] = {}
        self._read = 0.0

    def told(self, what: StreamEvent) -> None:
        now = time.monotonic()
        if isinstance(what, CallClosed):
            self.calls[what.call.call_id] = Heard(self._read, now)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Meanwhile whatever aiohttp reads is noticed: there is one stream at a time."""
        received = ResponseHandler.data_received

        def noticed(handler: ResponseHandler, data: bytes) -> None:
            self._read = time.monotonic()
            received(handler, data)

        ResponseHandler.data_received = noticed  # type: ignore[method-assign]
        try:
            yield
        finally:
            ResponseHandler.data_received = received  # type: ignore[method-assign]


async def heard(url: str, calls: int) -> tuple[dict[str, Heard], list[Run]]:
    """When the client heard of so many calls or some more, by their ids, in order; and the runs that they are of."""
    listening, runs, rng, city = Listening(), list[Run](), random.Random(0), KINDS["city"]
    fields, uncached = {"temperature": 0, "max_tokens": 200}, {"cache-control": "no-cache"}
    async with ChatClient(url, 60.0) as client:
        agent = Orchestrator(client, "pocket", weather(), fields, uncached)
        agent.register_streaming_callback(listening.told)
        with listening.reading():
            while len(listening.calls) < calls:
                runs.append(await agent.run(f"Check the weather in {city(rng)} and check the weather in {city(rng)}."))
    return listening.calls, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=200, help="(default: 200)")
    calls = parser.parse_args().calls
    with noting("calls_heard:NotingReplica", ENGINE) as (url, notes):
        told, _ = asyncio.run(heard(url, WARM + calls))
        while len(closed := noted(notes)) < len(told):
            time.sleep(0.01)  # a line is written behind its batch
    pairs = [(closed[call_id], each) for call_id, each in told.items()][WARM:]
    print(f"from the draw of the token that closes a call, ms, {len(pairs)} calls, one run at a time")
    for what, times in (
        ("handed on by the replica", [of.handed - of.drawn for of, _ in pairs]),
        ("read by the client", [each.read - of.drawn for of, each in pairs]),
        ("told to the callback", [each.told - of.drawn for of, each in pairs]),
        ("of that the client's own", [each.told - each.read for _, each in pairs]),
    ):
        ms = sorted(1e3 * each for each in times)
        print(f"{what:26} median {median(ms):.3f}, 99 % within {ms[int(len(ms) * 0.99)]:.3f}, least {ms[0]:.3f}")


if __name__ == "__main__":
    main()
