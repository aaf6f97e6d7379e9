"""Cache tags and priorities of a prompt's tokens (Sutradhara, section 4.3).

    tier     below 0            0                    1 to 100
             goes first         goes by its age      goes last: by tier, then by age

A label sets only the order of eviction; it protects no cell. The eviction queue (`radix`) limits how many cells are
above 0, and for how long.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

Tag: TypeAlias = Literal["system_prompt", "user_query", "tool_output", "response", "partial_prefill"]
TAGS: tuple[str, ...] = get_args(Tag)
SYSTEM: Tag = "system_prompt"
AHEAD: Tag = "partial_prefill"
OTHER = "other"  # what metrics call tokens without a tag

RELEASED = -1
"""The tier of cells that no turn will use again."""
PRIORITIES: Mapping[str, int] = {
    "response": RELEASED,
    "tool_output": 20,
    "user_query": 40,
    "system_prompt": 80,
    "partial_prefill": 100,
}
"""The tier of a tag named without a priority. The paper gives this order, and no numbers."""
SHARED_S = 600.0  # seconds after its last use that a prefix shared by programs stays in its tier


@dataclass(frozen=True, slots=True)
class Label:
    """A tag (for people) and a priority (the tier of eviction) of some tokens.

    A tier above 0 counts for `lasts` seconds after a use. `learns`: it counts only once another program than the one
    that computed the tokens has used them.
    """

    tag: str = ""
    priority: int = 0
    lasts: float = math.inf
    learns: bool = False

    def alike(self, other: "Label") -> bool:
        """Whether both mean the same order of eviction, whatever their tags."""
        return (self.priority, self.lasts, self.learns) == (other.priority, other.lasts, other.learns)


PLAIN = Label()


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a sequence's tokens: those from `ends[i - 1]` to `ends[i]` have `parts[i]`. Ends ascend.

    All tokens behind the last end, including the reply, have `rest`.
    """

    ends: tuple[int, ...] = ()
    parts: tuple[Label, ...] = ()
    rest: Label = PLAIN

    def at(self, position: int, size: int = 1) -> Label:
        """The label of a token; ends count from the page of `size` cells that they lie in."""
        place = bisect_right(self.ends, position, key=lambda end: end - end % size)
        return self.parts[place] if place < len(self.parts) else self.rest

    def pieces(self, start: int, end: int, size: int) -> list[tuple[int, Label]]:
        """[start, end), not empty, in pieces that are kept alike: where each ends, on a page's border but for the last.

        A piece has the tag of most of its tokens.
        """
        if not self.ends or start >= self.ends[-1]:
            return [(end, self.rest)]
        pieces: list[tuple[int, Label]] = []
        tags: list[dict[str, int]] = []
        begun = start
        for place in range(bisect_right(self.ends, start), len(self.ends) + 1):
            border, label = end, self.rest
            if place < len(self.ends):
                border, label = min(self.ends[place] - self.ends[place] % size, end), self.parts[place]
            if border <= begun:
                continue
            if pieces and pieces[-1][1].alike(label):
                pieces[-1] = border, label
            else:
                pieces.append((border, label))
                tags.append({})
            tags[-1][label.tag] = tags[-1].get(label.tag, 0) + border - begun
            begun = border
            if begun == end:
                break
        most = [max(each, key=lambda tag: each[tag]) for each in tags]
        return [(border, replace(label, tag=tag)) for (border, label), tag in zip(pieces, most, strict=True)]

    def tokens(self, end: int) -> dict[str, int]:
        """Tokens before `end`, counted by tag."""
        counts: dict[str, int] = {}
        before = 0
        for until, label in zip((*self.ends, end), (*self.parts, self.rest), strict=True):
            if before >= end:
                break
            counts[label.tag or OTHER] = counts.get(label.tag or OTHER, 0) + min(until, end) - before
            before = max(before, until)
        return counts


UNLABELLED = Labels()


@dataclass(frozen=True, slots=True)
class Hint:
    """A client's label for a part of its prompt: messages or tokens from `start` up to `end` (None: to the end of the
    reply), or the `reply` alone. A start behind the prompt means the reply. Without a tag, the role gives it.
    """

    where: Literal["messages", "tokens", "reply"]
    label: Label
    start: int = 0
    end: int | None = None


def labels_of(roles: Sequence[str], starts: Sequence[int], length: int, hints: Sequence[Hint] = ()) -> Labels:
    """The labels of a prompt of `length` tokens whose message `i`, of `roles[i]`, begins at token `starts[i]`.

    Without a hint the role decides; of overlapping hints the later one counts.
    """
    starts = [0, *starts[1:]] if starts else []
    ends = [*starts[1:], length]
    parts = [_BY_ROLE.get(role, PLAIN) for role in roles] or [PLAIN]
    if not hints:
        return _joined(ends, parts, _RESPONSE)
    spans = []
    for hint in hints:
        if hint.where == "reply":
            spans.append((length, math.inf, hint.label))
            continue
        begins, past = min(hint.start, length), math.inf if hint.end is None else min(hint.end, length)
        if hint.where == "messages":
            begins = starts[hint.start] if hint.start < len(starts) else length
            past = math.inf if hint.end is None else starts[hint.end] if hint.end < len(starts) else length
        spans.append((begins, past, hint.label))
    borders = sorted({each for each in (*ends, *(p for span in spans for p in span[:2])) if 0 < each <= length})
    borders = borders if borders and borders[-1] == length else [*borders, length]
    chosen = []
    for before in (0, *borders):  # the last one is that of what comes behind
        place = bisect_right(ends, before)
        role = parts[place] if before < length and place < len(parts) else _RESPONSE if before >= length else PLAIN
        chosen.append(role)
    points = [0, *borders]
    for begins, past, label in spans:
        for place in range(bisect_left(points, begins), bisect_left(points, past)):
            chosen[place] = label if label.tag else replace(label, tag=chosen[place].tag)
    return _joined(borders, chosen[:-1], chosen[-1])


SYSTEM_ROLES = ("system", "developer")
_BY_ROLE: Mapping[str, Label] = {
    **dict.fromkeys(SYSTEM_ROLES, Label(SYSTEM, PRIORITIES[SYSTEM], SHARED_S, learns=True)),
    "user": Label("user_query"),
    "tool": Label("tool_output"),
    "function": Label("tool_output"),
    "assistant": Label("response"),
}
_RESPONSE = Label("response")


def _joined(ends: Sequence[float], parts: Sequence[Label], rest: Label) -> Labels:
    """Neighbours of one label as one, and none that is empty."""
    spans: list[tuple[int, Label]] = []
    before = 0
    for end, label in zip(ends, parts, strict=True):
        if end <= before:
            continue
        if spans and spans[-1][1] == label:
            spans.pop()
        spans.append((int(end), label))
        before = int(end)
    return Labels(tuple(end for end, _ in spans), tuple(label for _, label in spans), rest)
