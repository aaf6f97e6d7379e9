"""The interface between the HTTP layer and the replicas. It knows neither HTTP nor Ray: `cluster` implements it."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.replicas.requests import (
    NOTHING_DRAWN,
    Answer,
    ChatPrompt,
    Errored,
    GenerateRequest,
    ModelCard,
    Piece,
    RawPrompt,
    ReplyTokens,
    SessionCall,
    SessionState,
    Usage,
)
from holdfast.replicas.stats import ReplicaStatus


@dataclass(frozen=True, slots=True)
class Routed:
    """A whole reply and the replica that gave it; `replica_id` is "" where none was reached."""

    replica_id: str
    reply: Answer | Errored


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of a reply that arrived together, in order, and the replica they come from. Never empty.

    `choice`: of which answer to the request, where there are several. `drawn`: the tokens they come from.
    """

    replica_id: str
    pieces: tuple[Piece, ...]
    choice: int = 0
    drawn: ReplyTokens = NOTHING_DRAWN


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """What the router knows of where a turn is best served: a wish, unless it is `bound`."""

    home: str | None = None  # the replica of the program's last turn, by the program's record
    parent: str | None = None  # the replica of the parent program
    prefixes: tuple[str, ...] = ()  # digests of the prompt's beginnings, longest first
    tokens: int = 0  # of the prompt, about
    prefix_tokens: int = 0  # of these, in the shortest of `prefixes`
    shared: bool = True  # False: Redis is away, so other routers cannot be asked
    bound: bool = False  # only `home` can serve it
    # Digests of whole conversations in the prompt, the longest first, each with its tokens. Only this router knows
    # where they were sent.
    histories: tuple[tuple[str, int], ...] = ()


ANYWHERE = RoutingHint()


class Backend(Protocol):
    """The replicas, seen from the router.

    Any method may raise `HoldfastError`: `OverloadedError` where no replica has room, `UnavailableError` where
    none is there. Other exceptions are bugs and are answered with status 500.
    """

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        """The whole reply. Cancelling the call aborts the request on its replica."""
        ...

    def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        """The reply as it is made; the last piece of the last batch is `Completed` or `Errored`.

        Closing the generator (`aclose`) before that aborts the request on its replica. It is closed exactly once
        on every path, also when it was never iterated.
        """
        ...

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        """Ask it of the session, the program of this key, at its replica.

        Raises UnknownSessionError and what else the session says, SessionLostError where that replica is gone.
        """
        ...

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        """A tenant's open sessions, of the replicas that answer in time."""
        ...

    async def end_program(self, scope: str, program_id: str) -> None:
        """A program is over: the replicas keep nothing for it any more. What runs of it goes on."""
        ...

    async def release(self, scope: str, handle: str) -> None:
        """Nobody comes back for what was computed ahead under a handle. Nothing, where no replica knows it."""
        ...

    async def drawn(self, request_id: str) -> Usage | None:
        """What was done for a request that was aborted, once its replica has ended it; None where it does not say."""
        ...

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str) -> Sequence[int]:
        """The token ids that a generation from `prompt` would start with. `scope`: the tenant that asks."""
        ...

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special tokens included."""
        ...

    async def models(self) -> Sequence[ModelCard]:
        """What is served, one card a model. Asked on every request, so answered from memory; () before start-up."""
        ...

    async def metrics(self, only: str | None = None) -> Mapping[str, str]:
        """The Prometheus text exposition of each replica by its id, each sample labelled with it.

        With `only` the others' are empty.
        """
        ...

    async def status(self) -> Sequence[ReplicaStatus]:
        """What each replica that answers in time says of itself."""
        ...

    async def activity(self, scope: str | None) -> Sequence[bytes]:
        """What each replica that answers in time does now for a tenant, None: for all, in JSON.

        An object each: `replica`, its id; `status`, a `ReplicaStatus` for those who ask for all; `turns` and `pins`,
        rows as `replicas.activity` has them.
        """
        ...

    async def healthy(self) -> bool:
        """Whether at least one replica can take requests."""
        ...
