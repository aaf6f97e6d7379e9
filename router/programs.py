"""The program table: when each program began, how many turns it took and which replica served the last one.

A program's arrival is the cluster's: the first router that sees it wins, through the store. After that this process
answers from memory and writes to the store behind the requests.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import orjson

from holdfast.router.background import Background
from holdfast.router.lru import Lru
from holdfast.router.store import Store


@dataclass(frozen=True, slots=True)
class Program:
    """`arrival` is in seconds since the epoch; `last_replica` is None before the first finished turn."""

    arrival: float
    turns: int = 0
    last_replica: str | None = None


class ProgramTable:
    """Programs by key (`<tenant>/<id>`), forgotten `ttl_s` after their last turn."""

    def __init__(self, store: Store, max_entries: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: Lru[Program] = Lru(max_entries)
        self._background = Background()

    async def begin(self, key: str) -> Program:
        """The program `key`, entered with the present time as its arrival where it is new."""
        now = self._clock()
        known = self._known.get(key, now)
        if known is not None:
            return known
        stands = await self._store.set_if_absent(_store_key(key), _encode(Program(now)), self._ttl_s)
        program = self._known.get(key, now) or _decode(stands, now)
        self._known.put(key, program, now + self._ttl_s)
        return program

    def finish(self, key: str, replica_id: str) -> None:
        """Count a turn that `replica_id` served. The store learns of it in the background."""
        now = self._clock()
        program = self._known.get(key, now) or Program(now)
        program = replace(program, turns=program.turns + 1, last_replica=replica_id)
        self._known.put(key, program, now + self._ttl_s)
        self._background.start(self._store.set(_store_key(key), _encode(program), self._ttl_s))

    def note(self, key: str) -> None:
        """Enter `key` in the background where it is new: its turn needed no replica."""
        if self._known.get(key, self._clock()) is None:
            self._background.start(self._enter(key))

    async def drain(self) -> None:
        """Wait until the store has everything."""
        await self._background.drain()

    async def _enter(self, key: str) -> None:
        await self.begin(key)


def _store_key(key: str) -> str:
    return f"program/{key}"


def _encode(program: Program) -> bytes:
    return orjson.dumps([program.arrival, program.turns, program.last_replica])


def _decode(value: bytes, now: float) -> Program:
    try:
        arrival, turns, last_replica = orjson.loads(value)
        return Program(float(arrival), int(turns), last_replica)
    except (ValueError, TypeError):  # written by something else: the turn goes on as the program's first
        return Program(now)
