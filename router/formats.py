"""Wire formats: how one endpoint that generates reads its requests and writes its answers. `turns` runs them all.

A format is made of two objects: a `Format` lives as long as the router and reads, an `Exchange` is one request that it
has read. Chat and plain completion are here, `/v1/responses` is in `responses`, `/v1/messages` in `anthropic`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from holdfast.replicas.requests import Answer, ModelCard
from holdfast.router.entry import Entry
from holdfast.router.prefills import StoredPrefills
from holdfast.router.protocol.chat import chat_reply, read_chat
from holdfast.router.protocol.completions import completion_reply, read_completion
from holdfast.router.protocol.prefills import continued
from holdfast.router.protocol.turn import Turn, check_length
from holdfast.router.streaming import ChatEncoder, CompletionEncoder, Encoder


@dataclass(frozen=True, slots=True)
class Arrival:
    """What every exchange knows of its request: whose it is, an id that no other one has, and when it came.

    `created` is in seconds since the epoch. `models` is never empty.
    """

    tenant: str
    unique: str
    created: int
    models: Sequence[ModelCard]


class Exchange(Protocol):
    """One request, read and valid. Its answer is written once, by `encoder` or by `reply`; then comes `keep`."""

    @property
    def turn(self) -> Turn: ...

    @property
    def program(self) -> str:
        """The key of the program that the request goes on with, where the format knows; "": it does not."""
        ...

    @property
    def skipped(self) -> str:
        """What of the request was left out, for the header `x-holdfast-skipped`; "": nothing."""
        ...

    def encoder(self, choice: int = 0) -> Encoder:
        """What writes this one of the answers as events; only formats whose turns have `others` are asked for more."""
        ...

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        """The whole answer in JSON, and the others that were asked for."""
        ...

    async def keep(self, program: str) -> None:
        """Keep what later requests may name of the answer, which was a turn of `program`. Its client waits for this."""
        ...

    def kept(self, data: bytes) -> bytes:
        """`data`, which is the answer or the end of its events, once `keep` has told whether the answer is kept."""
        ...


class Format(Protocol):
    """One endpoint. `name` is its label in metrics and logs."""

    name: str

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        """What the request asks for. Raises HoldfastError or ClientGoneError."""
        ...


class KeepsNothing:
    """What an exchange does whose answer no later request may name."""

    __slots__ = ()

    async def keep(self, program: str) -> None:
        return

    def kept(self, data: bytes) -> bytes:
        return data


@dataclass(frozen=True, slots=True)
class PlainExchange(KeepsNothing):
    """A request of a format that keeps nothing."""

    turn: Turn
    make_encoder: Callable[[int], Encoder]
    make_reply: Callable[[Answer, Sequence[Answer]], bytes]
    program: str = ""

    @property
    def skipped(self) -> str:
        return ", ".join(self.turn.skipped)

    def encoder(self, choice: int = 0) -> Encoder:
        return self.make_encoder(choice)

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        return self.make_reply(answer, others)


class ChatFormat:
    """`/v1/chat/completions`."""

    name = "chat"

    def __init__(self, entry: Entry, prefills: StoredPrefills) -> None:
        self._entry = entry
        self._prefills = prefills

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        turn, program = await self._entry.read(request, read_chat, arrival.models), ""
        if turn.prefill_id:
            prefill = await self._prefills.find(arrival.tenant, turn.prefill_id, "prefill_id")
            turn, program = check_length(continued(turn, prefill)), prefill.program
        reply_id, created, model = f"chatcmpl-{arrival.unique}", arrival.created, turn.model.name
        return PlainExchange(
            turn,
            lambda choice: ChatEncoder(
                reply_id, created, model, turn.include_usage, turn.event_names, choice, turn.thoughts
            ),
            lambda answer, others: chat_reply(reply_id, created, model, answer, others, turn.thoughts),
            program,
        )


class CompletionFormat:
    """`/v1/completions`."""

    name = "completion"

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        turn = await self._entry.read(request, read_completion, arrival.models)
        reply_id, created, model = f"cmpl-{arrival.unique}", arrival.created, turn.model.name
        return PlainExchange(
            turn,
            lambda choice: CompletionEncoder(reply_id, created, model, turn.include_usage, choice),
            lambda answer, others: completion_reply(reply_id, created, model, answer, others),
        )
