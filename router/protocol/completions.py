"""`/v1/completions`: its request body, the turn it becomes, and the whole reply. Chunks are in `streaming`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import orjson
from pydantic import Discriminator, Field, Tag, field_validator

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import Answer, ModelCard, RawPrompt
from holdfast.router.protocol.body import decode, one_or_many, validate
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints
from holdfast.router.protocol.turn import (
    GenerationBody,
    TokenId,
    Turn,
    build_sampling,
    build_turn,
    check_length,
    check_tokens,
    find_model,
)
from holdfast.router.protocol.usage import completion_logprobs, usage_object

MAX_LOGPROBS = 20


class CompletionBody(GenerationBody):
    """What a client may send. One prompt: text, or token ids, or a list with one of these in it."""

    prompt: Annotated[Annotated[str, Tag("one")] | Annotated[list[TokenId], Tag("many")], Discriminator(one_or_many)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    kv_hints: KvHints | None = None  # vLLM's: what parts of the prompt are worth in the cache

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_prompt(cls, given: Any) -> Any:
        if not isinstance(given, list) or not given or not isinstance(given[0], str | list):
            return given
        if len(given) > 1:
            raise ValueError("only one prompt a request is supported")
        return given[0]


def read_completion(raw: bytes, models: Sequence[ModelCard]) -> Turn:
    """The turn that a request body asks for. Raises InvalidRequestError, ContextLengthError or RefusedError."""
    body = validate(CompletionBody, decode(raw))
    return check_length(completion_turn(body, find_model(body.model, models)))


def completion_turn(body: CompletionBody, card: ModelCard) -> Turn:
    """The turn `body` asks for. Raises InvalidRequestError or ContextLengthError, naming the field."""
    prompt = raw_prompt(body.prompt, card)
    sampling = build_sampling(body, card, body.logprobs, body.max_tokens, "max_tokens")
    hints = read_hints(body.kv_hints)
    check_ranges(hints, 0)
    return replace(build_turn(body, prompt, card, sampling), hints=hints)


def raw_prompt(given: str | list[int], card: ModelCard) -> RawPrompt:
    """A prompt of text or token ids. Raises InvalidRequestError where it is empty or an id is unknown."""
    if not given:
        raise InvalidRequestError("'prompt' must not be empty", "prompt")
    if isinstance(given, str):
        return RawPrompt(given)
    check_tokens(given, card, "prompt")
    return RawPrompt(tuple(given))


def completion_reply(reply_id: str, created: int, model: str, answer: Answer) -> bytes:
    """The `text_completion` object in JSON. `created` is in seconds since the epoch."""
    choice = {
        "index": 0,
        "text": answer.text or "",
        "logprobs": completion_logprobs(answer.logprobs) if answer.logprobs else None,
        "finish_reason": answer.reason,
    }
    return orjson.dumps(
        {
            "id": reply_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": usage_object(answer.usage),
        }
    )
