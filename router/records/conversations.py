"""Digests of a prompt: by them a request finds its program, and a replica that has computed the prompt's beginning.

A conversation is a chain of digests: tools first, then message after message, so each digest stands for everything up
to its message. The last one is the conversation's `head`. A program without a name is found again by the head of what
it sent last (`programs`): a request looks at the heads that its own chain goes through, the latest first, but only at
those that a reply follows. So a conversation that goes on is found however much was added. A branch off a program's
past is a program of its own, and so is a second run of a task. Runs that stand at the same place are told apart by
their replies.

A plain prompt has no messages. Its program is found under a beginning of what it sent, with the digest of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import orjson

from holdfast.replicas.requests import Answer, ChatPrompt, RawPrompt

REPLIES = 32  # of a conversation that are looked at, the latest
BEGINNINGS = (1024, 256, 64, 16, 4, 1)  # characters or token ids of a plain prompt by which programs are found
CHARACTERS = 4  # of a token, about: exact enough for placing programs
HISTORIES = 5  # conversations looked up for one prompt: its own, and those before its latest replies
PLAIN = 512  # tokens of a plain prompt that others may begin with as well; nothing says where a common beginning ends
FIRST_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Standing:
    """A program's position in its conversation: the messages sent, and the `mark` of the reply ("": none yet)."""

    name: str  # of the program, within its tenant
    length: int
    head: str
    place: str
    at: float
    mark: str = ""

    def value(self) -> bytes:
        """As it is stored; the name and the place are the key."""
        return orjson.dumps([self.length, self.head, self.at, self.mark])

    @classmethod
    def of(cls, name: str, place: str, value: bytes) -> Standing:
        length, head, at, mark = orjson.loads(value)
        return cls(name, length, head, place, at, mark)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The digests of a request's prompt.

    `place` is where its program is found later, `places` are where the program that it continues may stand, best first.
    Lengths are numbers of messages, or of characters or token ids of a plain prompt.
    """

    place: str
    head: str
    length: int
    places: tuple[str, ...]
    digest: Callable[[int], str]  # of the first so many messages, or characters
    mark: Callable[[int], str]  # of the reply that follows them
    chat: bool
    reply_lengths: tuple[int, ...]  # of the conversations that replies follow, the latest first
    preamble: Preamble

    def continues(self, standings: Sequence[Standing]) -> list[Standing]:
        """The programs at these places that the request may continue. The one that has sent most of it comes first."""
        ranked: list[tuple[tuple[bool, int, int, float], Standing]] = []
        for each in standings:
            if not 0 < each.length <= self.length or self.digest(each.length) != each.head:
                continue
            if each.length == self.length:  # the same again, as long as it had no reply; a first request is a new run
                if self.reply_lengths and not each.mark:
                    ranked.append(((True, -each.length, 0, -each.at), each))
                continue
            mark = self.mark(each.length)
            if mark.startswith("calls") and each.mark.startswith("calls") and mark != each.mark:
                continue  # calls have ids, so this is another run's reply
            likely = 0 if mark and mark == each.mark else 1 if each.mark else 2
            ranked.append(((False, -each.length, likely, -each.at), each))
        return [each for _, each in sorted(ranked, key=lambda item: item[0])]


@dataclass(frozen=True, slots=True)
class Preamble:
    """The part of a prompt that other programs' prompts share: tools, and the messages before the first of a user; of a
    plain prompt the first `PLAIN` tokens.

    `digest` is "" where there is none. `tokens` is about its length, `prompt_tokens` that of the whole prompt.
    """

    digest: str
    tokens: int
    prompt_tokens: int


def conversation(scope: str, prompt: ChatPrompt | RawPrompt) -> Conversation:
    """The digests of `prompt`. `scope`: what conversations are never shared across, the model's name and the salt."""
    return _chat(scope, prompt) if isinstance(prompt, ChatPrompt) else _plain(scope, prompt)


def shared_prefix(scope: str, sent: Conversation) -> str:
    """The digest of the preamble. `scope`: what it is never shared across; "": there is no preamble."""
    return _hash(b"preamble", [scope, sent.preamble.digest])[:8].hex() if sent.preamble.digest else ""


def histories(scope: str, sent: Conversation) -> tuple[tuple[str, int], ...]:
    """Digests of the conversations in this one, the longest first, each with about its length in tokens.

    They are its own, under which a branch off it will look, and those before its latest replies: it may be a branch.
    """
    if not sent.chat:
        return ()
    lengths = [sent.length, *sent.reply_lengths][:HISTORIES]
    tokens = sent.preamble.prompt_tokens
    return tuple(
        (_hash(b"history", [scope, sent.digest(each)])[:8].hex(), tokens * each // sent.length) for each in lengths
    )


def placed_by(tenant: str, model: str, cache_salt: str) -> str:
    """The scope within which prompts may share a prefix, for placement."""
    return f"{tenant} {model}\0{cache_salt}" if cache_salt else f"{tenant} {model}"


def prompt_tokens(prompt: ChatPrompt | RawPrompt) -> int:
    """About how many tokens it has, by its length."""
    if isinstance(prompt, RawPrompt):
        return len(prompt.content) // _unit(prompt)
    return (len(orjson.dumps(prompt.tools)) + sum(map(_length, prompt.messages))) // CHARACTERS


def hint(name: str) -> str:
    """The digest of what two prompts share because their clients say so."""
    return _hash(b"hint", name)[:8].hex()


def mark_of(answer: Answer) -> str:
    """By what the next request's copy of a reply is known again."""
    return _mark([call.call_id for call in answer.tool_calls], answer.text)


def _chat(scope: str, prompt: ChatPrompt) -> Conversation:
    messages = prompt.messages
    digests = list(
        accumulate(
            messages,
            lambda before, message: _hash(before, _canonical(message)),
            initial=_hash(b"", [scope, prompt.tools]),
        )
    )
    replies = [i for i in range(len(messages) - 1, 0, -1) if messages[i]["role"] == "assistant"][:REPLIES]

    def digest(length: int) -> str:
        return digests[length].hex()

    def mark(length: int) -> str:
        reply = messages[length]
        return _mark([call["id"] for call in reply.get("tool_calls") or ()], reply.get("content"))

    n = len(messages)
    head, places = digest(n), tuple(map(digest, replies))
    first = sum(1 for _ in takewhile(lambda message: message["role"] in FIRST_ROLES, messages))
    lengths = list(accumulate(map(_length, messages), initial=len(orjson.dumps(prompt.tools))))
    tokens = lengths[first] // CHARACTERS
    preamble = Preamble(digest(first) if tokens else "", tokens, lengths[n] // CHARACTERS)
    return Conversation(head, head, n, (*places, head) if places else (), digest, mark, True, tuple(replies), preamble)


def _plain(scope: str, prompt: RawPrompt) -> Conversation:
    content = prompt.content if isinstance(prompt.content, str) else tuple(prompt.content)

    def digest(length: int) -> str:
        return _hash(b"", [scope, content[:length]]).hex()

    n, unit = len(content), _unit(prompt)
    places = tuple(_hash(b"", [scope, "plain", content[:each]]).hex() for each in BEGINNINGS if each <= n)
    long = n // unit >= PLAIN
    preamble = Preamble(digest(PLAIN * unit) if long else "", PLAIN if long else 0, n // unit)
    return Conversation(places[0] if places else "", digest(n), n, places, digest, lambda _: "", False, (), preamble)


def _unit(prompt: RawPrompt) -> int:
    """The length of a token in a plain prompt: characters, or one id."""
    return CHARACTERS if isinstance(prompt.content, str) else 1


def _length(message: Mapping[str, Any]) -> int:
    return len(message.get("content") or "") + sum(
        len(call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    )


def _canonical(message: Mapping[str, Any]) -> list[object]:
    """The parts of a message that stay the same when a client sends it again. Many clients omit reasoning."""
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
