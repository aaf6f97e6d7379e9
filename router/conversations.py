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
from holdfast.router.lru import Lru
from holdfast.router.programs import Begun, ProgramTable, Scripts

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
    """What a request sends. `places`: where what it continues may be kept, best first; its own is `place`."""

    place: str
    head: str
    length: int
    places: tuple[str, ...]
    digest: Callable[[int], str]  # of the first so many messages, or characters
    mark: Callable[[int], str]  # of the reply that follows them
    again: bool  # it is not a program's first, so whoever has sent the same and had no reply sends it again

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
    """The chain of `prompt`. `scope`: what conversations are never shared across, the model's name."""
    return _chat(scope, prompt) if isinstance(prompt, ChatPrompt) else _plain(scope, prompt)


CHARACTERS = 4  # of a token, about: for placing programs that is exact enough
FIRST_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Preamble:
    """What other programs' prompts begin with as well: tools, and the messages before the first of a user.

    `tokens` is about its length, `prompt_tokens` about that of the whole prompt.
    """

    digest: str
    tokens: int
    prompt_tokens: int


def preamble(scope: str, prompt: ChatPrompt | RawPrompt) -> Preamble:
    """That of `prompt`. `scope`: what it is never shared across, tenant and model."""
    if isinstance(prompt, RawPrompt):
        tokens = len(prompt.content) // (CHARACTERS if isinstance(prompt.content, str) else 1)
        return Preamble("", 0, tokens)
    first = list(takewhile(lambda message: message["role"] in FIRST_ROLES, prompt.messages))
    tools = orjson.dumps(prompt.tools, option=orjson.OPT_SORT_KEYS)
    tokens = (len(tools) + sum(map(_length, first))) // CHARACTERS
    whole = (len(tools) + sum(map(_length, prompt.messages))) // CHARACTERS
    digest = _hash(tools, [scope, [_canonical(message) for message in first]])[:8].hex() if tokens else ""
    return Preamble(digest, tokens, whole)


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
    return Conversation(digests[-1], digests[-1], n, places, lambda length: digests[length - 1], mark, bool(replies))


def _plain(scope: str, prompt: RawPrompt) -> Conversation:
    content = prompt.content if isinstance(prompt.content, str) else tuple(prompt.content)

    def digest(length: int) -> str:
        return _hash(b"", [scope, content[:length]]).hex()

    n = len(content)
    places = tuple(_hash(b"", [scope, "plain", content[:each]]).hex() for each in BEGINNINGS if each <= n)
    return Conversation(places[0] if places else "", digest(n), n, places, digest, lambda length: "", again=False)


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

_MOVE = """
local program, value, ttl, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if KEYS[2] then redis.call('HDEL', KEYS[2], program) end
redis.call('HSET', KEYS[1], program, value)
redis.call('PEXPIRE', KEYS[1], ttl)
local over = redis.call('HLEN', KEYS[1]) - most
if over > 0 then
  local all, rows = redis.call('HGETALL', KEYS[1]), {}
  for i = 1, #all, 2 do rows[#rows + 1] = {cjson.decode(all[i + 1])[4], all[i]} end
  table.sort(rows, function(one, two) return one[1] < two[1] end)
  for i = 1, over do redis.call('HDEL', KEYS[1], rows[i][2]) end
end
return {1}
"""

_REPLIED = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return {1}
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a program without a name stands with the turn that has come."""

    tenant: str
    kept: Kept


class Conversations:
    """Where programs without a name stand: in Redis, and those of this process in its memory for when that is away."""

    def __init__(
        self,
        programs: ProgramTable,
        scripts: Scripts | None,
        max_entries: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._programs = programs
        self._scripts = scripts
        self._ttl_s = ttl_s
        self._clock = clock
        self._near: Lru[dict[str, Kept]] = Lru(max_entries)

    async def begin(self, tenant: str, sent: Conversation) -> tuple[Begun, Standing]:
        """A turn comes, of the program that this conversation continues or of a new one."""
        for kept in await self._find(tenant, sent):
            begun = await self._programs.go_on(kept.program, sent.head, kept.head)
            if begun is not None:
                return begun, await self._move(tenant, kept.program, sent, kept)
        key = unnamed_program(tenant, secrets.token_hex(12))
        begun = await self._programs.begin(key, sent.head)
        return begun, await self._move(tenant, key, sent, None)

    async def replied(self, standing: Standing, mark: str) -> None:
        """A program has had its reply; nothing, if it has gone on meanwhile."""
        kept = replace(standing.kept, mark=mark)
        there = self._near.get(f"{standing.tenant}/{kept.place}", self._clock())
        if there is not None and kept.program in there:
            there[kept.program] = kept
        await self._script(_REPLIED, standing.tenant, (kept.place,), (kept.program, kept.value()))

    async def _find(self, tenant: str, sent: Conversation) -> list[Kept]:
        """The programs that a request may go on with, the likeliest first."""
        if not sent.places:
            return []
        found = await self._script(_FIND, tenant, sent.places, (MOST,))
        if found is None:
            now = self._clock()
            near = (self._near.get(f"{tenant}/{place}", now) or {} for place in sent.places)
            return sent.continues([kept for each in near for kept in each.values()])
        pairs = zip(found[::2], found[1::2], strict=True)
        return sent.continues([Kept(name.decode(), *orjson.loads(value)) for name, value in pairs])

    async def _move(self, tenant: str, program: str, sent: Conversation, before: Kept | None) -> Standing:
        """A program has sent this: it is found here from now on, and no more where it was before."""
        now, place = self._clock(), f"{tenant}/{sent.place}"
        kept = Kept(program, sent.length, sent.head, sent.place, now)
        old = () if before is None else (before.place,)
        if old and (left := self._near.get(f"{tenant}/{old[0]}", now)) is not None:
            left.pop(program, None)
        there = self._near.get(place, now) or {}
        there[program] = kept  # the last one
        while len(there) > MOST:
            del there[next(iter(there))]
        self._near.put(place, there, now + self._ttl_s)
        arguments = (program, kept.value(), int(self._ttl_s * 1000), MOST)
        await self._script(_MOVE, tenant, (sent.place, *old), arguments)
        return Standing(tenant, kept)

    async def _script(
        self, source: str, tenant: str, places: Sequence[str], arguments: Sequence[str | bytes | float]
    ) -> list[Any] | None:
        if self._scripts is None:
            return None
        # The places of a tenant are in one slot of a Redis cluster, for the scripts touch several.
        return await self._scripts.script(source, [f"heads/{{{tenant}}}/{place}" for place in places], arguments)
