"""Pointing: training teaches three attention heads which tokens of the prompt to look at.

One token of a reply decides whether to call a tool. A model that cannot yet distinguish the tools learns nothing from
that token. The words that fill each parameter are as hard to learn. So heads near the top learn to look at the next
tool, at the next value to copy and at its parameter. The layers above read the result.

Here: the loss of a batch's choices, and the positions of a call's parts in the prompt, by token (`row_choices`).
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
"""The target of a head that has nothing to look at: the first token, which has no meaning."""
HEADS = {"tools": (-2, 0), "sources": (-2, -1), "keys": (-1, 0)}
"""Layer and query head of each. The parameter follows from the value, so its head is one layer above."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Token ``at`` of a row shall look at any of ``tokens``."""

    at: int
    tokens: tuple[int, ...]


Choices = dict[str, list[Choice]]
"""The choices of each of ``HEADS``."""


@dataclass(frozen=True, slots=True)
class Pointing:
    """The choices of a batch, at most ``most`` in a row.

    ``row``, ``nth`` and ``at`` are ``[choices]``: the choice's row, its number in the row, and its token.
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
    queries = q.new_zeros(len(q), pointing.most, q.shape[-1])
    queries[row, nth] = q[row, at] * q.shape[-1] ** -0.5
    scores = torch.bmm(queries, k.transpose(1, 2))[row, nth].float()  # [choices, length]
    visible = scores.masked_fill(torch.arange(k.shape[1], device=k.device) > at[:, None], float("-inf"))
    right = torch.zeros_like(visible, dtype=torch.bool)
    right[pointing.choice, pointing.token] = True
    return (visible.logsumexp(-1) - visible.masked_fill(~right, float("-inf")).logsumexp(-1)).mean()


def pointing_losses(projections: Sequence[tuple[Tensor, Tensor]], pointing: Mapping[str, Pointing]) -> list[Tensor]:
    """The loss of each of ``HEADS``; ``seen`` are each layer's queries and keys ``[rows, heads, length, head_dim]``."""
    losses = []
    for name, (layer, head) in HEADS.items():
        q, k = projections[max(layer, -len(projections))]
        losses.append(pointing_loss(q[:, head], k[:, head], pointing[name]))
    return losses


def collate_pointing(rows: Sequence[Sequence[Choice]]) -> Pointing:
    """The choices of one head in the rows of a batch."""
    numbered = [(number, nth, choice) for number, row in enumerate(rows) for nth, choice in enumerate(row)]
    columns = (
        [number for number, _, _ in numbered],
        [nth for _, nth, _ in numbered],
        [choice.at for _, _, choice in numbered],
        [index for index, (_, _, choice) in enumerate(numbered) for _ in choice.tokens],
        [token for _, _, choice in numbered for token in choice.tokens],
    )
    most = max((len(row) for row in rows), default=0)
    return Pointing(most, *(torch.tensor(column, dtype=torch.long) for column in columns))


# ---- the parts of a call in the prompt ----


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of the conversation, its tokens, and the index of its first token in the row."""

    text: str
    tokens: Encoding
    first: int

    def at(self, start: int, end: int) -> range:
        """The row's tokens that contain characters ``start`` to ``end``."""
        inside = [i for i, (a, b) in enumerate(self.tokens.offsets) if a < end and b > start]
        return range(self.first + inside[0], self.first + inside[-1] + 1) if inside else range(0)

    def ids(self, span: range) -> list[int]:
        """The vocabulary ids of the row's tokens ``span``."""
        return self.tokens.ids[span.start - self.first : span.stop - self.first]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A string, number or switch in the arguments: characters ``start`` to ``end`` of a reply.

    ``mention`` is its text in the prompt. That is the value itself, which the reply has ``copied``, or the parameter's
    words for a switch, which it has not.
    """

    start: int
    end: int
    mention: str
    copied: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a reply: its tool, its braces, the starts of its parameters' names, and its values."""

    tool: str
    open_brace: int
    names: dict[str, int]
    leaves: list[Leaf]
    close_brace: int


@dataclass(frozen=True, slots=True)
class Declared:
    """A tool in the system prompt: the tokens of its name and parameter names, and the starts of the types."""

    name: tuple[int, ...]
    parameters: dict[str, tuple[range, int]]


def row_choices(conversation: Conversation, pieces: Sequence[Span], encoded: Sequence[Encoding]) -> Choices:
    """The targets of each head; ``pieces`` are the conversation's spans, ``encoded`` their tokens.

    tools: before a reply and after each of its calls, the next tool's name, or nowhere.
    sources: in the arguments, the next token to copy. After a value the target is the start of the next value; after
    the last one it is nowhere. A value that the prompt lacks, or has in other tokens, has no choices.
    keys: within a parameter's name, its next token in the tool's schema; after it, its type.
    """
    choices: Choices = {name: [] for name in HEADS}
    if not conversation.tools:
        return choices
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    system, previous = Place(pieces[0].text, encoded[0], 0), list[Place]()
    declared = _declared(conversation.tools, system)
    at = len(encoded[0].ids)
    for piece, tokens in zip(pieces[1:], encoded[1:], strict=True):
        place = Place(piece.text, tokens, at)
        if piece.learned:
            message = replies.pop(0)
            choices["tools"] += _tool_choices(place, message, declared)
            for call in _calls(piece.text, message):
                choices["sources"] += _source_choices(place, call, previous)
                choices["keys"] += _key_choices(place, call, declared[call.tool], system)
        previous.append(place)
        at += len(tokens.ids)
    return choices


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


def _source_choices(place: Place, call: Call, previous: Sequence[Place]) -> Iterator[Choice]:
    last_token = place.at(call.open_brace, call.open_brace + 1)[-1]  # the last token of the previous value
    for leaf in call.leaves:
        written = place.at(leaf.start, leaf.end)
        sources = _sources(leaf, previous)
        if leaf.copied:
            sources = [(where, span) for where, span in sources if where.ids(span) == place.ids(written)]
        if sources:
            starts = tuple(span[0] for _, span in sources)
            yield from (Choice(token, starts) for token in range(last_token, written[0]))
            for index, token in enumerate(written[:-1] if leaf.copied else (), start=1):
                yield Choice(token, tuple(span[index] for _, span in sources))
        last_token = written[-1]
    last = place.at(call.close_brace, call.close_brace + 1)[0]
    yield from (Choice(token, NOWHERE) for token in range(last_token, last))


def _key_choices(place: Place, call: Call, tool: Declared, system: Place) -> Iterator[Choice]:
    for name, start in call.names.items():
        written, (source, type_start) = place.at(start, start + len(name)), tool.parameters[name]
        if place.ids(written) == system.ids(source):
            targets = (*source, type_start)
            tokens = range(written[0] - 1, written[-1] + 1)
            yield from (Choice(token, (target,)) for token, target in zip(tokens, targets, strict=True))


def _sources(leaf: Leaf, previous: Sequence[Place]) -> list[tuple[Place, range]]:
    """The places of ``leaf`` in the latest message that mentions it, as whole words."""
    pattern = re.compile(rf"(?<![\w]){re.escape(leaf.mention)}(?![\w])")
    for place in reversed(previous):
        places = [(place, place.at(*match.span())) for match in pattern.finditer(place.text)]
        if places:
            return places
    return []


def _calls(text: str, message: Json) -> Iterator[Call]:
    at = 0
    for call in message.get("tool_calls") or ():
        open_brace = text.index(ARGUMENTS, at) + len(ARGUMENTS) - 1
        at = open_brace + 1
        names: dict[str, int] = {}
        leaves: list[Leaf] = []
        for name, value in call["function"]["arguments"].items():
            names[name] = text.index(f'"{name}": ', at) + 1
            at = names[name] + len(name) + len('": ')
            for part in value if isinstance(value, list) else (value,):
                start, at = _value_span(text, at, part)
                switch = isinstance(part, bool)
                leaves.append(Leaf(start, at, in_words(name) if switch else str(part), not switch))
        yield Call(call["function"]["name"], open_brace, names, leaves, text.index("}", at))


def _value_span(text: str, at: int, value: object) -> tuple[int, int]:
    """The characters of ``value`` in JSON from ``at`` on, without quotes."""
    json_text = json.dumps(value, ensure_ascii=False)
    start = text.index(json_text, at)
    quote = isinstance(value, str)
    return start + quote, start + len(json_text) - quote


def _declared(tools: Sequence[Json], system: Place) -> dict[str, Declared]:
    declared = {}
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
        declared[name] = Declared(tuple(system.at(first, first + len(name))), parameters)
    return declared
