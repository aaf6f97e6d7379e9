"""Time from the draw of a call's last token to the Python client's callback, through all of `holdfast serve`.

    python tools/calls_heard.py [--calls 200]

`holdfast.loadgen.orchestrator` runs one agent at a time over loopback; each question asks for two calls. Every process
reads the machine's monotonic clock. The engine reads it when it has drawn a step's tokens. The replica reads it when it
sends the piece that completes a call. The client reads it when it has read the bytes and when its callback runs. The
differences are the shares of the replica, of router, proxy and kernel together, and of the client.
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
WARM = 20  # calls before the measured ones


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """Times of a call's end in the replica, in seconds of the monotonic clock: last token drawn, last piece sent."""

    call_id: str
    drawn: float
    sent: float


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Times of a call's end in the client: its bytes were read, its callback was called."""

    read: float
    called: float


def watch(service: Service, report: Callable[[ReplicaTimes], None]) -> None:
    """Call `report` for each call that closes in the service's streams. There is one stream at a time."""
    landed, closing, drawn = 0.0, 0.0, dict[int, float]()  # by id of the event, which lives until it is read
    engine, read, stream = service.engine, service._read, service.stream
    commit, step = engine.scheduler.commit, engine.step

    def committed(planned: Any, output: Any, now: float) -> Any:
        nonlocal landed
        landed = now
        return commit(planned, output, now)

    def stepped(*arguments: Any) -> list[Event]:
        events = step(*arguments)
        drawn.update((id(event), landed) for event in events if isinstance(event, Tokens))
        return events

    def reading(attempt: Any, event: Tokens) -> Sequence[Piece]:
        nonlocal closing
        at, pieces = drawn.pop(id(event)), read(attempt, event)
        if any(isinstance(piece, ToolCallDelta) and piece.closed for piece in pieces):
            closing = at
        return pieces

    async def streaming(*arguments: Any) -> AsyncIterator[tuple[Piece, ...]]:
        ids: dict[int, str] = {}
        async with aclosing(stream(*arguments)) as batches:
            async for pieces in batches:
                calls, now = [piece for piece in pieces if isinstance(piece, ToolCallDelta)], time.monotonic()
                ids |= {call.index: call.call_id for call in calls if call.call_id}
                closed_calls = [ReplicaTimes(ids[call.index], closing, now) for call in calls if call.closed]
                try:
                    yield pieces
                finally:  # after the yield: it delays no piece, and runs even if the reader stops
                    for times in closed_calls:
                        report(times)

    patched: Any = service
    patched.engine.scheduler.commit, patched.engine.step = committed, stepped
    patched._read, patched.stream = reading, streaming


class NotingReplica(EngineReplica):
    """A replica that writes a line for each call that closes."""

    async def __init__(self, *arguments: Any) -> None:  # type: ignore[misc]
        await super().__init__(*arguments)
        watch(self._service, lambda times: note(astuple(times)))


def read_notes(notes: Path) -> dict[str, ReplicaTimes]:
    return {each[0]: ReplicaTimes(*each) for each in map(json.loads, notes.read_text().splitlines())}


def weather() -> Toolbox:
    tools = Toolbox()

    @tools.tool
    async def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        return f"sunny in {city}"

    return tools


class ClientClock:
    """Records when the client read the bytes of each call's end and when its callback ran."""

    def __init__(self) -> None:
        self.calls: dict[str, ClientTimes] = {}
        self._read = 0.0

    def called(self, event: StreamEvent) -> None:
        now = time.monotonic()
        if isinstance(event, CallClosed):
            self.calls[event.call.call_id] = ClientTimes(self._read, now)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record the time of each read of aiohttp. There is one stream at a time."""
        received = ResponseHandler.data_received

        def data_received(handler: ResponseHandler, data: bytes) -> None:
            self._read = time.monotonic()
            received(handler, data)

        ResponseHandler.data_received = data_received  # type: ignore[method-assign]
        try:
            yield
        finally:
            ResponseHandler.data_received = received  # type: ignore[method-assign]


async def client_call_times(url: str, calls: int) -> tuple[dict[str, ClientTimes], list[Run]]:
    """Client times of at least `calls` calls, by call id and in order, and the runs that made them."""
    listening, runs, rng, city = ClientClock(), list[Run](), random.Random(0), KINDS["city"]
    fields, uncached = {"temperature": 0, "max_tokens": 200}, {"cache-control": "no-cache"}
    async with ChatClient(url, 60.0) as client:
        agent = Orchestrator(client, "pocket", weather(), fields, uncached)
        agent.register_streaming_callback(listening.called)
        with listening.reading():
            while len(listening.calls) < calls:
                runs.append(await agent.run(f"Check the weather in {city(rng)} and check the weather in {city(rng)}."))
    return listening.calls, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=200, help="number of measured calls (default: 200)")
    calls = parser.parse_args().calls
    with noting("calls_heard:NotingReplica", ENGINE) as (url, notes):
        client_times, _ = asyncio.run(client_call_times(url, WARM + calls))
        while len(replica_times := read_notes(notes)) < len(client_times):
            time.sleep(0.01)  # the replica writes a line after its batch
    pairs = [(replica_times[call_id], client) for call_id, client in client_times.items()][WARM:]
    print(f"from the draw of the token that closes a call, ms, {len(pairs)} calls, one run at a time")
    for row, times in (
        ("handed on by the replica", [replica.sent - replica.drawn for replica, _ in pairs]),
        ("read by the client", [client.read - replica.drawn for replica, client in pairs]),
        ("told to the callback", [client.called - replica.drawn for replica, client in pairs]),
        ("of that the client's own", [client.called - client.read for _, client in pairs]),
    ):
        ms = sorted(1e3 * seconds for seconds in times)
        print(f"{row:26} median {median(ms):.3f}, 99 % within {ms[int(len(ms) * 0.99)]:.3f}, least {ms[0]:.3f}")


if __name__ == "__main__":
    main()
