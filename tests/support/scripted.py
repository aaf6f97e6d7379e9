"""A model that does one tool task, whatever it is told: it calls a tool of the client's, and answers with the result.

It stands behind the real router, over HTTP. What it calls depends on the tools that a request declares: each client has
one that runs a command or reads a file. Requests without tools (titles, summaries) get a word.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fake_backend import FakeBackend, World

from holdfast.replicas.events import Timing, Usage
from holdfast.replicas.requests import (
    ChatPrompt,
    Completed,
    GenerateRequest,
    ModelCard,
    Piece,
    RawPrompt,
    TextDelta,
    ToolCallDelta,
)
from holdfast.replicas.retention.latency import called
from holdfast.router.backend import ANYWHERE, Batch, Place

CARD = ModelCard("pocket", context_length=131072, vocabulary=50000, replica_id="r1", longest_token=1)
TIMING = Timing(arrived=0.0, scheduled=0.001, first_token=0.002, finished=0.003)


@dataclass
class Script:
    """`calls`: the arguments with which a tool is called, by its name; the first that a request declares is."""

    calls: Mapping[str, Mapping[str, Any]]
    said: str = "The file says: "


class ScriptedBackend(FakeBackend):
    """Calls once in a conversation; the results that come back stand in `results`."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.plan = script
        self.cards = (CARD,)
        self.results: list[str] = []

    async def tokenize(self, prompt: ChatPrompt | RawPrompt) -> Sequence[int]:
        return range(size(prompt))

    async def stream(self, request: GenerateRequest, place: Place = ANYWHERE) -> AsyncGenerator[Batch, None]:
        self.requests.append(request)
        self.places.append(place)
        for pieces in self.reply(request):
            yield Batch("r1", pieces)

    def reply(self, request: GenerateRequest) -> list[tuple[Piece, ...]]:
        """What it says, in the batches that it says it in."""
        prompt = request.prompt
        usage = Usage(prompt=size(prompt), cached=0, completion=8)
        tools = [tool["function"]["name"] for tool in prompt.tools] if isinstance(prompt, ChatPrompt) else []
        messages = prompt.messages if isinstance(prompt, ChatPrompt) else []
        results = [str(message["content"]) for message in messages if message["role"] == "tool"]
        self.results += results[len(self.results) :]
        name = next((name for name in self.plan.calls if name in tools), None)
        if name is not None and not results:
            arguments = json.dumps(self.plan.calls[name])
            half = len(arguments) // 2
            return [
                (TextDelta("I look. "),),
                (ToolCallDelta(0, f"call_{request.request_id[:8]}", name),),
                (
                    ToolCallDelta(0, arguments=arguments[:half]),
                    ToolCallDelta(0, arguments=arguments[half:], closed=True),
                ),
                (Completed("tool_calls", usage, TIMING, called((name,), "", interface=True, cut=False, ends=False)),),
            ]
        text = f"{self.plan.said}{results[-1]}" if results else "Hello"
        return [(TextDelta(text[:4]),), (TextDelta(text[4:]),), (Completed("stop", usage, TIMING),)]


def size(prompt: ChatPrompt | RawPrompt) -> int:
    """About as many tokens as a prompt has: four characters each."""
    told = json.dumps([prompt.messages, prompt.tools]) if isinstance(prompt, ChatPrompt) else str(prompt.content)
    return len(told) // 4 + 1


@contextmanager
def scripted(script: Script) -> Iterator[tuple[str, ScriptedBackend]]:
    """The address of a router with this model, and the model."""
    backend = ScriptedBackend(script)
    with World(backend).served() as address:
        yield address, backend
