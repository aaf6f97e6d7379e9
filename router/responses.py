"""`/v1/responses`: its wire formats for `turns`, and what else a tenant may do with its stored responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import ContextLengthError, HoldfastError, InvalidRequestError, UnavailableError
from holdfast.replicas.requests import Answer, ChatPrompt, ModelCard
from holdfast.router.answers import pieces_of
from holdfast.router.backend import Backend
from holdfast.router.entry import Entry
from holdfast.router.formats import Arrival, Exchange, KeepsNothing
from holdfast.router.http import answer_headers, json_response
from holdfast.router.protocol.declared_tools import DeclaredTools
from holdfast.router.protocol.responses import (
    ENCRYPTED,
    ResponsesBody,
    Translated,
    chat_messages,
    compacted,
    compaction_turn,
    compacts,
    input_items,
    read_input,
    read_responses,
    response_object,
    response_usage,
    responses_turn,
)
from holdfast.router.protocol.turn import Turn, check_length, find_model, with_defaults
from holdfast.router.response_events import CompactionEncoder, ResponseEncoder
from holdfast.router.stored_responses import StoredResponse, StoredResponses, StoredTurn

PAGE = 20  # input items in one answer where a client does not say how many
MOST = 100


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with all that it goes on with: `before` are the responses of its chain, `own` the items it adds.

    It `compacts` where it asks to have all of that made short, and for no answer.
    """

    body: ResponsesBody
    before: list[StoredTurn]
    own: list[dict[str, Any]]
    translated: Translated
    compacts: bool = False

    @property
    def program(self) -> str:
        return self.before[-1].program if self.before else ""


class ResponseExchange:
    """One response. It is stored as it was written; where there is no room for it, its `store` is false at its end."""

    def __init__(self, asked: Asked, arrival: Arrival, turn: Turn, skipped: str, stored: StoredResponses) -> None:
        self.turn = turn
        self.skipped = skipped
        self.program = asked.program
        self._asked = asked
        self._arrival = arrival
        self._stored = stored
        self._written: ResponseEncoder | None = None
        self._lost = False  # it was to be stored, and is not

    def encoder(self, choice: int = 0) -> ResponseEncoder:
        arrival, body = self._arrival, self._asked.body
        shell = response_object(body, f"resp_{arrival.unique}", arrival.created)
        conceal = partial(self._stored.items.close, arrival.tenant)
        if self._asked.compacts:
            self._written = CompactionEncoder(shell, arrival.unique, conceal)
        else:
            conceals = conceal if ENCRYPTED in body.include else None
            self._written = ResponseEncoder(shell, arrival.unique, conceals, self._asked.translated.tools)
        return self._written

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        return self.encoder().whole(pieces_of(answer))

    async def keep(self, program: str) -> None:
        if self._written is None:
            return
        asked, response = self._asked, self._written.response
        chain = [each.id for each in asked.before]
        turn = StoredTurn(response["id"], asked.own, response["output"], chain, program)
        if asked.body.store:
            self._lost = True  # also where this fails
            self._lost = not await self._stored.keep(self._arrival.tenant, StoredResponse(response, turn))

    def kept(self, data: bytes) -> bytes:
        return self._written.not_stored(data) if self._written is not None and self._lost else data


class CompactionExchange(KeepsNothing):
    """A conversation made short: what its users said, and a summary by the model that only we can read."""

    def __init__(self, asked: Asked, arrival: Arrival, turn: Turn, skipped: str, stored: StoredResponses) -> None:
        self.turn = turn
        self.skipped = skipped
        self.program = asked.program
        self._asked = asked
        self._arrival = arrival
        self._stored = stored

    def encoder(self, choice: int = 0) -> ResponseEncoder:
        raise NotImplementedError("a compaction is not streamed")

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        arrival, items = self._arrival, [*_items(self._asked.before), *self._asked.own]
        summary = self._stored.items.close(arrival.tenant, (answer.text or "").strip())
        compaction = {"id": f"cmp_{arrival.unique}", "type": "compaction", "encrypted_content": summary}
        return orjson.dumps(
            {
                "id": f"resp_{arrival.unique}",
                "object": "response.compaction",
                "created_at": arrival.created,
                "output": compacted(items, compaction),
                "usage": response_usage(answer.usage),
            }
        )


class ResponsesFormat:
    """`POST /v1/responses`."""

    name = "responses"

    def __init__(self, entry: Entry, backend: Backend, stored: StoredResponses) -> None:
        self._entry = entry
        self._backend = backend
        self._stored = stored

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        asked, card = await _asked(self._entry, self._stored, request, arrival)
        asked = replace(asked, compacts=compacts(asked.own))
        translate = compaction_turn if asked.compacts else responses_turn
        turn, skipped = translate(asked.body, asked.translated, card)
        if asked.body.truncation == "auto" and isinstance(turn.prompt, ChatPrompt):
            turn = await self._fitted(turn, turn.prompt, arrival.tenant)
        return ResponseExchange(asked, arrival, check_length(turn), ", ".join(skipped), self._stored)

    async def _fitted(self, turn: Turn, prompt: ChatPrompt, tenant: str) -> Turn:
        """`turn` without as many of the oldest exchanges of its `prompt` as it takes to fit, and to leave room for a
        reply.

        What stands before the first user's message stays, and so does the last exchange, whether it fits or not.
        """
        messages, fields = prompt.messages, turn.fields.messages
        begins = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not begins:
            return turn

        def without(n: int) -> ChatPrompt:
            return replace(prompt, messages=[*messages[: begins[0]], *messages[begins[n] :]])

        async def fits(n: int) -> bool:
            try:
                return len(await self._backend.tokenize(without(n), tenant)) < turn.model.context_length
            except ContextLengthError:
                return False

        least, most = 0, len(begins) - 1
        while least < most:
            n = (least + most) // 2
            if await fits(n):
                most = n
            else:
                least = n + 1
        if fields is not None:
            fields = [*fields[: begins[0]], *fields[begins[least] :]]
        return replace(turn, prompt=without(least), fields=replace(turn.fields, messages=fields))


class CompactionFormat:
    """`POST /v1/responses/compact`."""

    name = "compact"

    def __init__(self, entry: Entry, stored: StoredResponses) -> None:
        self._entry = entry
        self._stored = stored

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        asked, card = await _asked(self._entry, self._stored, request, arrival)
        await self._stored.items.prepare()
        body = asked.body.model_copy(update={"stream": False, "stream_options": None})
        turn, skipped = compaction_turn(body, asked.translated, card)
        return CompactionExchange(asked, arrival, check_length(turn), ", ".join(skipped), self._stored)


class ResponseEndpoints:
    """Stored responses over HTTP."""

    def __init__(self, entry: Entry, stored: StoredResponses) -> None:
        self._entry = entry
        self._stored = stored

    async def show(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            if request.query_params.get("stream", "false").lower() not in ("false", "0"):
                raise InvalidRequestError("'stream': only responses made in the background can be streamed", "stream")
            stored = await self._stored.find(tenant.name, request.path_params["response_id"])
            return json_response(orjson.dumps(stored.response))

    async def delete(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            response_id = request.path_params["response_id"]
            await self._stored.delete(tenant.name, response_id)
            return json_response(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request) -> Response:
        """Always refused: what is stored has ended, and nothing is made in the background."""
        async with self._entry.entered(request) as tenant:
            await self._stored.find(tenant.name, request.path_params["response_id"])
            raise InvalidRequestError("Cannot cancel a synchronous response: close its connection instead")

    async def input_items(self, request: Request) -> Response:
        """The items that the response's own request had, the latest first unless `order` says `asc`."""
        async with self._entry.entered(request) as tenant:
            stored = await self._stored.find(tenant.name, request.path_params["response_id"])
            return json_response(orjson.dumps(_page(stored.turn.input, request.query_params)))


class CountInput:
    """`POST /v1/responses/input_tokens`: how many tokens the prompt of a response would have."""

    def __init__(self, entry: Entry, backend: Backend, stored: StoredResponses) -> None:
        self._entry = entry
        self._backend = backend
        self._stored = stored

    async def count(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            models = await self._backend.models()
            if not models:
                raise UnavailableError("No model is loaded yet")
            body = await self._entry.read(request, read_input, models[0].name)
            asked = await _with_chain(self._stored, body, Arrival(tenant.name, "counted", 0, models))
            turn, skipped = responses_turn(body, asked.translated, find_model(body.model, models))
            answer_headers(request).skipped = ", ".join(skipped)
            try:
                tokens = await self._backend.tokenize(turn.prompt, tenant.name)
            except HoldfastError as error:
                raise turn.fields.error(error) from error
            return json_response(orjson.dumps({"object": "response.input_tokens", "input_tokens": len(tokens)}))


async def _asked(entry: Entry, stored: StoredResponses, request: Request, arrival: Arrival) -> tuple[Asked, ModelCard]:
    body = await entry.read(request, read_responses)
    asked = await _with_chain(stored, body, arrival)
    card = find_model(body.model, arrival.models)
    return replace(asked, body=with_defaults(body, card)), card


async def _with_chain(stored: StoredResponses, body: ResponsesBody, arrival: Arrival) -> Asked:
    before: list[StoredTurn] = []
    if body.previous_response_id is not None:
        before = await stored.conversation(arrival.tenant, body.previous_response_id, "previous_response_id")
    own = input_items(body, arrival.unique)
    items = _items(before)
    if ENCRYPTED in body.include or compacts(own) or any("encrypted_content" in item for item in (*items, *own)):
        await stored.items.prepare()
    reveal = partial(stored.items.open, arrival.tenant)
    tools = DeclaredTools(body.tools)
    return Asked(body, before, own, chat_messages(items, own, body.instructions, reveal, tools))


def _items(turns: Sequence[StoredTurn]) -> list[dict[str, Any]]:
    """What a conversation has so far; a compaction in it stands for what was before."""
    items: list[dict[str, Any]] = []
    for each in turns:
        items += each.items
        if items and items[-1]["type"] == "compaction" and compacts(each.input):
            items = compacted(items[:-1], items[-1])
    return items


def _page(items: Sequence[dict[str, Any]], asked: Mapping[str, str]) -> dict[str, Any]:
    order, limit, after = asked.get("order", "desc"), asked.get("limit", str(PAGE)), asked.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("'order' must be 'asc' or 'desc'", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MOST)) and 1 <= int(limit) <= MOST):
        raise InvalidRequestError(f"'limit' must be a number from 1 to {MOST}", "limit")
    listed = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [index for index, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise InvalidRequestError(f"'after': there is no item {after!r}", "after")
        listed = listed[places[0] + 1 :]
    data = listed[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(listed) > len(data),
    }
