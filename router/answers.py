"""A whole answer as pieces, and its form in the store. Pieces to answer: `replicas/requests.py`."""

from dataclasses import replace
from hashlib import blake2b
from math import inf, isnan, nan
from typing import Any

import orjson

from holdfast.replicas.requests import (
    Answer,
    Completed,
    LogprobText,
    Piece,
    ReasoningDelta,
    Started,
    TextDelta,
    Timing,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from holdfast.replicas.retention.latency import Called

NONE = "none"  # a log probability that there is not


def pieces_of(answer: Answer) -> tuple[Piece, ...]:
    """The pieces that make up `answer`."""
    pieces: list[Piece] = [Started("", answer.usage.prompt, answer.usage.cached)]
    if answer.reasoning:
        pieces.append(ReasoningDelta(answer.reasoning))
    if answer.text or answer.logprobs:
        pieces.append(TextDelta(answer.text or "", answer.logprobs))
    for index, call in enumerate(answer.tool_calls):
        pieces.append(ToolCallDelta(index, call.call_id, call.name, call.arguments, call.closed))
    pieces.append(Completed(answer.reason, answer.usage, answer.timing, answer.called, answer.stop))
    return tuple(pieces)


def repeated(answer: Answer, unique: str) -> Answer:
    """`answer` to another request: its calls have ids of their own, made from `unique`.

    An id that the model wrote itself (`functions.get_weather:0`) stays: its template shows ids to the model.
    """
    calls = tuple(
        call if ":" in call.call_id else replace(call, call_id=_call_id(call.call_id, f"{unique}/{index}"))
        for index, call in enumerate(answer.tool_calls)
    )
    return replace(answer, tool_calls=calls)


def _call_id(before: str, name: str) -> str:
    """An id in the form of `before`: with a prefix, or nine letters and digits, which is all that Mistral takes."""
    digest = blake2b(name.encode(), digest_size=12).hexdigest()
    return f"call_{digest}" if before.startswith("call_") else digest[:9]


def encode_answer(answer: Answer) -> bytes:
    """`answer` in JSON, without its timing."""
    usage = answer.usage
    return orjson.dumps(
        {
            "text": answer.text,
            "tool_calls": [[call.call_id, call.name, call.arguments, call.closed] for call in answer.tool_calls],
            "logprobs": [_pack(token) for token in answer.logprobs],
            "reason": answer.reason,
            "usage": [usage.prompt, usage.cached, usage.completion, usage.reasoning],
            "called": [answer.called.tools, answer.called.last],
            "reasoning": answer.reasoning,
            "stop": answer.stop,
        }
    )


def decode_answer(value: bytes) -> Answer:
    """The answer in `value`. Raises ValueError for anything that `encode_answer` did not write."""
    try:
        read = orjson.loads(value)
        return Answer(
            text=read["text"],
            tool_calls=tuple(ToolCall(*call) for call in read["tool_calls"]),
            logprobs=tuple(_unpack(token) for token in read["logprobs"]),
            reason=read["reason"],
            usage=Usage(*read["usage"]),
            timing=Timing(arrived=0.0),
            called=Called(tuple(read["called"][0]), read["called"][1]),
            reasoning=read["reasoning"],
            stop=read["stop"],
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer: {error}") from None


def _pack(token: LogprobText) -> list[Any]:
    logprob = NONE if isnan(token.logprob) else token.logprob
    return [token.token, token.bytes.hex(), logprob, [_pack(other) for other in token.top]]


def _unpack(packed: list[Any]) -> LogprobText:
    token, raw, logprob, top = packed
    value = -inf if logprob is None else nan if logprob == NONE else logprob  # JSON has no infinity
    return LogprobText(token, bytes.fromhex(raw), value, tuple(_unpack(other) for other in top))
