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
    """A whole reply and its replica; `replica_id` is "" if no replica was reached."""

    replica_id: str
    reply: Answer | Errored


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of a reply that arrived together, in order, and their replica. Never empty.

    `choice`: the number of the answer, if the request asks for several. `drawn`: the tokens of the pieces.
    """

    replica_id: str
    pieces: tuple[Piece, ...]
    choice: int = 0
    drawn: ReplyTokens = NOTHING_DRAWN


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """The router's knowledge of the best replica for a turn. It is a preference, unless it is `bound`."""

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
    """The replicas as the router sees them.

    Any method may raise `HoldfastError`: `OverloadedError` if no replica has room, `UnavailableError` without
    replicas. Other exceptions are bugs and are answered with status 500.
    """

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        """The whole reply. Cancelling the call aborts the request on its replica."""
        ...

    def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        """The reply as it is made; the last piece of the last batch is `Completed` or `Errored`.

        Closing the generator (`aclose`) before that aborts the request on its replica. The caller closes it exactly
        once on every path, even if it was never iterated.
        """
        ...

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        """Run a command on a session at its replica. `program`: the session's key.

        Raises UnknownSessionError and the session's other errors, SessionLostError if that replica is gone.
        """
        ...

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        """A tenant's open sessions at the replicas that answer in time."""
        ...

    async def end_program(self, scope: str, program_id: str) -> None:
        """End a program: the replicas drop what they keep for it. Its running requests go on."""
        ...

    async def release(self, scope: str, handle: str) -> None:
        """Release a prefill handle. Does nothing if no replica knows it."""
        ...

    async def drawn(self, request_id: str) -> Usage | None:
        """The usage of an aborted request, once its replica has ended it; None if the replica does not answer."""
        ...

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str) -> Sequence[int]:
        """The token ids of `prompt`. `scope`: the tenant."""
        ...

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special tokens included."""
        ...

    async def models(self) -> Sequence[ModelCard]:
        """One card for each served model, from memory; () before start-up."""
        ...

    async def metrics(self, only: str | None = None) -> Mapping[str, str]:
        """The Prometheus exposition of each replica, by replica id. With `only` the others' are empty."""
        ...

    async def status(self) -> Sequence[ReplicaStatus]:
        """The status of each replica that answers in time."""
        ...

    async def activity(self, scope: str | None) -> Sequence[bytes]:
        """The current activity of each replica that answers in time, for a tenant or (None) for all, in JSON.

        One object for each: `replica` (id), `status` (a `ReplicaStatus`, for all tenants only), `turns` and `pins`
        (rows of `replicas.activity`).
        """
        ...

    async def healthy(self) -> bool:
        """Whether a replica answers."""
        ...
