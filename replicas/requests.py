"""What a router sends to a replica and what comes back: plain picklable data in text, no HTTP.

A reply is a stream of `ReasoningDelta`, `TextDelta` and `ToolCallDelta`, ended by exactly one `Completed` or `Errored`;
or, for a caller that does not stream, one `Answer` that `AnswerBuilder` makes of the same stream. For a client that
reads the reply as it is made the engine's `Started` comes first, and again where another replica goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, TypeAlias

from holdfast.replicas.errors import ErrorInfo
from holdfast.replicas.events import Named, PartialPrefill, Started, Timing, Usage
from holdfast.replicas.kv.tags import Hint
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.retention.latency import Called
from holdfast.replicas.types import CellLimits, Origin, Priority, salted

ReplyReason: TypeAlias = Literal["stop", "length", "tool_calls"]

TOKEN = 4  # bytes of one, little-endian, where histories are kept


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """The reply's text is a JSON value of `schema`; not `strict`: as far as the schema can be followed."""

    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in OpenAI message dicts, for the model's chat template, and what its reply must be.

    `tools` are OpenAI tool dicts (`{"type": "function", "function": {...}}`). With `tool_choice` "none" no call may
    begin; the prompt is the same, so that a conversation goes on from its cells. With "required" the reply is calls,
    and where `forced_tool` names a tool one call of it. `allowed_tools` names those of `tools` that may be called,
    where not all may. `template_kwargs` go to the template as they are.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    forced_tool: str = ""
    allowed_tools: tuple[str, ...] = ()
    output: JsonOutput | None = None


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt for plain completion: text, or token ids taken as they are.

    `echo`: the reply begins with it; where log probabilities are asked for, with its own.
    """

    content: str | Sequence[int]
    echo: bool = False


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request is an operation of this session. `keep`: what it asks and what is answered become part of the history.

    `opens`: the session begins with it, or not at all. `standing`: nobody waits for its answer. With a `life` it is for
    the session that was opened with the same; one that is opened takes the place of another, or is joined, where it is
    there. Of several operations of one `name` the first is done; `content` tells whether the others are the same. `at`:
    how many tokens the history has to have; None: any. `appends` and `done` are what an opened one has behind it.
    """

    session_id: str
    keep: bool = True
    opens: bool = False
    standing: bool = False
    life: str = ""
    name: str = ""
    content: str = ""
    at: int | None = None
    appends: int = 0
    done: tuple[Named, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """A session's history from its `start`-th token on, as its replica has it: `tokens`, `TOKEN` bytes each.

    `appends` are those that made all of it, `done` the latest of them with a name. It is closed `idle_s` after its last
    operation.
    """

    life: str
    start: int
    tokens: bytes
    appends: int
    done: tuple[Named, ...] = ()
    idle_s: float = 0.0

    @property
    def end(self) -> int:
        """Tokens of the whole."""
        return self.start + len(self.tokens) // TOKEN

    def after(self, start: int) -> "History":
        """What comes behind the first `start` tokens, at most as many as there are."""
        tokens = self.tokens[(start - self.start) * TOKEN :]
        return replace(self, start=start, tokens=tokens, done=tuple(each for each in self.done if each.end > start))


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """Tokens of a reply from its `start`-th on, with their log probabilities where these are asked for.

    `seed`: what they are drawn with, where neither the request nor its prompt says that. `at`: tokens of the history
    that a session's operation goes on from. `over`: the model has ended the reply with them.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    seed: int | None = None
    start: int = 0
    at: int | None = None
    over: bool = False


NOTHING_DRAWN = ReplyTokens()


@dataclass(frozen=True, slots=True)
class EarlyTo:
    """Who is told of a stream's first pieces at once, on the machine at the address `node`, and by what name."""

    node: str
    port: int
    name: bytes


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One accepted request, validated by the router.

    `sampling.max_tokens` is a bound: the engine reduces it to what the context leaves. -1: all of that.
    `program_turns` are those before this one, `answered_turns` of them up to the program's last answer; `program_end`:
    the program will not come back after it. `weight` is the tenant's, `cells` what it may have of them (None: as
    before), `priority` the request's class, `root` the program that it is a sub-agent of, if it is; with a
    `cache_salt` it finds cells that came with the same, and no others. `prefixes`: a router's digests of what the
    prompt of a new program begins with.
    `background`: of the prompt, a chat, what the program's next one is sure to begin with is computed ahead; the reply
    is empty, with reason "length" where all of it is, "stop" where as much as there was time and room for.
    `hints`: what the client says its prompt's parts are worth; where it says nothing their roles decide.
    `within_s`: its answer is wanted so soon from now on, with `begins` only the beginning of it.
    `drawn`: what another replica has drawn of the reply, whose pieces are with the client: what comes is the rest.
    With a `session` it goes on from that session's history; `sampling.max_tokens` 0: nothing is drawn.
    `origin`: who sent it, a client or the server itself.
    `trace` is the W3C trace context in which it is served (`traceparent`, `tracestate`),
    empty without tracing. `early`: who is told of its first pieces before they come with the others.
    """

    request_id: str
    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    stop: tuple[str, ...] = ()
    scope: str = ""
    program_id: str = ""
    program_arrival: float = 0.0
    program_turns: int = 0
    answered_turns: int = 0
    program_end: bool = False
    weight: float = 1.0
    cells: CellLimits | None = None
    priority: Priority = Priority.INTERACTIVE
    within_s: float = inf
    begins: bool = False
    root: str = ""
    cache_salt: str = ""
    prefixes: tuple[str, ...] = ()
    background: PartialPrefill | None = None
    origin: Origin = Origin.CLIENT
    trace: Mapping[str, str] = field(default_factory=dict)
    session: SessionTurn | None = None
    hints: tuple[Hint, ...] = ()
    drawn: ReplyTokens | None = None
    early: EarlyTo | None = None

    @property
    def cache_scope(self) -> str:
        """Where what is kept of it is found: its tenant's scope, or with a salt a part of that."""
        return salted(self.scope, self.cache_salt)

    @property
    def most_tokens(self) -> float:
        """That its answer may have."""
        return self.sampling.max_tokens if self.sampling.max_tokens >= 0 else inf

    @property
    def foretellable(self) -> bool:
        """Whether it has a deadline, and comes behind all that wait, so that before it is read its time can be told."""
        goes_on = self.program_turns or self.session is not None or self.drawn is not None
        return self.within_s < inf and not goes_on and self.background is None


@dataclass(frozen=True, slots=True)
class LogprobText:
    """A token's text, its bytes and its log probability; `top` holds the alternatives.

    `bytes` of all tokens together are the reply's text: an end of sequence and other tokens that leave no text have
    none. In `token` bytes that are no whole character stand as `\\xf0`.
    The first token of an echoed prompt has none: it is not a number.
    """

    token: str
    bytes: bytes
    logprob: float
    top: tuple["LogprobText", ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    logprobs: tuple[LogprobText, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What a model thought before its answer: no part of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of tool call `index`: the first piece has `call_id` and `name`, later ones only `arguments`.

    `closed`: with it the call is whole, and can be run while the reply goes on.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a whole reply, and what its program waits for now. `stop`: the stop string that ended it; "": none.

    `history`: what an operation has added to its session's.
    """

    reason: ReplyReason
    usage: Usage
    timing: Timing
    called: Called = field(default_factory=Called)
    stop: str = ""
    history: History | None = None


@dataclass(frozen=True, slots=True)
class Errored:
    """The request was rejected, failed or aborted; nothing follows."""

    error: ErrorInfo
    usage: Usage = field(default_factory=Usage)


Piece: TypeAlias = Started | TextDelta | ReasoningDelta | ToolCallDelta | Completed | Errored


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # JSON text, valid, and as the model wrote it where that was
    closed: bool = True  # False: the reply broke off in it, and the arguments with it


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply. `text` is None when the reply is tool calls alone."""

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


@dataclass(frozen=True, slots=True)
class Question:
    """A question that stands with a session: answered ahead, after each append."""

    question_id: str
    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class QuestionState:
    """A question with its latest answer. `seen`: the append that the answer has seen, 0 where there is none yet.

    `age_s`: since it was answered. `error`: why the append after that has none.
    """

    question: Question
    answer: Answer | None = None
    seen: int = 0
    age_s: float = 0.0
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class SessionState:
    """An open session: `tokens` of history, made by so many `appends`. `busy`: an operation of it waits or runs.

    `expires_s`: it is closed so much later, where nobody uses it before. `history`: as much of that as was asked for.
    """

    session_id: str
    tokens: int
    appends: int
    age_s: float
    expires_s: float
    busy: bool = False
    questions: tuple[QuestionState, ...] = ()
    replica_id: str = ""
    history: History | None = None


@dataclass(frozen=True, slots=True)
class OfSession:
    """About this session; with a `life` about that which was opened with the same."""

    scope: str
    session_id: str
    life: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class DescribeSession(OfSession):
    pass


@dataclass(frozen=True, slots=True)
class ReadHistory(OfSession):
    """Its history from the `start`-th token on."""

    start: int


@dataclass(frozen=True, slots=True)
class ForkOff(OfSession):
    """Open `child_id` with the history that the session has after the operations before, all of which is told.

    A child of the same `child_life` that is there is the one that was to be opened.
    """

    child_id: str
    child_life: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class EndSession(OfSession):
    pass


@dataclass(frozen=True, slots=True)
class AddQuestion(OfSession):
    """Nothing, where it stands already."""

    question: Question


@dataclass(frozen=True, slots=True)
class RemoveQuestion(OfSession):
    question_id: str


@dataclass(frozen=True, slots=True)
class ReadQuestion(OfSession):
    """As `DescribeSession`, and counted: somebody wants the answer."""

    question_id: str


SessionCall: TypeAlias = (
    DescribeSession | ReadHistory | ForkOff | EndSession | AddQuestion | RemoveQuestion | ReadQuestion
)
"""What is asked of a session besides generating. It is answered by the session's state after it, a fork's child's."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a replica serves, for `/v1/models` and for validation in the router.

    `longest_token`: no token stands for more characters; 0: one may stand for any number. `defaults`: fields of
    sampling, by their names in the API, that the model's own files set. `tools_as_text`: the chat template takes no
    tools, so they are told in the system prompt.
    """

    name: str
    context_length: int
    vocabulary: int
    replica_id: str = ""
    fingerprint: str = ""  # changes with the model's files and with the settings that decide what it answers
    longest_token: int = 0
    defaults: Mapping[str, float] = field(default_factory=dict)
    tools_as_text: bool = False


class Drawing:
    """What a reply has drawn by now: a replica keeps it to tell of it piece by piece, a router to have the whole."""

    def __init__(self, drawn: ReplyTokens | None = None) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._told = 0
        self.seed: int | None = None
        self.at: int | None = None
        self.over = False
        if drawn is not None:
            self.merge(drawn)
            self._told = len(self._tokens)

    def add(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> None:
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)

    def withdraw(self, kept: int) -> None:
        """Only the first `kept` tokens stand."""
        del self._tokens[kept:], self._logprobs[kept:]
        self.over = False
        self._told = min(self._told, kept)

    def merge(self, drawn: ReplyTokens) -> None:
        """What a replica has told."""
        self.withdraw(drawn.start)
        self.add(drawn.tokens, drawn.logprobs)
        self.seed, self.at, self.over = drawn.seed, drawn.at, drawn.over

    def take(self) -> ReplyTokens:
        """What was drawn, or withdrawn, since the last call."""
        start, self._told = self._told, len(self._tokens)
        return self._since(start)

    @property
    def whole(self) -> ReplyTokens:
        return self._since(0)

    def _since(self, start: int) -> ReplyTokens:
        tokens, logprobs = tuple(self._tokens[start:]), tuple(self._logprobs[start:])
        return ReplyTokens(tokens, logprobs, self.seed, start, self.at, self.over)


class AnswerBuilder:
    """Collects the pieces of one reply to the whole answer; `terminal` is set once the last piece has come."""

    def __init__(self) -> None:
        self.terminal: Completed | Errored | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[LogprobText] = []
        self._calls: dict[int, ToolCallDelta] = {}
        self._arguments: dict[int, list[str]] = {}
        self._closed: set[int] = set()

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, TextDelta):
                self._texts.append(piece.text)
                self._logprobs.extend(piece.logprobs)
            elif isinstance(piece, ReasoningDelta):
                self._reasoning.append(piece.text)
            elif isinstance(piece, ToolCallDelta):
                self._calls.setdefault(piece.index, piece)
                self._arguments.setdefault(piece.index, []).append(piece.arguments)
                if piece.closed:
                    self._closed.add(piece.index)
            elif not isinstance(piece, Started):
                self.terminal = piece

    def answer(self) -> Answer | None:
        """The whole answer, or None where the reply has not completed."""
        if not isinstance(self.terminal, Completed):
            return None
        calls = tuple(
            ToolCall(first.call_id or "", first.name or "", "".join(self._arguments[index]), index in self._closed)
            for index, first in sorted(self._calls.items())
        )
        text = "".join(self._texts)
        return Answer(
            text=None if calls and not text else text,
            tool_calls=calls,
            logprobs=tuple(self._logprobs),
            reason=self.terminal.reason,
            usage=self.terminal.usage,
            timing=self.terminal.timing,
            called=self.terminal.called,
            reasoning="".join(self._reasoning),
            stop=self.terminal.stop,
            history=self.terminal.history,
        )

    def error(self) -> Errored:
        """How the reply failed. Raises ValueError for one that completed or has not ended."""
        if not isinstance(self.terminal, Errored):
            raise ValueError(f"the reply has not failed: {self.terminal}")
        return self.terminal
