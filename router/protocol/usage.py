"""The `usage` and `logprobs` objects of OpenAI replies."""

import codecs
from collections.abc import Sequence
from math import isnan
from typing import Any

from holdfast.replicas.requests import LogprobText, Usage

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts; `cached_tokens` is always there, 0 for a miss, and `reasoning_tokens` where the model thought."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    if usage.reasoning:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return counts


def chat_logprobs(tokens: Sequence[LogprobText]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where the tokens of one text begin in it, in characters; a split character counts once it is whole."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def next(self, token: LogprobText) -> int:
        """The offset of the token that comes next."""
        begin = self._end
        self._end += len(self._utf8.decode(token.bytes))
        return begin


def completion_logprobs(tokens: Sequence[LogprobText], offsets: TextOffsets | None = None) -> dict[str, Any]:
    """The `logprobs` object of a plain completion; `offsets` has read the tokens before these."""
    offsets = offsets or TextOffsets()
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [_value(token) for token in tokens],
        "top_logprobs": [
            None if isnan(token.logprob) else {_name(other): _value(other) for other in token.top} for token in tokens
        ],
        "text_offset": [offsets.next(token) for token in tokens],
    }


def _name(token: LogprobText) -> str:
    """A token as OpenAI's plain completions name it: where it is no whole characters, by its bytes."""
    try:
        token.bytes.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.token}"
    return token.token


def _entry(token: LogprobText) -> dict[str, Any]:
    return {"token": token.token, "logprob": _value(token), "bytes": list(token.bytes)}


def _value(token: LogprobText) -> float | None:
    return None if isnan(token.logprob) else max(token.logprob, LEAST_LOGPROB)
