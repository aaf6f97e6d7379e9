"""Tools as values: parameters, JSON schemas in the styles of OpenAI clients, and random tools."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

from pocket.kinds import DESCRIPTIONS, ENUMS, KINDS, Value
from pocket.words import VERBS, Lexicon, listed

Json = dict[str, Any]

COMMON_KINDS = listed("city person date time email path id word query integer number boolean")
"""The kinds of three in four parameters of composed tools; the rest are of any kind."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; ``kind`` is a key of ``KINDS`` or ``enum`` with ``choices``."""

    name: str
    kind: str
    required: bool = True
    description: str = ""
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The name in words, as a user says it."""
        return in_words(self.name)

    def draw(self, rng: random.Random, lex: Lexicon) -> Value:
        """A value for this parameter."""
        return rng.choice(self.choices) if self.kind == "enum" else KINDS[self.kind].draw(rng, lex)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a tool's result."""

    name: str
    kind: str
    choices: tuple[str, ...] = ()

    def draw(self, rng: random.Random, lex: Lexicon) -> Value:
        """A value of the field."""
        return rng.choice(self.choices) if self.choices else KINDS[self.kind].draw(rng, lex)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, with the sentences that request it (``{0}`` is the first parameter)."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: tuple[Field, ...] = field(default=())


def in_words(name: str) -> str:
    """``check_in`` and ``checkIn`` as ``check in``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").replace("-", " ").replace(".", " ").lower()


def camel(name: str) -> str:
    """``get_weather`` as ``getWeather``."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def restyled(tool: Tool, rng: random.Random) -> Tool:
    """``tool``; one in ten has camel-case names throughout."""
    return camel_cased(tool) if rng.random() <= 0.1 else tool


def camel_cased(tool: Tool) -> Tool:
    """``tool`` with camel-case names throughout."""
    parameters = tuple(replace(p, name=camel(p.name)) for p in tool.parameters)
    return replace(tool, name=camel(tool.name), parameters=parameters)


def described(parameter: Parameter, rng: random.Random, lex: Lexicon) -> Parameter:
    """``parameter`` with a description of its kind."""
    options = DESCRIPTIONS.get(parameter.kind, ("The {w}", "{w}", "{w} to use"))
    example = parameter.draw(rng, lex)
    text = rng.choice(options).format(w=parameter.words, v=example)
    return replace(parameter, description=text[:1].upper() + text[1:])


def random_parameter(rng: random.Random, lex: Lexicon, noun: str) -> Parameter:
    """A parameter of any kind. One in five is an enum, and some have invented names."""
    if rng.random() < 0.2:
        names, choices = rng.choice(ENUMS)
        if rng.random() < 0.12:
            choices = tuple(dict.fromkeys(lex.noun(rng) for _ in range(4)))
        return Parameter(rng.choice(names), "enum", choices=choices)
    kind = rng.choice(COMMON_KINDS if rng.random() < 0.75 else tuple(KINDS))
    name = rng.choice(KINDS[kind].names)
    chance = rng.random()
    if kind == "id" and chance < 0.5:
        name = f"{noun}_id"
    elif chance < 0.08:
        name = lex.noun(rng)
    elif chance < 0.2:
        name = f"{lex.noun(rng)}_{name}"
    return Parameter(name, kind)


def random_tool(rng: random.Random, lex: Lexicon, *, verb: str = "", noun: str = "") -> Tool:
    """A tool composed of a verb, one or two nouns, and one to three random parameters."""
    verb = verb or rng.choice(tuple(VERBS))
    noun = noun or (lex.noun(rng) if rng.random() < 0.85 else f"{lex.noun(rng)}_{lex.noun(rng)}")
    thing = in_words(noun)
    parameters: dict[str, Parameter] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 2, 2, 3))):
        parameter = random_parameter(rng, lex, noun.split("_")[0])
        parameters.setdefault(parameter.name, parameter)
    ordered = sorted(parameters.values(), key=lambda p: p.kind in ("boolean", "enum", "integer", "number"))
    optional_from = rng.randint(1, len(ordered))
    ordered = [replace(p, required=i < optional_from) for i, p in enumerate(ordered)]
    article = "an" if thing[0] in "aeiou" else "a"
    verbs = VERBS[verb]
    requests = tuple(
        pattern.format(s=phrase, t=thing, a=article)
        for phrase in verbs
        for pattern in ("{s} the {t}", "{s} {a} {t}", "{s} {t}", "{s} my {t}")
    )
    description = rng.choice(
        (
            f"{verb.capitalize()} {article} {thing}.",
            f"{verb.capitalize()} the {thing}",
            f"{verbs[-1].capitalize()} {article} {thing}.",
            f"{verb.capitalize()} {thing} data",
        )
    )
    return Tool(f"{verb}_{noun}", description, tuple(ordered), requests, random_result(rng, lex, noun))


def random_result(rng: random.Random, lex: Lexicon, noun: str) -> tuple[Field, ...]:
    """Two to four result fields."""
    fields: dict[str, Field] = {}
    for _ in range(rng.randint(2, 4)):
        chance = rng.random()
        if chance < 0.25:
            result_field = Field(
                "status", "word", ("ok", "done", "pending", "success", "active", "completed", "queued")
            )
        elif chance < 0.45:
            result_field = Field(rng.choice((f"{noun}_id", "id", "reference", "code")), "id")
        else:
            kind = rng.choice(("integer", "number", "date", "word", "city", "person", "query", "time", "path"))
            names = ("total", "count", "score", "value") if kind == "integer" else KINDS[kind].names
            result_field = Field(lex.noun(rng) if rng.random() < 0.3 else rng.choice(names), kind)
        fields.setdefault(result_field.name, result_field)
    return tuple(fields.values())


def schema(tool: Tool, rng: random.Random) -> Json:
    """The OpenAI tool object, in the varying detail and key order of real clients."""
    style = rng.random()
    properties: Json = {}
    for p in tool.parameters:
        entry: Json = {"type": "string" if p.kind == "enum" else KINDS[p.kind].json_type}
        if p.kind == "list":
            entry["items"] = {"type": "string"}
        if p.choices:
            entry["enum"] = list(p.choices)
        if style > 0.25 and p.description:
            entry["description"] = p.description
            if style > 0.85:
                entry = dict(sorted(entry.items(), key=lambda item: item[0] != "description"))
        properties[p.name] = entry
    parameters: Json = {"type": "object", "properties": properties}
    required = [p.name for p in tool.parameters if p.required]
    if rng.random() < 0.9:
        parameters["required"] = required
    function: Json = {"name": tool.name, "description": tool.description, "parameters": parameters}
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
        function["strict"] = True
    if rng.random() < 0.1:
        function = dict(sorted(function.items(), key=lambda item: item[0] != "description"))
    elif rng.random() < 0.05:
        del function["description"]
    return {"type": "function", "function": function}
