"""Programs over HTTP: ending one, heartbeats that end it when its client is gone, and the latencies of its tools."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError
from holdfast.replicas.retention.latency import LatencySnapshot, ToolLatency, pooled
from holdfast.router.backend import Backend
from holdfast.router.background import Background
from holdfast.router.entry import Entry, json_response
from holdfast.router.protocol.body import Body, deleted_reply, read
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.records import SHARE, Lru, ProgramTable, Records, ToolLatencies, named_program

log = logging.getLogger(__name__)

MOST = 65_536  # programs with heartbeats in one router; the tenant with the most of them loses its oldest
HEARD_BYTES = 2**20  # of one tenant's heartbeats in Redis
QUANTILES = (50, 90, 99)  # of the latencies of tools
SPARE_S = 0.5  # how late a heartbeat may be; its record lives a little longer


class HeartbeatBody(Body):
    """`within_s`: the client promises another heartbeat within so many seconds."""

    within_s: Annotated[float, Field(gt=0, le=3600)]


@dataclass(frozen=True, slots=True)
class RunId:
    """One run of a program: it began at `arrival` in the program's `life`, as its `first` run or a later one."""

    life: str
    arrival: float
    first: bool = field(compare=False)


class Heartbeats:
    """Ends programs whose clients promised a heartbeat and did not send it. `over` ends a program.

    `run` gives a program's present run, None before its first turn. A heartbeat counts for the run in which it was
    sent; one before the first turn counts for the first run. A later run of the same name without heartbeats goes on.

    The router that got the last heartbeat ends the program: Redis has the token of the last heartbeat. While Redis is
    away, no program is ended; its pin expires.
    """

    def __init__(
        self,
        records: Records,
        over: Callable[[str, str], Awaitable[object]],
        run: Callable[[str], Awaitable[RunId | None]],
    ) -> None:
        self._records = records
        self._over = over
        self._run = run
        self._timers: Lru[asyncio.TimerHandle] = Lru(MOST, share=SHARE)
        self._background = Background()

    async def heard(self, tenant: str, key: str, within_s: float) -> None:
        """A heartbeat of a program; the client promises the next one within `within_s` seconds."""
        run, token = await self._run(key), secrets.token_bytes(8)
        await self._records.put(_heartbeat_key(key), token, within_s + 3 * SPARE_S, HEARD_BYTES)
        self._stop(key)
        timer = asyncio.get_running_loop().call_later(within_s + SPARE_S, self._missed, tenant, key, token, run)
        self._timers.put(key, timer, time.monotonic() + within_s + 2 * SPARE_S, owner=tenant)

    async def over(self, key: str) -> None:
        """The program has ended: its heartbeats no longer count, in any router."""
        self._stop(key)
        await self._records.delete(_heartbeat_key(key))

    def _stop(self, key: str) -> None:
        timer = self._timers.get(key, time.monotonic())
        if timer is not None:
            timer.cancel()
            self._timers.remove(key)

    def _missed(self, tenant: str, key: str, token: bytes, run: RunId | None) -> None:
        if key in self._timers:
            self._timers.remove(key)
            self._background.start(self._end(tenant, key, token, run))

    async def _end(self, tenant: str, key: str, token: bytes, run: RunId | None) -> None:
        try:
            record = await self._records.get(_heartbeat_key(key))
            if record is None or record.value != token:
                return  # another router has a later heartbeat, or the program has ended
            now = await self._run(key)
            if now != run and not (run is None and now is not None and now.first):
                return
            await self._over(tenant, key)
            log.info("program %s ended: its client sent no heartbeat", key)
        except HoldfastError as error:
            log.info("program %s should end without heartbeats, and could not: %s", key, error)


def _heartbeat_key(key: str) -> str:
    return f"heard/{key}"


class ProgramEndpoints:
    """The calls of a tenant about its programs and tools."""

    def __init__(
        self, backend: Backend, entry: Entry, programs: ProgramTable, latencies: ToolLatencies, records: Records
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._latencies = latencies
        self._heartbeats = Heartbeats(records, self._over, self._run)

    async def end(self, request: Request) -> Response:
        """End a program: its state is dropped and its name is free.

        Raises RefusedError for an unknown program, UnavailableError when a replica or Redis does not answer.
        """
        async with self._entry.entered(request) as tenant:
            program_id = request.path_params["program_id"]
            key = named_program(tenant.name, program_id)
            if not await self._over(tenant.name, key):
                raise RefusedError(Refusal.NO_PROGRAM, f"The program '{program_id}' does not exist", "program_id")
            return json_response(deleted_reply("program.deleted", program_id))

    async def heartbeat(self, request: Request) -> Response:
        """The program's client is alive. The program ends when the next heartbeat does not arrive in time."""
        async with self._entry.entered(request) as tenant:
            program_id = request.path_params["program_id"]
            key = named_program(tenant.name, program_id)
            within_s = (await self._entry.read(request, partial(read, HeartbeatBody))).within_s
            await self._heartbeats.heard(tenant.name, key, within_s)
            reply = {"id": program_id, "object": "program.heartbeat", "within_s": within_s}
            return json_response(orjson.dumps(reply))

    async def _over(self, tenant: str, key: str) -> bool:
        """End a program; False for an unknown one. Raises UnavailableError when a replica does not answer."""
        await self._backend.end_program(tenant, key)  # first: if it fails, the program can be ended again
        await self._heartbeats.over(key)
        return await self._programs.forget(key)

    async def _run(self, key: str) -> RunId | None:
        program = await self._programs.look(key)
        if program is None or not program.came:  # a prefill makes a record without a turn
            return None
        return RunId(program.life, program.arrival, program.came <= max(program.run_turns, 1))

    async def tool_latency(self, request: Request) -> Response:
        """The latencies of the caller's tools; for operators also those of all tenants together."""
        async with self._entry.entered(request) as tenant:
            snapshot = await self._latencies.known()
            return json_response(latency_reply(tenant.name, snapshot, operates=tenant.operator))


def latency_reply(tenant: str, snapshot: LatencySnapshot, *, operates: bool) -> bytes:
    """The latencies of the tenant's tools, the most called first, and `overall`: of all of them together.

    For an operator (`operates`), `overall` has the tools of all tenants. Times are in seconds. Quantiles are of the
    latest intervals, the other figures of all.
    """
    own = [(tools, latency) for (owner, tools), latency in snapshot.tools.items() if owner == tenant]
    own.sort(key=lambda item: (-item[1].count, item[0]))
    data = [{"tools": tools.split(","), **_figures(latency)} for tools, latency in own]
    overall = snapshot.overall if operates else pooled(latency for _, latency in own)
    return orjson.dumps({"object": "list", "data": data, "overall": _figures(overall)})


def _figures(latency: ToolLatency) -> dict[str, Any]:
    recent = latency.recent
    quantiles = {
        f"p{share}_s": recent[max(math.ceil(len(recent) * share / 100) - 1, 0)] if recent else None
        for share in QUANTILES
    }
    return {"count": latency.count, "mean_s": latency.mean, "std_s": math.sqrt(latency.variance), **quantiles}
