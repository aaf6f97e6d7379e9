"""Which part of a prompt is tokenized already (Stateful Inference, section 3.4): only the new end of it is, then.

A conversation is kept as a text and the ids that stand for it: a prompt as it was tokenized, or a finished turn with
its ids exactly as they were generated. A new text takes over the longest beginning that it shares with one of them, up
to the beginning of an added token, where no merge can cross. Not here: tokenizing itself (`encode`).
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from string import printable
from typing import Any, TypeAlias

import numpy as np

from holdfast.replicas.text.encode import AddedTokens, Encoder, read_added_tokens
from holdfast.replicas.types import TokenIds, common_prefix, tenant_of

_SHARE = 0.5
"""Of all characters, how many one tenant may have: whatever it does, the others keep the rest."""
_OVERHEAD = 256
"""What an entry takes in memory whatever its text, counted in characters."""
_TAIL = 32
"""No merge of a text's last token with what follows it reaches further back, in characters."""
_ENDINGS = 256
"""How many ends of texts are remembered: those of a template's fixed parts."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A text of a program and its ids. It may be cut before character `chars[i]`, which is token `tokens[i]`.

    `mark` as in `Rendered`: the same text means other ids under another one. `part`: of its tenant's texts those that
    are found together. `program` is empty where it is not known.
    """

    text: str
    ids: TokenIds
    chars: list[int]
    tokens: list[int]
    mark: str = ""
    program: str = ""
    part: str = ""

    @property
    def size(self) -> int:
        return len(self.text) + _OVERHEAD

    def contained_in(self, other: "Entry") -> bool:
        """Whether `other` is of the same program and goes on from this one."""
        same = (self.program, self.mark, self.part) == (other.program, other.mark, other.part)
        return same and other.text.startswith(self.text)


_NOTHING = Entry("", np.zeros(0, np.int32), [], [])


@dataclass(frozen=True, slots=True)
class Begun:
    """A text for whose first `char` characters the first `token` ids of `base` stand; the rest is to be tokenized."""

    text: str
    mark: str
    scope: str
    program: str
    base: Entry
    char: int
    token: int

    @property
    def rest(self) -> str:
        return self.text[self.char :]


class TokenCache:
    """Conversations of `tokenizer` (a transformers tokenizer), at most so many `characters` of them.

    Each belongs to a program of a scope: a tenant's, or a part of it. Scopes do not see each other's. Where there are
    too many, those go that were used longest ago: a tenant's own once it has more than half of all, else anybody's.
    """

    def __init__(self, tokenizer: Any, characters: float = math.inf) -> None:
        self.added: AddedTokens = read_added_tokens(tokenizer.backend_tokenizer)
        self.encoder = Encoder(tokenizer.backend_tokenizer, self.added)
        starts = list(self.added.starts.values())
        self._starts = np.zeros(max(starts, default=-1) + 2, np.bool_)  # by id; the last stands for all above, too
        self._starts[starts] = True
        self._limit = characters
        self._size = 0
        self._tenants: dict[str, _TenantEntries] = {}
        self._used: OrderedDict[Entry, str] = OrderedDict()  # with their tenants, the one used last at the end
        self._unsure: dict[str, int] = {}
        self.reused = 0  # characters taken from entries
        self.tokenized = 0  # characters tokenized

    def encode(self, text: str, mark: str = "", scope: str = "", program: str = "") -> TokenIds:
        """int32 ids of a rendered text, no tokens added around it; `mark` as in `Rendered`."""
        begun = self.begin(text, mark, scope, program)
        return self.end(begun, self.tokenize(begun, self.encoder))

    def begin(self, text: str, mark: str = "", scope: str = "", program: str = "") -> Begun:
        """What is known of a text; `end` takes what `tokenize` makes of it, whatever was encoded meanwhile."""
        return Begun(text, mark, scope, program, *self._longest(text, mark, scope, program))

    def tokenize(self, begun: Begun, encoder: Encoder) -> Entry:
        """The whole text. Changes nothing but the encoder, so another thread may do it with an encoder of its own."""
        ids = begun.base.ids[: begun.token]
        if begun.char < len(begun.text):
            ids = np.concatenate((ids, encoder.encode(begun.rest, begun.mark, at_start=begun.char == 0)))
        return self._entry(begun, ids)

    def end(self, begun: Begun, entry: Entry) -> TokenIds:
        """The ids of the whole text, which is kept."""
        self.reused += begun.char
        self.tokenized += len(begun.text) - begun.char
        self._keep(begun, entry)
        return entry.ids

    def unsure(self, text: str) -> int:
        """How many of a text's last tokens may be others once a character stands behind it."""
        tail = text[-_TAIL:]
        if tail not in self._unsure:
            if len(self._unsure) >= _ENDINGS:
                self._unsure.clear()
            ids = self.encoder.encode(tail)
            self._unsure[tail] = max(len(ids) - common_prefix(ids, self.encoder.encode(tail + c)) for c in printable)
        return self._unsure[tail]

    def remember(self, text: str, ids: TokenIds, mark: str = "", scope: str = "", program: str = "") -> None:
        """A finished turn: from now on `text` stands for `ids`, also as the beginning of a longer text."""
        ids = np.asarray(ids, np.int32)
        base, char, token = self._longest(text, mark, scope, program)
        if not np.array_equal(base.ids[:token], ids[:token]):
            base, char, token = _NOTHING, 0, 0
        begun = Begun(text, mark, scope, program, base, char, token)
        self._keep(begun, self._entry(begun, ids))

    def _longest(self, text: str, mark: str, scope: str, program: str) -> tuple[Entry, int, int]:
        """The entry that shares most with `text`, and where to cut it: in characters and in tokens.

        What the program's latest turn shares has its ids, whoever else may share more.
        """
        best, char, token = _NOTHING, 0, 0
        tenant, part = tenant_of(scope), _part(scope)
        if (known := self._tenants.get(tenant)) is not None:
            if (own := known.latest.get((part, program))) is not None and own.mark == mark:
                best, (char, token) = own, self._cut(own, text)
            given = best.ids[:token]
            for entry in known.nearest(part, mark, text, program):
                cut = self._cut(entry, text) if entry is not own else (0, 0)
                if cut[0] > char and np.array_equal(entry.ids[: len(given)], given):
                    best, (char, token) = entry, cut
            if char:
                self._used.move_to_end(best)
                known.used.move_to_end(best)
        return best, char, token

    def _cut(self, entry: Entry, text: str) -> tuple[int, int]:
        """Up to where `entry` can stand for the beginning of `text`."""
        shared = common_start(entry.text, text)
        if shared == len(entry.text) and (shared == len(text) or self.added.start_at(text, shared)):
            return shared, len(entry.ids)
        for index in range(bisect_right(entry.chars, shared) - 1, -1, -1):
            if self.added.start_at(text, entry.chars[index]):
                return entry.chars[index], entry.tokens[index]
        return 0, 0

    def _entry(self, begun: Begun, ids: TokenIds) -> Entry:
        """The text of `begun`, for which `ids` stand: up to the cut its base, with what is known of that."""
        base = begun.base
        known = bisect_left(base.chars, begun.char)
        chars, tokens = self._cuts(begun.text, ids, begun.char, begun.token)
        chars, tokens = base.chars[:known] + chars, base.tokens[:known] + tokens
        return Entry(begun.text, ids, chars, tokens, begun.mark, begun.program, _part(begun.scope))

    def _cuts(self, text: str, ids: TokenIds, char: int, token: int) -> tuple[list[int], list[int]]:
        """Where added tokens begin from `char` and `token` on, as far as text and ids agree about them."""
        if self.added.all is None:
            return [], []
        found = (match for match in self.added.all.finditer(text, char) if match[0] in self.added.starts)
        places = token + np.flatnonzero(self._starts.take(ids[token:], mode="clip"))
        chars: list[int] = []
        for place, match in zip(places, found, strict=False):
            if ids[place] != self.added.starts[match[0]]:
                break
            chars.append(match.start())
        return chars, places[: len(chars)].tolist()

    def _keep(self, begun: Begun, entry: Entry) -> None:
        """Keep an entry, and no longer what its program has that is contained in it."""
        if entry.size > self._limit * _SHARE:
            return
        tenant = tenant_of(begun.scope)
        known = self._tenants.get(tenant) or _TenantEntries()
        for old in (begun.base, known.latest.get((entry.part, entry.program)), known.find(_key(entry))):
            if old is not None and old in self._used and old.contained_in(entry):
                self._drop(old)
        known.add(entry)
        self._tenants[tenant] = known
        self._used[entry] = tenant
        self._size += entry.size
        while known.size > self._limit * _SHARE:
            self._drop(next(iter(known.used)))
        while self._size > self._limit:
            self._drop(next(iter(self._used)))

    def _drop(self, entry: Entry) -> None:
        tenant = self._used.pop(entry)
        self._size -= entry.size
        known = self._tenants[tenant]
        known.remove(entry)
        if not known.used:
            del self._tenants[tenant]


_Key: TypeAlias = tuple[str, str, str, str]


def _key(entry: Entry) -> _Key:
    return entry.part, entry.mark, entry.text, entry.program


def _part(scope: str) -> str:
    """Which part of its tenant's texts a scope is; "" is the one without a name."""
    return scope.partition("\0")[2]


class _TenantEntries:
    """The entries of one tenant, found by their part and program, or by how they begin.

    They are kept by part, in the order of their texts: what shares most with a text stands next to where that belongs.
    """

    def __init__(self) -> None:
        self.latest: dict[tuple[str, str], Entry] = {}  # of each program, by part
        self.used: OrderedDict[Entry, None] = OrderedDict()  # the one used last at the end
        self.size = 0
        self._sorted: list[Entry] = []

    def nearest(self, part: str, mark: str, text: str, program: str) -> list[Entry]:
        """Entries of this part and mark, of which one shares most with `text`."""
        kind = part, mark
        place = bisect_left(self._sorted, (*kind, text, program), key=_key)
        found = [entry for entry in self._sorted[max(0, place - 1) : place + 1] if (entry.part, entry.mark) == kind]
        # One that is contained in the text as a whole may share no more than these, which go on in another way.
        whole = text[: max((common_start(entry.text, text) for entry in found), default=0)]
        place = bisect_left(self._sorted, (*kind, whole, ""), key=_key)
        return found + [entry for entry in self._sorted[place : place + 1] if _key(entry)[:3] == (*kind, whole)]

    def find(self, key: _Key) -> Entry | None:
        place = bisect_left(self._sorted, key, key=_key)
        return self._sorted[place] if place < len(self._sorted) and _key(self._sorted[place]) == key else None

    def add(self, entry: Entry) -> None:
        """Take in an entry whose key is new."""
        self._sorted.insert(bisect_left(self._sorted, _key(entry), key=_key), entry)
        self.used[entry] = None
        self.size += entry.size
        if entry.program:
            self.latest[entry.part, entry.program] = entry

    def remove(self, entry: Entry) -> None:
        del self._sorted[bisect_left(self._sorted, _key(entry), key=_key)]
        del self.used[entry]
        self.size -= entry.size
        if self.latest.get((entry.part, entry.program)) is entry:
            del self.latest[entry.part, entry.program]


def common_start(one: str, other: str) -> int:
    """How many characters two texts have in common from their beginning."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
