"""What goes into the engine and what comes out: frozen commands and events in token ids, no text.

Every submitted request ends in exactly one terminal event: `Finished`, `Aborted`, `Rejected` or `Failed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypeAlias

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.kv.tags import UNLABELLED, Labels
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.speculation.skeletons import SkeletonSet
from holdfast.replicas.types import (
    NO_TOKENS,
    RANKS,
    CellLimits,
    Origin,
    Priority,
    TokenIds,
    record,
    salted,
)

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens as an engine counts them for one request: of its prompt `computed` and found in the cache, drawn, drafted,
    and of the drafts `accepted`.

    More is drawn than a reply has where that is ended early, and computed where a sequence was preempted.
    """

    computed: int = 0
    cached: int = 0
    drawn: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.computed + other.computed,
            self.cached + other.cached,
            self.drawn + other.drawn,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached` of the `prompt` tokens were not computed again; `reasoning` of the
    `completion` tokens were thinking, which the text side tells and the engine does not.

    `work`: what it took, which another run of the same request may do otherwise: two usages are equal without it.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    work: Work = field(default=NO_WORK, compare=False)


NOTHING_USED = Usage()


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened, in seconds of the engine's clock; None: never came that far.

    `render_s` is what rendering and tokenizing took before `arrived`, `validate_s` what reading the reply took (text,
    stops, tool calls) besides its decoding. The text side tells them, the engine does not.
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    render_s: float = 0.0
    validate_s: float = 0.0


# ---- sessions ----

REMEMBERED = 128  # operations with a name, of a session


@dataclass(frozen=True, slots=True)
class Named:
    """An operation by which a session's history came to have `end` tokens: of this `name`, with this content."""

    name: str
    content: str
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What a session of this `life` has been told: `tokens`, by so many `appends`; `done`: the latest with a name."""

    life: str = ""
    tokens: TokenIds = field(default_factory=lambda: NO_TOKENS)
    appends: int = 0
    done: tuple[Named, ...] = ()


# ---- commands ----


@dataclass(frozen=True, slots=True)
class PartialPrefill:
    """Work ahead of a program's next turn: nobody waits for it, it holds nobody up, and it draws nothing.

    What it computes is kept for `keep_s` seconds under the name `handle`. Without one it is work of the engine's own:
    kept as long as what the program's last turn left, and no longer.
    """

    handle: str = ""
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Submit:
    """One request. `program_arrival` is when its program began; `scope` is the tenant's cache scope.

    `skeletons` are the fixed texts of the calls it may make, for drafts.
    `matcher` says which tokens may be drawn; from here on it belongs to the engine.
    The last `n_generated` of `tokens` were drawn by an earlier request that this one goes on from.
    `sampling.max_tokens` 0: the prompt is computed into the cache and nothing is drawn.
    With a `session_id` it is an operation on that session: `tokens` come after the session's history, and if it
    finishes and `keep` is set, they and what was drawn become part of it, with `closing` behind it as far as it is not
    drawn. Operations of a session run in order; one for a `standing` question does not keep it open. One with a
    `name` that is part of the history is not done again. With a `life` it is for the session that was opened with the
    same; `at`: how long the history has to be, None: as it is.
    `program_turns` are the turns that the program had before, `answered_turns` of them up to its last answer;
    `program_end`: it has none after this one.
    `weight` is the tenant's, `priority` the request's class, and `root` the program that it counts for, where that is
    not its own: a sub-agent's. `cells`: what its tenant may have of them from now on; None: as before. `prefixes` are a
    router's digests of what it begins with. `background`: it is work ahead, with `sampling.max_tokens` 0; it ends
    sooner, with reason "stop", where the turn comes that it is for, or no cells are free for it. `labels` say what its
    tokens are, a session's excepted: they have none. Its answer is wanted within `within_s` seconds of its arrival,
    with `begins` only the beginning of it; `foreseen`: that it is expected by then was settled when it came.
    `origin`: who sent it, a client or the server itself.
    """

    request_id: str
    tokens: TokenIds
    sampling: Sampling = field(default_factory=Sampling)
    scope: str = ""
    program_id: str = ""
    program_arrival: float = 0.0
    skeletons: SkeletonSet | None = None
    session_id: str = ""
    keep: bool = True
    matcher: Matcher | None = None
    n_generated: int = 0
    program_turns: int = 0
    answered_turns: int = 0
    program_end: bool = False
    weight: float = 1.0
    priority: Priority = Priority.INTERACTIVE
    within_s: float = inf
    begins: bool = False
    foreseen: bool = False
    root: str = ""
    cache_salt: str = ""
    prefixes: tuple[str, ...] = ()
    background: PartialPrefill | None = None
    origin: Origin = Origin.CLIENT
    closing: TokenIds = field(default_factory=lambda: NO_TOKENS)
    standing: bool = False
    labels: Labels = UNLABELLED
    cells: CellLimits | None = None
    life: str = ""
    name: str = ""
    content: str = ""
    at: int | None = None

    @property
    def rank(self) -> int:
        """Of its class: the highest gives way first, and to lower ones only."""
        return len(RANKS) if self.background is not None else RANKS.index(self.priority)

    @property
    def cache_scope(self) -> str:
        """Where its cells are found: its tenant's, or with a salt a part of that."""
        return salted(self.scope, self.cache_salt)

    @property
    def root_program(self) -> str:
        """The program that it counts for among those of its tenant."""
        return self.root or self.who

    @property
    def who(self) -> str:
        """Whose the cells are that are computed for it: its program's, or its own."""
        return self.program_id or self.request_id


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
class Started:
    """The first tokens of a request's prompt were computed: it has `prompt` tokens, and `cached` of them were found in
    the cache. Told once, and only of requests with `Submit.begins`: their clients read the reply as it is made.
    """

    request_id: str
    prompt: int
    cached: int


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
