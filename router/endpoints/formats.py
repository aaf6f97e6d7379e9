"""How each API that generates reads its requests and writes its answers. `turns` serves them all.

A `Format` lives as long as the router and reads requests. An `Exchange` is one request that was read. The formats of
`/v1/responses` are in `responses`, those of sessions in `sessions`.
"""

from collections.abc import Callable, Sequence
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
    """What a format knows of a request before it is read.

    `unique` is an id of this request alone, `created` seconds since the epoch. `models` is never empty.
    """

    tenant: str
    unique: str
    created: int
    models: Sequence[ModelCard]


@dataclass(slots=True)
class Exchange:
    """One valid request. Its answer is written once, by `encoder` or by `reply`; then `keep` is called.

    `program` is the key of the program that the request continues, if the format knows it.
    """

    turn: Turn
    program: str

    @property
    def skipped(self) -> str:
        """The parts of the request that were left out, for the header `x-holdfast-skipped`."""
        return ", ".join(self.turn.skipped)

    def encoder(self, choice: int = 0) -> Encoder:
        """Writes one of the answers as events."""
        raise NotImplementedError

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        """The whole answer in JSON, with the other choices."""
        raise NotImplementedError

    async def keep(self, program: str) -> None:
        """Store what later requests may refer to; the answer was a turn of `program`. The client waits for it."""

    def kept(self, data: bytes) -> bytes:
        """`data`, the answer or its last events, after `keep` has found out whether the answer is stored."""
        return data


@dataclass(slots=True)
class PlainExchange(Exchange):
    """A request whose answer is not stored."""

    make_encoder: Callable[[int], Encoder]
    make_reply: Callable[[Answer, Sequence[Answer]], bytes]

    def encoder(self, choice: int = 0) -> Encoder:
        return self.make_encoder(choice)

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        return self.make_reply(answer, others)


class Format(Protocol):
    """One endpoint. `name` is its label in metrics and logs."""

    name: str

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        """Raises HoldfastError or ClientGoneError."""
        ...


class ChatFormat:
    """`POST /v1/chat/completions`."""

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
        return PlainExchange(
            turn,
            program,
            lambda choice: ChatEncoder(*head, turn.include_usage, turn.event_names, choice, turn.thoughts),
            lambda answer, others: chat_reply(*head, answer, others, turn.thoughts),
        )


class CompletionFormat:
    """`POST /v1/completions`."""

    name = "completion"

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        turn = await self._entry.read(request, read_completion, arrival.models)
        head = (f"cmpl-{arrival.unique}", arrival.created, turn.model.name)
        return PlainExchange(
            turn,
            "",
            lambda choice: CompletionEncoder(*head, turn.include_usage, choice),
            lambda answer, others: completion_reply(*head, answer, others),
        )


class MessagesFormat:
    """`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

    name = "messages"

    def __init__(self, entry: Entry, backend: Backend) -> None:
        self._entry = entry
        self._backend = backend

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        body = await self._entry.read(request, read_messages)
        card = find_model(body.model, arrival.models)
        turn = check_length(messages_turn(body, chat_prompt(body), card))
        reply_id, most = f"msg_{arrival.unique}", body.max_tokens
        return PlainExchange(
            turn,
            "",
            lambda choice: AnthropicEncoder(reply_id, card.name, most),
            lambda answer, others: orjson.dumps(message_object(reply_id, card.name, answer, most)),
        )

    async def count(self, request: Request) -> Response:
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
    """How many tokens a prompt has. Raises HoldfastError with the request's own field names."""
    try:
        return len(await backend.tokenize(prompt, tenant))
    except HoldfastError as error:
        raise fields.error(error) from error
