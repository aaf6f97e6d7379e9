"""Rounds of chat requests for engines to compare: recorded conversations with tools.

Rounds follow from the seed. Each prompt contains the recorded replies of earlier turns, whatever was generated: every
engine gets the same prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from holdfast.loadgen.bench.conversations import Conversation, Json, recorded
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, GenerateRequest

MAX_TOKENS = 128  # of a turn, as in the paper's evaluation
SHARED_TOOLS = 24
"""About 2,000 tokens of declarations."""


@dataclass(frozen=True, slots=True)
class Round:
    """One repetition of a scenario: `lanes` run at the same time, the requests of a lane one after another.

    `interleaved`: only one request runs at a time, the first of each lane, then the second of each, and so on.
    """

    scenario: str
    lanes: tuple[tuple[ChatPrompt, ...], ...]
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """`lanes` conversations at a time, of `turns` assistant turns each.

    `shared`: all of a round begin with one system prompt and one set of tools. `interleaved`: as in `Round`.
    """

    name: str
    lanes: int
    turns: int
    rounds: int
    shared: bool = False
    interleaved: bool = False


SCENARIOS = (
    Scenario("turns6", lanes=1, turns=6, rounds=4),
    Scenario("turns35", lanes=1, turns=35, rounds=1),
    Scenario("burst8", lanes=8, turns=1, rounds=4, shared=True),
    Scenario("agents8", lanes=8, turns=6, rounds=2),
    Scenario("agents8-shared", lanes=8, turns=6, rounds=2, shared=True),
    Scenario("agents8-interleaved", lanes=8, turns=6, rounds=2, shared=True, interleaved=True),
)


def rounds(scenario: Scenario, seed: int = 0, scale: float = 1.0) -> Iterator[Round]:
    """The scenario's repetitions, no prompt twice; `scale` multiplies their number.

    With several lanes the number of rounds is even, so that each side begins equally often.
    """
    rng = random.Random(f"{seed}/{scenario.name}")
    source = _endless(rng)
    number = max(1, round(scenario.rounds * scale))
    for _ in range(number + number % 2 if scenario.lanes > 1 else number):
        some = [next(source) for _ in range(scenario.lanes)]
        if scenario.shared:
            some = _sharing(rng, some)
        lanes = tuple(_turns(conversation, scenario.turns) for conversation in some)
        yield Round(scenario.name, lanes, scenario.interleaved)


def request(name: str, prompt: ChatPrompt, scope: str) -> GenerateRequest:
    """A greedy turn of the conversation `name`."""
    return GenerateRequest(name, prompt, Sampling(MAX_TOKENS), scope=scope, program_id=name.rpartition("/")[0])


def _endless(rng: random.Random) -> Iterator[Conversation]:
    """The recorded conversations in random order, again and again, each under a system prompt of its own."""
    for number in count():
        if number % len(recorded()) == 0:
            order = rng.sample(recorded(), len(recorded()))
        script = order[number % len(order)]
        messages = [message for message in script.messages if message["role"] != "system"]
        yield Conversation((_system(rng), *messages), script.tools)


def _turns(conversation: Conversation, turns: int) -> tuple[ChatPrompt, ...]:
    """The prompts of the first assistant turns."""
    messages = [_as_client(message) for message in conversation.messages]
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return tuple(ChatPrompt(messages[:end], conversation.tools) for end in ends[:turns])


def _sharing(rng: random.Random, some: list[Conversation]) -> list[Conversation]:
    """The same conversations over one system prompt and one set of tools."""
    every = {tool["function"]["name"]: tool for each in recorded() for tool in each.tools}
    tools, system = tuple(rng.sample(list(every.values()), SHARED_TOOLS)), _system(rng)
    return [Conversation((system, *conversation.messages[1:]), tools) for conversation in some]


def _system(rng: random.Random) -> Json:
    return {"role": "system", "content": f"You are assistant number {rng.randrange(10**6)}."}


def _as_client(message: Json) -> Json:
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
