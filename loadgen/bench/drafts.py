"""Tokens that a forward pass would yield with drafts: an OpenAI-format trace replayed teacher-forced, no model.

Each assistant turn is "generated" token by token as the trace has it; a draft counts as right where the trace goes on
with it. Conversations come in file order and as one tenant, so the memory knows only turns that came before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from holdfast.loadgen.bench.conversations import END, MARKS, Conversation, spans, train_bpe
from holdfast.loadgen.bench.harness import Row, report
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
"""The pattern that cuts text into words before the BPE merges, as in the tokenizers of these models."""

COLUMNS = {"drafters": "<24", "tokens_per_forward": ">18.2f", "tokens_per_forward_tool_calls": ">29.2f"}
COLUMNS |= {"acceptance": ">10.2f", "drafting_us": ">11.1f", "open_ms": ">8.2f", "memory_bytes": ">12"}

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


def main(
    trace: Path, tools: Path | None = None, tokenizer: Path | None = None, cut: str = "pocket", as_json: bool = False
) -> int:
    """Replay `trace` once for each combination of drafters and print the yield of each.

    `tokenizer` is a folder with a tokenizer.json; without one, a byte-level BPE is trained on the trace, over words
    as `cut` cuts them. Raises ConfigError for files that are missing or not what they should be.
    """
    declared = read_tools(tools) if tools else []
    conversations = read_trace(trace, declared)
    encoder = load_tokenizer(tokenizer) if tokenizer else train_tokenizer(conversations, cut)
    tokens = [encoded(conversation, encoder) for conversation in conversations]
    turns = [turn for conversation in tokens for turn in conversation.turns]
    settings = {
        "trace": trace.name,
        "conversations": len(tokens),
        "turns": len(turns),
        "tool_call_turns": sum(turn.calls for turn in turns),
        "tokens": sum(turn.end - turn.start for turn in turns),
        "tokenizer": str(tokenizer) if tokenizer else f"bpe-{cut}",
        "vocabulary": encoder.get_vocab_size(),
        "max_draft": DraftConfig().max_draft,
    }
    runs = (replay(tokens, config, name) for name, config in SWITCHES)
    if as_json:
        print(json.dumps({**settings, "runs": list(runs)}))
    else:
        print(", ".join(f"{key} {value}" for key, value in settings.items()), flush=True)
        report(runs, COLUMNS, None)
    return 0


def replay(conversations: Iterable[Tokens], config: DraftConfig, name: str = "") -> Row:
    """Draft through all turns of `conversations` with one drafter.

    Tokens per forward are of all turns' tokens together, no mean of turns. `acceptance` is of proposed drafts. Times
    are this thread's: `drafting_us` of a sequence and step, learning included, `open_ms` of indexing a whole prompt,
    `close_ms` of remembering a turn. `memory_bytes` is the most held for earlier turns.
    """
    drafter = Drafter(config, EngineStats())
    counts: list[tuple[int, int, int, int]] = []  # of each turn: tokens, forwards, drafts, right ones
    calling: list[bool] = []
    times = [0.0, 0.0, 0.0]
    memory = 0
    for conversation in conversations:
        for turn in conversation.turns:
            sequence = decoding("turn", "trace", conversation.ids[: turn.end], turn.start)
            clock = [time.thread_time()]
            drafter.catch_up([sequence])
            clock.append(time.thread_time())
            # The clock is read around the turn: a reading costs as much as a draft. So comparing counts as drafting.
            steps = []
            while sequence.length < turn.end:
                steps.append(draft(drafter, [sequence]))
            clock.append(time.thread_time())
            drafter.close(sequence)
            drafter.catch_up(())
            clock.append(time.thread_time())
            counts.append((turn.end - turn.start, len(steps), sum(n for n, _ in steps), sum(n for _, n in steps)))
            calling.append(turn.calls)
            times = [total + end - begin for total, (begin, end) in zip(times, pairwise(clock), strict=True)]
            memory = max(memory, drafter.memory_bytes)
    _, forwards, drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
    opening, drafting, closing = times
    return {
        "drafters": name,
        "tokens_per_forward": _tokens_per_forward(counts),
        "tokens_per_forward_tool_calls": _tokens_per_forward(compress(counts, calling)),
        "acceptance": round(accepted / max(drafted, 1), 3),
        "drafted": drafted,
        "forwards": forwards,
        "drafting_us": round(drafting / max(forwards, 1) * 1e6, 1),
        "open_ms": round(opening / len(counts) * 1e3, 3),
        "close_ms": round(closing / len(counts) * 1e3, 3),
        "memory_bytes": memory,
    }


def _tokens_per_forward(counts: Iterable[tuple[int, int, int, int]]) -> float:
    rows = list(counts)
    return round(sum(tokens for tokens, *_ in rows) / max(sum(forwards for _, forwards, *_ in rows), 1), 3)


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
        following = sequence.buffer[sequence.length : sequence.length + len(draft) + 1].tolist()
        right = common_prefix(draft.tolist(), following)
        drafter.learn(sequence, following[: right + 1])
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
