"""What goes into the engine and what comes out: frozen commands and events in token ids, no text.

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
    GenerateRequest,
    Named,
    SessionTurn,
    Started,
    Timing,
    Usage,
)
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.types import NO_TOKENS, TokenIds, record

FinishReason: TypeAlias = Literal["stop", "length"]


# ---- sessions ----

REMEMBERED = 128  # operations with a name, of a session


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What a session of this `life` has been told: `tokens`, by so many `appends`; `done`: the latest with a name."""

    life: str = ""
    tokens: TokenIds = field(default_factory=lambda: NO_TOKENS)
    appends: int = 0
    done: tuple[Named, ...] = ()


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
        """Its operation; `NO_SESSION` without one."""
        return self.session or NO_SESSION


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Begin a session without a history. Ends, like the other commands for sessions, in one terminal event.

    With a `life` it takes the place of one of another life. `appends` and `done` are of what it is about to be told.
    """

    request_id: str
    session_id: str
    scope: str = ""
    life: str = ""
    appends: int = 0
    done: tuple[Named, ...] = ()


@dataclass(frozen=True, slots=True)
class ForkSession:
    """Open session `child_id` with the history that `session_id` has after the operations before this one."""

    request_id: str
    session_id: str
    child_id: str
    scope: str = ""
    life: str = ""
    child_life: str = ""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a session now and let its cells and row go; operations that are not over are aborted."""

    request_id: str
    session_id: str
    scope: str = ""
    life: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a request now as finished by `stop`: its text reached a stop string or closed a tool call.

    The text ended with token `completion` of what was drawn; what came after it, before the engine heard of that, is
    nobody's. None: all of it counts.
    """

    request_id: str
    completion: int | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request now: its client has gone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """What a finished request called, told after its terminal event: its program comes back when that is done.

    `tools` are the tools' names, several for parallel calls, none where it is not known what the program waits for.
    `turn` counts the program's turns from 1, `answered_turns` of them up to the answer before; `last`: there will be
    no other.
    """

    request_id: str
    scope: str
    program_id: str
    tools: tuple[str, ...] = ()
    last: bool = False
    turn: int = 1
    answered_turns: int = 0

    @property
    def run_turn(self) -> int:
        """Its number since the program's last answer, from 1."""
        return self.turn - self.answered_turns


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """A program is over, whatever it called last: nothing is kept for it any more."""

    scope: str
    program_id: str


@dataclass(frozen=True, slots=True)
class ProgramExpected:
    """The next turn of a program waits elsewhere to be let in here: what is kept for it is kept `seconds` more."""

    scope: str
    program_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class HandleReleased:
    """Nobody comes back for what was computed ahead under this handle; what still is being computed ends."""

    scope: str
    handle: str


@dataclass(frozen=True, slots=True)
class ToolLatencies:
    """How long tools take, as the cluster knows it now."""

    latency: LatencySnapshot


@dataclass(frozen=True, slots=True)
class ServedElsewhere:
    """What other replicas have served since the last time while others waited, in seconds, by `<class>/<tenant>`."""

    seconds: Mapping[str, float]


SessionCommand: TypeAlias = OpenSession | ForkSession | CloseSession
Request: TypeAlias = Submit | SessionCommand  # what ends in a terminal event
Notice: TypeAlias = TurnEnded | ProgramEnded | ProgramExpected | HandleReleased | ToolLatencies | ServedElsewhere
Command: TypeAlias = Request | Stop | Abort | Notice

# ---- events ----


@record
class Tokens:
    """Tokens committed for a request in one step; `logprobs` is empty or as long as `tokens`."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """`past`: of an operation's session, after it; it went on from the first `start` tokens of that."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timing: Timing
    past: Past | None = field(default=None, compare=False)
    start: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Rejected:
    """Refused before any work was done for it."""

    request_id: str
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """Went wrong during work."""

    request_id: str
    error: ErrorInfo
    usage: Usage = field(default_factory=Usage)


Terminal: TypeAlias = Finished | Aborted | Rejected | Failed
Event: TypeAlias = Started | Tokens | Terminal


def used_by(ended: Event | None) -> Usage:
    """What a request had used that ended so. None: it never was the engine's."""
    return ended.usage if isinstance(ended, Finished | Aborted | Failed) else NOTHING_USED
