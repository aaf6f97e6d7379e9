"""Rounds of chat requests for engines to compare: conversations with tools, and bursts over one preamble.

They are in words that Pocket was not trained on, and follow from the seed alone. Histories are teacher-forced: the next
prompt has the assistant's turn as the conversation has it, whatever was generated, so that every engine sees the same
prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.loadgen.pocket.conversations import Conversation, lexicon, write
from holdfast.loadgen.pocket.words import Split
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, GenerateRequest

MAX_TOKENS = 128  # of a turn, as in the paper's evaluation
BURST_TOOLS = 24
"""About 2,000 tokens of declarations."""
_MOST_CHARACTERS = 20_000  # of a conversation: some 7,000 of Pocket's tokens, which its context holds


@dataclass(frozen=True, slots=True)
class Round:
    """One repetition of a scenario: `lanes` run at the same time, the requests of a lane one after another."""

    scenario: str
    lanes: tuple[tuple[ChatPrompt, ...], ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`lanes` conversations at a time, of `turns` assistant turns each; a burst is one turn over shared tools."""

    name: str
    lanes: int
    turns: int
    tools: int
    rounds: int
    burst: bool = False


SCENARIOS = (
    Scenario("turns6", lanes=1, turns=6, tools=5, rounds=4),
    Scenario("turns35", lanes=1, turns=35, tools=4, rounds=1),
    Scenario("burst8", lanes=8, turns=1, tools=BURST_TOOLS, rounds=4, burst=True),
    Scenario("agents8", lanes=8, turns=6, tools=5, rounds=2),
)


def rounds(scenario: Scenario, seed: int = 0, scale: float = 1.0) -> Iterator[Round]:
    """The scenario's repetitions, no prompt twice; `scale` times as many.

    Where whole rounds take turns their number is even, so that each side begins as often as the other.
    """
    rng = random.Random(f"{seed}/{scenario.name}")
    count = max(1, round(scenario.rounds * scale))
    for _ in range(count + count % 2 if scenario.lanes > 1 else count):
        if scenario.burst:
            lanes = _burst(rng, scenario)
        else:
            lanes = tuple(_turns(_conversation(rng, scenario)) for _ in range(scenario.lanes))
        yield Round(scenario.name, lanes)


def request(name: str, prompt: ChatPrompt, scope: str) -> GenerateRequest:
    """A greedy turn of the conversation `name`."""
    return GenerateRequest(name, prompt, Sampling(MAX_TOKENS), scope=scope, program_id=name.rpartition("/")[0])


def _conversation(rng: random.Random, scenario: Scenario) -> Conversation:
    while True:
        made = write(rng, lexicon(Split.HELD_OUT), tools=scenario.tools, turns=scenario.turns)
        if len(str(made.messages)) + len(str(made.tools)) < _MOST_CHARACTERS or scenario.burst:
            return made


def _turns(conversation: Conversation) -> tuple[ChatPrompt, ...]:
    """The prompt of each assistant turn."""
    messages = [_as_client(message) for message in conversation.messages]
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return tuple(ChatPrompt(messages[:end], conversation.tools) for end in ends)


def _burst(rng: random.Random, scenario: Scenario) -> tuple[tuple[ChatPrompt, ...], ...]:
    """Different first requests over one system prompt and one set of tools."""
    shared = _conversation(rng, scenario)
    system = {"role": "system", "content": f"You are assistant number {rng.randrange(10**6)}."}
    asked: list[dict[str, Any]] = []
    while len(asked) < scenario.lanes:
        asked += [m for m in _conversation(rng, Scenario("", 1, 1, 5, 1)).messages if m["role"] == "user"][:1]
    return tuple((ChatPrompt([system, message], shared.tools),) for message in asked)


def _as_client(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client sends it: a call's arguments are JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return message | {
        "tool_calls": [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    }
