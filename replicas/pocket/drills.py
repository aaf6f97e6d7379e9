"""Drills: training conversations made of decisions alone, nearly twice as many per token as in whole conversations.

Requests follow one another without final answers and mostly without results, and some replies are learned only up to
the point where nothing is left to decide. The scores never use drills.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from holdfast.replicas.pocket.conversations import (
    Conversation,
    Writer,
    chain,
    draw_tools,
    parallel_requests,
    sequence,
    strange_request,
)
from holdfast.replicas.pocket.requests import Request, ask, sentence
from holdfast.replicas.pocket.schemas import Tool, schema
from holdfast.replicas.pocket.words import Lexicon

NO_TOOL = "I have no tool for that."


def drill(rng: random.Random, lex: Lexicon, most_tools: int) -> Conversation:
    """Six to twelve requests over one set of tools; half the sets have no descriptions of parameters."""
    tools = draw_tools(rng, lex, rng.randint(1, most_tools), 0.3)
    if rng.random() < 0.5:
        tools = tuple(undescribed(tool) for tool in tools)
    writer = Writer(rng, lex, tools, terse=True)
    kinds, weights = zip(*TURNS, strict=True)
    for _ in range(rng.randint(6, 12)):
        rng.choices(kinds, weights)[0](writer)
    return Conversation(tuple(writer.messages), tuple(schema(tool, rng) for tool in tools))


def undescribed(tool: Tool) -> Tool:
    """``tool`` without descriptions of its parameters."""
    return replace(tool, parameters=tuple(replace(p, description="") for p in tool.parameters))


def refuse(w: Writer) -> None:
    """A request that no tool fits; the list of tools in the answer is left out."""
    w.say("user", strange_request(w))
    _begin(w, NO_TOOL)


def name(w: Writer) -> None:
    """A request without arguments; only the name of the tool is learned."""
    candidates = [tool for tool in w.tools if not any("{" in pattern for pattern in tool.requests)]
    if not candidates:
        call(w)
        return
    tool = w.rng.choice(candidates)
    w.say("user", sentence(Request(w.rng.choice(tool.requests), tool, {}), w.rng))
    _begin(w, f'<tool_call>\n{{"name": "{tool.name}", "arguments": {{')


def call(w: Writer) -> None:
    """One request, one call."""
    request = ask(w.rng.choice(w.tools), w.rng, w.lex)
    w.say("user", sentence(request, w.rng))
    w.ask_for([request])


def calls(w: Writer) -> None:
    """One request, several calls."""
    w.ask_for(parallel_requests(w))


def _begin(w: Writer, text: str) -> None:
    w.messages.append({"role": "assistant", "content": text, "unfinished": True})


TURNS: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (refuse, 0.18),
    (name, 0.18),
    (call, 0.32),
    (calls, 0.18),
    (chain, 0.1),
    (sequence, 0.04),
)
