"""Conversations as clients send them, and replies as clients add them up: tokens go in, pieces come out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    Completed,
    GenerateRequest,
    ReasoningDelta,
    TextDelta,
    Timing,
    ToolCallDelta,
    Usage,
)
from holdfast.replicas.text.conversation import FREE, Constraints, TextSide
from holdfast.replicas.text.reply import Reply


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def call(arguments: Any, *ids: str) -> dict[str, Any]:
    """A message with calls of "f" of these ids."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": each, "type": "function", "function": function} for each in ids or ("000000001",)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(content: str, call_id: str = "000000001") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@dataclass(frozen=True)
class Told:
    """What a client adds up, `calls` by name and arguments, and what it is made of."""

    reasoning: str
    text: str
    calls: list[list[str]]
    ended: Any
    pieces: list[Any]
    reply: Reply

    @property
    def answer(self) -> Answer:
        """The same as the engine's service adds it up."""
        built, usage = AnswerBuilder(), Usage(0, 0, self.reply.completion_tokens, self.reply.reasoning_tokens)
        built.add((*self.pieces, Completed(self.ended, usage, Timing(0.0))))
        answer = built.answer()
        assert answer is not None
        return answer

    @property
    def logprobs(self) -> list[Any]:
        return [entry for piece in self.pieces if isinstance(piece, TextDelta) for entry in piece.logprobs]


def ids_of(side: TextSide, text: str) -> list[int]:
    found: list[int] = side.tokenizer.encode(text, add_special_tokens=False)
    return found


def told(
    side: TextSide,
    ask: GenerateRequest,
    said: str | list[int],
    cuts: Sequence[int] | None = None,
    *,
    reason: Any = "stop",
    limits: Constraints = FREE,
    logprobs: Sequence[TokenLogprobs] = (),
) -> Told:
    """A reply that the engine ends for `reason` behind `said`, whose tokens come cut at `cuts`, or one by one.

    One that is to be written again does not end.
    """
    reply = side.reply(ask, side.encode(ask.prompt, ask.scope, ask.program_id), limits)
    ids = ids_of(side, said) if isinstance(said, str) else said
    pieces: list[Any] = []
    for begin, end in pairwise(range(len(ids) + 1) if cuts is None else [0, *cuts, len(ids)]):
        pieces += reply.feed(ids[begin:end], logprobs[begin:end])
    tail, ended = reply.finish(reason) if reply.rewrite is None else ([], reason)
    pieces += tail
    texts = ["".join(each.text for each in pieces if isinstance(each, kind)) for kind in (ReasoningDelta, TextDelta)]
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
    return Told(texts[0], texts[1], calls, ended, pieces, reply)
