"""`/v1/completions`: its request body, the turn it becomes, and the whole reply. Chunks are in `streaming`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import orjson
from pydantic import Discriminator, Field, Tag

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import Answer, ModelCard, RawPrompt
from holdfast.router.protocol.body import decode, validate
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints
from holdfast.router.protocol.turn import (
    MAX_ANSWERS,
    Choices,
    GenerationBody,
    TokenId,
    Turn,
    build_sampling,
    build_turn,
    check_length,
    check_tokens,
    find_model,
    several,
    with_defaults,
)
from holdfast.router.protocol.usage import completion_logprobs, usage_object

MAX_LOGPROBS = 20


def _prompt_kind(given: object) -> str:
    if not isinstance(given, list):
        return "a text"
    first = given[0] if given else None
    return "texts" if isinstance(first, str) else "lists of token ids" if isinstance(first, list) else "token ids"


class CompletionBody(GenerationBody):
    """What a client may send. A prompt is text or token ids; there may be a list of them. `max_tokens` may be 0
    with `echo`.
    """

    prompt: Annotated[
        Annotated[str, Tag("a text")]
        | Annotated[list[TokenId], Tag("token ids")]
        | Annotated[Annotated[list[str], Field(max_length=MAX_ANSWERS)], Tag("texts")]
        | Annotated[Annotated[list[list[TokenId]], Field(max_length=MAX_ANSWERS)], Tag("lists of token ids")],
        Discriminator(_prompt_kind),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    n: Choices = 1
    echo: bool = False  # the reply begins with the prompt, with its log probabilities where some are asked for
    kv_hints: KvHints | None = None  # vLLM's: what parts of the prompt are worth in the cache


def read_completion(raw: bytes, models: Sequence[ModelCard]) -> Turn:
    """The turn that a request body asks for. Raises InvalidRequestError, ContextLengthError or RefusedError."""
    body = validate(CompletionBody, decode(raw))
    return check_length(completion_turn(body, find_model(body.model, models)))


def completion_turn(body: CompletionBody, card: ModelCard) -> Turn:
    """The turn `body` asks for. Raises InvalidRequestError or ContextLengthError, naming the field."""
    body = with_defaults(body, card)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("'max_tokens' may be 0 only with 'echo': true", "max_tokens")
    prompts = _prompts(body, card)
    sampling = build_sampling(body, card, body.logprobs, body.max_tokens, "max_tokens")
    hints = read_hints(body.kv_hints)
    check_ranges(hints, 0)
    turn = replace(build_turn(body, prompts[0], card, sampling), hints=hints)
    return several(turn, prompts, body.n) if len(prompts) > 1 or body.n > 1 else turn


def _prompts(body: CompletionBody, card: ModelCard) -> list[RawPrompt]:
    given = body.prompt
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [raw_prompt(given, card, echo=body.echo)]  # type: ignore[arg-type]
    if len(given) == 1:
        return [raw_prompt(given[0], card, echo=body.echo)]
    return [raw_prompt(each, card, f"prompt.{i}", echo=body.echo) for i, each in enumerate(given)]  # type: ignore[arg-type]


def raw_prompt(given: str | list[int], card: ModelCard, field: str = "prompt", *, echo: bool = False) -> RawPrompt:
    """A prompt of text or token ids. Raises InvalidRequestError where it is empty or an id is unknown."""
    if not given:
        raise InvalidRequestError(f"'{field}' must not be empty", field)
    if isinstance(given, str):
        return RawPrompt(given, echo)
    check_tokens(given, card, field)
    return RawPrompt(tuple(given), echo)


def completion_reply(reply_id: str, created: int, model: str, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
    """The `text_completion` object in JSON. `created` is in seconds since the epoch.

    `others` are the choices after the first; the usage of all of them is that of `answer`.
    """
    return orjson.dumps(
        {
            "id": reply_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [_choice(index, each) for index, each in enumerate((answer, *others))],
            "usage": usage_object(answer.usage),
        }
    )


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text or "",
        "logprobs": completion_logprobs(answer.logprobs) if answer.logprobs else None,
        "finish_reason": answer.reason,
    }
