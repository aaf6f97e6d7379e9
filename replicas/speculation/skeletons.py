"""Drafts of the fixed text of tool calls: opener, name, keys and punctuation, known from the declared tools.

    a tool's JSON schema -> CallTemplate, its call's text with fillers for values -> Skeleton, its tokens between values
    the tools of a request -> SkeletonSet, and for each sequence a SkeletonCursor that follows it

A skeleton is one tool's canonical call. A cursor follows the drawn tokens through it; drafts alternate between fixed
text and values, which the caller fills from elsewhere. The model verifies all of it, so a call that leaves the
canonical form costs only the draft. No tokenizer here: the caller encodes texts and hands the offsets back.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from holdfast.replicas.speculation.ngrams import WINDOW, common_prefix

Bigram: TypeAlias = tuple[int, int]
Encode: TypeAlias = Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]
"""Text to token ids and each one's character range, without special tokens around."""

HOLE = -2
"""In place of a value."""
SHORT_VALUE = 8
"""Tokens up to which a value is taken for a word or an id."""

_CLOSER = '"'
_BREAKS = (".", ",", ";", ":", ")", "!", "?", "\n", "*", "<|")
_MAX_DEPTH = 8  # of nested objects; deeper ones are left to the model
_REPEATED_DEPTH = 3  # of lists whose skeleton has two items
_FILLER, _NUMBER = "Q", "7"  # stand in for values while the text is encoded
_STRING, _OTHER = "\0string", "\0other"  # values, among the pieces of a call's text


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The token ids of one tool's call. Between two segments is a value, which may be any tokens."""

    segments: tuple[tuple[int, ...], ...]


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
    for part in _value_text({"type": "object", **(parameters or {})}, 0):
        if part in (_STRING, _OTHER):
            filler = _FILLER if part is _STRING else _NUMBER
            holes.append((len(text), len(text) + len(filler)))
            text += filler
        else:
            text += part
    return CallTemplate(text + form.after, tuple(holes))


def _value_text(schema: Mapping[str, Any], depth: int) -> Iterable[str]:
    """The pieces of a value's text, `_STRING` and `_OTHER` where the model has to fill it in."""
    kind = schema.get("type")
    properties = schema.get("properties", {})
    if kind == "object" and depth < _MAX_DEPTH and isinstance(properties, Mapping) and schema.get("properties", True):
        yield from _object_text(properties, depth)
    elif kind == "array" and depth < _MAX_DEPTH and isinstance(schema.get("items"), Mapping):
        yield "["
        yield from _value_text(schema["items"], depth + 1)
        if depth < _REPEATED_DEPTH:  # a second item shows how a list goes on; a longer one repeats it
            yield ", "
            yield from _value_text(schema["items"], depth + 1)
        yield "]"
    elif kind == "string":
        yield '"'
        yield _STRING
        yield '"'
    else:
        yield _OTHER


def _object_text(properties: Mapping[str, Any], depth: int) -> Iterable[str]:
    yield "{"
    for i, (key, schema) in enumerate(properties.items()):
        yield (", " if i else "") + json.dumps(key, ensure_ascii=False) + ": "
        yield from _value_text(schema if isinstance(schema, Mapping) else {}, depth + 1)
    yield "}"


class Place(NamedTuple):
    """The next token's position in one skeleton of a set."""

    skeleton: int
    position: int


class SkeletonSet:
    """The skeletons of one list of tools, compiled once and shared by all its requests. Immutable.

    Tokens that begin with a quote are `closers`: a value copied from JSON ends before one. Those that begin with a
    full stop, a comma and the like are `breaks`: they end a short value copied from prose, but not a sentence.
    """

    __slots__ = ("_alike", "_inner", "_next_hole", "_value_ends", "breaks", "closers", "flat", "openings")

    def __init__(self, skeletons: Sequence[Skeleton], closers: Iterable[int] = (), breaks: Iterable[int] = ()) -> None:
        self.closers, self.breaks = frozenset(closers), frozenset(breaks)
        self.flat = tuple(flat for flat in map(_flat, skeletons) if flat and flat[0] != HOLE)
        self._value_ends = tuple(map(_value_ends, self.flat))
        self._inner = tuple(map(_bigrams, self.flat))
        self._next_hole = tuple(map(_next_hole, self.flat))
        self._alike = _alike(self.flat)
        self.openings: dict[Bigram, list[Place]] = {}  # up to each skeleton's first value
        for s, tokens in enumerate(self.flat):
            opening = tokens[: tokens.index(HOLE)] if HOLE in tokens else tokens
            for bigram, positions in _bigrams(opening).items():
                self.openings.setdefault(bigram, []).extend(Place(s, position) for position in positions)

    def knows(self, bigram: Bigram, inside: int | None) -> bool:
        """Whether `locate` may find something."""
        return bigram in self.openings or (inside is not None and bigram in self._inner[inside])

    def locate(self, bigram: Bigram, tail: array[int], inside: int | None) -> Place | None:
        """Where the tokens of `tail` lead, which ends with `bigram`.

        The beginning of any call counts as a whole; else, within skeleton `inside`, the longest match.
        """
        for place in self.openings.get(bigram, ()):
            if _common_suffix(self.flat[place.skeleton], place.position, tail) == min(place.position, WINDOW):
                return place
        positions = self._inner[inside].get(bigram) if inside is not None else None
        if inside is None or positions is None:
            return None
        return Place(inside, max(positions, key=lambda position: _common_suffix(self.flat[inside], position, tail)))

    def after_value(self, place: Place, token: int) -> Place | None:
        """Where `token` leads from a value at `place`: past it, or past another one where lists repeat or keys lack."""
        tokens, position = self.flat[place.skeleton], place.position
        if position == len(tokens) or tokens[position] != HOLE:
            return None
        if tokens[position + 1] == token:
            return Place(place.skeleton, position + 2)
        ends = self._value_ends[place.skeleton].get(token)
        if ends is None or token not in self.closers:
            return None
        later = [end for end in ends if end > position]
        return Place(place.skeleton, min(later) if later else max(ends))

    def towards(self, place: Place, draft: Sequence[int]) -> Place:
        """While several tools begin alike up to `place`, that one which `draft` goes on with for longest."""
        tokens, position = self.flat[place.skeleton], place.position
        if position > self._alike[place.skeleton] or self._next_hole[place.skeleton][0] < position:
            return place
        best, found = 0, place
        for s, other in enumerate(self.flat):
            if other[:position] == tokens[:position]:
                length = common_prefix(draft, other[position:])
                if length > best:
                    best, found = length, Place(s, position)
        return found

    def compose(self, place: Place, filled: int, limit: int, fill: Callable[[list[int]], Sequence[int]]) -> list[int]:
        """At most `limit` tokens from `place` on. `fill` continues what is drafted so far, which may end in a value.

        At a value, `filled` tokens of it are there. The draft ends where a value does not come to its end.
        """
        tokens, holes, position = self.flat[place.skeleton], self._next_hole[place.skeleton], place.position
        out: list[int] = []
        while len(out) < limit and position < len(tokens):
            hole = holes[position]
            out += tokens[position:hole]
            if len(out) >= limit or hole == len(tokens):
                break
            if not self._value(out, fill(out), tokens[hole + 1], 0 if out else filled):
                break
            position = hole + 1
        return out[:limit]

    def _value(self, out: list[int], copied: Sequence[int], following: int, filled: int) -> bool:
        """Append the rest of a value, of which `filled` tokens are there, to `out`; whether it ends there."""
        for token in copied:
            if token == following:
                return True
            if filled and (token in self.closers or (filled <= SHORT_VALUE and token in self.breaks)):
                return True
            out.append(token)
            filled += 1
        return False


class SkeletonCursor:
    """Where one sequence is in its tools' skeletons; `place` is None outside of calls.

    At a value, `filled` counts its tokens so far.
    """

    __slots__ = ("_last", "filled", "place", "skeletons")

    def __init__(self, skeletons: SkeletonSet, last: int) -> None:
        self.skeletons, self._last, self.filled = skeletons, last, 0
        self.place: Place | None = None

    def advance(self, drawn: Sequence[int], window: Callable[[], array[int]]) -> None:
        """Take in drawn tokens; `window` gives the `WINDOW` before them."""
        last, here, skeletons = self._last, self.place, self.skeletons
        openings = skeletons.openings
        for i, token in enumerate(drawn):
            bigram = last, token
            if here is not None or bigram in openings:
                place = self._follow(here, token) if here is not None else None
                inside = here.skeleton if here is not None else None
                if place is None and skeletons.knows(bigram, inside):
                    behind = (window() + array("i", drawn[: i + 1]))[-WINDOW:]
                    place = skeletons.locate(bigram, behind, inside)
                if place is not None:
                    self.filled, here = 0, place
                elif here is not None:
                    self.filled += 1
                    here = self._in_value(here)
            last = token
        self._last, self.place = last, here

    def compose(self, draft: Sequence[int], limit: int, fill: Callable[[list[int]], Sequence[int]]) -> list[int]:
        """At most `limit` tokens from here on, of the tool that `draft` goes on with; `fill` as in `SkeletonSet`."""
        if self.place is None:
            return []
        return self.skeletons.compose(self.skeletons.towards(self.place, draft), self.filled, limit, fill)

    def _follow(self, place: Place, token: int) -> Place | None:
        """The place after `token` where it goes on from `place` as the skeleton says."""
        tokens, position = self.skeletons.flat[place.skeleton], place.position
        if position < len(tokens) and tokens[position] == token:
            return Place(place.skeleton, position + 1)
        return self.skeletons.after_value(place, token)

    def _in_value(self, place: Place) -> Place | None:
        """Something else than the fixed text was drawn: the value before it goes on, or the call is over."""
        tokens, position = self.skeletons.flat[place.skeleton], place.position
        if position == len(tokens):
            return None
        while position >= 0 and tokens[position] != HOLE:
            position -= 1
        return Place(place.skeleton, position) if position >= 0 else None


def _flat(skeleton: Skeleton) -> tuple[int, ...]:
    """The segments with a hole between each two. Values with nothing between them are one; none is left at the end."""
    tokens: list[int] = []
    for i, segment in enumerate(skeleton.segments):
        if i and (not tokens or tokens[-1] != HOLE):
            tokens.append(HOLE)
        tokens.extend(segment)
    while tokens and tokens[-1] == HOLE:
        tokens.pop()
    return tuple(tokens)


def _next_hole(tokens: tuple[int, ...]) -> list[int]:
    """By position, that of the next value from there on; behind the last one the end."""
    holes, following = [len(tokens)] * (len(tokens) + 1), len(tokens)
    for position in reversed(range(len(tokens))):
        if tokens[position] == HOLE:
            following = position
        holes[position] = following
    return holes


def _alike(texts: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each, up to which position another one is the same."""
    alike = [0] * len(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)  # so that the likest stand side by side
    for one, other in itertools.pairwise(order):
        length = common_prefix(texts[one], texts[other])
        alike[one], alike[other] = max(alike[one], length), max(alike[other], length)
    return alike


def _value_ends(tokens: tuple[int, ...]) -> dict[int, list[int]]:
    """By the token after a value, the positions after that token."""
    ends: dict[int, list[int]] = {}
    for i, token in enumerate(tokens):
        if i and tokens[i - 1] == HOLE:
            ends.setdefault(token, []).append(i + 1)
    return ends


def _bigrams(tokens: tuple[int, ...]) -> dict[Bigram, list[int]]:
    """By two tokens that follow each other, the positions after them."""
    bigrams: dict[Bigram, list[int]] = {}
    for i in range(1, len(tokens)):
        if HOLE not in tokens[i - 1 : i + 1]:
            bigrams.setdefault((tokens[i - 1], tokens[i]), []).append(i + 1)
    return bigrams


def _common_suffix(tokens: tuple[int, ...], position: int, tail: Sequence[int]) -> int:
    """How many tokens before `position` equal the end of `tail`."""
    length, most = 0, min(position, len(tail))
    while length < most and tokens[position - 1 - length] == tail[-1 - length]:
        length += 1
    return length
