"""The request readers and answer writers of each API that generates. `turns` serves them all.

A `Format` lives as long as the router and reads requests. An `Exchange` is one request that was read. The formats of
`/v1/responses` are in `responses`, those of sessions in `sessions`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, UnavailableError
from holdfast.replicas.requests import Answer, ChatPrompt, ModelCard, RawPrompt
from holdfast.router.backend import Backend
from holdfast.router.endpoints.prefills import StoredPrefills
from holdfast.router.entry import Entry, answer_headers, json_response
from holdfast.router.protocol.anthropic import (
    AnthropicEncoder,
    chat_prompt,
    message_object,
    messages_turn,
    read_count,
    read_messages,
)
from holdfast.router.protocol.chat import ChatEncoder, chat_reply, read_chat
from holdfast.router.protocol.completions import CompletionEncoder, completion_reply, read_completion
from holdfast.router.protocol.errors import FieldNames
from holdfast.router.protocol.prefills import continued
from holdfast.router.protocol.replies import Encoder
from holdfast.router.protocol.turn import Turn, check_length, find_model


@dataclass(frozen=True, slots=True)
class Arrival:
    """The facts about a request that a format has before it reads the body.

    `unique` is an id of this request alone, `created` seconds since the epoch. `models` is never empty.
    """

    tenant: str
    unique: str
    created: int
    models: Sequence[ModelCard]


async def _nothing(program: str) -> None:
    """A reply that is not stored."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One valid request, and how its answer is written, once: by `encoder`, which gets a choice's number, or `reply`.

    `program` is the key of the program that the request continues, if the format knows it. `keep` stores what later
    requests may refer to, of a turn of this program; the client waits for it. `kept` then returns the final answer or
    last events to send.
    """

    turn: Turn
    encoder: Callable[[int], Encoder]
    reply: Callable[[Answer, Sequence[Answer]], bytes]
    program: str = ""
    keep: Callable[[str], Awaitable[None]] = _nothing
    kept: Callable[[bytes], bytes] = bytes


class Format(Protocol):
    """One endpoint. `name` is its label in metrics and logs."""

    name: str

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        """Raises HoldfastError or ClientGoneError."""
        ...


class ChatFormat:
    """A chat completion."""

    name = "chat"

    def __init__(self, entry: Entry, prefills: StoredPrefills) -> None:
        self._entry = entry
        self._prefills = prefills

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        turn, program = await self._entry.read(request, read_chat, arrival.models), ""
        if turn.prefill_id:
            prefill = await self._prefills.find(arrival.tenant, turn.prefill_id, "prefill_id")
            turn, program = check_length(continued(turn, prefill)), prefill.program
        head = (f"chatcmpl-{arrival.unique}", arrival.created, turn.model.name)
        return Exchange(
            turn,
            lambda choice: ChatEncoder(*head, turn.include_usage, choice, thoughts=turn.thoughts),
            lambda answer, others: chat_reply(*head, answer, others, turn.thoughts),
            program,
        )


class CompletionFormat:
    """A completion of text or token ids."""

    name = "completion"

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        turn = await self._entry.read(request, read_completion, arrival.models)
        head = (f"cmpl-{arrival.unique}", arrival.created, turn.model.name)
        return Exchange(
            turn,
            lambda choice: CompletionEncoder(*head, turn.include_usage, choice),
            lambda answer, others: completion_reply(*head, answer, others),
        )


class MessagesFormat:
    """A message of Anthropic's API."""

    name = "messages"

    def __init__(self, entry: Entry, backend: Backend) -> None:
        self._entry = entry
        self._backend = backend

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        body = await self._entry.read(request, read_messages)
        card = find_model(body.model, arrival.models)
        turn = check_length(messages_turn(body, chat_prompt(body), card))
        reply_id, most = f"msg_{arrival.unique}", body.max_tokens
        return Exchange(
            turn,
            lambda choice: AnthropicEncoder(reply_id, card.name, most),
            lambda answer, others: orjson.dumps(message_object(reply_id, card.name, answer, most)),
        )

    async def count(self, request: Request) -> Response:
        """Count the tokens of a message's prompt."""
        async with self._entry.entered(request) as tenant:
            models = await loaded_models(self._backend)
            body = await self._entry.read(request, read_count)
            find_model(body.model, models)
            translated = chat_prompt(body)
            answer_headers(request).skipped = ", ".join(translated.skipped)
            count = await count_tokens(self._backend, translated.prompt, tenant.name, translated.fields)
            return json_response(orjson.dumps({"input_tokens": count}))


async def loaded_models(backend: Backend) -> Sequence[ModelCard]:
    """The served models. Raises UnavailableError before one is loaded."""
    models = await backend.models()
    if not models:
        raise UnavailableError("No model is loaded yet")
    return models


async def count_tokens(backend: Backend, prompt: ChatPrompt | RawPrompt, tenant: str, fields: FieldNames) -> int:
    """The number of tokens in a prompt. Raises HoldfastError with the request's own field names."""
    try:
        return len(await backend.tokenize(prompt, tenant))
    except HoldfastError as error:
        raise fields.error(error) from error
