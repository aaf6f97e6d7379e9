"""`/v1/completions`, `/tokenize` and `/detokenize` (in vLLM's shapes): requests in, replies and events out."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import ConfigDict, Discriminator, Field, Tag

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import Answer, ChatPrompt, ModelCard, RawPrompt, TextDelta
from holdfast.router.protocol.body import Body, missing, read
from holdfast.router.protocol.chat import Messages, Tools, check_tools, plain_messages, plain_tools
from holdfast.router.protocol.replies import ChunkEncoder, TextOffsets, closed_choice, completion_logprobs, whole_reply
from holdfast.router.protocol.turn import (
    MAX_ANSWERS,
    MAX_LOGPROBS,
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

OBJECT = "text_completion"
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _prompt_kind(value: object) -> str:
    if not isinstance(value, list):
        return "a text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists of token ids" if isinstance(first, list) else "token ids"


class CompletionBody(GenerationBody):
    """A prompt is text or token ids; there may be a list of prompts. `max_tokens` may be 0 with `echo`."""

    prompt: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[Tokens, Tag("token ids")]
        | Annotated[Annotated[list[Text], Field(max_length=MAX_ANSWERS)], Tag("texts")]
        | Annotated[Annotated[list[Tokens], Field(max_length=MAX_ANSWERS)], Tag("lists of token ids")],
        Discriminator(_prompt_kind),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Logprobs | None = None
    n: Choices = 1
    echo: bool = False  # the reply begins with the prompt, with its log probabilities if any are asked for


def read_completion(raw: bytes, models: Sequence[ModelCard]) -> Turn:
    """The turn of a request body. Raises InvalidRequestError, ContextLengthError or RefusedError."""
    body = read(CompletionBody, raw)
    return check_length(completion_turn(body, find_model(body.model, models)))


def completion_turn(body: CompletionBody, card: ModelCard) -> Turn:
    """The turn of `body`. Raises InvalidRequestError, naming the field."""
    body = with_defaults(body, card)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("'max_tokens' may be 0 only with 'echo': true", "max_tokens")
    prompts = _prompts(body, card)
    turn = build_turn(body, prompts[0], card, build_sampling(body, card, body.max_tokens, logprobs=body.logprobs))
    return several(turn, prompts, body.n) if len(prompts) > 1 or body.n > 1 else turn


def _prompts(body: CompletionBody, card: ModelCard) -> list[RawPrompt]:
    value: Any = body.prompt
    single = isinstance(value, str) or isinstance(value[0], int)
    prompts = [value] if single else value
    return [
        raw_prompt(each, card, f"prompt.{i}" if len(prompts) > 1 else "prompt", echo=body.echo)
        for i, each in enumerate(prompts)
    ]


def raw_prompt(value: str | list[int], card: ModelCard, field: str, *, echo: bool = False) -> RawPrompt:
    """A prompt of text or token ids. Raises InvalidRequestError for an id outside the vocabulary."""
    if isinstance(value, str):
        return RawPrompt(value, echo)
    check_tokens(value, card, field)
    return RawPrompt(tuple(value), echo)


def completion_reply(reply_id: str, created: int, model: str, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
    """The `text_completion` object in JSON. `others` are the choices after the first; `answer` has the usage of all."""
    choices = [
        closed_choice(index, each, completion_logprobs(each.logprobs), text=each.text or "")
        for index, each in enumerate((answer, *others))
    ]
    return whole_reply(OBJECT, reply_id, created, model, choices, answer.usage)


class CompletionEncoder(ChunkEncoder):
    """Writes `text_completion` chunks. Completions have no reasoning and no tool calls."""

    KIND = OBJECT
    LAST: ClassVar = {"text": ""}

    def __init__(self, *head: Any) -> None:
        super().__init__(*head)
        self._offsets = TextOffsets()

    def text(self, piece: TextDelta) -> bytes:
        if not piece.text and not piece.logprobs:
            return b""
        return self.chunk(completion_logprobs(piece.logprobs, self._offsets), None, text=piece.text)


# ---- /tokenize and /detokenize ----


class TokenizeBody(Body):
    """Either `prompt` or `messages`. A generation from the same input starts with the same ids."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


def read_tokenize(raw: bytes, models: Sequence[ModelCard]) -> tuple[ChatPrompt | RawPrompt, ModelCard]:
    """The prompt of a request body, and the model. Raises InvalidRequestError unless there is exactly one prompt."""
    body = read(TokenizeBody, raw)
    card = _card(body.model, models)
    if (body.messages is None) == (body.prompt is None):
        raise InvalidRequestError("Give either 'prompt' or 'messages'", "prompt")
    if body.messages is None:
        return raw_prompt(body.prompt or "", card, "prompt"), card
    check_tools(body.tools)
    kwargs = body.chat_template_kwargs
    return ChatPrompt(plain_messages(body.messages), plain_tools(body.tools), template_kwargs=kwargs), card


def read_detokenize(raw: bytes, models: Sequence[ModelCard]) -> list[int]:
    """The ids of a request body. Raises InvalidRequestError for an id outside the vocabulary."""
    body = read(DetokenizeBody, raw)
    check_tokens(body.tokens, _card(body.model, models), "tokens")
    return body.tokens


def tokenize_reply(tokens: Sequence[int], card: ModelCard) -> bytes:
    ids = [int(token) for token in tokens]
    return orjson.dumps({"count": len(ids), "max_model_len": card.context_length, "tokens": ids, "token_strs": None})


def detokenize_reply(text: str) -> bytes:
    return orjson.dumps({"prompt": text})


def _card(name: str | None, models: Sequence[ModelCard]) -> ModelCard:
    """The model called `name`, or the only one. Raises RefusedError or InvalidRequestError."""
    if name is None and len(models) > 1:
        raise missing("model")
    return models[0] if name is None else find_model(name, models)
