"""The `usage` and `logprobs` objects of OpenAI replies."""

from collections.abc import Sequence
from typing import Any

from holdfast.replicas.events import Usage
from holdfast.replicas.requests import LogprobText

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI sends this


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts; `cached_tokens` is always there, 0 for a miss."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def chat_logprobs(tokens: Sequence[LogprobText]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content = [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[LogprobText], offset: int = 0) -> dict[str, Any]:
    """The `logprobs` object of a plain completion; `offset` is the length of the text before these tokens."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_value(token) for token in tokens],
        "top_logprobs": [{other.token: _value(other) for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _entry(token: LogprobText) -> dict[str, Any]:
    return {"token": token.token, "logprob": _value(token), "bytes": list(token.bytes)}


def _value(token: LogprobText) -> float:
    return max(token.logprob, LEAST_LOGPROB)
