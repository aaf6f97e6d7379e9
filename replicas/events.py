"""The engine's commands and events: frozen data in token ids, no text.

Every submitted request ends in exactly one terminal event: `Finished`, `Aborted`, `Rejected` or `Failed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.kv.tags import UNLABELLED, Labels
from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import (
    NO_SESSION,
    NOTHING_USED,
    CloseSession,
    ForkSession,
    GenerateRequest,
    OpRecord,
    SessionCommand,
    SessionTurn,
    Started,
    Timing,
    Usage,
)
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.types import NO_TOKENS, TokenIds, record

FinishReason: TypeAlias = Literal["stop", "length"]

REMEMBERED = 128  # latest named operations that a session's log keeps


@dataclass(frozen=True, slots=True, eq=False)
class SessionLog:
    """A session's history: its tokens, the number of appends that made them, and the latest named operations."""

    life: str = ""
    tokens: TokenIds = field(default_factory=lambda: NO_TOKENS)
    appends: int = 0
    done: tuple[OpRecord, ...] = ()


# ---- commands ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(GenerateRequest):
    """A request for the engine: what the client asked for, and what the service makes of it.

    `sampling` is complete. For an operation on a session `tokens` follow the session's history.
    """

    tokens: TokenIds = field(default_factory=lambda: NO_TOKENS)  # the prompt
    n_generated: int = 0  # the last of `tokens` that an earlier attempt drew: part of the reply
    labels: Labels = UNLABELLED  # cache priorities of `tokens`; ignored for a session
    matcher: Matcher | None = None  # restricts the tokens that may be drawn; owned by the engine from here on
    closing: TokenIds = field(default_factory=lambda: NO_TOKENS)  # ends a reply that a session keeps
    foreseen: bool = False  # its deadline was checked before it was tokenized

    @classmethod
    def of(cls, request: GenerateRequest) -> "Submit":
        """`request`, with nothing resolved yet."""
        return cls(**{each.name: getattr(request, each.name) for each in fields(GenerateRequest)})

    @property
    def turn(self) -> SessionTurn:
        """Its operation on a session; `NO_SESSION` without one."""
        return self.session or NO_SESSION


@dataclass(frozen=True, slots=True)
class OpenSession(SessionCommand):
    """Open a session without tokens. It replaces a session of another life.

    `appends` and `done` describe the history that is about to be restored into it.
    """

    appends: int = 0
    done: tuple[OpRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish a request: its text reached a stop string or closed its last tool call.

    Tokens drawn after the first `completion` ones are discarded; None keeps all.
    """

    request_id: str
    completion: int | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request: its client has gone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Reports the tools that a finished request called. Its program returns when they are done."""

    request_id: str
    scope: str
    program_id: str
    tools: tuple[str, ...] = ()  # empty: it is unknown what the program waits for
    last: bool = False  # the program has no further turn
    turn: int = 1  # of the program, from 1
    answered_turns: int = 0  # of these, up to the previous answer

    @property
    def run_turn(self) -> int:
        """Its number since the program's last answer, from 1."""
        return self.turn - self.answered_turns


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """A program is over. Nothing is kept for it any more."""

    scope: str
    program_id: str


@dataclass(frozen=True, slots=True)
class ProgramExpected:
    """A program's next turn waits in a router for this replica. Its pin is extended by `seconds`."""

    scope: str
    program_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class HandleReleased:
    """A prefill handle is no longer needed. A computation that still runs for it ends."""

    scope: str
    handle: str


@dataclass(frozen=True, slots=True)
class ToolLatencies:
    """The cluster's current statistics of tool latency."""

    latency: LatencySnapshot


@dataclass(frozen=True, slots=True)
class ServedElsewhere:
    """Seconds of contended service on other replicas since the last report, by `<class>/<tenant>`."""

    seconds: Mapping[str, float]


Request: TypeAlias = Submit | OpenSession | ForkSession | CloseSession  # ends in one terminal event
Notice: TypeAlias = TurnEnded | ProgramEnded | ProgramExpected | HandleReleased | ToolLatencies | ServedElsewhere
Command: TypeAlias = Request | Stop | Abort | Notice

# ---- events ----


@record
class Tokens:
    """Tokens committed for a request in one step. `logprobs` is empty or as long as `tokens`."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is complete. For a session's operation: its log afterwards, and the log's length before."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timing: Timing
    past: SessionLog | None = field(default=None, compare=False)
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused before the engine worked on it."""

    request_id: str
    error: ErrorInfo
    usage: Usage = NOTHING_USED


@dataclass(frozen=True, slots=True)
class Failed:
    """An error stopped it."""

    request_id: str
    error: ErrorInfo
    usage: Usage = NOTHING_USED


Terminal: TypeAlias = Finished | Aborted | Rejected | Failed
Event: TypeAlias = Started | Tokens | Terminal
