"""Sources: where in the prompt the parts of a call stand, token by token, for the heads of ``pointing`` to look at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from holdfast.loadgen.pocket.conversations import Conversation
from holdfast.loadgen.pocket.pointing import HEADS, NOWHERE, Choice
from holdfast.loadgen.pocket.render import Span, tool_lines
from holdfast.loadgen.pocket.schemas import Json, in_words

ARGUMENTS = '"arguments": {'
CALL_END = "</tool_call>"

Choices = dict[str, list[Choice]]
"""The choices of each of ``HEADS``."""


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of the conversation and the row's token that it starts with."""

    text: str
    tokens: Encoding
    first: int

    def at(self, start: int, end: int) -> range:
        """The row's tokens that characters ``start`` to ``end`` stand in."""
        inside = [i for i, (a, b) in enumerate(self.tokens.offsets) if a < end and b > start]
        return range(self.first + inside[0], self.first + inside[-1] + 1) if inside else range(0)

    def ids(self, span: range) -> list[int]:
        """The vocabulary's numbers of the row's tokens ``span``."""
        return self.tokens.ids[span.start - self.first : span.stop - self.first]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A string, number or switch in the arguments: characters ``start`` to ``end`` of a reply, and what to look for.

    ``said`` is how the prompt says it: the value itself, or the parameter's words for a switch, which is not
    ``copied``.
    """

    start: int
    end: int
    said: str
    copied: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it is written: its tool, its braces, its parameters' names with their start, and their values."""

    tool: str
    opened: int
    names: dict[str, int]
    leaves: list[Leaf]
    closed: int


@dataclass(frozen=True, slots=True)
class Declared:
    """A tool in the system prompt: the tokens of its name; of its parameters' names, and where their types start."""

    name: tuple[int, ...]
    parameters: dict[str, tuple[range, int]]


def row_choices(conversation: Conversation, pieces: Sequence[Span], encoded: Sequence[Encoding]) -> Choices:
    """Where each head is to look; ``pieces`` are the conversation's spans, ``encoded`` their tokens.

    tools: before a reply and behind each of its calls, at the next tool's name, or nowhere.
    sources: through the arguments, at the token that is copied next; from the end of a value on, at the start of the
    one that follows; behind the last, nowhere. What stands nowhere, or in other tokens, has no choices.
    keys: while a parameter's name is written, at its next token in the tool's schema, and then at its type.
    """
    found: Choices = {name: [] for name in HEADS}
    if not conversation.tools:
        return found
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    system, said = Place(pieces[0].text, encoded[0], 0), list[Place]()
    declared = _declared(conversation.tools, system)
    at = len(encoded[0].ids)
    for piece, tokens in zip(pieces[1:], encoded[1:], strict=True):
        place = Place(piece.text, tokens, at)
        if piece.learned:
            message = replies.pop(0)
            found["tools"] += _tool_choices(place, message, declared)
            for call in _calls(piece.text, message):
                found["sources"] += _source_choices(place, call, said)
                found["keys"] += _key_choices(place, call, declared[call.tool], system)
        said.append(place)
        at += len(tokens.ids)
    return found


def called(message: Json) -> list[str]:
    """The tools that an assistant message calls, begins to call or asks the arguments of, in order."""
    if message.get("tool_calls"):
        return [call["function"]["name"] for call in message["tool_calls"]]
    if message.get("asks_for"):
        return [message["asks_for"]]
    if message.get("unfinished") and message["content"].startswith("<tool_call>"):
        return [message["content"].split('"')[3]]
    return []


def _tool_choices(place: Place, message: Json, declared: dict[str, Declared]) -> Iterator[Choice]:
    ends = [place.at(*match.span())[-1] for match in re.finditer(CALL_END, place.text)]
    following = [declared[name].name for name in called(message)]
    following += [] if message.get("unfinished") and following else [NOWHERE]
    return (Choice(token, span) for token, span in zip((place.first - 1, *ends), following, strict=False))


def _source_choices(place: Place, call: Call, said: Sequence[Place]) -> Iterator[Choice]:
    behind = place.at(call.opened, call.opened + 1)[-1]  # the token in which the value before ends
    for leaf in call.leaves:
        written = place.at(leaf.start, leaf.end)
        found = _found(leaf, said)
        if leaf.copied:
            found = [(where, span) for where, span in found if where.ids(span) == place.ids(written)]
        if found:
            starts = tuple(span[0] for _, span in found)
            yield from (Choice(token, starts) for token in range(behind, written[0]))
            for index, token in enumerate(written[:-1] if leaf.copied else (), start=1):
                yield Choice(token, tuple(span[index] for _, span in found))
        behind = written[-1]
    last = place.at(call.closed, call.closed + 1)[0]
    yield from (Choice(token, NOWHERE) for token in range(behind, last))


def _key_choices(place: Place, call: Call, tool: Declared, system: Place) -> Iterator[Choice]:
    for name, start in call.names.items():
        written, (source, type_start) = place.at(start, start + len(name)), tool.parameters[name]
        if place.ids(written) == system.ids(source):
            targets = (*source, type_start)
            tokens = range(written[0] - 1, written[-1] + 1)
            yield from (Choice(token, (target,)) for token, target in zip(tokens, targets, strict=True))


def _found(leaf: Leaf, said: Sequence[Place]) -> list[tuple[Place, range]]:
    """Where ``leaf`` is said in the latest message that says it, by whole words."""
    wanted = re.compile(rf"(?<![\w]){re.escape(leaf.said)}(?![\w])")
    for place in reversed(said):
        found = [(place, place.at(*match.span())) for match in wanted.finditer(place.text)]
        if found:
            return found
    return []


def _calls(text: str, message: Json) -> Iterator[Call]:
    at = 0
    for call in message.get("tool_calls") or ():
        opened = text.index(ARGUMENTS, at) + len(ARGUMENTS) - 1
        at = opened + 1
        names: dict[str, int] = {}
        leaves: list[Leaf] = []
        for name, value in call["function"]["arguments"].items():
            names[name] = text.index(f'"{name}": ', at) + 1
            at = names[name] + len(name) + len('": ')
            for part in value if isinstance(value, list) else (value,):
                start, at = _written(text, at, part)
                switch = isinstance(part, bool)
                leaves.append(Leaf(start, at, in_words(name) if switch else str(part), not switch))
        yield Call(call["function"]["name"], opened, names, leaves, text.index("}", at))


def _written(text: str, at: int, value: object) -> tuple[int, int]:
    """The characters of ``value`` in JSON at or behind ``at``, without quotes."""
    written = json.dumps(value, ensure_ascii=False)
    start = text.index(written, at)
    quote = isinstance(value, str)
    return start + quote, start + len(written) - quote


def _declared(tools: Sequence[Json], system: Place) -> dict[str, Declared]:
    found = {}
    line_start = 0
    for tool, line in zip(tools, tool_lines(tools), strict=True):
        line_start = system.text.index(line, line_start)
        name = tool["function"]["name"]
        first = line_start + line.index(f'"name": "{name}"') + len('"name": "')
        at = line_start + line.index('"properties": {')
        parameters: dict[str, tuple[range, int]] = {}
        for parameter, entry in tool["function"]["parameters"]["properties"].items():
            start = system.text.index(f'"{parameter}": {{', at) + 1
            type_start = system.text.index('"type": "', start) + len('"type": "')
            span = system.at(start, start + len(parameter))
            parameters[parameter] = span, system.at(type_start, type_start + 1)[0]
            at = type_start + len(entry["type"])
        found[name] = Declared(tuple(system.at(first, first + len(name))), parameters)
    return found
