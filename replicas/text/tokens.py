"""Text to token ids, tokenizing only what is new (Stateful Inference, section 3.4), as sessions are stateful.

An entry is a text and the ids that stand for it: a prompt as tokenized, or a finished turn with its ids exactly as
they were generated. A new text takes over the longest beginning that some entry shares with it, up to the
beginning of an added token, where no merge can cross. Special tokens in marked text stay text.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.replicas.text.added import AddedTokens, read_added_tokens
from holdfast.replicas.text.encoder import Encoder
from holdfast.replicas.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class Entry:
    """A text and its ids. It may be cut before character `chars[i]`, which is token `tokens[i]`."""

    text: str
    ids: TokenIds
    chars: list[int]
    tokens: list[int]


_EMPTY = Entry("", np.zeros(0, np.int32), [], [])


@dataclass(frozen=True, slots=True)
class Begun:
    """A text for whose first `char` characters the first `token` ids of an entry stand; the rest is to be tokenized."""

    text: str
    mark: str
    scope: str
    base: Entry
    char: int
    token: int

    @property
    def rest(self) -> str:
        return self.text[self.char :]


class TokenCache:
    """The last `entries` texts of `tokenizer` (a transformers tokenizer). Scopes do not see each other's entries."""

    def __init__(self, tokenizer: Any, entries: int = 64) -> None:
        self.added: AddedTokens = read_added_tokens(tokenizer.backend_tokenizer)
        self._start_ids = np.array(sorted(self.added.starts.values()), np.int32)
        self.encoder = Encoder(tokenizer.backend_tokenizer, self.added)
        self._limit = entries
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self.reused = 0  # characters taken from entries
        self.tokenized = 0  # characters tokenized

    def encode(self, text: str, mark: str = "", scope: str = "") -> TokenIds:
        """int32 ids of a rendered text, no tokens added around it; `mark` as in `Rendered`."""
        begun = self.begin(text, mark, scope)
        return self.end(begun, self.tokenize(begun, self.encoder))

    def begin(self, text: str, mark: str = "", scope: str = "") -> Begun:
        """What is known of a text; `end` takes what `tokenize` makes of it, whatever was encoded meanwhile."""
        scope = f"{scope}\0{mark}"  # the same text means other ids under another mark
        base, char, token = self._longest(text, scope)
        return Begun(text, mark, scope, base, char, token)

    def tokenize(self, begun: Begun, encoder: Encoder) -> Entry:
        """The whole text. Changes nothing but the encoder, so another thread may do it with an encoder of its own."""
        ids = begun.base.ids[: begun.token]
        if begun.char < len(begun.text):
            ids = np.concatenate((ids, encoder.encode(begun.rest, begun.mark, at_start=begun.char == 0)))
        return self._entry(begun.text, ids, begun.base, begun.char, begun.token)

    def end(self, begun: Begun, entry: Entry) -> TokenIds:
        """The ids of the whole text, which is remembered."""
        self.reused += begun.char
        self.tokenized += len(begun.text) - begun.char
        self._store(begun.scope, entry, begun.base)
        return entry.ids

    def remember(self, text: str, ids: TokenIds, mark: str = "", scope: str = "") -> None:
        """A finished turn: from now on `text` stands for `ids`, also as the beginning of a longer text."""
        ids = np.asarray(ids, np.int32)
        scope = f"{scope}\0{mark}"
        base, char, token = self._longest(text, scope)
        if not np.array_equal(base.ids[:token], ids[:token]):
            base, char, token = _EMPTY, 0, 0
        self._store(scope, self._entry(text, ids, base, char, token), base)

    def _longest(self, text: str, scope: str) -> tuple[Entry, int, int]:
        """The entry that shares most with `text`, and where to cut: in characters and in tokens."""
        best, char, token = _EMPTY, 0, 0
        for (owner, _), entry in reversed(self._entries.items()):
            if owner == scope and entry.text.startswith(text[: char + 1]):
                cut = self._cut(entry, text)
                if cut[0] > char:
                    best, (char, token) = entry, cut
        return best, char, token

    def _cut(self, entry: Entry, text: str) -> tuple[int, int]:
        """Up to where `entry` can stand for the beginning of `text`."""
        length = len(entry.text)
        if text.startswith(entry.text) and (length == len(text) or self.added.start_at(text, length)):
            return length, len(entry.ids)
        low, high = 0, bisect_right(entry.chars, len(text))
        while low < high:
            middle = (low + high) // 2
            if text.startswith(entry.text[: entry.chars[middle]]):
                low = middle + 1
            else:
                high = middle
        for index in range(low - 1, -1, -1):
            if self.added.start_at(text, entry.chars[index]):
                return entry.chars[index], entry.tokens[index]
        return 0, 0

    def _entry(self, text: str, ids: TokenIds, base: Entry, char: int, token: int) -> Entry:
        """An entry that is `base` up to the cut."""
        known = bisect_left(base.chars, char)
        chars, tokens = self._cuts(text, ids, char, token)
        return Entry(text, ids, base.chars[:known] + chars, base.tokens[:known] + tokens)

    def _store(self, scope: str, entry: Entry, base: Entry) -> None:
        """Keep an entry that was made of `base`. A base that the text goes on from is contained in it."""
        if entry.text.startswith(base.text):
            self._entries.pop((scope, base.text), None)
        self._entries.pop((scope, entry.text), None)
        self._entries[scope, entry.text] = entry
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def _cuts(self, text: str, ids: TokenIds, char: int, token: int) -> tuple[list[int], list[int]]:
        """Where added tokens begin from `char` and `token` on, as far as text and ids agree about them."""
        if self.added.all is None:
            return [], []
        found = (match for match in self.added.all.finditer(text, char) if match[0] in self.added.starts)
        places = token + np.flatnonzero(np.isin(ids[token:], self._start_ids))
        chars: list[int] = []
        for place, match in zip(places, found, strict=False):
            if ids[place] != self.added.starts[match[0]]:
                break
            chars.append(match.start())
        return chars, places[: len(chars)].tolist()
