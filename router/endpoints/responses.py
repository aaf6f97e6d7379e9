"""`/v1/responses`: its formats for `turns`, and the endpoints of stored responses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import ContextLengthError, InvalidRequestError
from holdfast.replicas.requests import Answer, ChatPrompt, ModelCard
from holdfast.router.backend import Backend
from holdfast.router.endpoints.formats import Arrival, Exchange, count_tokens, loaded_models
from holdfast.router.entry import Entry, answer_headers, json_response
from holdfast.router.protocol.body import deleted_reply, read_query
from holdfast.router.protocol.declared_tools import DeclaredTools
from holdfast.router.protocol.replies import Encoder
from holdfast.router.protocol.responses import (
    ENCRYPTED,
    CompactionEncoder,
    ItemsQuery,
    ResponseEncoder,
    ResponsesBody,
    StoredQuery,
    TranslatedItems,
    chat_messages,
    compacted,
    compaction_turn,
    compacts,
    input_items,
    read_responses,
    response_object,
    response_usage,
    responses_turn,
)
from holdfast.router.protocol.turn import Turn, check_length, find_model, with_defaults
from holdfast.router.records import StoredResponse, StoredResponses, StoredTurn, pieces_of


@dataclass(frozen=True, slots=True)
class ChainedRequest:
    """A request, the stored turns that it continues, and the items that it adds."""

    body: ResponsesBody
    before: list[StoredTurn]
    own: list[dict[str, Any]]
    translated: TranslatedItems

    @property
    def program(self) -> str:
        return self.before[-1].program if self.before else ""


class StoredReply:
    """Writes one response and stores it as it was written. If there is no room, its last event says `store: false`."""

    def __init__(self, chained: ChainedRequest, arrival: Arrival, stored: StoredResponses) -> None:
        self._chained = chained
        self._arrival = arrival
        self._stored = stored
        self._written: ResponseEncoder | None = None
        self._lost = False  # it should be stored, and is not

    def encoder(self, choice: int = 0) -> ResponseEncoder:
        body, unique = self._chained.body, self._arrival.unique
        shell = response_object(body, f"resp_{unique}", self._arrival.created)
        conceal = partial(self._stored.items.encrypt, self._arrival.tenant)
        if compacts(self._chained.own):
            self._written = CompactionEncoder(shell, unique, conceal)
        else:
            conceal_thoughts = conceal if ENCRYPTED in body.include else None
            self._written = ResponseEncoder(shell, unique, conceal_thoughts, self._chained.translated.tools)
        return self._written

    def reply(self, answer: Answer, others: Sequence[Answer]) -> bytes:
        return self.encoder().whole(pieces_of(answer))

    async def keep(self, program: str) -> None:
        if self._written is None or not self._chained.body.store:
            return
        response, chain = self._written.response, [each.id for each in self._chained.before]
        turn = StoredTurn(response["id"], self._chained.own, response["output"], chain, program)
        self._lost = True  # also if this fails
        self._lost = not await self._stored.keep(self._arrival.tenant, StoredResponse(response, turn))

    def kept(self, data: bytes) -> bytes:
        return self._written.not_stored(data) if self._written is not None and self._lost else data


class ResponsesFormat:
    """A response."""

    name = "responses"

    def __init__(self, entry: Entry, backend: Backend, stored: StoredResponses) -> None:
        self._entry = entry
        self._backend = backend
        self._stored = stored

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        chained, card = await _read(self._entry, self._stored, request, arrival)
        translate = compaction_turn if compacts(chained.own) else responses_turn
        turn = translate(chained.body, chained.translated, card)
        if chained.body.truncation == "auto" and isinstance(turn.prompt, ChatPrompt):
            turn = await self._truncated(turn, turn.prompt, arrival.tenant)
        reply = StoredReply(chained, arrival, self._stored)
        return Exchange(check_length(turn), reply.encoder, reply.reply, chained.program, reply.keep, reply.kept)

    async def _truncated(self, turn: Turn, prompt: ChatPrompt, tenant: str) -> Turn:
        """`turn` without as many of the oldest exchanges as it takes to fit and to leave room for a reply.

        The messages before the first user's stay, and the last exchange stays even if it does not fit.
        """
        messages, fields = prompt.messages, turn.fields.messages
        starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not starts:
            return turn

        def without(n: int) -> ChatPrompt:
            return replace(prompt, messages=[*messages[: starts[0]], *messages[starts[n] :]])

        async def fits(n: int) -> bool:
            try:
                return len(await self._backend.tokenize(without(n), tenant)) < turn.model.context_length
            except ContextLengthError:
                return False

        least, most = 0, len(starts) - 1
        while least < most:
            n = (least + most) // 2
            if await fits(n):
                most = n
            else:
                least = n + 1
        if fields is not None:
            fields = [*fields[: starts[0]], *fields[starts[least] :]]
        return replace(turn, prompt=without(least), fields=replace(turn.fields, messages=fields))


class CompactionFormat:
    """Compact a conversation: the users' messages, and the model's summary, encrypted."""

    name = "compact"

    def __init__(self, entry: Entry, stored: StoredResponses) -> None:
        self._entry = entry
        self._stored = stored

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        chained, card = await _read(self._entry, self._stored, request, arrival)
        await self._stored.items.prepare()
        body = chained.body.model_copy(update={"stream": False, "stream_options": None})
        turn = check_length(compaction_turn(body, chained.translated, card))

        def reply(answer: Answer, others: Sequence[Answer]) -> bytes:
            summary = self._stored.items.encrypt(arrival.tenant, (answer.text or "").strip())
            compaction = {"id": f"cmp_{arrival.unique}", "type": "compaction", "encrypted_content": summary}
            return orjson.dumps(
                {
                    "id": f"resp_{arrival.unique}",
                    "object": "response.compaction",
                    "created_at": arrival.created,
                    "output": compacted([*_items(chained.before), *chained.own], compaction),
                    "usage": response_usage(answer.usage),
                }
            )

        return Exchange(turn, _no_encoder, reply, chained.program)


def _no_encoder(choice: int) -> Encoder:
    raise NotImplementedError("a compaction is not streamed")


class ResponseEndpoints:
    """Stored responses, and the count of a prompt's tokens."""

    def __init__(self, entry: Entry, backend: Backend, stored: StoredResponses) -> None:
        self._entry = entry
        self._backend = backend
        self._stored = stored

    async def show(self, request: Request) -> Response:
        """A stored response."""
        async with self._entry.entered(request) as tenant:
            read_query(StoredQuery, request.query_params)  # it cannot be streamed
            stored = await self._stored.find(tenant.name, request.path_params["response_id"])
            return json_response(orjson.dumps(stored.response))

    async def delete(self, request: Request) -> Response:
        """Delete a stored response."""
        async with self._entry.entered(request) as tenant:
            response_id = request.path_params["response_id"]
            await self._stored.delete(tenant.name, response_id)
            return json_response(deleted_reply("response", response_id))

    async def cancel(self, request: Request) -> Response:
        """Always refused: a stored response has ended."""
        async with self._entry.entered(request) as tenant:
            await self._stored.find(tenant.name, request.path_params["response_id"])
            raise InvalidRequestError("Cannot cancel a synchronous response: close its connection instead")

    async def input_items(self, request: Request) -> Response:
        """A page of the items of the response's own request, the latest first unless `order` is `asc`."""
        async with self._entry.entered(request) as tenant:
            query = read_query(ItemsQuery, request.query_params)
            stored = await self._stored.find(tenant.name, request.path_params["response_id"])
            return json_response(orjson.dumps(_page(stored.turn.input, query)))

    async def count(self, request: Request) -> Response:
        """Count the tokens of a response's prompt."""
        async with self._entry.entered(request) as tenant:
            models = await loaded_models(self._backend)
            body = await self._entry.read(request, read_responses, models[0].name)
            chained = await _with_chain(self._stored, body, Arrival(tenant.name, "counted", 0, models))
            turn = responses_turn(body, chained.translated, find_model(body.model, models))
            answer_headers(request).skipped = ", ".join(turn.skipped)
            count = await count_tokens(self._backend, turn.prompt, tenant.name, turn.fields)
            return json_response(orjson.dumps({"object": "response.input_tokens", "input_tokens": count}))


async def _read(
    entry: Entry, stored: StoredResponses, request: Request, arrival: Arrival
) -> tuple[ChainedRequest, ModelCard]:
    body = await entry.read(request, read_responses)
    chained = await _with_chain(stored, body, arrival)
    card = find_model(body.model, arrival.models)
    return replace(chained, body=with_defaults(body, card)), card


async def _with_chain(stored: StoredResponses, body: ResponsesBody, arrival: Arrival) -> ChainedRequest:
    before: list[StoredTurn] = []
    if body.previous_response_id is not None:
        before = await stored.conversation(arrival.tenant, body.previous_response_id, "previous_response_id")
    own = input_items(body, arrival.unique)
    items = _items(before)
    if ENCRYPTED in body.include or compacts(own) or any("encrypted_content" in item for item in (*items, *own)):
        await stored.items.prepare()
    reveal = partial(stored.items.decrypt, arrival.tenant)
    tools = DeclaredTools(body.tools)
    return ChainedRequest(body, before, own, chat_messages(items, own, body.instructions, reveal, tools))


def _items(turns: Sequence[StoredTurn]) -> list[dict[str, Any]]:
    """The items of a conversation; a compaction replaces the items before it."""
    items: list[dict[str, Any]] = []
    for each in turns:
        items += each.items
        if items and items[-1]["type"] == "compaction" and compacts(each.input):
            items = compacted(items[:-1], items[-1])
    return items


def _page(items: Sequence[dict[str, Any]], query: ItemsQuery) -> dict[str, Any]:
    listed = list(items) if query.order == "asc" else list(reversed(items))
    if query.after is not None:
        places = [index for index, item in enumerate(listed) if item["id"] == query.after]
        if not places:
            raise InvalidRequestError(f"'after': there is no item {query.after!r}", "after")
        listed = listed[places[0] + 1 :]
    data = listed[: query.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(listed) > len(data),
    }
