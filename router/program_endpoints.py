"""Programs and their tools over HTTP: how a program ends, by request or as its client goes, and how long tools take."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError
from holdfast.router.backend import Backend
from holdfast.router.background import Background
from holdfast.router.entry import Entry
from holdfast.router.http import json_response
from holdfast.router.identity import named_program
from holdfast.router.lru import SHARE, Lru
from holdfast.router.programs import ProgramTable
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.protocol.programs import heartbeat_reply, latency_reply, program_ended_reply, read_heartbeat
from holdfast.router.records import Records
from holdfast.router.tool_latency import ToolLatencies

log = logging.getLogger(__name__)

MOST = 65_536  # programs that live by their clients' word, of one router; the tenant with most of them loses its oldest
HEARD_BYTES = 2**20  # of the words of one tenant
SPARE_S = 0.5  # how long after its time a missing word is looked for; it stays in Redis a little longer


@dataclass(frozen=True, slots=True)
class RunId:
    """Which run of a program: the one that began at `arrival` in its `life`, the `first` one of that or a later one."""

    life: str
    arrival: float
    first: bool = field(compare=False)


class Heartbeats:
    """Programs whose clients say every now and then that they are there; `over` ends those whose clients do not.

    `run` tells a program's present run, None where it has had no turn. A word counts for the run in which it was said,
    one that comes before the first turn for the first run: whoever takes a name again without saying anything is not
    ended by it.

    The router that heard of a program last ends it: the latest word stays in Redis a little longer than it counts, and
    goes with its program. While Redis is away nobody knows, and a program is left to its pin's time.
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
        """The client of a program is there, and says so again in `within_s` seconds."""
        run, word = await self._run(key), secrets.token_bytes(8)
        await self._records.put(_heard(key), word, within_s + 3 * SPARE_S, HEARD_BYTES)
        self._stop(key)
        timer = asyncio.get_running_loop().call_later(within_s + SPARE_S, self._silent, tenant, key, word, run)
        self._timers.put(key, timer, time.monotonic() + within_s + 2 * SPARE_S, owner=tenant)

    async def over(self, key: str) -> None:
        """The program is over, and what was heard of it counts no more, here or elsewhere."""
        self._stop(key)
        await self._records.delete(_heard(key))

    def _stop(self, key: str) -> None:
        """The program's timer runs no more."""
        timer = self._timers.get(key, time.monotonic())
        if timer is not None:
            timer.cancel()
            self._timers.remove(key)

    def _silent(self, tenant: str, key: str, word: bytes, run: RunId | None) -> None:
        if key in self._timers:
            self._timers.remove(key)
            self._background.start(self._end(tenant, key, word, run))

    async def _end(self, tenant: str, key: str, word: bytes, run: RunId | None) -> None:
        try:
            record = await self._records.get(_heard(key))
            if record is None or record.value != word:
                return  # there is a later one, or the program that it was said of is over
            now = await self._run(key)
            if now != run and not (run is None and now is not None and now.first):
                return
            await self._over(tenant, key)
            log.info("the client of program %s has gone", key)
        except HoldfastError as error:
            log.info("the client of program %s has gone, and not every replica knows: %s", key, error)


def _heard(key: str) -> str:
    return f"heard/{key}"


class ProgramEndpoints:
    """What a tenant may do with its programs besides asking them."""

    def __init__(
        self, backend: Backend, entry: Entry, programs: ProgramTable, latencies: ToolLatencies, records: Records
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._latencies = latencies
        self._heartbeats = Heartbeats(records, self._over, self._run)

    async def end(self, request: Request) -> Response:
        """A program is over: nothing is kept for it, and its name is free.

        Raises RefusedError for an unknown one, UnavailableError where a replica does not answer, or Redis, which may
        know the program: to be tried again.
        """
        async with self._entry.entered(request) as tenant:
            program_id = request.path_params["program_id"]
            key = named_program(tenant.name, program_id)
            if not await self._over(tenant.name, key):
                raise RefusedError(Refusal.NO_PROGRAM, f"The program '{program_id}' does not exist", "program_id")
            return json_response(program_ended_reply(program_id))

    async def heartbeat(self, request: Request) -> Response:
        """The program's client is there. Where it does not say so again in time, the program is over."""
        async with self._entry.entered(request) as tenant:
            program_id = request.path_params["program_id"]
            key = named_program(tenant.name, program_id)
            within_s = await self._entry.read(request, read_heartbeat)
            await self._heartbeats.heard(tenant.name, key, within_s)
            return json_response(heartbeat_reply(program_id, within_s))

    async def _over(self, tenant: str, key: str) -> bool:
        """End a program; False where it is unknown. Raises UnavailableError where a replica does not answer."""
        await self._backend.end_program(tenant, key)  # first: where it fails, the program can be ended again
        await self._heartbeats.over(key)
        return await self._programs.forget(key)

    async def _run(self, key: str) -> RunId | None:
        program = await self._programs.look(key)
        if program is None or not program.came:  # there may be a record without a turn, of work ahead
            return None
        return RunId(program.life, program.arrival, program.came <= max(program.run_turns, 1))

    async def tool_latency(self, request: Request) -> Response:
        """The caller's own tools; for operators all tenants' together as well."""
        async with self._entry.entered(request) as tenant:
            snapshot = await self._latencies.known()
            return json_response(latency_reply(tenant.name, snapshot, operates=tenant.operator))
