"""An agent program: its turns, what tools do between them, its sub-agents. Data only.

Workloads draw programs, traces hold them, the runner sends them over HTTP and the simulator plays them. A prompt is a
list of messages, or only a length: the simulator plays lengths, `traces.lengths` makes texts of them.

Times of a recorded trace are milliseconds, as in the formats that are read and written. A message, a tool and an
assistant's answer are JSON objects as an OpenAI client sends them, and are never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.replicas.errors import ConfigError

Json = dict[str, Any]
Messages = tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Sized:
    """A prompt with a known length only: in tokens, with an id for each block of it.

    Blocks with the same id have the same content. None: nothing is known to be shared.
    """

    tokens: int
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a turn: the assistant's message, token counts of the server, and times since the request.

    ``kept`` is the message in the history where that is not ``answer``, such as a scripted one.
    """

    answer: Json | None = None
    kept: Json | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None  # generated
    reason: str | None = None  # why the answer ended, as the server says
    failure: str | None = None
    first_token_ms: float | None = None
    latency_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None

    @property
    def history(self) -> Json | None:
        """The assistant's message in the prompts that follow; None: the trace has none."""
        return self.answer if self.kept is None else self.kept


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One tool that runs after a turn of known lengths: its result has `tokens` tokens.

    Its call is complete after `closes` tokens of the reply; 0: at the end of the reply.
    """

    tool: str
    seconds: float
    tokens: int = 0
    closes: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the messages that it adds to the conversation, its fields, and its time.

    ``prompt`` holds the messages after the previous answer; with ``whole`` it is the whole prompt, and earlier messages
    are dropped. ``system`` replaces the text of the first message from this turn on; in a program of known lengths it
    names the beginning of the prompt. ``runs`` and ``children``, tools and sub-agents that the next turn waits for, are
    of programs of known lengths. Raises ConfigError for sampling fields that would replace the conversation.
    """

    prompt: Messages | Sized
    whole: bool = False
    tools: tuple[Json, ...] = ()
    sampling: Json = field(default_factory=dict)  # other fields of the request's body
    max_tokens: int | None = None
    at_ms: float | None = None  # when it was sent, from the start of the trace
    delay_ms: float | None = None  # since the end of the previous turn: the time of its tools
    output: Output = Output()
    system: str = ""
    runs: tuple[ToolRun, ...] = ()
    children: tuple[Program, ...] = ()

    def __post_init__(self) -> None:
        for name in ("messages", "tools"):
            if name in self.sampling:
                raise ConfigError(f"{name!r} is no sampling field", name)

    @property
    def added(self) -> int:
        """Tokens that a turn of known length adds to the prompt."""
        assert isinstance(self.prompt, Sized)
        return self.prompt.tokens

    @property
    def reply(self) -> int:
        """Tokens of the answer, of a turn of known length."""
        return self.output.tokens or 0

    @property
    def pause_s(self) -> float:
        """Seconds that its tools run, all at once."""
        return max((run.seconds for run in self.runs), default=0.0)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first tokens of a program that others share: preamble number `preamble` of its tenant.

    Of a sub-agent they are what `parent` had at the end of its turn number `fork`.
    """

    tokens: int
    preamble: int = 0
    parent: Program | None = None
    fork: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """One agent run. ``closing``: messages after the last answer, which no request followed.

    ``scripted``: it follows the server's answers, so it has more turns than are sent. A program of known lengths has a
    ``number``, a shared ``beginning``, and the second when it ``arrived``, of a sub-agent after its parent's turn.
    Raises ConfigError without id or turns, and for a first turn that is ``whole``.
    """

    id: str
    turns: tuple[Turn, ...]
    tenant: str = ""
    closing: Messages = ()
    number: int = 0
    arrived: float = 0.0
    beginning: Beginning = Beginning(0)
    scripted: bool = False

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError("a program needs an id", "id")
        if not self.turns:
            raise ConfigError(f"program {self.id!r} has no turn", "turns")
        if self.turns[0].whole:
            raise ConfigError(f"program {self.id!r}: the first turn drops nothing", "turns")

    @property
    def arrival_ms(self) -> float | None:
        """When its first turn was sent, from the start of the trace."""
        return self.turns[0].at_ms

    @property
    def length(self) -> int:
        """Tokens of all prompts and answers, of a program of known lengths."""
        return sum(turn.added + turn.reply for turn in self.turns)

    @property
    def begins(self) -> str:
        """The name of its shared beginning."""
        beginning = self.beginning
        if beginning.parent is None:
            return f"preamble/{self.tenant}/{beginning.preamble}"
        return beginning.parent.standing(beginning.fork)

    def standing(self, at: int) -> str:
        """The name of the whole text at the end of turn `at`."""
        return f"{self.id}/{at}"


def sized(
    number: int, turns: Iterable[Turn], arrived: float = 0.0, beginning: Beginning = Beginning(0), tenant: str = ""
) -> Program:
    """A program of known lengths."""
    return Program(f"program-{number}", tuple(turns), tenant, (), number, arrived, beginning)


def sized_turn(prompt: int, reply: int, tool: str = "", seconds: float = 0.0) -> Turn:
    """A turn of known lengths with the one tool that runs after it; "": none."""
    return Turn(Sized(prompt), output=Output(tokens=reply), runs=(ToolRun(tool, seconds),) if tool else ())


def from_zero(programs: Iterable[Program]) -> tuple[Program, ...]:
    """The same programs with the earliest moment of all at zero."""
    programs = tuple(programs)
    start = min((turn.at_ms for program in programs for turn in program.turns if turn.at_ms is not None), default=0.0)

    def earlier(turn: Turn) -> Turn:
        return turn if turn.at_ms is None else replace(turn, at_ms=turn.at_ms - start)

    return tuple(replace(program, turns=tuple(map(earlier, program.turns))) for program in programs)


def continued(earlier: Turn, prompt: Sequence[Json], later: Turn) -> tuple[Turn, Turn]:
    """Split the whole prompt of ``later`` after ``prompt``, the whole prompt of ``earlier``.

    ``later`` keeps the new messages, ``earlier`` the answer that went into the history. If the prompts do not
    continue each other, ``later`` stays ``whole``.
    """
    assert not isinstance(later.prompt, Sized)
    longer, length = later.prompt, len(prompt)
    if len(longer) <= length or list(longer[:length]) != list(prompt) or longer[length].get("role") != "assistant":
        return earlier, replace(later, whole=True)
    answer, output = longer[length], earlier.output
    if answer != output.history:
        unknown = output.history is None and output.failure is None
        output = replace(output, answer=answer) if unknown else replace(output, kept=answer)
    return replace(earlier, output=output), replace(later, prompt=tuple(longer[length + 1 :]), whole=False)


def prompts(program: Program) -> Iterator[Messages]:
    """The whole prompt of every turn, as recorded. Raises ConfigError where the trace does not have it."""
    whole: Messages = ()
    previous: Turn | None = None
    for index, turn in enumerate(program.turns):
        if isinstance(turn.prompt, Sized):
            raise ConfigError(f"program {program.id!r}, turn {index}: the trace has the prompt's length only", "prompt")
        if previous is None or turn.whole:
            whole = turn.prompt
        elif previous.output.history is None:
            raise ConfigError(f"program {program.id!r}, turn {index - 1}: the trace has no answer", "answer")
        else:
            whole = (*whole, previous.output.history, *turn.prompt)
        if turn.system:
            whole = ({**whole[0], "content": turn.system}, *whole[1:])
        yield whole
        previous = turn
