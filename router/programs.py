"""The program table: when each program began, how many turns it took and which replica served the last one.

A program's arrival is the cluster's: the first router that sees it wins, through the store. After that this process
answers from memory and writes to the store behind the requests.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import orjson

from holdfast.router.background import Background
from holdfast.router.lru import Lru
from holdfast.router.store import Store


@dataclass(frozen=True, slots=True)
class Program:
    """Times are in seconds since the epoch; `last_replica` is None before the first finished turn.

    Between two turns `paused` is when the last one ended, and `tools` the key of what it called. From its first turn,
    or the first one after an answer, to the next answer `began` is when that turn came, and `run_turns` how many have.
    """

    arrival: float
    turns: int = 0
    last_replica: str | None = None
    paused: float | None = None
    tools: str = ""
    began: float | None = None
    run_turns: int = 0

    @property
    def answered_turns(self) -> int:
        """Of `turns`, those up to its last answer; too few where the run had turns that no replica has served."""
        return max(self.turns - self.run_turns, 0)


@dataclass(frozen=True, slots=True)
class Run:
    """A program's way from a question to the answer that calls no tool."""

    seconds: float
    turns: int


@dataclass(frozen=True, slots=True)
class Pause:
    """The next turn of a program has come `seconds` after the one that called `tools`."""

    tools: str
    seconds: float


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

    def resume(self, key: str) -> Pause | None:
        """A turn of a known program comes in: the pause that ends with it, told once. None: there was none."""
        now = self._clock()
        program = self._known.get(key, now)
        if program is None:
            return None
        came = replace(
            program,
            paused=None,
            tools="",
            began=now if program.began is None else program.began,
            run_turns=program.run_turns + 1,
        )
        self._known.put(key, came, now + self._ttl_s)
        return None if program.paused is None else Pause(program.tools, max(now - program.paused, 0.0))

    def over(self, key: str) -> Run | None:
        """A known program has its answer: the run that ends with it, told once."""
        now = self._clock()
        program = self._known.get(key, now)
        if program is None or program.began is None:
            return None
        self._known.put(key, replace(program, began=None, run_turns=0), now + self._ttl_s)
        return Run(max(now - program.began, 0.0), program.run_turns)

    def finish(self, key: str, replica_id: str, tools: str = "") -> None:
        """Count a turn that `replica_id` served and that called `tools`. The store learns of it in the background."""
        now = self._clock()
        program = self._known.get(key, now) or Program(now)
        paused = now if tools else None
        program = replace(program, turns=program.turns + 1, last_replica=replica_id, paused=paused, tools=tools)
        self._known.put(key, program, now + self._ttl_s)
        self._background.start(self._write(key, program))

    def latest(self, limit: int) -> list[tuple[str, Program]]:
        """At most so many of the programs that this process knows, the last one that had a turn first."""
        return list(islice(self._known.latest(self._clock()), limit))

    def note(self, key: str) -> None:
        """Enter `key` in the background where it is new: its turn needed no replica."""
        if self._known.get(key, self._clock()) is None:
            self._background.start(self._enter(key))

    async def end(self, key: str) -> bool:
        """Forget a program: it is over. False where nobody knows it."""
        known = self._known.get(key, self._clock()) is not None
        self._known.remove(key)
        await self._background.settled()  # a turn that is being written would come back
        there = await self._store.get(_store_key(key)) is not None
        await self._store.delete(_store_key(key))
        return known or there

    async def drain(self) -> None:
        """Wait until the store has everything."""
        await self._background.drain()

    async def _enter(self, key: str) -> None:
        await self.begin(key)

    async def _write(self, key: str, program: Program) -> None:
        """Store what is known of a program. Its arrival never becomes later, though this process may have forgotten it
        meanwhile, or have met the program while it could not ask the store.
        """
        stands = await self._store.get(_store_key(key))
        now = self._clock()
        program = self._known.get(key, now) or program
        if stands is not None and (arrival := _decode(stands, now).arrival) < program.arrival:
            program = replace(program, arrival=arrival)
            self._known.put(key, program, now + self._ttl_s)
        await self._store.set(_store_key(key), _encode(program), self._ttl_s)


def _store_key(key: str) -> str:
    return f"program/{key}"


def _encode(program: Program) -> bytes:
    return orjson.dumps(
        [
            program.arrival,
            program.turns,
            program.last_replica,
            program.paused,
            program.tools,
            program.began,
            program.run_turns,
        ]
    )


def _decode(value: bytes, now: float) -> Program:
    try:
        arrival, turns, last_replica, paused, tools, began, run_turns = orjson.loads(value)
        return Program(
            float(arrival), int(turns), last_replica, _time(paused), str(tools), _time(began), int(run_turns)
        )
    except (ValueError, TypeError):  # written by something else: the turn goes on as the program's first
        return Program(now)


def _time(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]
