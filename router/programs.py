"""The program table: one record of each program for the whole cluster, in Redis, with a version.

    begin    a turn comes: its program's record is made or read, its pause ends, and a new run gets its arrival
    end      a turn is served: it counts, says where it was, and its tools begin a pause or its answer ends the run
    forget   a program is over: its record stays as a grave, so that a late end of a turn does not bring it back

Each is one script in Redis, so whichever router a turn comes to, it finds what the others wrote. Times are those of
Redis' clock, less how long ago a thing happened, so the machines' clocks need not agree.

A tenant has at most so many records: who invents names without end loses its own oldest ones, and nobody else's.

A router's own memory is a cache of the records it has seen, kept by version. While Redis is away it is the table:
`_begun` and `_ended` below do what the scripts do. What happened meanwhile is told to Redis, in order, once it is back:
it counts, and changes nothing of what other routers told of later turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import orjson

from holdfast.router.lru import SHARE, Lru
from holdfast.router.records import Records

log = logging.getLogger(__name__)

UNTOLD = 4096  # programs with something that Redis does not know yet; who has most of them loses its oldest
STEPS = 256  # of each of them, the latest


@dataclass(frozen=True, slots=True)
class Program:
    """One record. Times are in seconds since the epoch.

    A run goes from a question to the answer that calls no tool. Seniority is the run's: `arrival` is when its first
    turn came, `run_turns` how many have come in it (0: it is over). Of `turns`, which replicas have served,
    `answered_turns` are those up to the last answer. Between two turns `paused` is when the last one ended and `tools`
    the key of what it called. `seen` is when a turn came or ended last, `came` counts all that came, and `head` names
    the conversation of the latest. A program that is forgotten and begins again has another `life`.
    """

    life: str
    arrival: float
    seen: float
    version: int = 0
    turns: int = 0
    answered_turns: int = 0
    came: int = 0
    run_turns: int = 0
    last_replica: str | None = None
    paused: float | None = None
    tools: str = ""
    head: str = ""
    gone: bool = False
    told: str = ""  # the id of what was done to it last
    root: str = ""  # the name of the program that it is a sub-agent of, at the top; "": it is none


@dataclass(frozen=True, slots=True)
class Run:
    """A program's way from a question to the answer that calls no tool."""

    seconds: float
    turns: int


@dataclass(frozen=True, slots=True)
class ToolGap:
    """The next turn of a program has come `seconds` after the one that called `tools`."""

    tools: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that has come: its program as it stands with it, and the pause that it ended, told to one turn only.

    Not `shared`: Redis did not say so, and may know the program otherwise.
    """

    key: str
    program: Program
    pause: ToolGap | None = None
    shared: bool = True

    @property
    def root(self) -> str:
        """The key of the program that it counts for among those of its tenant: its own, but for a sub-agent."""
        return f"{_tenant(self.key)}/{self.program.root}" if self.program.root else self.key


_FIELDS = tuple(each.name for each in fields(Program))

# A record is a hash of texts, "" where there is none; it comes and goes as a row of JSON. `known` is what the caller
# has, for a server that lost it all. KEYS[1] names all records of a tenant, each by when something happened to it;
# those of the longest ago go where there are more than `most`. They are in one slot of a Redis cluster.
_RECORD = (
    "local FIELDS = {"
    + ", ".join(f"'{name}'" for name in _FIELDS)
    + """}
local all, ttl, ago, id, known, most = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local time = redis.call('TIME')
local clock = tonumber(time[1]) + tonumber(time[2]) / 1e6
local now = clock - ago

local function read(key, known)
  local found = redis.call('HMGET', key, unpack(FIELDS))
  if not found[1] then
    if known == '' then return nil end
    found = cjson.decode(known)
  end
  local record = {}
  for i, name in ipairs(FIELDS) do record[name] = found[i] or '' end
  return record
end

-- By this programs are served. Where the clock was set back the next one is not before those that have come.
local function arrival()
  local last = (tonumber(redis.call('ZREVRANGE', all, 0, 0, 'WITHSCORES')[2]) or 0) / 1e6
  return string.format('%.6f', last > clock and last or now)
end

local function made(life)
  return {life = life, arrival = arrival(), version = string.format('%.0f', now * 1e6)}
end

local function count(record, name, by)
  record[name] = string.format('%.0f', (tonumber(record[name]) or 0) + by)
end

local function row(record)
  local found = {}
  for i, name in ipairs(FIELDS) do found[i] = record[name] or '' end
  return found
end

local before = ''
if known ~= '' then
  for i, name in ipairs(FIELDS) do if name == 'told' then before = cjson.decode(known)[i] end end
end

-- Whether something happened to the record after what is told now: that comes late, counts, and changes nothing else.
-- Clocks are asked only where somebody else has told something since what the caller knows.
local function later(record)
  return record and record.told ~= before and (tonumber(record.seen) or 0) > now
end

local function done(record)
  return record and (record.told == id or record.told == 'late ' .. id)
end

local function write(key, record)
  local latest = math.max(now, tonumber(record.seen) or 0)
  record.told = later(record) and 'late ' .. id or id
  record.seen = string.format('%.6f', latest)
  count(record, 'version', 1)
  local fields = {}
  for i, value in ipairs(row(record)) do
    fields[2 * i - 1], fields[2 * i] = FIELDS[i], value
  end
  redis.call('HSET', key, unpack(fields))
  redis.call('PEXPIRE', key, ttl)
  redis.call('ZADD', all, string.format('%.0f', latest * 1e6), string.sub(key, #all + 2))
  redis.call('ZREMRANGEBYSCORE', all, '-inf', string.format('%.0f', now * 1e6 - ttl * 1e3))
  local over = redis.call('ZCARD', all) - most
  if over > 0 then
    local gone = redis.call('ZPOPMIN', all, over)
    for i = 1, #gone, 2 do redis.call('DEL', all .. '/' .. gone[i]) end
  end
  redis.call('PEXPIRE', all, ttl)
end
"""
)

# A turn comes for a record, or for none: the record with it and the pause that it ends, in JSON.
BEGIN = (
    _RECORD
    + """
local rest, life, head, parent = tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]

local function rooted(record, key)
  local above = all .. '/' .. parent
  if parent == '' or above == key then return end
  local root = redis.call('HGET', above, 'root')
  record.root = root and root ~= '' and root or parent
end

local function begin(key, record)
  if done(record) then return cjson.encode(row(record)), '' end
  if later(record) and (ARGV[10] or '') == '' then
    if record.gone ~= '1' then
      count(record, 'came', 1)
      if (tonumber(record.run_turns) or 0) > 0 then count(record, 'run_turns', 1) end
      write(key, record)
    end
    return cjson.encode(row(record)), ''
  end
  local pause = ''
  if not record or record.gone == '1' then
    local version = record and record.version
    record = made(life)
    if version then record.version = version end
    rooted(record, key)
  else
    local rested = now - tonumber(record.seen) > rest
    if rested then record.answered_turns, record.run_turns = record.turns, '0' end
    if (tonumber(record.run_turns) or 0) == 0 then record.arrival = arrival() end
    if not rested and record.paused ~= '' then
      pause = {record.tools, string.format('%.6f', math.max(now - tonumber(record.paused), 0))}
    end
  end
  count(record, 'came', 1)
  count(record, 'run_turns', 1)
  record.paused, record.tools, record.head = '', '', head
  write(key, record)
  return cjson.encode(row(record)), pause
end
"""
)

_BEGIN = (
    BEGIN
    + """
local continues, record = ARGV[10], read(KEYS[2], known)
if continues ~= '' and (not record or record.gone == '1' or record.head ~= continues) then return {} end
return {begin(KEYS[2], record)}
"""
)

_END = (
    _RECORD
    + """
local life, came, replica, tools, over = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10] == '1'
if KEYS[3] and redis.call('HEXISTS', KEYS[3], ARGV[11]) == 1 then redis.call('HSET', KEYS[3], ARGV[11], ARGV[12]) end
local record = read(KEYS[2], known)
if not record or record.gone == '1' or (life ~= '' and record.life ~= life) or done(record) then return {} end
if replica ~= '' then count(record, 'turns', 1) end
local latest = came == '' and not later(record) or came ~= '' and (tonumber(record.came) or 0) <= tonumber(came)
if latest then
  if replica ~= '' then record.last_replica = replica end
  if tools ~= '' then record.paused, record.tools = string.format('%.6f', now), tools end
end
local run = ''
if over and (latest or came ~= '') and (tonumber(record.run_turns) or 0) > 0 then
  run = {string.format('%.6f', math.max(now - tonumber(record.arrival), 0)), record.run_turns}
  record.run_turns, record.answered_turns = '0', record.turns
end
write(KEYS[2], record)
return {cjson.encode(row(record)), run}
"""
)

_FORGET = (
    _RECORD
    + """
local record = read(KEYS[2], known)
if not record or record.gone == '1' then return {} end
local version = record.version
record = made('')
record.version, record.gone = version, '1'
write(KEYS[2], record)
return {cjson.encode(row(record))}
"""
)


# Work ahead of a program's next turn was done at a replica: that is where the turn is best served. It is no turn.
_PLACED = (
    _RECORD
    + """
local replica, life = ARGV[6], ARGV[7]
local record = read(KEYS[2], known)
if done(record) or record and record.gone == '1' and later(record) then return {cjson.encode(row(record))} end
if not record or record.gone == '1' then
  local version = record and record.version
  record = made(life)
  if version then record.version = version end
end
if not later(record) then record.last_replica = replica end
write(KEYS[2], record)
return {cjson.encode(row(record))}
"""
)

_LOOK = (
    "local found = redis.call('HMGET', KEYS[2], "
    + ", ".join(f"'{name}'" for name in _FIELDS)
    + """)
if not found[1] then return {} end
for i = 1, #found do found[i] = found[i] or '' end
return {cjson.encode(found)}
"""
)


@dataclass(frozen=True, slots=True)
class Stand:
    """What is kept of a program at a place of its conversation: `value`, if anything of it is there still."""

    place: str  # a key
    program: str
    value: bytes


@dataclass(frozen=True, slots=True)
class _Step:
    """Something that happened to a program, as a script is told of it: now, or once Redis is back.

    `known` is the record before it. A step that is told twice, because its answer was lost, is known by its id unless
    another has come between.
    """

    source: str
    key: str
    known: Program | None
    arguments: tuple[str | bytes | float, ...]
    at: float  # on the monotonic clock
    id: str
    places: tuple[str, ...] = ()  # keys beside those of its record

    @classmethod
    def now(
        cls,
        source: str,
        key: str,
        known: Program | None,
        *arguments: str | bytes | float,
        places: tuple[str, ...] = (),
        id_: str = "",
    ) -> _Step:
        return cls(source, key, known, arguments, time.monotonic(), id_ or secrets.token_hex(6), places)

    @property
    def keys(self) -> list[str]:
        return [*record_keys(self.key), *self.places]

    async def run(self, scripts: Records, ttl_s: float, most: int) -> list[Any] | None:
        """What Redis says to it; None: it is away."""
        return await scripts.try_script(self.source, self.keys, self.told(ttl_s, most, time.monotonic()))

    def told(self, ttl_s: float, most: int, now: float) -> list[str | bytes | float]:
        known = b"" if self.known is None else orjson.dumps(_row(self.known))
        return [int(ttl_s * 1000), max(now - self.at, 0.0), self.id, known, most, *self.arguments]


class ProgramTable:
    """Programs by key (`<tenant>/<id>`), forgotten `ttl_s` after their last turn.

    One that rested longer than `rest_s` begins a new run, though its last one had no answer. `scripts` None: there is
    this process alone, and its memory of `max_entries` is the table; in Redis each tenant has up to `most`.
    """

    def __init__(
        self,
        scripts: Records | None,
        max_entries: int,
        ttl_s: float,
        rest_s: float,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        most: int = 65536,
    ) -> None:
        self._scripts = scripts
        self._ttl_s = ttl_s
        self._rest_s = rest_s
        self._retry_s = retry_s
        self._clock = clock
        self._most = most
        self._known: Lru[Program] = Lru(max_entries, share=SHARE)
        self._untold: Lru[deque[_Step]] = Lru(UNTOLD, share=0.0)
        self._telling = asyncio.Lock()
        self._teller: asyncio.Task[None] | None = None

    async def begin(self, key: str, head: str = "", id_: str = "", parent: str = "") -> Begun:
        """A turn comes for the program `key`, with the conversation `head`; where it is a new one, a sub-agent of
        `parent`, the key of another one of its tenant.
        """
        begun = await self._begin(key, head, "", id_, parent)
        assert begun is not None  # it claims nothing
        return begun

    async def go_on(self, key: str, head: str, continues: str, id_: str = "") -> Begun | None:
        """A turn comes that `continues` a conversation. None, and nothing done: that is not the program's latest."""
        return await self._begin(key, head, continues, id_)

    async def find(
        self,
        source: str,
        tenant: str,
        head: str,
        keys: Sequence[str],
        arguments: Sequence[str | bytes],
        id_: str,
        parent: str = "",
    ) -> Begun | None:
        """A turn comes, with the conversation `head`, for a program of `tenant` that `source` finds: a script that goes
        on from `BEGIN`, and returns the program's name and what `begin` says. It gets `keys` after the records', and
        `arguments` after the head and the name of the `parent` that a new one has. None: Redis is away; then nothing is
        done, or was done by the name of `id_`.
        """
        if self._scripts is None:
            return None
        first: list[str | bytes | float] = [int(self._ttl_s * 1000), 0.0, id_, "", self._most, self._rest_s]
        told = [*first, secrets.token_hex(6), head, program_name(parent), *arguments]
        answer = await self._scripts.try_script(source, [_records(tenant), *keys], told)
        return None if answer is None else self._begun(f"{tenant}/{answer[0].decode()}", answer[1:])

    @property
    def untold(self) -> bool:
        """Whether there is something that Redis does not know yet."""
        return len(self._untold) > 0

    async def catch_up(self, keys: Iterable[str]) -> None:
        """Tell Redis what it does not know of these programs."""
        for key in keys:
            if key in self._untold:
                await self._catch_up(key)

    async def _begin(self, key: str, head: str, continues: str, id_: str = "", parent: str = "") -> Begun | None:
        life, known = secrets.token_hex(6), self._get(key)
        told = (self._rest_s, life, head, program_name(parent), continues)
        step = _Step.now(_BEGIN, key, known, *told, id_=id_)
        answer = await self._tell(step)
        if answer is None:
            known = self._get(key)  # may have changed meanwhile
            if continues and (known is None or known.gone or known.head != continues):
                return None
            above = self._get(parent) if parent and parent != key else None
            root = program_name(parent) if parent != key else ""
            root = above.root or root if above is not None else root
            program, pause = _begun(known, self._clock(), self._rest_s, life, head, root)
            program = replace(program, told=step.id)
            self._keep(key, program)
            return Begun(key, program, pause, shared=False)
        begun = self._begun(key, answer) if answer else None
        if begun is not None and begun.program.gone:  # it was forgotten while this was on its way, and begins anew
            return await self._begin(key, head, continues, parent=parent)
        return begun

    def _begun(self, key: str, answer: Sequence[Any]) -> Begun:
        program = _record(answer[0])
        self._keep(key, program)
        pause = ToolGap(answer[1][0].decode(), float(answer[1][1])) if answer[1] else None
        return Begun(key, program, pause)

    async def end(
        self, begun: Begun, replica_id: str = "", tools: str = "", *, over: bool = False, stand: Stand | None = None
    ) -> Run | None:
        """A turn that has come is served: by `replica_id`, or by none that counts it.

        It called `tools`, or it is `over`: the run that ends with it, told once. `stand` is kept in the same step.
        """
        key, turn = begun.key, begun.program
        known = self._get(key) or turn
        which = (turn.life, turn.came) if begun.shared else ("", "")
        arguments: tuple[str | bytes, ...] = (*which, replica_id, tools, "1" if over else "0")
        places: tuple[str, ...] = ()
        if stand is not None:
            arguments, places = (*arguments, stand.program, stand.value), (stand.place,)
        step = _Step.now(_END, key, known, *arguments, places=places)
        answer = await self._tell(step)
        if answer is None:
            known = self._get(key) or turn
            if known.gone or known.life != turn.life:
                return None
            program, run = _ended(known, self._clock(), turn.came, replica_id, tools, over)
            self._keep(key, replace(program, told=step.id))
            return run
        if not answer:
            return None
        self._keep(key, _record(answer[0]))
        return Run(float(answer[1][0]), int(answer[1][1])) if answer[1] else None

    async def forget(self, key: str) -> bool:
        """A program is over, and its name is free. False where nobody knows it."""
        known = self._get(key)
        step = _Step.now(_FORGET, key, known)
        answer, now = await self._tell(step), self._clock()
        if answer is None:
            if known is None or known.gone:
                return False
            self._keep(key, Program("", now, now, known.version + 1, gone=True, told=step.id))
            return True
        if answer:
            self._keep(key, _record(answer[0]))
        return bool(answer)

    async def placed(self, key: str, replica_id: str) -> None:
        """Work ahead of the program's next turn was done by `replica_id`. There may be no such program yet."""
        life, known = secrets.token_hex(6), self._get(key)
        step = _Step.now(_PLACED, key, known, replica_id, life)
        answer = await self._tell(step)
        if answer:
            self._keep(key, _record(answer[0]))
        elif answer is None:
            known, now = self._get(key), self._clock()
            if known is None or known.gone:
                known = Program(life, now, now, version=known.version if known else 0)
            at = known.version + 1
            self._keep(key, replace(known, seen=now, version=at, last_replica=replica_id, told=step.id))

    async def look(self, key: str) -> Program | None:
        """The program's record, as it stands; None: there is none. Of one that Redis has lost this process's own."""
        answer = None if self._scripts is None else await self._scripts.try_script(_LOOK, record_keys(key), [])
        program = _record(answer[0]) if answer else self._get(key)
        return None if program is None or program.gone else program

    def latest(self) -> list[tuple[str, Program]]:
        """The programs that this process has served and remembers, the one with the latest turn first."""
        return [(key, program) for key, program in self._known.latest(self._clock()) if not program.gone]

    async def close(self) -> None:
        """Tell Redis what it does not know, unless it is away: then it will not get it."""
        if self._teller is not None:
            self._teller.cancel()
            await asyncio.wait({self._teller})
        await self._tell_all()

    # ---- this process's memory ----

    def _get(self, key: str) -> Program | None:
        return self._known.get(key, self._clock())

    def _keep(self, key: str, program: Program) -> None:
        """Remember what was learnt, unless an answer that overtook this one told something newer."""
        known = self._get(key)
        if known is None or known.version <= program.version:
            self._known.put(key, program, self._clock() + self._ttl_s, owner=_tenant(key))

    # ---- Redis ----

    async def _tell(self, step: _Step) -> list[Any] | None:
        """What Redis says to it, after all that it has not been told of the same program. None: it is away."""
        if self._scripts is None:
            return None
        if step.key in self._untold:
            await self._catch_up(step.key)
        answer = None if step.key in self._untold else await step.run(self._scripts, self._ttl_s, self._most)
        if answer is None:
            steps = self._untold.get(step.key, 0.0)
            if steps is None:
                steps = deque(maxlen=STEPS)
                self._untold.put(step.key, steps, math.inf, owner=_tenant(step.key))
            steps.append(step)
            if self._teller is None or self._teller.done():
                self._teller = asyncio.get_running_loop().create_task(self._keep_telling())
        return answer

    async def _catch_up(self, key: str) -> None:
        """Tell Redis what it has not been told of a program, as far as it answers."""
        async with self._telling:
            steps = self._untold.get(key, 0.0)
            while steps:
                scripts = self._scripts
                if scripts is None or scripts.degraded or await steps[0].run(scripts, self._ttl_s, self._most) is None:
                    return
                steps.popleft()
            self._untold.remove(key)

    async def _keep_telling(self) -> None:
        while self._untold:
            await asyncio.sleep(self._retry_s)
            await self._tell_all()

    async def _tell_all(self) -> None:
        for key in [key for key, _ in self._untold.latest(0.0)][::-1]:
            await self._catch_up(key)


# ---- what the scripts do, while Redis is away ----


def _begun(
    program: Program | None, now: float, rest_s: float, life: str, head: str, root: str = ""
) -> tuple[Program, ToolGap | None]:
    """A turn comes at `now`: the record with it, and the pause that it ends. A new one has this `root`."""
    if program is None or program.gone:
        program = Program(life, now, now, version=program.version if program else 0, root=root)
    rested = now - program.seen > rest_s
    pause = None
    if program.paused is not None and not rested:
        pause = ToolGap(program.tools, max(now - program.paused, 0.0))
    if rested:
        program = replace(program, run_turns=0, answered_turns=program.turns)
    return (
        replace(
            program,
            arrival=program.arrival if program.run_turns else now,
            seen=now,
            version=program.version + 1,
            came=program.came + 1,
            run_turns=program.run_turns + 1,
            paused=None,
            tools="",
            head=head,
        ),
        pause,
    )


def _ended(
    program: Program, now: float, came: int, replica_id: str, tools: str, over: bool
) -> tuple[Program, Run | None]:
    """The turn that came as the `came`-th is served at `now`: the record after it, and the run that it ends."""
    turns = program.turns + bool(replica_id)
    program = replace(program, turns=turns, seen=now, version=program.version + 1)
    if program.came <= came:  # else a later turn has come already, and waits for no tool of this one
        program = replace(program, last_replica=replica_id or program.last_replica)
        if tools:
            program = replace(program, paused=now, tools=tools)
    if not over or not program.run_turns:
        return program, None
    run = Run(max(now - program.arrival, 0.0), program.run_turns)
    return replace(program, run_turns=0, answered_turns=turns), run


# ---- records as texts ----


def _tenant(key: str) -> str:
    return key.partition("/")[0]


def program_name(key: str) -> str:
    """What a program is called within its tenant."""
    return key.partition("/")[2]


def _records(tenant: str) -> str:
    """The key of what names a tenant's records."""
    return f"programs/{{{tenant}}}"


def record_keys(key: str) -> list[str]:
    """Where a program's record is, after what names all of its tenant."""
    tenant, _, name = key.partition("/")
    return [_records(tenant), f"{_records(tenant)}/{name}"]


def _row(program: Program) -> list[str]:
    return [_text(getattr(program, name)) for name in _FIELDS]


def _text(value: object) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "1"
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _record(row: bytes) -> Program:
    found: Mapping[str, str] = dict(zip(_FIELDS, orjson.loads(row), strict=True))
    return Program(
        life=found["life"],
        arrival=float(found["arrival"] or 0),
        seen=float(found["seen"] or 0),
        version=int(found["version"] or 0),
        turns=int(found["turns"] or 0),
        answered_turns=int(found["answered_turns"] or 0),
        came=int(found["came"] or 0),
        run_turns=int(found["run_turns"] or 0),
        last_replica=found["last_replica"] or None,
        paused=float(found["paused"]) if found["paused"] else None,
        tools=found["tools"],
        head=found["head"],
        gone=found["gone"] == "1",
        told=found["told"],
        root=found["root"],
    )
