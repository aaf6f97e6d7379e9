"""Held-out tasks for the scores: conversations in unseen words, cut before the assistant turn that is to be written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.loadgen.pocket import conversations as episodes
from holdfast.loadgen.pocket.conversations import Conversation, lexicon, write
from holdfast.loadgen.pocket.schemas import Json
from holdfast.loadgen.pocket.words import Split

LONG_TURNS = 35
LATE_TURN = 30
MOST_CHARACTERS = 24_000
"""About 8,000 tokens; a longer conversation would not fit the context and is drawn again."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the model sees, and the assistant message that is right."""

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
    """A call whose first argument stands in an earlier result."""
    while True:
        conversation = _draw(rng, episodes.chain)
        calls = [m for m in conversation.messages if m.get("tool_calls")]
        if len(calls) == 2:
            return cut(conversation, -2)


def no_tool_task(rng: random.Random) -> Task:
    """A request that no tool fits, in every third task after a request that one did."""
    before = (episodes.single,) if rng.random() < 0.33 else ()
    return cut(_draw(rng, *before, episodes.no_fit), -1)


def answer_task(rng: random.Random) -> Task:
    """The text that quotes a result."""
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
