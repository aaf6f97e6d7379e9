"""Where in a token sequence the end of a text occurred before: an index that grows with the sequence.

Chains of equal n-grams, as in LZ77: a table leads from the hash of n tokens to where they were last, and from there
to the occurrence before. A look-up walks a bounded number of candidates and measures each one that can be longer than
the best so far. What to do with what is found is decided in `drafter`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.replicas.types import TokenIds

WINDOW = 32
"""Longest match that is measured, in tokens."""
GAP = -1
"""Stands between texts that do not continue each other; nothing is drafted across it."""
LONG, LONG_CANDIDATES = 6, 32
"""A chain of n-grams of `LONG` tokens, of which a look-up compares at most so many, latest first."""
PAIR_CANDIDATES = 16
"""The same for the chain of pairs, which is looked up where no longer n-gram is found; of single tokens, the latest."""

_PAD, _CONTEXT_PAD = -2, -3  # before the first token, in an index and in a context: unequal, so no match
TOKEN_BYTES = 4
_BITS = 8 * TOKEN_BYTES
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x9E3779B1
_FINALIZER = 0x85EBCA6B  # the high bits of a product with it are well mixed
_DROP = pow(_MULTIPLIER, LONG, _WORD + 1) * _FINALIZER & _WORD  # what a token leaving the hash was multiplied with
_MIN_BITS, _MAX_BITS = 8, 16  # of a chain's table; 2**16 heads are 256 KiB


class Occurrence(NamedTuple):
    """`length` tokens before position `end` of an index equal the end of a context. Length 0: none do."""

    length: int
    end: int


NO_OCCURRENCE = Occurrence(0, 0)


class Context(NamedTuple):
    """The end of a text to look up: its last `WINDOW` tokens, and hashes of its last `LONG`, two and one."""

    window: array[int]
    long: int
    pair: int
    single: int


class NGramIndex:
    """A token sequence that grows at its end, and the chains over it.

    Building takes a few numpy passes over the tokens, an append the same small work for any length. An n-gram enters
    its chain when a token follows it: the end itself has no continuation. Positions count from the buffer's beginning,
    which is padding, so that comparing backwards needs no check of bounds; position 0 ends a chain.
    """

    __slots__ = ("_buffer", "_capacity", "_long", "_long_heads", "_long_older", "_pair", "_pair_heads",
                 "_pair_older", "_shift", "_single", "_single_heads")  # fmt: skip

    def __init__(self, tokens: TokenIds, capacity: int = 0) -> None:
        """Index `tokens`. `capacity`: how many it is going to hold, which sizes the tables and bounds nothing."""
        padded = np.full(WINDOW + len(tokens), _PAD, np.int32)
        padded[WINDOW:] = tokens
        self._buffer = array("i", padded.tobytes())
        bits = min(max(max(len(tokens), capacity).bit_length() + 1, _MIN_BITS), _MAX_BITS)
        self._capacity = 1 << (bits - 1) if bits < _MAX_BITS else sys.maxsize
        self._shift = 32 - bits
        self._long, self._pair, self._single = _hashes(self._buffer)
        self._long_heads, self._long_older = _chain(padded, LONG, self._shift)
        self._pair_heads, self._pair_older = _chain(padded, 2, self._shift)
        heads = np.zeros(1 << bits, np.int32)
        slots = _slots(padded, 1, self._shift)
        heads[slots] = np.arange(WINDOW + 1, WINDOW + 1 + len(slots), dtype=np.int32)  # of equal slots the last stays
        self._single_heads = array("i", heads.tobytes())

    def __len__(self) -> int:
        return len(self._buffer) - WINDOW

    @property
    def crowded(self) -> bool:
        """Whether it holds more than its tables were sized for; building it anew would make look-ups faster."""
        return len(self) > self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes held by the tokens and the chains."""
        heads = (self._long_heads, self._pair_heads, self._single_heads)
        return sum(map(len, (*heads, self._buffer, self._long_older, self._pair_older))) * TOKEN_BYTES

    def tokens(self, start: int = 0) -> TokenIds:
        """A copy of the tokens from `start` on, int32."""
        return np.frombuffer(self._buffer[WINDOW + start :].tobytes(), np.int32)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        buffer, shift, end = self._buffer, self._shift, len(self._buffer)
        buffer.extend(tokens)
        long_heads, pair_heads, single_heads = self._long_heads, self._pair_heads, self._single_heads
        older_long, older_pair = self._long_older.append, self._pair_older.append
        long, pair, single = self._long, self._pair, self._single
        for token in tokens:
            if end > WINDOW:
                slot = long >> shift
                older_long(long_heads[slot])
                long_heads[slot] = end
                slot = pair >> shift
                older_pair(pair_heads[slot])
                pair_heads[slot] = end
                single_heads[single >> shift] = end
            # The polynomial hash rolls: the new token comes in, the one `LONG` before it drops out.
            before, single = single, token * _FINALIZER & _WORD
            long = (long * _MULTIPLIER + single - buffer[end - LONG] * _DROP) & _WORD
            pair = (before * _MULTIPLIER + single) & _WORD
            end += 1
        self._long, self._pair, self._single = long, pair, single

    def window(self) -> array[int]:
        """The last `WINDOW` tokens, padded before the first."""
        buffer = self._buffer
        missing = 2 * WINDOW - len(buffer)
        if missing > 0:
            return array("i", [_CONTEXT_PAD] * missing) + buffer[WINDOW:]
        return buffer[-WINDOW:]

    def context(self) -> Context:
        """The sequence's own end, as `longest` takes it."""
        return Context(self.window(), self._long, self._pair, self._single)

    def after(self, occurrence: Occurrence, limit: int) -> array[int]:
        """At most `limit` tokens that came after it, up to the end or a gap."""
        tokens = self._buffer[occurrence.end : occurrence.end + limit]
        return tokens[: tokens.index(GAP)] if GAP in tokens else tokens

    def longest(self, context: Context, above: int = 0) -> Occurrence:
        """Where the candidates agree with more than `above` tokens of `context`: the longest, of equals the latest."""
        if above >= WINDOW:
            return NO_OCCURRENCE
        window = context.window
        if end := self._long_heads[context.long >> self._shift]:
            least = above if above >= LONG else LONG - 1
            found = self._walk(window, end, self._long_older, LONG_CANDIDATES, least)
            if found.length:
                return found
        if above >= LONG - 1:  # a shorter n-gram would not lead to a longer match
            return NO_OCCURRENCE
        if end := self._pair_heads[context.pair >> self._shift]:
            found = self._walk(window, end, self._pair_older, PAIR_CANDIDATES, above or 1)
            if found.length:
                return found
        if above:
            return NO_OCCURRENCE
        end = self._single_heads[context.single >> self._shift]
        return Occurrence(1, end) if end and self._buffer[end - 1] == window[-1] else NO_OCCURRENCE

    def _walk(self, window: array[int], end: int, older: array[int], candidates: int, best: int) -> Occurrence:
        """The longest one of more than `best` tokens along the chain that begins at position `end`."""
        buffer, value, found = self._buffer, 0, 0
        ahead = best + 1
        wanted = window[-ahead]  # the token that a longer match has at its beginning
        for _ in range(candidates):
            if buffer[end - ahead] == wanted:
                # Read big-endian the last token is lowest: the lowest bit that differs says how many agree.
                value = value or int.from_bytes(window, "big")
                differs = value ^ int.from_bytes(buffer[end - WINDOW : end], "big")
                if not differs:
                    return Occurrence(WINDOW, end)
                length = ((differs & -differs).bit_length() - 1) // _BITS
                if length >= ahead:
                    found, best, ahead = end, length, length + 1
                    wanted = window[-ahead]
            end = older[end]
            if not end:
                break
        return Occurrence(best, found) if found else NO_OCCURRENCE


def _hashes(tokens: array[int]) -> tuple[int, int, int]:
    """Of the last `LONG` tokens, of the last two and of the last: polynomials, the last token with power 0, times the
    finalizer. The high bits are the slot in a table."""
    long = 0
    for token in tokens[-LONG:]:
        long = (long * _MULTIPLIER + token) & _WORD
    pair, single = tokens[-2] * _MULTIPLIER + tokens[-1], tokens[-1]
    return long * _FINALIZER & _WORD, pair * _FINALIZER & _WORD, single * _FINALIZER & _WORD


def _chain(padded: TokenIds, n: int, shift: int) -> tuple[array[int], array[int]]:
    """The chain of n-grams of a padded sequence: by slot the latest position, and by position the next older one."""
    slots = _slots(padded, n, shift)
    by_slot = np.argsort(slots, kind="stable")  # 16-bit keys: a radix sort
    ordered, ends = slots[by_slot], (by_slot + (WINDOW + 1)).astype(np.int32)
    same = ordered[1:] == ordered[:-1]
    older = np.zeros(max(len(padded), WINDOW + 1), np.int32)  # by position, up to the one before the end
    older[ends[1:][same]] = ends[:-1][same]
    heads = np.zeros(1 << (32 - shift), np.int32)
    latest = np.append(~same, True)[: len(slots)]
    heads[ordered[latest]] = ends[latest]
    return array("i", heads.tobytes()), array("i", older.tobytes())


def _slots(padded: TokenIds, n: int, shift: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The slot of the n-gram that ends at each token after the padding but the last: that of `_hashes`, for all."""
    tokens = padded.view(np.uint32)[WINDOW - n + 1 :]
    count = max(len(padded) - WINDOW - 1, 0)
    value = np.zeros(count, np.uint32)
    for k in range(n):
        value = value * np.uint32(_MULTIPLIER) + tokens[k : k + count]
    return ((value * np.uint32(_FINALIZER)) >> np.uint32(shift)).astype(np.uint16)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens two texts begin: of a draft and what was drawn, how many drafts were right."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
