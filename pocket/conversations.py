"""Conversations with tools, composed from episodes: training data or, with held-out words, test data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.loadgen.bench.conversations import Conversation
from pocket.catalog import CATALOG, catalog_tool
from pocket.kinds import KINDS
from pocket.tools import Json, Parameter, Tool, described, in_words, random_tool, restyled, schema
from pocket.utterances import (
    CAPABILITY,
    Request,
    ask,
    capability,
    decline,
    follow_up,
    mention,
    off_topic,
    sentence,
    small_talk,
    stated,
    system_prompt,
)
from pocket.words import VERBS, Lexicon, Split

MOST_TOOLS = 8


@dataclass(slots=True)
class Writer:
    """An unfinished conversation: its tools, words and messages so far. A ``terse`` one has no answers."""

    rng: random.Random
    lex: Lexicon
    tools: tuple[Tool, ...]
    messages: list[Json] = field(default_factory=list)
    calls_made: int = 0
    terse: bool = False

    def say(self, role: str, content: str) -> None:
        """Append a message of text."""
        self.messages.append({"role": role, "content": content})

    def ask_for(self, requests: list[Request]) -> list[Json]:
        """Append an assistant turn with one call per request; returns the calls."""
        calls: list[Json] = []
        for request in requests:
            self.calls_made += 1
            function = {"name": request.tool.name, "arguments": request.arguments}
            calls.append({"id": f"call_{self.calls_made}", "type": "function", "function": function})
        self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        return calls

    def call(self, requests: list[Request]) -> list[Json]:
        """Append an assistant turn with one call per request, and their results. Returns the results."""
        calls = self.ask_for(requests)
        results = [self.result(request.tool) for request in requests]
        for call, result in zip(calls, results, strict=True):
            content = result_text(result, self.rng)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return results

    def result(self, tool: Tool) -> Json:
        """A result of ``tool``; one call in twenty-five fails."""
        if self.rng.random() < 0.04:
            return {"error": self.rng.choice(("not found", "timeout", "permission denied", "service unavailable"))}
        return {f.name: f.draw(self.rng, self.lex) for f in tool.result}

    def answer(self, requests: list[Request], results: list[Json]) -> None:
        """Append the final text, which quotes the results."""
        if self.terse:
            return
        self.say("assistant", " ".join(report(q, r) for q, r in zip(requests, results, strict=True)))


def result_text(result: Json, rng: random.Random) -> str:
    """A result as JSON, or in some cases as plain lines."""
    if rng.random() < 0.12:
        return "\n".join(f"{key}: {plain(value)}" for key, value in result.items())
    if rng.random() < 0.15:
        return json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(result, ensure_ascii=False)


def plain(value: Any) -> str:
    """A result value in prose."""
    return ", ".join(value) if isinstance(value, list) else str(value)


def report(request: Request, result: Json) -> str:
    """One sentence on a result: its fields in order, or its error."""
    if "error" in result:
        return f"The {in_words(request.tool.name)} call failed: {result['error']}."
    parts = [f"{in_words(key)} is {plain(value)}" for key, value in result.items()]
    fields = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"The {fields}."


def single(w: Writer) -> None:
    """One request, one call, one answer."""
    request = ask(w.rng.choice(w.tools), w.rng, w.lex)
    w.say("user", sentence(request, w.rng))
    w.answer([request], w.call([request]))


def parallel(w: Writer) -> None:
    """One request that needs several independent calls, of one tool or of different ones."""
    requests = parallel_requests(w)
    w.answer(requests, w.call(requests))


def parallel_requests(w: Writer) -> list[Request]:
    """Append a user message that needs several independent calls. Returns their requests."""
    count = w.rng.choice((2, 2, 2, 2, 3))
    first = w.rng.choice(w.tools)
    if w.rng.random() < 0.5:
        requests = same_tool(first, count, w)
        if requests:
            return requests
    requests = [ask(w.rng.choice(w.tools), w.rng, w.lex) for _ in range(count)]
    texts = [sentence(requests[0], w.rng).rstrip(".?!")] + [request.text for request in requests[1:]]
    w.say(
        "user",
        w.rng.choice((" and ", " and also ", ", and ", "; ", ". Also ", " and ")).join(texts)
        + w.rng.choice((".", "?", "")),
    )
    return requests


def same_tool(tool: Tool, count: int, w: Writer) -> list[Request]:
    """Append a request for one call with several values of its first parameter. Empty if the tool does not allow it."""
    head = tool.parameters[0]
    if head.kind not in ("city", "person", "id", "word", "path", "ticker", "date"):
        return []
    base = ask(tool, w.rng, w.lex)
    value = str(base.arguments[head.name])
    if base.text.count(value) != 1 or (head.kind == "id" and len(value) < 3):
        return []
    values = [value]
    while len(values) < count:
        other = str(head.draw(w.rng, w.lex))
        if other not in values and not any(str(v) == other for v in base.arguments.values()):
            values.append(other)
    joined = (
        ", ".join(values[:-1]) + w.rng.choice((" and ", " and in " if head.kind == "city" else " and ")) + values[-1]
    )
    text = base.text.replace(value, joined)
    joint = replace(base, text=text)
    w.say("user", sentence(joint, w.rng))
    return [replace(base, arguments={**base.arguments, head.name: v}) for v in values]


def sequence(w: Writer) -> None:
    """One request for several calls one after another. It contains all their arguments."""
    requests = [ask(w.rng.choice(w.tools), w.rng, w.lex) for _ in range(w.rng.choice((2, 2, 3)))]
    then = w.rng.choice((", then ", " and then ", ". Then ", ", after that "))
    opening = w.rng.choice(("", "first, ", "please "))
    w.say("user", opening + then.join(request.text for request in requests) + ".")
    results = [w.call([request])[0] for request in requests]
    w.answer(requests, results)


def chain(w: Writer) -> None:
    """A call that needs a value of an earlier result. The request for it is the same one or the next."""
    links = [link for a in w.tools for b in w.tools if a is not b for link in linked(a, b)]
    if not links:
        single(w)
        return
    first, second, key = w.rng.choice(links)
    request = ask(first, w.rng, w.lex)
    head = second.parameters[0]
    later = {p.name: p.draw(w.rng, w.lex) for p in second.parameters[1:] if p.required or w.rng.random() < 0.3}
    order = follow_up(second, w.rng)
    clauses, later = stated(second, later, w.rng, {0})
    order += clauses
    at_once = w.rng.random() < 0.6
    if at_once:
        then = w.rng.choice((" and then ", ", then ", " and "))
        w.say("user", sentence(replace(request, question=False), w.rng).rstrip(".?!") + then + order + ".")
    else:
        w.say("user", sentence(request, w.rng))
    results = w.call([request])
    if "error" in results[0] or not at_once:
        w.answer([request], results)
        if "error" in results[0]:
            return
        w.say("user", w.rng.choice(("", "now ", "ok, ", "please ", "Great, ")) + order + w.rng.choice((".", "")))
    final = Request(order, second, {head.name: results[0][key], **later})
    results = w.call([final])
    w.answer([final], results)


def linked(first: Tool, second: Tool) -> list[tuple[Tool, Tool, str]]:
    """The field of ``first``'s result that fits ``second``'s first argument: by its name, or as the only one."""
    head = second.parameters[0]
    same_thing = first.name.split("_")[-1] == second.name.split("_")[-1]
    fitting = [
        f.name
        for f in first.result
        if f.kind == head.kind
        and not f.choices
        and (f.name == head.name or f.name in head.name.split("_") or (same_thing and f.kind == "id"))
    ]
    if head.name in fitting:
        return [(first, second, head.name)]
    return [(first, second, fitting[0])] if len(fitting) == 1 else []


def no_fit(w: Writer) -> None:
    """A request that none of the tools can serve."""
    w.say("user", strange_request(w))
    w.say("assistant", decline(w.tools))


def strange_request(w: Writer) -> str:
    """A user message that none of the tools can serve: off topic, or for a tool with another noun."""
    if w.rng.random() < 0.35:
        return off_topic(w.rng, w.lex)
    return sentence(ask(stranger(w), w.rng, w.lex), w.rng)


def stranger(w: Writer) -> Tool:
    """A tool that the writer lacks, with a noun that none of its tools has."""
    tool = draw_tool(w.rng, w.lex, w.lex.split is Split.TRAIN)
    names = {in_words(known.name) for known in w.tools}
    nouns = {word for name in names for word in name.split(" ")[1:]}
    while in_words(tool.name) in names or nouns & set(in_words(tool.name).split(" ")[1:]):
        tool = random_tool(w.rng, w.lex)
    return tool


def ask_back(w: Writer) -> None:
    """A request without its required arguments, the question for them, and the call after the answer."""
    candidates = [t for t in w.tools if not any("{" in pattern for pattern in t.requests)]
    if not candidates:
        single(w)
        return
    tool = w.rng.choice(candidates)
    request = Request(w.rng.choice(tool.requests), tool, {})
    w.say("user", sentence(request, w.rng))
    missing = [p for p in tool.parameters if p.required]
    w.say("assistant", f"Please tell me the {' and the '.join(p.words for p in missing)}.")
    w.messages[-1]["asks_for"] = tool.name
    arguments: Json = {p.name: p.draw(w.rng, w.lex) for p in missing}
    only = arguments[missing[0].name]
    short = len(missing) == 1 and isinstance(only, str) and w.rng.random() < 0.5
    required = replace(tool, parameters=tuple(missing))
    text, stated_arguments = (only, arguments) if short else stated(required, arguments, w.rng, set())
    w.say("user", text.strip(" ,"))
    request = Request(text, tool, stated_arguments)
    w.answer([request], w.call([request]))


def chat(w: Writer) -> None:
    """Small talk, or a question about the model's abilities."""
    if w.rng.random() < 0.25:
        w.say("user", w.rng.choice(CAPABILITY))
        w.say("assistant", capability(w.tools))
        return
    text, answer = small_talk(w.rng)
    w.say("user", text)
    w.say("assistant", answer)


Episode = Callable[[Writer], None]
EPISODES: tuple[tuple[Episode, float], ...] = (
    (single, 0.37),
    (parallel, 0.20),
    (chain, 0.13),
    (sequence, 0.06),
    (no_fit, 0.18),
    (ask_back, 0.02),
    (chat, 0.04),
)


def draw_tool(rng: random.Random, lex: Lexicon, catalog: bool) -> Tool:
    """A tool of the catalog (one in three, if ``catalog`` is set) or a composed one."""
    if catalog and rng.random() < 0.33:
        return restyled(catalog_tool(rng.choice(CATALOG[rng.choice(tuple(CATALOG))]), rng), rng)
    return restyled(random_tool(rng, lex), rng)


def draw_tools(rng: random.Random, lex: Lexicon, count: int, catalog_share: float) -> tuple[Tool, ...]:
    """Tools with different names: from one field of the catalog, composed at random, or siblings that share a noun."""
    tools: dict[str, Tool] = {}
    if rng.random() < catalog_share:
        rows = CATALOG[rng.choice(tuple(CATALOG))]
        for row in rng.sample(rows, min(count, len(rows))):
            tool = catalog_tool(row, rng)
            tools[tool.name] = tool
    while len(tools) < count:
        if tools and rng.random() < 0.25:
            tool = sibling(rng.choice(tuple(tools.values())), rng, lex)
        else:
            tool = draw_tool(rng, lex, catalog_share > 0)
        if all(in_words(tool.name) != in_words(name) for name in tools):
            tools[tool.name] = tool
    chosen = list(tools.values())
    rng.shuffle(chosen)
    return tuple(replace(t, parameters=tuple(described(p, rng, lex) for p in t.parameters)) for t in chosen)


def sibling(tool: Tool, rng: random.Random, lex: Lexicon) -> Tool:
    """A tool with the noun of ``tool`` that takes an id or a field of its result."""
    noun = "_".join(in_words(tool.name).split(" ")[1:]) or lex.noun(rng)
    head = Parameter(f"{noun}_id", "id")
    for f in tool.result:
        if f.kind not in ("integer", "number") and not f.choices and rng.random() < 0.5:
            head = Parameter(f.name, f.kind)
    own = set(VERBS.get(in_words(tool.name).split(" ")[0], ()))
    composed = random_tool(
        rng, lex, verb=rng.choice([v for v, verbs in VERBS.items() if not own & set(verbs)]), noun=noun
    )
    rest = tuple(p for p in composed.parameters if p.name != head.name)[: rng.randint(0, 2)]
    return replace(composed, parameters=(head, *rest))


def write(
    rng: random.Random,
    lex: Lexicon,
    *,
    tools: int,
    turns: int = 0,
    episodes: tuple[Episode, ...] = (),
    catalog_share: float | None = None,
) -> Conversation:
    """A conversation with ``tools`` tools: at least ``turns`` assistant turns, or exactly ``episodes``.

    The share ``catalog_share`` of the tool sets comes from the catalog; by default only in training.
    """
    if catalog_share is None:
        catalog_share = 0.45 if lex.split is Split.TRAIN else 0.0
    writer = Writer(rng, lex, draw_tools(rng, lex, tools, catalog_share))
    if rng.random() < 0.6:
        writer.say("system", system_prompt(rng, lex))
    if episodes:
        for episode in episodes:
            episode(writer)
    kinds, weights = zip(*(EPISODES if tools else ((no_fit, 0.3), (chat, 0.7))), strict=True)
    while not episodes and sum(m["role"] == "assistant" for m in writer.messages) < turns:
        rng.choices(kinds, weights)[0](writer)
    return Conversation(tuple(writer.messages), tuple(schema(tool, rng) for tool in writer.tools))


def echo(rng: random.Random, lex: Lexicon) -> Conversation:
    """Requests to repeat values of every kind word for word: the simplest exercise in copying."""
    writer = Writer(rng, lex, ())
    for _ in range(rng.randint(1, 3)):
        values = [mention(KINDS[rng.choice(tuple(KINDS))].draw(rng, lex)) for _ in range(rng.randint(2, 16))]
        text = rng.choice((" ", ", ", "\n")).join(values)
        writer.say("user", rng.choice(("Repeat: ", "repeat ", "Echo: ", "Say this: ")) + text)
        writer.say("assistant", text)
    return Conversation(tuple(writer.messages), ())


def training_conversation(
    seed: int,
    lex: Lexicon | None = None,
    *,
    most_tools: int = MOST_TOOLS,
    long_share: float = 0.0,
    echo_share: float = 0.02,
) -> Conversation:
    """The conversation of one seed. ``long_share`` of them have 20 to 38 turns; ``echo_share`` only repeat."""
    rng = random.Random(seed)
    lex = lex or _LEXICONS[Split.TRAIN]
    if rng.random() < echo_share:
        return echo(rng, lex)
    if rng.random() < long_share:
        return write(rng, lex, tools=rng.randint(2, MOST_TOOLS), turns=rng.randint(20, 37))
    if rng.random() < 0.04:
        return write(rng, lex, tools=0, turns=rng.randint(1, 3))
    tools = min(rng.randint(1, most_tools), rng.randint(1, most_tools))
    return write(rng, lex, tools=tools, turns=rng.randint(2, most_tools + 2))


_LEXICONS: dict[Split, Lexicon] = {split: Lexicon(split) for split in Split}


def lexicon(split: Split) -> Lexicon:
    """The shared word lists of one split."""
    return _LEXICONS[split]
