"""Which program a request without a name belongs to: the one whose last known conversation it continues.

A conversation is known by a chain of digests: tools first, then message after message, so that each digest stands for
everything up to its message; the last one is the conversation's `head`. A program is kept under the head of what it has
sent last. A request looks for the heads that its own chain goes through, the latest first, but only those that a reply
follows. So a conversation that goes on is found, however much was added; a program that has gone on is found no more
where it was, so a branch off its past is a program of its own; and a second run of a task, which begins with what the
first one sent, continues nothing. Runs that stand at the same place are told apart by their replies.

A plain prompt has no messages: programs are kept under a beginning of what they sent, with the whole's length.

What stands in Redis here is where to look. Whether a program still stands there its record says (`programs`), in the
same step in which the turn begins; so of two requests that find one program only one goes on with it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import orjson

from holdfast.replicas.requests import Answer, ChatPrompt, RawPrompt
from holdfast.router.identity import unnamed_program
from holdfast.router.lru import SHARE, Lru
from holdfast.router.programs import BEGIN, Begun, ProgramTable, Stand, program_name
from holdfast.router.records import Records

REPLIES = 32  # of a conversation that are looked back over, the latest
MOST = 64  # programs kept at one place, the latest
BEGINNINGS = (1024, 256, 64, 16, 4, 1)  # characters or token ids of a plain prompt by which programs are looked for


@dataclass(frozen=True, slots=True)
class Kept:
    """A program at a place: what it had sent, and the `mark` of the reply to that ("": there is none yet)."""

    program: str
    length: int
    head: str
    place: str
    at: float
    mark: str = ""

    def value(self) -> bytes:
        return orjson.dumps([self.length, self.head, self.place, self.at, self.mark])


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request sends. `places`: where what it continues may be kept, best first; its own is `place`.

    `by_head`: a place is the head of what is kept there, so its programs have sent as much as it stands for.
    """

    place: str
    head: str
    length: int
    places: tuple[str, ...]
    digest: Callable[[int], str]  # of the first so many messages, or characters
    mark: Callable[[int], str]  # of the reply that follows them
    again: bool  # it is not a program's first, so whoever has sent the same and had no reply sends it again
    by_head: bool
    lengths: tuple[int, ...] = ()  # of what each place stands for, where they are heads

    @property
    def marks(self) -> list[str]:
        """Of the reply that follows each place; "" for its own."""
        return [self.mark(length) if length < self.length else "" for length in self.lengths]

    def continues(self, kept: Sequence[Kept]) -> list[Kept]:
        """Of the programs at these places those that this may go on with: who has sent most of it first."""
        found: list[tuple[tuple[bool, int, int, float], Kept]] = []
        for each in kept:
            if not 0 < each.length <= self.length or self.digest(each.length) != each.head:
                continue
            if each.length == self.length:
                if self.again and not each.mark:
                    found.append(((True, -each.length, 0, -each.at), each))
                continue
            mark = self.mark(each.length)
            if mark.startswith("calls") and each.mark.startswith("calls") and mark != each.mark:
                continue  # calls have ids: it is another run's reply
            likely = 0 if mark and mark == each.mark else 1 if each.mark else 2
            found.append(((False, -each.length, likely, -each.at), each))
        return [each for _, each in sorted(found, key=lambda item: item[0])]


def conversation(scope: str, prompt: ChatPrompt | RawPrompt) -> Conversation:
    """The chain of `prompt`. `scope`: what conversations are never shared across, the model's name and the salt."""
    return _chat(scope, prompt) if isinstance(prompt, ChatPrompt) else _plain(scope, prompt)


CHARACTERS = 4  # of a token, about: for placing programs that is exact enough
HISTORIES = 5  # conversations that are looked for in one: its own, and before its latest replies
PLAIN = 512  # tokens of a plain prompt that others may begin with as well: it says nothing of where that ends
FIRST_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Preamble:
    """What other programs' prompts begin with as well: tools, and the messages before the first of a user; of a plain
    prompt the first `PLAIN` tokens, about, where it is as long.

    `tokens` is about its length, `prompt_tokens` about that of the whole prompt.
    """

    digest: str
    tokens: int
    prompt_tokens: int


def preamble(scope: str, prompt: ChatPrompt | RawPrompt) -> Preamble:
    """That of `prompt`. `scope`: what it is never shared across, tenant and model."""
    if isinstance(prompt, RawPrompt):
        each = CHARACTERS if isinstance(prompt.content, str) else 1
        begins, tokens = prompt.content[: PLAIN * each], len(prompt.content) // each
        digest = _hash(b"plain", [scope, begins])[:8].hex() if tokens >= PLAIN else ""
        return Preamble(digest, PLAIN if digest else 0, tokens)
    first = list(takewhile(lambda message: message["role"] in FIRST_ROLES, prompt.messages))
    tools = orjson.dumps(prompt.tools, option=orjson.OPT_SORT_KEYS)
    tokens = (len(tools) + sum(map(_length, first))) // CHARACTERS
    whole = (len(tools) + sum(map(_length, prompt.messages))) // CHARACTERS
    digest = _hash(tools, [scope, [_canonical(message) for message in first]])[:8].hex() if tokens else ""
    return Preamble(digest, tokens, whole)


def histories(scope: str, sent: Conversation, tokens: int) -> tuple[tuple[str, int], ...]:
    """Digests of the conversations that are in one of so many tokens, the longest first, each with about its length:
    its own, under which a branch off it will look, and those that replies follow, where it may be a branch itself.
    """
    if not sent.by_head:
        return ()
    lengths = [sent.length, *(each for each in sent.lengths if each < sent.length)][:HISTORIES]
    return tuple(
        (_hash(b"history", [scope, sent.digest(each)])[:8].hex(), tokens * each // sent.length) for each in lengths
    )


def placed_by(tenant: str, model: str, cache_salt: str) -> str:
    """What the beginning of a prompt is never shared across, for placement."""
    return f"{tenant} {model}\0{cache_salt}" if cache_salt else f"{tenant} {model}"


def prompt_tokens(prompt: ChatPrompt | RawPrompt) -> int:
    """About how many tokens it has, by its length."""
    if isinstance(prompt, RawPrompt):
        return len(prompt.content) // (CHARACTERS if isinstance(prompt.content, str) else 1)
    return (len(orjson.dumps(prompt.tools)) + sum(map(_length, prompt.messages))) // CHARACTERS


def hint(name: str) -> str:
    """The digest of what two prompts share because their clients say so."""
    return _hash(b"hint", name)[:8].hex()


def mark_of(answer: Answer) -> str:
    """By what the next request's copy of a reply is known again."""
    return _mark([call.call_id for call in answer.tool_calls], answer.text)


def _chat(scope: str, prompt: ChatPrompt) -> Conversation:
    digest = _hash(b"", [scope, prompt.tools])
    digests = []
    for message in prompt.messages:
        digest = _hash(digest, _canonical(message))
        digests.append(digest.hex())
    n = len(digests)
    replies = [i for i in range(n - 1, 0, -1) if prompt.messages[i]["role"] == "assistant"][:REPLIES]

    def mark(length: int) -> str:
        reply = prompt.messages[length]
        return _mark([call["id"] for call in reply.get("tool_calls") or ()], reply.get("content"))

    places = (*(digests[i - 1] for i in replies), *((digests[-1],) if replies else ()))
    lengths = (*replies, *((n,) if replies else ()))
    head = digests[-1]
    return Conversation(head, head, n, places, lambda length: digests[length - 1], mark, bool(replies), True, lengths)


def _plain(scope: str, prompt: RawPrompt) -> Conversation:
    content = prompt.content if isinstance(prompt.content, str) else tuple(prompt.content)

    def digest(length: int) -> str:
        return _hash(b"", [scope, content[:length]]).hex()

    n = len(content)
    places = tuple(_hash(b"", [scope, "plain", content[:each]]).hex() for each in BEGINNINGS if each <= n)
    return Conversation(places[0] if places else "", digest(n), n, places, digest, lambda length: "", False, False)


def _length(message: Mapping[str, Any]) -> int:
    return len(message.get("content") or "") + sum(
        len(call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    )


def _canonical(message: Mapping[str, Any]) -> list[object]:
    """What of a message stays the same when a client sends it again: thoughts are left out by many."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], (message.get("content") or "").strip(), calls, message.get("tool_call_id")]


def _mark(call_ids: Sequence[str], text: str | None) -> str:
    if call_ids:
        return "calls " + _hash(b"", list(call_ids)).hex()
    return "text " + _hash(b"", (text or "").strip()).hex()


def _hash(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


_FIND = """
local found, most = {}, tonumber(ARGV[1])
for i, key in ipairs(KEYS) do
  for _, each in ipairs(redis.call('HGETALL', key)) do found[#found + 1] = each end
  if #found >= 2 * most then break end
end
return found
"""

# KEYS: the records' (`BEGIN`), what names all places of the tenant, the request's own place, and those to look in, best
# first. ARGV: the program's name where it is a new one, what to keep of it at its place, how many are kept at one, how
# many places a tenant has, and which programs may be gone on with: as JSON of names, heads and numbers of places, or ''
# to look for them in all places, by the head and the mark that follow for each. A place is by its head in that case.
_GO_ON = (
    BEGIN
    + """
local new, value, most, places, likely = ARGV[10], ARGV[11], tonumber(ARGV[12]), tonumber(ARGV[13]), ARGV[14]
local heads, here = KEYS[2], KEYS[3]

local function candidates()
  if likely ~= '' then return cjson.decode(likely) end
  local found = {}
  for i = 4, #KEYS do
    local mark, again, rows = ARGV[8 + 2 * i], KEYS[i] == here, {}
    local all = redis.call('HGETALL', KEYS[i])
    for j = 1, #all, 2 do
      local kept = cjson.decode(all[j + 1])
      local at, before = kept[4], kept[5]
      local calls = string.sub(mark, 1, 5) == 'calls' and string.sub(before, 1, 5) == 'calls'
      if again then
        if before == '' then rows[#rows + 1] = {0, -at, all[j]} end
      elseif not calls or mark == before then  -- calls have ids: another one's is another run's reply
        rows[#rows + 1] = {mark ~= '' and mark == before and 0 or before ~= '' and 1 or 2, -at, all[j]}
      end
    end
    table.sort(rows, function(one, two)
      if one[1] ~= two[1] then return one[1] < two[1] end
      return one[2] < two[2]
    end)
    for _, each in ipairs(rows) do found[#found + 1] = {each[3], ARGV[7 + 2 * i], i} end
    if #found >= most then break end
  end
  return found
end

local name, record, left = new, nil, nil
for _, each in ipairs(candidates()) do
  local there = read(KEYS[1] .. '/' .. each[1], '')
  -- Told before, where the answer was lost, or it stands there still.
  if there and there.gone ~= '1' and (there.head == each[2] or there.told == id) then
    name, record, left = each[1], there, KEYS[each[3]]
    break
  end
end

local stamp = string.format('%.0f', now * 1e6)
if left then
  redis.call('HDEL', left, name)
  if left ~= here and redis.call('EXISTS', left) == 0 then redis.call('ZREM', heads, string.sub(left, #heads + 2)) end
end
redis.call('HSET', here, name, value)
redis.call('PEXPIRE', here, ttl)
local over = redis.call('HLEN', here) - most
if over > 0 then
  local all, rows = redis.call('HGETALL', here), {}
  for i = 1, #all, 2 do rows[#rows + 1] = {cjson.decode(all[i + 1])[4], all[i]} end
  table.sort(rows, function(one, two) return one[1] < two[1] end)
  for i = 1, over do redis.call('HDEL', here, rows[i][2]) end
end
redis.call('ZADD', heads, stamp, string.sub(here, #heads + 2))
redis.call('ZREMRANGEBYSCORE', heads, '-inf', string.format('%.0f', now * 1e6 - ttl * 1e3))
over = redis.call('ZCARD', heads) - places
if over > 0 then
  local gone = redis.call('ZPOPMIN', heads, over)
  for i = 1, #gone, 2 do redis.call('DEL', heads .. '/' .. gone[i]) end
end
redis.call('PEXPIRE', heads, ttl)
return {name, begin(KEYS[1] .. '/' .. name, record)}
"""
)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a program without a name stands with the turn that has come."""

    tenant: str
    kept: Kept


class Conversations:
    """Where programs without a name stand: in Redis, and those of this process in its memory for when that is away.

    Each tenant has up to `places` of them in Redis; those of the longest ago go first.
    """

    def __init__(
        self,
        programs: ProgramTable,
        scripts: Records | None,
        max_entries: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
        places: int = 65536,
    ) -> None:
        self._programs = programs
        self._scripts = scripts
        self._ttl_s = ttl_s
        self._clock = clock
        self._places = places
        self._near: Lru[dict[str, Kept]] = Lru(max_entries, share=SHARE)

    async def begin(self, tenant: str, sent: Conversation, parent: str = "") -> tuple[Begun, Standing]:
        """A turn comes, of the program that this conversation continues or of a new one, a sub-agent of `parent`: in
        one step in Redis, and for a plain prompt in two.
        """
        if self._programs.untold:
            await self._programs.catch_up(kept.program for kept in self._near_by(tenant, sent))
        new, id_ = unnamed_program(tenant, secrets.token_hex(12)), secrets.token_hex(6)
        begun = await self._begin(tenant, sent, new, id_, parent)
        if begun is None:
            begun = await self._begin_alone(tenant, sent, new, id_, parent)
        return begun, self._move(tenant, begun.key, sent)

    async def look(self, tenant: str, sent: Conversation) -> str | None:
        """The program that a turn with this conversation would go on with, as far as is known. Changes nothing."""
        found = await self._find(tenant, sent)
        for kept in self._near_by(tenant, sent) if found is None else found:
            return kept.program
        return None

    def replied(self, standing: Standing, mark: str) -> Stand:
        """A program has had its reply: what is to be kept of it, where it has not gone on meanwhile."""
        kept = replace(standing.kept, mark=mark)
        there = self._near.get(f"{standing.tenant}/{kept.place}", self._clock())
        if there is not None and kept.program in there:
            there[kept.program] = kept
        return Stand(_key(standing.tenant, kept.place), program_name(kept.program), kept.value())

    async def _begin(self, tenant: str, sent: Conversation, new: str, id_: str, parent: str) -> Begun | None:
        """None: Redis is away."""
        places, likely = list(sent.places), b""
        of_places: list[str] = []
        if sent.by_head:
            # For a plain prompt who may be meant is seen only by its digests, which Redis cannot make.
            of_places = [each for place, mark in zip(places, sent.marks, strict=True) for each in (place, mark)]
        else:
            found = await self._find(tenant, sent)
            if found is None:
                return None
            likely = orjson.dumps(
                [(program_name(kept.program), kept.head, 4 + places.index(kept.place)) for kept in found]
            )
        kept = Kept(new, sent.length, sent.head, sent.place, self._clock())
        keys = [_heads(tenant), *(_key(tenant, place) for place in (sent.place, *places))]
        told: list[str | bytes] = [program_name(new), kept.value(), str(MOST), str(self._places), likely, *of_places]
        return await self._programs.find(_GO_ON, tenant, sent.head, keys, told, id_, parent)

    async def _begin_alone(self, tenant: str, sent: Conversation, new: str, id_: str, parent: str) -> Begun:
        """By what this process knows."""
        for kept in self._near_by(tenant, sent):
            begun = await self._programs.go_on(kept.program, sent.head, kept.head, id_)
            if begun is not None:
                return begun
        return await self._programs.begin(new, sent.head, id_, parent)

    async def _find(self, tenant: str, sent: Conversation) -> list[Kept] | None:
        """The programs that a request may go on with, the likeliest first; None: Redis is away."""
        if self._scripts is None:
            return None
        found = await self._scripts.try_script(_FIND, [_key(tenant, place) for place in sent.places], [MOST])
        if found is None:
            return None
        pairs = zip(found[::2], found[1::2], strict=True)
        return sent.continues([Kept(f"{tenant}/{name.decode()}", *orjson.loads(value)) for name, value in pairs])

    def _near_by(self, tenant: str, sent: Conversation) -> list[Kept]:
        """Those that a request may go on with, the likeliest first, as far as this process knows."""
        now = self._clock()
        near = (self._near.get(f"{tenant}/{place}", now) or {} for place in sent.places)
        return sent.continues([kept for each in near for kept in each.values()])

    def _move(self, tenant: str, program: str, sent: Conversation) -> Standing:
        """A program has sent this: it is found here from now on, and no more where it was before."""
        now, place = self._clock(), f"{tenant}/{sent.place}"
        kept = Kept(program, sent.length, sent.head, sent.place, now)
        for old in sent.places:
            if (left := self._near.get(f"{tenant}/{old}", now)) is not None:
                left.pop(program, None)
        there = self._near.get(place, now) or {}
        there[program] = kept  # the last one
        while len(there) > MOST:
            del there[next(iter(there))]
        self._near.put(place, there, now + self._ttl_s, owner=tenant)
        return Standing(tenant, kept)


# The places of a tenant are in one slot of a Redis cluster, for the scripts touch several; its programs are in it, too.


def _heads(tenant: str) -> str:
    """The key of what names a tenant's places."""
    return f"heads/{{{tenant}}}"


def _key(tenant: str, place: str) -> str:
    return f"{_heads(tenant)}/{place}"
