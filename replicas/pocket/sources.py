"""Sources: which tokens of the prompt the arguments of a call are copied from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from holdfast.replicas.pocket.conversations import Conversation
from holdfast.replicas.pocket.pointing import NOWHERE, Choice, tokens_of
from holdfast.replicas.pocket.render import Span
from holdfast.replicas.pocket.schemas import Json, in_words

ARGUMENTS = '"arguments": {'


@dataclass(frozen=True, slots=True)
class Leaf:
    """A string, number or switch in the arguments: characters ``start`` to ``end`` of a reply, and what to look for.

    ``said`` is how the prompt says it: the value itself, or the parameter's words for a switch.
    """

    start: int
    end: int
    said: str
    copied: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of the conversation and the row's token that it starts with."""

    text: str
    tokens: Encoding
    first: int


def source_choices(conversation: Conversation, pieces: Sequence[Span], encoded: Sequence[Encoding]) -> list[Choice]:
    """For each token within arguments, where the token that is copied next stands.

    From the end of one value to the start of the next that is where the next one starts; behind the last it is nowhere.
    A value that stands nowhere in the prompt, or in other tokens, has no choices.
    """
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    choices: list[Choice] = []
    said: list[Place] = []
    at = 0
    for piece, tokens in zip(pieces, encoded, strict=True):
        place = Place(piece.text, tokens, at)
        if piece.learned:
            for opened, leaves, closed in _calls(piece.text, replies.pop(0)):
                choices += _call_choices(place, opened, leaves, closed, said)
        if at or not conversation.tools:
            said.append(place)
        at += len(tokens.ids)
    return choices


def _call_choices(place: Place, opened: int, leaves: list[Leaf], closed: int, said: Sequence[Place]) -> list[Choice]:
    """The choices of one call, whose arguments are characters ``opened`` to ``closed`` of the reply at ``place``."""
    choices: list[Choice] = []
    behind = tokens_of(place.tokens, opened, opened + 1)[-1]  # the token in which the value before ends
    for leaf in leaves:
        written = tokens_of(place.tokens, leaf.start, leaf.end)
        found = _found(leaf, said)
        if leaf.copied:
            ids = [place.tokens.ids[i] for i in written]
            found = [(where, span) for where, span in found if [where.tokens.ids[i] for i in span] == ids]
        if found:
            starts = tuple(where.first + span[0] for where, span in found)
            choices += [Choice(place.first + token, starts) for token in range(behind, written[0])]
            if leaf.copied:
                for index, token in enumerate(written[:-1], start=1):
                    sources = tuple(where.first + span[index] for where, span in found)
                    choices.append(Choice(place.first + token, sources))
        behind = written[-1]
    last = tokens_of(place.tokens, closed, closed + 1)[0]
    return choices + [Choice(place.first + token, NOWHERE) for token in range(behind, last)]


def _found(leaf: Leaf, said: Sequence[Place]) -> list[tuple[Place, range]]:
    """Where ``leaf`` is said in the latest message that says it, by whole words."""
    wanted = re.compile(rf"(?<![\w]){re.escape(leaf.said)}(?![\w])")
    for place in reversed(said):
        found = [(place, tokens_of(place.tokens, *match.span())) for match in wanted.finditer(place.text)]
        if found:
            return found
    return []


def _calls(text: str, message: Json) -> Iterator[tuple[int, list[Leaf], int]]:
    """Each call of a reply: where its arguments' brace opens, their leaves, where it closes."""
    at = 0
    for call in message.get("tool_calls") or ():
        opened = text.index(ARGUMENTS, at) + len(ARGUMENTS) - 1
        at = opened + 1
        leaves: list[Leaf] = []
        for name, value in call["function"]["arguments"].items():
            at = text.index(json.dumps(name) + ": ", at) + len(json.dumps(name)) + 2
            for part in value if isinstance(value, list) else (value,):
                start, at = _written(text, at, part)
                switch = isinstance(part, bool)
                leaves.append(Leaf(start, at, in_words(name) if switch else str(part), not switch))
        yield opened, leaves, text.index("}", at)


def _written(text: str, at: int, value: object) -> tuple[int, int]:
    """The characters of ``value`` in JSON at or behind ``at``, without quotes."""
    written = json.dumps(value, ensure_ascii=False)
    start = text.index(written, at)
    quote = isinstance(value, str)
    return start + quote, start + len(written) - quote
