"""The inputs and outputs of a replica and of its engine: frozen, picklable data without HTTP.

    router   GenerateRequest --> service   Submit, Stop, Abort --> engine      in text, in token ids
             Piece, Answer  <--            Started, Tokens, Terminal <--

A reply is a stream of `ReasoningDelta`, `TextDelta` and `ToolCallDelta` pieces, ended by exactly one `Completed` or
`Errored`. For streaming clients `Started` comes first. In the engine, every submitted request ends in exactly one
`Finished`, `Aborted`, `Rejected` or `Failed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from math import inf
from operator import add
from typing import Any, Literal, TypeAlias

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.kv.tags import UNLABELLED, Hint, Labels
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.retention.latency import Called, LatencySnapshot
from holdfast.replicas.types import NO_TOKENS, RANKS, CellLimits, Origin, Priority, TokenIds, record, salted

FinishReason: TypeAlias = Literal["stop", "length"]
ReplyReason: TypeAlias = Literal["stop", "length", "tool_calls"]

TOKEN = 4  # bytes of a stored token id, little-endian


# ---- what a request used ----


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that the engine processed for one request.

    `drawn` exceeds the reply if the reply was ended early. `computed` exceeds the prompt if the sequence was preempted.
    """

    computed: int = 0  # prompt tokens
    cached: int = 0  # prompt tokens found in the cache
    drawn: int = 0
    drafted: int = 0
    accepted: int = 0  # of `drafted`

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, astuple(self), astuple(other)))


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached` is part of `prompt`; `reasoning`, from the text side, of `completion`.

    `work` may differ between two runs of the same request, so comparisons ignore it.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    work: Work = field(default=NO_WORK, compare=False)


NOTHING_USED = Usage()


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request by the engine's clock, in seconds. None: the request never reached that point.

    The text side fills in `render_s` (rendering and tokenizing, before `arrived`) and `validate_s` (parsing the reply).
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    render_s: float = 0.0
    validate_s: float = 0.0


# ---- the request ----


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """The reply's text is a JSON value of `schema`. Without `strict` unsupported parts of the schema are ignored."""

    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in OpenAI message dicts, for the model's chat template, and constraints on the reply.

    `tool_choice` does not change the prompt, so a conversation keeps its cached cells.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI tool dicts: {"type": "function", "function": {...}}
    tool_choice: Literal["auto", "none", "required"] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the template, which may have other names
    forced_tool: str = ""  # with "required": the reply is one call of this tool
    allowed_tools: tuple[str, ...] = ()  # subset of `tools` that may be called; empty: all
    output: JsonOutput | None = None
    thinking_budget: int | None = None  # tokens that a block of thinking may have; None: any number


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt for plain completion: text, or token ids used unchanged.

    `echo`: the reply starts with the prompt, and with its log probabilities if those are requested.
    """

    content: str | Sequence[int]
    echo: bool = False


NO_PROMPT = RawPrompt(())


@dataclass(frozen=True, slots=True)
class PartialPrefill:
    """Background prefill for a program's next turn. It draws nothing and yields to every other request.

    The computed cells are kept for `keep_s` seconds under the name `handle`.
    """

    handle: str
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OpRecord:
    """A named operation on a session. After it the session's history had `end` tokens."""

    name: str
    content: str
    end: int


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The request is an operation on this session.

    An operation with a `name` that is already part of the history is not repeated.
    """

    session_id: str
    keep: bool = True  # prompt and reply become part of the history
    opens: bool = False  # open the session; it stays closed if the request fails
    standing: bool = False  # asked for a standing question: no client waits, the session's idle time goes on
    life: str = ""  # only for the session opened with the same life; opening one of another life replaces it
    name: str = ""
    content: str = ""  # digest that tells two operations of one name apart
    at: int | None = None  # required length of the history in tokens; None: any
    appends: int = 0  # of the history that `opens` restores
    done: tuple[OpRecord, ...] = ()  # likewise


NO_SESSION = SessionTurn("")


@dataclass(frozen=True, slots=True)
class History:
    """A session's history from token `start` on."""

    life: str
    start: int
    tokens: bytes  # `TOKEN` bytes each
    appends: int  # that made the whole history
    done: tuple[OpRecord, ...] = ()  # the latest named operations
    idle_s: float = 0.0  # the session is closed this long after its last operation

    @property
    def end(self) -> int:
        """Tokens of the whole history."""
        return self.start + len(self.tokens) // TOKEN

    def after(self, start: int) -> "History":
        """The part after the first `start` tokens."""
        tokens = self.tokens[(start - self.start) * TOKEN :]
        return replace(self, start=start, tokens=tokens, done=tuple(each for each in self.done if each.end > start))


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """Tokens of a reply from position `start` on, with their log probabilities if those are requested."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    seed: int | None = None  # of the noise, if neither the request nor its prompt determines it
    start: int = 0
    at: int | None = None  # tokens of the session's history before this operation
    over: bool = False  # the model ended the reply with these tokens


NOTHING_DRAWN = ReplyTokens()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A client's request, validated by the router. `Submit` adds the fields that the service fills in."""

    request_id: str
    prompt: ChatPrompt | RawPrompt = NO_PROMPT
    # max_tokens -1: all that the context leaves; 0: compute the prompt, draw nothing
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    scope: str = ""  # the tenant's cache scope
    program_id: str = ""
    program_arrival: float = 0.0  # when the program began
    program_turns: int = 0  # of the program before this one
    answered_turns: int = 0  # of these, up to the program's last answer
    program_end: bool = False  # the program has no further turn
    weight: float = 1.0  # the tenant's
    cells: CellLimits | None = None  # the tenant's; None: unchanged
    priority: Priority = Priority.INTERACTIVE
    within_s: float = inf  # deadline of the answer, in seconds from now
    begins: bool = False  # the client streams: `within_s` is for the first token, and `Started` is reported
    root: str = ""  # the program that this one is a sub-agent of
    cache_salt: str = ""  # cells are shared only between requests of the same salt
    prefixes: tuple[str, ...] = ()  # the router's digests of the prompt's beginning, for a new program
    background: PartialPrefill | None = None  # finishes with "length" if all was computed, with "stop" if interrupted
    origin: Origin = Origin.CLIENT
    trace: Mapping[str, str] = field(default_factory=dict)  # W3C trace context; empty without tracing
    session: SessionTurn | None = None  # continue from this session's history
    hints: tuple[Hint, ...] = ()  # the client's cache priorities for parts of the prompt; default: by message role
    drawn: ReplyTokens | None = None  # the part of the reply that another replica has drawn and delivered
    replica: str = ""  # the replica that the router sent it to; another one refuses it

    @property
    def cache_scope(self) -> str:
        """Scope of its cached cells: the tenant's, or a salted part of it."""
        return salted(self.scope, self.cache_salt)

    @property
    def most_tokens(self) -> float:
        """Upper bound of the reply's length."""
        return self.sampling.max_tokens if self.sampling.max_tokens >= 0 else inf

    @property
    def foretellable(self) -> bool:
        """Whether its deadline can be checked before its prompt is tokenized: it starts behind all waiting requests."""
        goes_on = self.program_turns or self.session is not None or self.drawn is not None
        return self.within_s < inf and not goes_on and self.background is None

    @property
    def rank(self) -> int:
        """Preemption rank of its class. Higher ranks give way to lower ones."""
        return len(RANKS) if self.background is not None else RANKS.index(self.priority)

    @property
    def who(self) -> str:
        """Owner of the cells computed for it: its program, or the request itself."""
        return self.program_id or self.request_id

    @property
    def root_program(self) -> str:
        """The program that its service is charged to."""
        return self.root or self.who


# ---- the reply ----


@dataclass(frozen=True, slots=True)
class Started:
    """The first prompt tokens were computed. Reported once, only for requests with `begins`."""

    request_id: str
    prompt: int  # tokens
    cached: int  # of these, found in the cache


@dataclass(frozen=True, slots=True)
class LogprobText:
    """A token's text and log probability. The `bytes` of all tokens together are the reply's text."""

    token: str  # bytes that form no whole character are written as `\xf0`
    bytes: bytes  # empty for tokens without text, such as an end of sequence
    logprob: float  # NaN for the first token of an echoed prompt
    top: tuple["LogprobText", ...] = ()  # the alternatives


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    logprobs: tuple[LogprobText, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning of the model, not part of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call `index`. The first one has `call_id` and `name`, later ones only `arguments`."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    closed: bool = False  # the call is complete and can run while the reply continues


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a complete reply."""

    reason: ReplyReason
    usage: Usage
    timing: Timing
    called: Called = field(default_factory=Called)  # what the program waits for now
    stop: str = ""  # the stop string that ended the reply
    history: History | None = None  # what the operation added to its session


@dataclass(frozen=True, slots=True)
class Errored:
    """The end of a reply that was rejected, aborted or failed."""

    error: ErrorInfo
    usage: Usage = field(default_factory=Usage)


Piece: TypeAlias = Started | TextDelta | ReasoningDelta | ToolCallDelta | Completed | Errored


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # valid JSON text, unchanged if the model's own was valid
    closed: bool = True  # False: the reply ended inside the call


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete reply. `text` is None if it consists of tool calls alone."""

    text: str | None
    tool_calls: tuple[ToolCall, ...]
    logprobs: tuple[LogprobText, ...]
    reason: ReplyReason
    usage: Usage
    timing: Timing
    called: Called = field(default_factory=Called)
    reasoning: str = ""
    stop: str = ""
    history: History | None = None


# ---- sessions ----


@dataclass(frozen=True, slots=True)
class Question:
    """A standing question of a session. It is answered in advance, after each append."""

    question_id: str
    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuestionState:
    """A standing question and its latest answer."""

    question: Question
    answer: Answer | None = None
    seen: int = 0  # number of the append that the answer takes into account; 0: no answer yet
    age_s: float = 0.0  # of the answer
    error: ErrorInfo | None = None  # why a later append has no answer


@dataclass(frozen=True, slots=True)
class SessionState:
    """An open session."""

    session_id: str
    tokens: int  # of its history
    appends: int
    age_s: float
    expires_s: float  # until it is closed, unless it is used
    busy: bool = False  # an operation waits or runs
    questions: tuple[QuestionState, ...] = ()
    replica_id: str = ""
    history: History | None = None  # the requested part


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """Concerns this session; with a `life` only the session opened with the same life.

    The engine executes `OpenSession`, `ForkSession` and `CloseSession` in order with the session's operations. The
    service sets their `request_id`.
    """

    scope: str
    session_id: str
    life: str = field(default="", kw_only=True)
    request_id: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class ForkSession(SessionCommand):
    """Open `child_id` with the session's history after all earlier operations. A child of this life may exist."""

    child_id: str
    child_life: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class CloseSession(SessionCommand):
    """Close the session and free its cells and row. Its unfinished operations are aborted."""


@dataclass(frozen=True, slots=True)
class DescribeSession(SessionCommand):
    """Returns the history from token `start` on as well, if given. Counts as a read of the answer to `question_id`."""

    start: int | None = None
    question_id: str = ""


@dataclass(frozen=True, slots=True)
class AddQuestion(SessionCommand):
    """Does nothing if the question stands already."""

    question: Question


@dataclass(frozen=True, slots=True)
class RemoveQuestion(SessionCommand):
    question_id: str


SessionCall: TypeAlias = DescribeSession | ForkSession | CloseSession | AddQuestion | RemoveQuestion
"""A router's call about a session, besides generating. It returns the session's state, for a fork the child's."""


# ---- the engine: commands ----


LOGGED_OPERATIONS = 128  # latest named operations that a session's log keeps


@dataclass(frozen=True, slots=True, eq=False)
class SessionLog:
    """A session's history: its tokens, the number of appends that made them, and the latest named operations."""

    life: str = ""
    tokens: TokenIds = field(default_factory=lambda: NO_TOKENS)
    appends: int = 0
    done: tuple[OpRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit(GenerateRequest):
    """A request for the engine: the client's request, and the fields that the service fills in.

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
Notice: TypeAlias = TurnEnded | ProgramEnded | HandleReleased | ToolLatencies | ServedElsewhere
Command: TypeAlias = Request | Stop | Abort | Notice


# ---- the engine: events ----


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

    @property
    def error(self) -> ErrorInfo:
        return ErrorInfo(ErrorKind.UNAVAILABLE, "the request was aborted")


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


# ---- collecting a reply ----


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model that a replica serves, for `/v1/models` and for validation in the router."""

    name: str
    context_length: int
    vocabulary: int
    replica_id: str = ""
    fingerprint: str = ""  # changes with the model's files and with settings that change its answers
    longest_token: int = 0  # characters; 0: unbounded
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling fields that the model's files set
    tools_as_text: bool = False  # the chat template takes no tools, so the system prompt describes them
    prompt_seed: bool = True  # a request without a seed gets one from its prompt, so its answer may be kept


class PartialReply:
    """The tokens drawn so far for a reply. A replica reports them piece by piece; a router merges the pieces."""

    def __init__(self, drawn: ReplyTokens | None = None) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reported = 0
        self.seed: int | None = None
        self.at: int | None = None
        self.over = False
        if drawn is not None:
            self.merge(drawn)
            self._reported = len(self._tokens)

    def add(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> None:
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)

    def withdraw(self, kept: int) -> None:
        """Drop all but the first `kept` tokens."""
        del self._tokens[kept:], self._logprobs[kept:]
        self.over = False
        self._reported = min(self._reported, kept)

    def merge(self, drawn: ReplyTokens) -> None:
        """Add a piece that a replica reported."""
        self.withdraw(drawn.start)
        self.add(drawn.tokens, drawn.logprobs)
        self.seed, self.at, self.over = drawn.seed, drawn.at, drawn.over

    def take(self) -> ReplyTokens:
        """The change since the last call."""
        start, self._reported = self._reported, len(self._tokens)
        return self._since(start)

    @property
    def whole(self) -> ReplyTokens:
        return self._since(0)

    def _since(self, start: int) -> ReplyTokens:
        tokens, logprobs = tuple(self._tokens[start:]), tuple(self._logprobs[start:])
        return ReplyTokens(tokens, logprobs, self.seed, start, self.at, self.over)


class AnswerBuilder:
    """Collects the pieces of one reply into an `Answer`. The last piece sets `terminal`."""

    def __init__(self) -> None:
        self.terminal: Completed | Errored | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[LogprobText] = []
        self._calls: dict[int, list[ToolCallDelta]] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, TextDelta):
                self._texts.append(piece.text)
                self._logprobs.extend(piece.logprobs)
            elif isinstance(piece, ReasoningDelta):
                self._reasoning.append(piece.text)
            elif isinstance(piece, ToolCallDelta):
                self._calls.setdefault(piece.index, []).append(piece)
            elif not isinstance(piece, Started):
                self.terminal = piece

    def answer(self) -> Answer | None:
        """The answer; None if the reply has not completed."""
        end = self.terminal
        if not isinstance(end, Completed):
            return None
        text, reasoning, calls = "".join(self._texts), "".join(self._reasoning), list[ToolCall]()
        for _, (first, *rest) in sorted(self._calls.items()):
            arguments = "".join(each.arguments for each in (first, *rest))
            closed = any(each.closed for each in (first, *rest))
            calls.append(ToolCall(first.call_id or "", first.name or "", arguments, closed))
        shown = None if calls and not text else text
        reply = (shown, tuple(calls), tuple(self._logprobs), end.reason, end.usage, end.timing)
        return Answer(*reply, end.called, reasoning, end.stop, end.history)

    def error(self) -> Errored:
        """The error that ended the reply. Raises ValueError if it completed or has not ended."""
        if not isinstance(self.terminal, Errored):
            raise ValueError(f"the reply has not failed: {self.terminal}")
        return self.terminal
