"""How many tokens a forward pass would yield with drafts: an OpenAI-format trace replayed teacher-forced, no model.

Each assistant turn is "generated" token by token as the trace has it; a draft counts as right where the trace goes on
with it. Conversations come in file order and as one tenant, so the memory knows only turns that came before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from holdfast.loadgen.bench.conversations import END, MARKS, Conversation, spans, train_bpe
from holdfast.loadgen.inflate import CUT
from holdfast.loadgen.program import Program, prompts
from holdfast.loadgen.traces import logs
from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence, Status
from holdfast.replicas.requests import Submit
from holdfast.replicas.speculation.drafter import Drafter
from holdfast.replicas.speculation.ngrams import common_prefix
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import TokenIds

VOCABULARY = 16000

_MARKS = ("<|im_start|>", END, *MARKS)
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "pocket": CUT,
    "qwen": _QWEN,
    "llama": _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""How text is cut into words before the BPE merges, as the tokenizers of these models do."""

_HEAD = "drafters                 tokens/forward  tool calls  acceptance  us/step  open ms  memory KiB"

SWITCHES: tuple[tuple[str, DraftConfig], ...] = (
    ("off", DraftConfig(enabled=False)),
    ("lookup", DraftConfig(memory_bytes=1)),  # too little for any turn
    ("lookup+memory", DraftConfig()),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: how long its prompt is in the conversation's tokens, and where the turn ends in them."""

    start: int
    end: int
    calls: bool


@dataclass(frozen=True, slots=True)
class Tokens:
    """One conversation, rendered and encoded."""

    ids: TokenIds
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one replay found. Tokens per forward are of all turns' tokens together, no mean of turns.

    Times are this thread's.
    """

    drafters: str
    tokens_per_forward: float
    tokens_per_forward_tool_calls: float
    acceptance: float  # of proposed drafts
    drafted: int
    forwards: int
    drafting_us: float  # a sequence and step, learning included
    open_ms: float  # a turn, indexing its whole prompt
    close_ms: float  # a turn, remembering it
    memory_bytes: int  # most held for earlier turns


@dataclass(slots=True)
class _Count:
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: _Count) -> None:
        self.forwards += other.forwards
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0


def main(
    trace: Path, tools: Path | None = None, tokenizer: Path | None = None, cut: str = "pocket", as_json: bool = False
) -> int:
    """Replay `trace` once for each combination of drafters and print what each yields.

    `tokenizer` is a folder with a tokenizer.json; without one, a byte-level BPE is trained on the trace, over words
    as `cut` cuts them. Raises ConfigError for files that are missing or not what they should be.
    """
    declared = read_tools(tools) if tools else []
    conversations = read_trace(trace, declared)
    encoder = load_tokenizer(tokenizer) if tokenizer else train_tokenizer(conversations, cut)
    tokens = [encoded(conversation, encoder) for conversation in conversations]
    turns = [turn for conversation in tokens for turn in conversation.turns]
    about = {
        "trace": trace.name,
        "conversations": len(tokens),
        "turns": len(turns),
        "tool_call_turns": sum(turn.calls for turn in turns),
        "tokens": sum(turn.end - turn.start for turn in turns),
        "tokenizer": str(tokenizer) if tokenizer else f"bpe-{cut}",
        "vocabulary": encoder.get_vocab_size(),
        "max_draft": DraftConfig().max_draft,
    }
    if not as_json:
        print(", ".join(f"{key} {value}" for key, value in about.items()), _HEAD, sep="\n", flush=True)
    runs = []
    for name, config in SWITCHES:
        runs.append(replay(tokens, config, name))
        if not as_json:
            print(_row(runs[-1]), flush=True)
    if as_json:
        print(json.dumps({**about, "runs": [asdict(run) for run in runs]}))
    return 0


def replay(conversations: Iterable[Tokens], config: DraftConfig, name: str = "") -> Replayed:
    """Draft through all turns of `conversations` with one drafter."""
    drafter = Drafter(config, EngineStats())
    every, calling, watch = _Count(), _Count(), _Stopwatch()
    memory = turns = 0
    for conversation in conversations:
        for turn in conversation.turns:
            count = _replay_turn(drafter, conversation.ids, turn, watch)
            every.add(count)
            if turn.calls:
                calling.add(count)
            memory, turns = max(memory, drafter.memory_bytes), turns + 1
    return Replayed(
        drafters=name,
        tokens_per_forward=round(every.tokens_per_forward, 3),
        tokens_per_forward_tool_calls=round(calling.tokens_per_forward, 3),
        acceptance=round(every.accepted / max(every.drafted, 1), 3),
        drafted=every.drafted,
        forwards=every.forwards,
        drafting_us=round(watch.drafting / max(every.forwards, 1) * 1e6, 1),
        open_ms=round(watch.opening / max(turns, 1) * 1e3, 3),
        close_ms=round(watch.closing / max(turns, 1) * 1e3, 3),
        memory_bytes=memory,
    )


@dataclass(slots=True)
class _Stopwatch:
    """Seconds of this thread's processor time; what else the machine does is not counted."""

    opening: float = 0.0
    drafting: float = 0.0
    closing: float = 0.0


def _replay_turn(drafter: Drafter, ids: TokenIds, turn: Turn, watch: _Stopwatch) -> _Count:
    count, sequence = _Count(tokens=turn.end - turn.start), decoding("turn", "trace", ids[: turn.end], turn.start)
    begin = time.thread_time()
    drafter.catch_up([sequence])
    opened = time.thread_time()
    # The clock is read around the turn: a reading costs as much as a draft. So comparing counts as drafting here.
    while sequence.length < turn.end:
        drafted, right = draft(drafter, [sequence])
        count.forwards += 1
        count.drafted += drafted
        count.accepted += right
    drafted_at = time.thread_time()
    drafter.close(sequence)
    drafter.catch_up(())
    watch.opening += opened - begin
    watch.drafting += drafted_at - opened
    watch.closing += time.thread_time() - drafted_at
    return count


def decoding(name: str, scope: str, text: TokenIds, n_prompt: int) -> Sequence:
    """A sequence that has computed its prompt and is going to draw the rest of `text`, which its buffer holds."""
    sampling = Sampling(len(text) - n_prompt)
    sequence = Sequence.of(
        Submit(name, tokens=text[:n_prompt], sampling=sampling, scope=scope), 0, 0.0, frozenset(), seed=0
    )
    sequence.buffer[n_prompt:] = text[n_prompt:]
    sequence.move(Status.RUNNING)
    return sequence


def draft(drafter: Drafter, sequences: SequenceOf[Sequence]) -> tuple[int, int]:
    """One step: all `sequences` verify their drafts and draw from their buffers. Drafts, and right ones, of all."""
    drafter.prepare(sequences)
    drafted = accepted = 0
    for sequence in sequences:
        draft = drafter.propose(sequence)
        rest = sequence.buffer[sequence.length : sequence.length + len(draft) + 1].tolist()
        right = common_prefix(draft.tolist(), rest)
        drafter.learn(sequence, rest[: right + 1])
        sequence.length += right + 1
        drafted += len(draft)
        accepted += right
    return drafted, accepted


def read_trace(path: Path, tools: SequenceOf[dict[str, Any]]) -> list[Conversation]:
    """Conversations of a JSONL file with OpenAI `messages`; a line's own `tools` go before `tools`."""
    try:
        return [_conversation(program) for program in logs.read_openai(path, tuple(tools)).programs]
    except ConfigError as error:
        raise ConfigError(error.message, "trace") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not conversations in OpenAI's format: {error}", "trace") from error


def read_tools(path: Path) -> list[dict[str, Any]]:
    """A JSON list of tool schemas in OpenAI's format."""
    try:
        return list(logs.read_tools(path))
    except ConfigError as error:
        raise ConfigError(error.message, "tools") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder."""
    file = folder / "tokenizer.json"
    _read(file, "tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{file} is not a tokenizer: {error}", "tokenizer") from error


def train_tokenizer(conversations: Iterable[Conversation], cut: str, vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens, trained on the conversations' own text."""
    if cut not in CUTS:
        raise ConfigError(f"cut must be one of {', '.join(CUTS)}, not {cut}", "cut")
    texts = (span.text for conversation in conversations for span in spans(conversation))
    return train_bpe(texts, CUTS[cut], vocabulary, marks=_MARKS)


def encoded(conversation: Conversation, tokenizer: Tokenizer) -> Tokens:
    """Rendered span by span, so that a turn begins and ends between two tokens, as where a model generates it."""
    ids: list[int] = []
    turns = []
    for span in spans(conversation):
        start = len(ids)
        ids += tokenizer.encode(span.text, add_special_tokens=False).ids
        if span.learned:
            turns.append(Turn(start, len(ids), "<tool_call>" in span.text))
    return Tokens(np.array(ids, np.int32), tuple(turns))


def _conversation(program: Program) -> Conversation:
    last = program.turns[-1]
    *_, prompt = prompts(program)
    messages = (*prompt, *((last.output.answer,) if last.output.answer else ()), *program.closing)
    return Conversation(tuple(_message(message) for message in messages), last.tools)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of calls as objects, and text where a client may leave it out or send it in parts."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [{"function": _call(call["function"])} for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": content, **({"tool_calls": calls} if calls else {})}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    return {"name": function["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field) from error


def _row(found: Replayed) -> str:
    return (
        f"{found.drafters:<24} {found.tokens_per_forward:>14.2f} {found.tokens_per_forward_tool_calls:>11.2f}"
        f" {found.acceptance:>11.2f} {found.drafting_us:>8.1f} {found.open_ms:>8.2f} {found.memory_bytes >> 10:>11}"
    )
