"""Held-out scores of a model folder, decoded greedily by plain transformers.

``python -m pocket.evaluate [--model DIR] [--count N] [--json FILE]``

A task is a conversation in unseen words, cut before the assistant turn that the model writes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.loadgen.bench.conversations import Conversation, call_object
from holdfast.loadgen.inflate import WEIGHTS
from pocket import conversations as episodes
from pocket.conversations import lexicon, write
from pocket.tools import Json
from pocket.words import Split

_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
BATCH_TOKENS = 24_000
MOST_NEW_TOKENS = 320
LONG_TURNS = 35
LATE_TURN = 30
MOST_CHARACTERS = 24_000
"""About 8,000 tokens. A longer conversation does not fit the context; another one is drawn."""


@dataclass(frozen=True, slots=True)
class Task:
    """The model's input, and the right assistant message."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...]
    expected: Json


def cut(conversation: Conversation, turn: int) -> Task:
    """The task of writing assistant turn ``turn`` (from 0, negative from the end)."""
    at = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"][turn]
    return Task(conversation.messages[:at], conversation.tools, conversation.messages[at])


def _draw(rng: random.Random, *kinds: episodes.Episode, catalog: float = 0.0) -> Conversation:
    return write(rng, lexicon(Split.HELD_OUT), tools=rng.randint(1, 8), episodes=kinds, catalog_share=catalog)


def single_task(rng: random.Random) -> Task:
    """One call."""
    return cut(_draw(rng, episodes.single), 0)


def catalog_task(rng: random.Random) -> Task:
    """One call of a tool that was seen in training, with unseen values."""
    return cut(_draw(rng, episodes.single, catalog=1.0), 0)


def parallel_task(rng: random.Random) -> Task:
    """Two or three calls in one turn."""
    while True:
        task = cut(_draw(rng, episodes.parallel), 0)
        if len(task.expected.get("tool_calls", ())) > 1:
            return task


def chain_task(rng: random.Random) -> Task:
    """A call whose first argument comes from an earlier result."""
    while True:
        conversation = _draw(rng, episodes.chain)
        calls = [m for m in conversation.messages if m.get("tool_calls")]
        if len(calls) == 2:
            return cut(conversation, -2)


def no_tool_task(rng: random.Random) -> Task:
    """A request that no tool fits. One task in three has a request before it that a tool fits."""
    before = (episodes.single,) if rng.random() < 0.33 else ()
    return cut(_draw(rng, *before, episodes.no_fit), -1)


def answer_task(rng: random.Random) -> Task:
    """A text that quotes a result."""
    return cut(_draw(rng, episodes.single), 1)


def late_task(rng: random.Random) -> Task:
    """The first call at or after turn 30 of a conversation of at least 35 turns."""
    while True:
        conversation = write(rng, lexicon(Split.HELD_OUT), tools=rng.randint(2, 8), turns=LONG_TURNS)
        assistant = [m for m in conversation.messages if m["role"] == "assistant"]
        late = [turn for turn, m in enumerate(assistant) if turn >= LATE_TURN - 1 and m.get("tool_calls")]
        if late and len(str(conversation.messages)) + len(str(conversation.tools)) < MOST_CHARACTERS:
            return cut(conversation, late[0])


SUITES: dict[str, Callable[[random.Random], Task]] = {
    "single": single_task,
    "catalog": catalog_task,
    "parallel": parallel_task,
    "chain": chain_task,
    "no_tool": no_tool_task,
    "answer": answer_task,
    "turn_30": late_task,
}


def tasks(suite: str, count: int, seed: int) -> list[Task]:
    """``count`` tasks of one suite."""
    rng = random.Random(f"{seed}/{suite}")
    return [SUITES[suite](rng) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Score:
    """One line of the table: a share of ``count`` tasks and its bar (0: no bar)."""

    suite: str
    measure: str
    share: float
    count: int
    bar: float = 0.0

    @property
    def met(self) -> bool:
        """Whether the bar is reached."""
        return self.share >= self.bar


@dataclass(frozen=True, slots=True)
class Outcome:
    """The assessment of one written turn."""

    valid: bool
    named: bool
    exact: bool
    is_text: bool


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls of an assistant turn; None if a block is not a JSON object of name and arguments."""
    calls = []
    for block in _BLOCK.findall(text):
        try:
            call = json.loads(block)
        except json.JSONDecodeError:
            return None
        if (
            not isinstance(call, dict)
            or not isinstance(call.get("name"), str)
            or not isinstance(call.get("arguments"), dict)
        ):
            return None
        calls.append(call)
    return calls if text.count("<tool_call>") == len(calls) else None


def judge(task: Task, text: str) -> Outcome:
    """Compare a written turn with the right one; the order of parallel calls is free."""
    expected_calls = [call_object(call) for call in task.expected.get("tool_calls", ())]
    calls = parse_calls(text)
    declared = {tool["function"]["name"] for tool in task.tools}
    if not expected_calls:
        return Outcome(True, True, text == task.expected["content"], calls == [] and bool(text.strip()))
    valid = bool(calls)
    named = valid and all(call["name"] in declared for call in calls or ())
    return Outcome(valid, named, valid and _canonical(calls or []) == _canonical(expected_calls), not calls)


def _canonical(calls: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(call, sort_keys=True) for call in calls)


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, batch_tasks: Sequence[Task]) -> list[str]:
    """Greedy turns for tasks, in batches of similar length."""
    prompts = [
        tokenizer.apply_chat_template(
            list(task.messages), tools=list(task.tools), add_generation_prompt=True, tokenize=False
        )
        for task in batch_tasks
    ]
    lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    order = sorted(range(len(prompts)), key=lambda i: lengths[i])
    texts = [""] * len(prompts)
    while order:
        size = max(1, min(len(order), BATCH_TOKENS // (lengths[order[-1]])))
        group, order = order[-size:], order[:-size]
        inputs = tokenizer([prompts[i] for i in group], return_tensors="pt", padding=True, padding_side="left").to(
            model.device
        )
        out = model.generate(**inputs, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)
        for index, ids in zip(group, out[:, inputs["input_ids"].shape[1] :], strict=True):
            texts[index] = tokenizer.decode(ids, skip_special_tokens=True)
    return texts


def scores_of(suite: str, outcomes: list[Outcome]) -> list[Score]:
    """The lines that one suite adds to the table, with the bars of the model card."""
    count = len(outcomes)

    def share(name: str) -> float:
        return sum(bool(getattr(outcome, name)) for outcome in outcomes) / count

    if suite == "no_tool":
        return [Score(suite, "answers in text", share("is_text"), count, 0.95)]
    if suite == "answer":
        return [Score(suite, "text exactly as expected", share("exact"), count)]
    if suite == "parallel":
        return [Score(suite, "all calls complete and right", share("exact"), count, 0.92)]
    if suite == "turn_30":
        return [
            Score(suite, "valid call of a declared tool", share("named"), count, 0.95),
            Score(suite, "all arguments right", share("exact"), count),
        ]
    barred = suite == "single"
    return [
        Score(suite, "parses as a call", share("valid"), count, 0.98 if barred else 0.0),
        Score(suite, "declared tool name", share("named"), count, 0.98 if barred else 0.0),
        Score(suite, "all arguments right", share("exact"), count, 0.95 if barred else 0.0),
    ]


def evaluate(folder: Path, count: int, seed: int, device: str = "cpu", show: int = 0) -> list[Score]:
    """All scores of a model folder; ``show`` prints that many wrong turns of each suite."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    scores: list[Score] = []
    for suite in SUITES:
        suite_tasks = tasks(suite, count if suite != "turn_30" else max(1, count // 2), seed)
        texts = answers(model, tokenizer, suite_tasks)
        outcomes = [judge(task, text) for task, text in zip(suite_tasks, texts, strict=True)]
        scores += scores_of(suite, outcomes)
        wrong = [i for i, o in enumerate(outcomes) if not (o.is_text if suite == "no_tool" else o.exact)]
        for index in wrong[:show]:
            print(
                f"[{suite}] {suite_tasks[index].messages[-1]['content']}\n"
                f"  wrote  {texts[index]!r}\n  wanted {suite_tasks[index].expected}"
            )
    return scores


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    lines = ["| suite | measure | score | bar | tasks |", "|---|---|---|---|---|"]
    for s in scores:
        bar = f"{s.bar:.0%} {'met' if s.met else 'missed'}" if s.bar else "-"
        lines.append(f"| {s.suite} | {s.measure} | {s.share:.1%} | {bar} | {s.count} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="pocket evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--count", type=int, default=200, help="tasks per suite")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    parser.add_argument("--show", type=int, default=0, help="print this many wrong turns of each suite")
    options = parser.parse_args(argv)
    if options.count < 1:
        parser.error(f"--count must be at least 1, not {options.count}")
    scores = evaluate(options.model, options.count, options.seed, options.device, options.show)
    print(table(scores))
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
