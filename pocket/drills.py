"""Drills: training conversations of decisions alone, nearly twice as many per token as in whole conversations.

Requests follow one another without final answers and mostly without results. Some replies are learned only up to their
last decision. The scores never use drills.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from holdfast.loadgen.bench.conversations import Conversation
from pocket.conversations import Writer, chain, draw_tools, parallel_requests, same_tool, sequence, stranger
from pocket.tools import Tool, camel_cased, in_words, random_tool, schema
from pocket.utterances import Request, ask, off_topic, sentence
from pocket.words import VERBS, Lexicon

NO_TOOL = "I have no tool for that."


def drill(rng: random.Random, lex: Lexicon, most_tools: int) -> Conversation:
    """Six to twelve requests with one set of tools. Half of the sets have no descriptions of parameters."""
    tools = tuple(varied(tool, rng, lex) for tool in draw_tools(rng, lex, rng.randint(1, most_tools), 0.3))
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


def varied(tool: Tool, rng: random.Random, lex: Lexicon) -> Tool:
    """``tool`` with camel-case names (one in five), or with nouns added to some parameter names."""
    names = [f"{lex.noun(rng)}_{p.name}" if rng.random() < 0.12 else p.name for p in tool.parameters]
    parameters = tuple(replace(p, name=name) for p, name in zip(tool.parameters, names, strict=True))
    tool = replace(tool, parameters=parameters) if len({*names}) == len(names) else tool
    return camel_cased(tool) if rng.random() < 0.2 else tool


def decide(w: Writer) -> None:
    """A request for one of the tools or, as often, for none of them. It is learned up to the tool's name.

    Both kinds have the same wording, with and without arguments, so that only the tools distinguish them.
    """
    if w.rng.random() < 0.5:
        tool = w.rng.choice(w.tools)
        w.say("user", _request_text(w, tool))
        _begin(w, f'<tool_call>\n{{"name": "{tool.name}", "arguments": {{')
        return
    is_off_topic = w.rng.random() < 0.15
    w.say("user", off_topic(w.rng, w.lex) if is_off_topic else _request_text(w, _missing_tool(w)))
    _begin(w, NO_TOOL)


def _missing_tool(w: Writer) -> Tool:
    """A tool that the writer lacks. It mostly shares a verb with one of the writer's tools, but not the noun."""
    verbs = [verb for tool in w.tools if (verb := in_words(tool.name).split(" ")[0]) in VERBS]
    if not verbs or w.rng.random() < 0.35:
        return stranger(w)
    known = {word for tool in w.tools for word in in_words(tool.name).split(" ")}
    while True:
        tool = random_tool(w.rng, w.lex, verb=w.rng.choice(verbs))
        if not known & set(in_words(tool.name).split(" ")[1:]):
            return tool


def _request_text(w: Writer, tool: Tool) -> str:
    """A request for ``tool``: its name in words, a sentence without arguments, or one with all required arguments."""
    chance = w.rng.random()
    if chance < 0.15:
        return in_words(tool.name)
    bare = [pattern for pattern in tool.requests if "{" not in pattern]
    request = Request(w.rng.choice(bare), tool, {}) if bare and chance < 0.4 else ask(tool, w.rng, w.lex)
    return sentence(request, w.rng)


def call(w: Writer) -> None:
    """One request, one call."""
    request = ask(w.rng.choice(w.tools), w.rng, w.lex)
    w.say("user", sentence(request, w.rng))
    w.ask_for([request])


def calls(w: Writer) -> None:
    """One request, several calls."""
    w.ask_for(parallel_requests(w))


def spread(w: Writer) -> None:
    """One request for the same call with several values, if a tool allows it."""
    for tool in w.rng.sample(w.tools, len(w.tools)):
        if requests := same_tool(tool, w.rng.choice((2, 2, 3)), w):
            w.ask_for(requests)
            return
    calls(w)


def _begin(w: Writer, text: str) -> None:
    w.messages.append({"role": "assistant", "content": text, "unfinished": True})


TURNS: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (decide, 0.20),
    (call, 0.20),
    (calls, 0.36),
    (spread, 0.08),
    (chain, 0.12),
    (sequence, 0.04),
)
