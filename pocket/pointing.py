"""Pointing: while training, three attention heads are told where in the prompt to look.

Whether to call at all is one token of a reply, and a model that cannot yet tell the tools apart there learns nothing
from it; which words of a request fill which parameter is as hidden. So heads near the top learn to look at the next
tool, at the value that is copied next and at its parameter, and what is above them reads it.

Here: the loss of a batch's choices, and where the parts of a call stand in the prompt, token by token (`row_choices`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Encoding
from torch import Tensor

from holdfast.loadgen.bench.conversations import Conversation, Span, tool_lines
from pocket.tools import Json, in_words

ARGUMENTS = '"arguments": {'
CALL_END = "</tool_call>"
NOWHERE = (0,)
"""Where a head looks when nothing is next: the first token, which says nothing."""
HEADS = {"tools": (-2, 0), "sources": (-2, -1), "keys": (-1, 0)}
"""Layer and query head of each. The parameter is known once the value is, so its head is a layer above."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Token ``at`` of a row is to look at ``tokens``, no matter at which of them."""

    at: int
    tokens: tuple[int, ...]


Choices = dict[str, list[Choice]]
"""The choices of each of ``HEADS``."""


@dataclass(frozen=True, slots=True)
class Pointing:
    """The choices of a batch, at most ``most`` in a row.

    ``row``, ``nth`` and ``at`` are ``[choices]``: of its row the choice is number ``nth``, for token ``at``.
    ``choice`` and ``token`` are ``[pairs]``: choice ``choice[i]`` may look at ``token[i]`` of its row.
    """

    most: int
    row: Tensor
    nth: Tensor
    at: Tensor
    choice: Tensor
    token: Tensor

    def to(self, device: torch.device) -> Pointing:
        """The same on ``device``."""
        moved = (each.to(device) for each in (self.row, self.nth, self.at, self.choice, self.token))
        return Pointing(self.most, *moved)


def pointing_loss(q: Tensor, k: Tensor, pointing: Pointing) -> Tensor:
    """Mean of -log of the attention on the right tokens; zero for a batch without choices.

    ``q`` and ``k`` ``[rows, length, head_dim]`` are one head's, in position; ``q`` is not scaled yet.
    """
    if not pointing.most:
        return q.new_zeros((), dtype=torch.float32)
    row, nth, at = pointing.row, pointing.nth, pointing.at
    asked = q.new_zeros(len(q), pointing.most, q.shape[-1])
    asked[row, nth] = q[row, at] * q.shape[-1] ** -0.5
    scores = torch.bmm(asked, k.transpose(1, 2))[row, nth].float()  # [choices, length]
    seen = scores.masked_fill(torch.arange(k.shape[1], device=k.device) > at[:, None], float("-inf"))
    right = torch.zeros_like(seen, dtype=torch.bool)
    right[pointing.choice, pointing.token] = True
    return (seen.logsumexp(-1) - seen.masked_fill(~right, float("-inf")).logsumexp(-1)).mean()


def pointing_losses(seen: Sequence[tuple[Tensor, Tensor]], pointing: Mapping[str, Pointing]) -> list[Tensor]:
    """The loss of each of ``HEADS``; ``seen`` are each layer's queries and keys ``[rows, heads, length, head_dim]``."""
    losses = []
    for name, (layer, head) in HEADS.items():
        q, k = seen[max(layer, -len(seen))]
        losses.append(pointing_loss(q[:, head], k[:, head], pointing[name]))
    return losses


def collate_pointing(rows: Sequence[Sequence[Choice]]) -> Pointing:
    """The choices of one head in the rows of a batch."""
    found = [(number, nth, choice) for number, row in enumerate(rows) for nth, choice in enumerate(row)]
    columns = (
        [number for number, _, _ in found],
        [nth for _, nth, _ in found],
        [choice.at for _, _, choice in found],
        [index for index, (_, _, choice) in enumerate(found) for _ in choice.tokens],
        [token for _, _, choice in found for token in choice.tokens],
    )
    most = max((len(row) for row in rows), default=0)
    return Pointing(most, *(torch.tensor(column, dtype=torch.long) for column in columns))


# ---- where the parts of a call stand in the prompt ----


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
