"""`/tokenize` and `/detokenize`, in the shapes that vLLM gave them."""

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import Field

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt, ModelCard, RawPrompt
from holdfast.router.protocol.body import Body, decode, validate
from holdfast.router.protocol.completions import raw_prompt
from holdfast.router.protocol.messages import Messages, Tools, check_tools, plain_messages, plain_tools
from holdfast.router.protocol.turn import TokenId, check_tokens, find_model


class TokenizeBody(Body):
    """Either `prompt` or `messages`. The ids are those that a generation from the same input would start with."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


def read_tokenize(raw: bytes, models: Sequence[ModelCard]) -> tuple[ChatPrompt | RawPrompt, ModelCard]:
    """The prompt that a request body wants tokenized, and by which model. Raises as `tokenize_prompt`."""
    body = validate(TokenizeBody, decode(raw))
    card = _card(body.model, models)
    return tokenize_prompt(body, card), card


def read_detokenize(raw: bytes, models: Sequence[ModelCard]) -> list[int]:
    """The ids that a request body wants as text. Raises as `detokenize_tokens`."""
    body = validate(DetokenizeBody, decode(raw))
    return detokenize_tokens(body, _card(body.model, models))


def tokenize_prompt(body: TokenizeBody, card: ModelCard) -> ChatPrompt | RawPrompt:
    """The prompt to tokenize. Raises InvalidRequestError unless there is exactly one."""
    if body.messages is not None and body.prompt is None:
        check_tools(body.tools)
        return ChatPrompt(
            messages=plain_messages(body.messages),
            tools=plain_tools(body.tools),
            template_kwargs=body.chat_template_kwargs,
        )
    if body.prompt is not None and body.messages is None:
        return raw_prompt(body.prompt, card)
    raise InvalidRequestError("Give either 'prompt' or 'messages'", "prompt")


def tokenize_reply(tokens: Sequence[int], card: ModelCard) -> bytes:
    reply = {
        "count": len(tokens),
        "max_model_len": card.context_length,
        "tokens": [int(token) for token in tokens],
        "token_strs": None,
    }
    return orjson.dumps(reply)


def detokenize_tokens(body: DetokenizeBody, card: ModelCard) -> list[int]:
    """The ids to turn into text. Raises InvalidRequestError for one outside the vocabulary."""
    check_tokens(body.tokens, card, "tokens")
    return body.tokens


def detokenize_reply(text: str) -> bytes:
    return orjson.dumps({"prompt": text})


def _card(name: str | None, models: Sequence[ModelCard]) -> ModelCard:
    """The model called `name`; where it is left out, the only one. Raises RefusedError or InvalidRequestError."""
    if name is None and len(models) > 1:
        raise InvalidRequestError("Missing required parameter: 'model'", "model")
    return models[0] if name is None else find_model(name, models)
