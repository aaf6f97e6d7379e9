"""From a tool's JSON schema to the text of its call, with holes for the values; and from tokens to a `Skeleton`.

Knows schemas and text, no tokenizer: the caller encodes the text and hands the offsets back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.replicas.speculation.skeleton import Skeleton, SkeletonSet

Encode: TypeAlias = Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]
"""Text to token ids and each one's character range, without special tokens around."""

_CLOSER = '"'
_BREAKS = (".", ",", ";", ":", ")", "!", "?", "\n", "*", "<|")
_MAX_DEPTH = 8  # of nested objects; deeper ones are left to the model
_REPEATED_DEPTH = 3  # of lists whose skeleton has two items
_FILLER, _NUMBER = "Q", "7"  # stand in for values while the text is encoded


@dataclass(frozen=True, slots=True)
class ValueEndings:
    """Tokens that end a value copied from JSON (`closers`), or a short one copied from prose (`breaks`)."""

    closers: frozenset[int]
    breaks: frozenset[int]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around a call's name and arguments. The default is Hermes', which Qwen writes too."""

    before_name: str = '<tool_call>\n{"name": "'
    before_arguments: str = '", "arguments": '
    after: str = "}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """A call's text with fillers, and the filler's character ranges in it, in order."""

    text: str
    holes: tuple[tuple[int, int], ...]

    def cut(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Skeleton:
        """The skeleton of the encoded text. A token that shares a character with a filler belongs to its value."""
        segments: list[list[int]] = [[]]
        hole = 0
        for token, (start, end) in zip(ids, offsets, strict=True):
            while hole < len(self.holes) and start >= self.holes[hole][1]:
                hole += 1
            while len(segments) < hole + 1:
                segments.append([])
            if hole == len(self.holes) or end <= self.holes[hole][0]:
                segments[-1].append(token)
        while len(segments) < len(self.holes) + 1:
            segments.append([])
        return Skeleton(tuple(tuple(segment) for segment in segments))


def call_template(name: str, parameters: Mapping[str, Any] | None, form: CallFormat | None = None) -> CallTemplate:
    """The canonical call of a tool: its arguments in the schema's order, two items in an outer list."""
    form = form or CallFormat()
    text = form.before_name + json.dumps(name, ensure_ascii=False)[1:-1] + form.before_arguments
    holes: list[tuple[int, int]] = []
    for part in _value({"type": "object", **(parameters or {})}, 0):
        if part in (_STRING, _OTHER):
            filler = _FILLER if part is _STRING else _NUMBER
            holes.append((len(text), len(text) + len(filler)))
            text += filler
        else:
            text += part
    return CallTemplate(text + form.after, tuple(holes))


_STRING, _OTHER = "\0string", "\0other"


def _value(schema: Mapping[str, Any], depth: int) -> Iterable[str]:
    kind = schema.get("type")
    properties = schema.get("properties", {})
    if kind == "object" and depth < _MAX_DEPTH and isinstance(properties, Mapping) and schema.get("properties", True):
        yield from _object(properties, depth)
    elif kind == "array" and depth < _MAX_DEPTH and isinstance(schema.get("items"), Mapping):
        yield "["
        yield from _value(schema["items"], depth + 1)
        if depth < _REPEATED_DEPTH:  # a second item shows how a list goes on; a longer one repeats it
            yield ", "
            yield from _value(schema["items"], depth + 1)
        yield "]"
    elif kind == "string":
        yield '"'
        yield _STRING
        yield '"'
    else:
        yield _OTHER


def _object(properties: Mapping[str, Any], depth: int) -> Iterable[str]:
    yield "{"
    for i, (key, schema) in enumerate(properties.items()):
        yield (", " if i else "") + json.dumps(key, ensure_ascii=False) + ": "
        yield from _value(schema if isinstance(schema, Mapping) else {}, depth + 1)
    yield "}"


def compile_tools(
    tools: Iterable[Mapping[str, Any]], encode: Encode, endings: ValueEndings, form: CallFormat | None = None
) -> SkeletonSet:
    """The skeletons of `tools`, which are schemas in OpenAI's format. What is no function with a name is skipped."""
    skeletons = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            template = call_template(function["name"], function.get("parameters"), form)
            skeletons.append(template.cut(*encode(template.text)))
    return SkeletonSet(skeletons, endings.closers, endings.breaks)


def value_endings(texts: Iterable[tuple[int, str]]) -> ValueEndings:
    """Sort a vocabulary's tokens, each with its text, by how they may end a value. Once for a tokenizer."""
    closers, breaks = set(), set()
    for token, text in texts:
        if text.startswith(_CLOSER):
            closers.add(token)
        elif text.startswith(_BREAKS):
            breaks.add(token)
    return ValueEndings(frozenset(closers), frozenset(breaks))
