"""The program table: one record of each program for the whole cluster, in Redis.

    begin    a turn comes: its program's record is made or read, its pause ends, and a new run gets its arrival
    end      a turn is served: it counts, says which replica served it, and its tools begin a pause or its answer ends
             the run
    forget   a program is over

Each is one script, so whichever router a turn comes to, it finds what the others wrote. Times are those of Redis'
clock, so the machines' clocks need not agree. The record also says where a program without a name stands in its
conversation (`conversations`); of two requests that continue one program at once, one continues it and the other begins
a new one.

The number of records of a tenant is bounded. A tenant that invents names without end loses its own oldest records.

While Redis is away a turn goes by the records that this router remembers, and nothing is written.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from holdfast.replicas.errors import UnavailableError
from holdfast.router.config import RouterConfig
from holdfast.router.records.conversations import Conversation, Standing
from holdfast.router.records.identity import unnamed_program
from holdfast.router.records.lru import SHARE, Lru
from holdfast.router.records.store import Argument, Records

PROGRAMS_AT_PLACE = 64  # that are kept at one place of a conversation, the latest


@dataclass(frozen=True, slots=True)
class Program:
    """One record. Times are in seconds since the epoch.

    A run goes from a question to the answer that calls no tool. Seniority is the run's: `arrival` is when its first
    turn came, `run_turns` how many have come in it (0: it is over). Of the `turns` that replicas have served,
    `answered_turns` are those up to the last answer. Between two turns `paused` is when the last one ended and `tools`
    the key of what it called. `seen` is when a turn came or ended last, and `came` counts all that came. A program that
    is forgotten and begins again has another `life`. `root` names the program whose sub-agent it is, at the top.
    """

    life: str
    seen: float
    arrival: float = 0.0
    turns: int = 0
    answered_turns: int = 0
    came: int = 0
    run_turns: int = 0
    last_replica: str | None = None
    paused: float | None = None
    tools: str = ""
    root: str = ""

    @staticmethod
    def of(reply: Sequence[bytes]) -> Program:
        """From the reply to `HGETALL`."""
        fields = zip(reply[::2], reply[1::2], strict=True)
        return _PROGRAM.validate_python({name.decode(): value.decode() for name, value in fields})


_PROGRAM = TypeAdapter(Program)


@dataclass(frozen=True, slots=True)
class Run:
    """A program's way from a question to the answer that calls no tool."""

    seconds: float
    turns: int


@dataclass(frozen=True, slots=True)
class ToolGap:
    """The next turn of a program came `seconds` after the one that called `tools`."""

    tools: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that has come: its program's record with it, and the pause that it ended, which one turn only gets.

    `shared` is False while Redis is away: then the record is what this router remembers. `standing` is set for a
    program without a name.
    """

    key: str
    program: Program
    pause: ToolGap | None = None
    shared: bool = True
    standing: Standing | None = None

    @property
    def root(self) -> str:
        """The key of the program that it counts for among those of its tenant: its own, but for a sub-agent."""
        return f"{_tenant(self.key)}/{self.program.root}" if self.program.root else self.key


# A record is a hash `program/{tenant}/<name>`, and `program/{tenant}` has all names of a tenant by when they were seen
# last. `places/{tenant}/<place>` has the standings of the programs at a place by name; a record names its place.
# KEYS: both beginnings. ARGV: TTL in ms, most records of a tenant, the time in seconds ('': Redis' clock).
_TABLE = """
local programs, places, ttl, most = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(ARGV[3]) or tonumber(time[1]) + tonumber(time[2]) / 1e6

local function key_of(name) return programs .. '/' .. name end
local function seconds(value) return string.format('%.6f', math.max(value, 0)) end

local function leave_place(name)
  local place = redis.call('HGET', key_of(name), 'place')
  if place then redis.call('HDEL', places .. '/' .. place, name) end
end

local function touch(name)
  redis.call('HSET', key_of(name), 'seen', seconds(now))
  redis.call('PEXPIRE', key_of(name), ttl)
  redis.call('ZADD', programs, seconds(now), name)
  redis.call('ZREMRANGEBYSCORE', programs, '-inf', now - ttl / 1e3)
  local over = redis.call('ZCARD', programs) - most
  local oldest = over > 0 and redis.call('ZPOPMIN', programs, over) or {}
  for i = 1, #oldest, 2 do
    leave_place(oldest[i])
    redis.call('DEL', key_of(oldest[i]))
  end
  redis.call('PEXPIRE', programs, ttl)
end
"""
# ARGV: the name of a new program ('': none is made), life, parent, seconds after which a run ends by itself; '' or the
# place with the standing there, the head, how many programs a place keeps, and pairs of names and heads of programs
# that may be continued. Returns the name, the record, and tools and length of the pause.
_BEGIN = (
    _TABLE
    + """
local name, life, parent, idle = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local place, standing, head, kept = ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11])
for i = 12, #ARGV, 2 do
  if redis.call('HGET', key_of(ARGV[i]), 'head') == ARGV[i + 1] then
    name = ARGV[i]
    break
  end
end
if name == '' then return {} end
local key, pause = key_of(name), {}
local seen, paused, tools, turns = unpack(redis.call('HMGET', key, 'seen', 'paused', 'tools', 'turns'))
if not seen then
  redis.call('HSET', key, 'life', life)
  if parent ~= '' and parent ~= name then
    redis.call('HSET', key, 'root', redis.call('HGET', key_of(parent), 'root') or parent)
  end
elseif now - seen > idle then
  redis.call('HSET', key, 'run_turns', 0, 'answered_turns', turns or 0)
elseif paused then
  pause = {tools, seconds(now - paused)}
end
if redis.call('HINCRBY', key, 'run_turns', 1) == 1 then redis.call('HSET', key, 'arrival', seconds(now)) end
redis.call('HINCRBY', key, 'came', 1)
redis.call('HDEL', key, 'paused', 'tools')
if place ~= '' then
  leave_place(name)
  local here = places .. '/' .. place
  redis.call('HSET', key, 'head', head, 'place', place)
  redis.call('HSET', here, name, standing)
  redis.call('PEXPIRE', here, ttl)
  if redis.call('HLEN', here) > kept then
    local all, oldest, since = redis.call('HGETALL', here), nil, math.huge
    for i = 1, #all, 2 do
      local at = cjson.decode(all[i + 1])[3]
      if at < since then oldest, since = all[i], at end
    end
    redis.call('HDEL', here, oldest)
  end
end
touch(name)
return {name, redis.call('HGETALL', key), pause}
"""
)
# ARGV: name, life and number of the turn ('': any), the replica that served it ('': none), the tools that it called,
# '1': its run is over, and '' or the place where the program stood with its standing now. Returns the record, and
# seconds and turns of a run that ends.
_END = (
    _TABLE
    + """
local name, life, came, replica, called, over = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9] == '1'
local here, key, run = places .. '/' .. ARGV[10], key_of(name), {}
if ARGV[10] ~= '' and redis.call('HEXISTS', here, name) == 1 then redis.call('HSET', here, name, ARGV[11]) end
local lives, latest, arrival, in_run = unpack(redis.call('HMGET', key, 'life', 'came', 'arrival', 'run_turns'))
if not lives or life ~= '' and lives ~= life then return {} end
local turns = redis.call('HINCRBY', key, 'turns', replica ~= '' and 1 or 0)
if came == '' or tonumber(latest) <= tonumber(came) then  -- else a later turn has come, and waits for none of its tools
  if replica ~= '' then redis.call('HSET', key, 'last_replica', replica) end
  if called ~= '' then redis.call('HSET', key, 'paused', seconds(now), 'tools', called) end
end
if over and tonumber(in_run or 0) > 0 then
  run = {seconds(now - arrival), in_run}
  redis.call('HSET', key, 'run_turns', 0, 'answered_turns', turns)
end
touch(name)
return {redis.call('HGETALL', key), run}
"""
)
# A replica has computed a prefill for a program's next turn, which is best served there. The program may not exist yet.
# ARGV: name, replica, life of a new one.
_PLACE = (
    _TABLE
    + """
redis.call('HSETNX', key_of(ARGV[4]), 'life', ARGV[6])
redis.call('HSET', key_of(ARGV[4]), 'last_replica', ARGV[5])
touch(ARGV[4])
return {redis.call('HGETALL', key_of(ARGV[4]))}
"""
)
_FORGET = (
    _TABLE
    + """
leave_place(ARGV[4])
redis.call('ZREM', programs, ARGV[4])
return {redis.call('DEL', key_of(ARGV[4]))}
"""
)
_LOOK = "return redis.call('HGETALL', KEYS[1])"
# KEYS: places. ARGV: how many standings are enough.
_STANDINGS = """
local found, n = {}, 0
for i, key in ipairs(KEYS) do
  found[i] = redis.call('HGETALL', key)
  n = n + #found[i] / 2
  if n >= tonumber(ARGV[1]) then break end
end
return found
"""


class ProgramTable:
    """Programs by key (`<tenant>/<name>`), forgotten `program_ttl_s` after their last turn.

    One that rested longer than `program_rest_s` begins a new run, though its last one had no answer. `clock` stands in
    the place of Redis' own, for tests.
    """

    def __init__(self, records: Records, config: RouterConfig, clock: Callable[[], float] | None = None) -> None:
        self._records = records
        self._config = config
        self._clock = clock
        self._programs: Lru[Program] = Lru(config.program_entries, share=SHARE)
        self._standings: Lru[Standing] = Lru(config.program_entries, share=SHARE)  # by tenant and place, the latest

    async def begin(self, key: str, parent: str = "") -> Begun:
        """A turn comes for the program `key`. A new one is a sub-agent of `parent`, the key of another program."""
        try:
            begun = await self._begin(key, program_name(key), parent)
            assert begun is not None  # there is a program of that name now
            return begun
        except UnavailableError:
            return self._remembered(key, parent)

    async def begin_conversation(self, tenant: str, sent: Conversation, parent: str = "") -> Begun:
        """A turn comes for the program whose conversation it continues, or for a new one."""
        new = unnamed_program(tenant, secrets.token_hex(12))
        standing = Standing(program_name(new), sent.length, sent.head, sent.place, self._now())
        try:
            begun = None
            continued = sent.continues(self._known_standings(tenant, sent))[:1]
            if continued and continued[0].mark and continued[0].mark == sent.mark(continued[0].length):
                begun = await self._begin(new, "", parent, standing, continued)  # saves a trip
            if begun is None:
                continued = sent.continues(await self._stored_standings(tenant, sent))
                begun = await self._begin(new, program_name(new), parent, standing, continued)
            assert begun is not None
        except UnavailableError:
            continued = sent.continues(self._known_standings(tenant, sent))
            begun = self._remembered(f"{tenant}/{continued[0].name}" if continued else new, parent)
        standing = replace(standing, name=program_name(begun.key))
        for place in sent.places:
            self._standings.remove(f"{tenant}/{place}")
        self._standings.put(f"{tenant}/{sent.place}", standing, self._deadline(), owner=tenant)
        return replace(begun, standing=standing)

    async def look_conversation(self, tenant: str, sent: Conversation) -> str | None:
        """The key of the program that a turn with this conversation would continue. Changes nothing."""
        try:
            standings = await self._stored_standings(tenant, sent)
        except UnavailableError:
            standings = self._known_standings(tenant, sent)
        continued = sent.continues(standings)
        return f"{tenant}/{continued[0].name}" if continued else None

    async def end(
        self, begun: Begun, replica_id: str = "", tools: str = "", *, over: bool = False, mark: str = ""
    ) -> Run | None:
        """A turn that has come is served: by `replica_id`, or by none that counts it.

        It called `tools`, or its run is `over`; one call only gets the run. `mark` is the reply's.
        """
        key, turn, standing = begun.key, begun.program, begun.standing
        place: tuple[str, str | bytes] = ("", "")
        if standing is not None:
            standing = replace(standing, mark=mark)
            place = (standing.place, standing.value())
            place_key = f"{_tenant(key)}/{standing.place}"
            remembered = self._standings.get(place_key, self._now())
            if remembered is not None and remembered.name == standing.name:
                self._standings.put(place_key, standing, self._deadline(), owner=_tenant(key))
        which = (turn.life, turn.came) if begun.shared else ("", "")
        arguments = (program_name(key), *which, replica_id, tools, "1" if over else "0", *place)
        reply = await self._records.try_script(_END, _keys(key), self._arguments(*arguments))
        if reply is None or not (reply or begun.shared):
            self._keep(key, replace(turn, last_replica=replica_id or turn.last_replica))
        if not reply:
            return None
        self._keep(key, Program.of(reply[0]))
        return Run(float(reply[1][0]), int(reply[1][1])) if reply[1] else None

    async def forget(self, key: str) -> bool:
        """End a program and free its name. False if there is none. Raises UnavailableError."""
        (deleted,) = await self._records.script(_FORGET, _keys(key), self._arguments(program_name(key)))
        self._programs.remove(key)
        return bool(deleted)

    async def placed(self, key: str, replica_id: str) -> None:
        """Work ahead of the program's next turn was done by `replica_id`. There may be no such program yet."""
        arguments = self._arguments(program_name(key), replica_id, secrets.token_hex(6))
        reply = await self._records.try_script(_PLACE, _keys(key), arguments)
        if reply is not None:
            self._keep(key, Program.of(reply[0]))
        else:
            program = self._programs.get(key, self._now()) or Program("", self._now(), self._now())
            self._keep(key, replace(program, last_replica=replica_id))

    async def look(self, key: str) -> Program | None:
        """The program's record; while Redis is away, as this router remembers it. None: there is none."""
        reply = await self._records.try_script(_LOOK, [f"{_keys(key)[0]}/{program_name(key)}"], [])
        if reply is None:
            return self._programs.get(key, self._now())
        return Program.of(reply) if reply else None

    def latest(self) -> list[tuple[str, Program]]:
        """The programs that this router has served and remembers, the one with the latest turn first."""
        return list(self._programs.latest(self._now()))

    # ---- Redis ----

    async def _begin(
        self, key: str, name: str, parent: str, standing: Standing | None = None, continued: Sequence[Standing] = ()
    ) -> Begun | None:
        """A turn comes for one of these programs, or else for `name`; "": for none. `key` is of the same tenant."""
        place: tuple[Argument, ...] = ("", "", "")
        if standing is not None:
            place = (standing.place, standing.value(), standing.head)
        arguments = self._arguments(
            name, secrets.token_hex(6), program_name(parent), self._config.program_rest_s, *place
        )
        arguments += [PROGRAMS_AT_PLACE, *(text for each in continued for text in (each.name, each.head))]
        reply = await self._records.script(_BEGIN, _keys(key), arguments)
        if not reply:
            return None
        raw_name, record, pause = reply
        key, program = f"{_tenant(key)}/{raw_name.decode()}", Program.of(record)
        if program.last_replica is None and (remembered := self._programs.get(key, self._now())) is not None:
            # Redis has lost the record, or never had it.
            program = replace(program, last_replica=remembered.last_replica)
        self._keep(key, program)
        return Begun(key, program, ToolGap(pause[0].decode(), float(pause[1])) if pause else None)

    async def _stored_standings(self, tenant: str, sent: Conversation) -> list[Standing]:
        if not sent.places:
            return []
        places = [f"{_places(tenant)}/{place}" for place in sent.places]
        reply: list[list[bytes]] = await self._records.script(_STANDINGS, places, [PROGRAMS_AT_PLACE])
        return [
            Standing.of(name.decode(), place, value)
            for place, row in zip(sent.places, reply, strict=False)
            for name, value in zip(row[::2], row[1::2], strict=True)
        ]

    def _arguments(self, *more: Argument) -> list[Argument]:
        ttl_ms, most = int(self._config.program_ttl_s * 1000), self._config.program_tenant_entries
        return [ttl_ms, most, "" if self._clock is None else self._clock(), *more]

    # ---- this router's memory ----

    def _remembered(self, key: str, parent: str) -> Begun:
        """Begin a turn while Redis is away."""
        now = self._now()
        program = self._programs.get(key, now)
        if program is None:
            above = self._programs.get(parent, now) if parent != key else None
            root = program_name(parent) if parent != key else ""
            program = Program("", now, now, root=(above.root if above else "") or root)
        arrival = program.arrival if program.run_turns else now
        program = replace(program, arrival=arrival, seen=now, came=program.came + 1, paused=None, tools="")
        self._keep(key, program)
        return Begun(key, program, shared=False)

    def _known_standings(self, tenant: str, sent: Conversation) -> list[Standing]:
        known = (self._standings.get(f"{tenant}/{place}", self._now()) for place in sent.places)
        return [standing for standing in known if standing is not None]

    def _keep(self, key: str, program: Program) -> None:
        self._programs.put(key, program, self._deadline(), owner=_tenant(key))

    def _now(self) -> float:
        return time.time() if self._clock is None else self._clock()

    def _deadline(self) -> float:
        return self._now() + self._config.program_ttl_s


def _tenant(key: str) -> str:
    return key.partition("/")[0]


def program_name(key: str) -> str:
    """A program's name within its tenant."""
    return key.partition("/")[2]


# The braces keep a tenant's programs in one slot of a Redis cluster, because the scripts touch several keys. Release
# 0.1 has records of another form under `programs/` and `heads/`.


def _keys(key: str) -> list[str]:
    return [f"program/{{{_tenant(key)}}}", _places(_tenant(key))]


def _places(tenant: str) -> str:
    return f"places/{{{tenant}}}"
