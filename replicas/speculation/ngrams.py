"""Where in a token sequence the end of a text occurred before: an index that grows with the sequence.

A chain of equal pairs of tokens, as in LZ77: a table leads from the hash of a pair to where it was last, and from there
to the occurrence before. A look-up walks a bounded number of candidates and measures each one that can be longer than
the best so far. Where no pair is found, another table has the latest place of the last token. What to do with what is
found is decided in `drafter`.
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
CANDIDATES = 128
"""Of a chain a look-up compares at most so many, latest first."""

_PAD, _CONTEXT_PAD = -2, -3  # before the first token, in an index and in a context: unequal, so no match
TOKEN_BYTES = 4
_BITS = 8 * TOKEN_BYTES
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x9E3779B1
_FINALIZER = 0x85EBCA6B  # the high bits of a product with it are well mixed
_MIN_BITS, _MAX_BITS = 8, 16  # of a table; 2**16 heads are 256 KiB


class Occurrence(NamedTuple):
    """`length` tokens before position `end` of an index equal the end of a context. Length 0: none do."""

    length: int
    end: int


NO_OCCURRENCE = Occurrence(0, 0)


class NGramIndex:
    """A token sequence that grows at its end, and the chain over it.

    Building takes a few numpy passes over the tokens, an append the same small work for any length. A pair enters its
    chain when a token follows it: the end itself has no continuation. Positions count from the buffer's beginning,
    which is padding, so that comparing backwards needs no check of bounds; position 0 ends a chain.
    """

    __slots__ = ("_buffer", "_capacity", "_heads", "_older", "_shift", "_single_heads")

    def __init__(self, tokens: TokenIds, capacity: int = 0) -> None:
        """Index `tokens`. `capacity`: how many it is going to hold, which sizes the tables and bounds nothing."""
        padded = np.full(WINDOW + len(tokens), _PAD, np.int32)
        padded[WINDOW:] = tokens
        self._buffer = array("i", padded.tobytes())
        bits = min(max(max(len(tokens), capacity).bit_length() + 1, _MIN_BITS), _MAX_BITS)
        self._capacity = 1 << (bits - 1) if bits < _MAX_BITS else sys.maxsize
        self._shift = 32 - bits
        ids = padded.view(np.uint32)[WINDOW - 1 : -1]  # of each token that another one follows, and of the one before
        ends = np.arange(WINDOW + 1, WINDOW + len(ids), dtype=np.int32)
        single, pair = [
            (value * np.uint32(_FINALIZER)) >> np.uint32(self._shift)
            for value in (ids[1:], ids[:-1] * np.uint32(_MULTIPLIER) + ids[1:])
        ]
        heads = np.zeros((2, 1 << bits), np.int32)
        heads[0, pair], heads[1, single] = ends, ends  # of equal slots the last stays
        by_slot = np.argsort(pair.astype(np.uint16), kind="stable")  # 16-bit keys: a radix sort
        same = pair[by_slot[1:]] == pair[by_slot[:-1]]
        older = np.zeros(max(len(padded), WINDOW + 1), np.int32)  # by position, up to the one before the end
        older[ends[by_slot[1:][same]]] = ends[by_slot[:-1][same]]
        self._heads, self._single_heads, self._older = [array("i", each.tobytes()) for each in (*heads, older)]

    def __len__(self) -> int:
        return len(self._buffer) - WINDOW

    @property
    def crowded(self) -> bool:
        """Whether it holds more than its tables were sized for; building it anew would make look-ups faster."""
        return len(self) > self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes held by the tokens, the tables and the chain."""
        return sum(map(len, (self._heads, self._single_heads, self._buffer, self._older))) * TOKEN_BYTES

    def tokens(self, start: int = 0) -> TokenIds:
        """A copy of the tokens from `start` on, int32."""
        return np.frombuffer(self._buffer[WINDOW + start :].tobytes(), np.int32)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        buffer, shift, end = self._buffer, self._shift, len(self._buffer)
        heads, single_heads, older = self._heads, self._single_heads, self._older
        before, last = buffer[-2], buffer[-1]
        for token in tokens:
            if end > WINDOW:
                slot = _pair(before, last) >> shift
                older.append(heads[slot])
                heads[slot] = end
                single_heads[(last * _FINALIZER & _WORD) >> shift] = end
            before, last = last, token
            end += 1
        buffer.extend(tokens)

    def window(self) -> array[int]:
        """The last `WINDOW` tokens, padded before the first: what `longest` looks up."""
        buffer = self._buffer
        missing = 2 * WINDOW - len(buffer)
        if missing > 0:
            return array("i", [_CONTEXT_PAD] * missing) + buffer[WINDOW:]
        return buffer[-WINDOW:]

    def after(self, occurrence: Occurrence, limit: int) -> array[int]:
        """At most `limit` tokens that came after it, up to the end or a gap."""
        tokens = self._buffer[occurrence.end : occurrence.end + limit]
        return tokens[: tokens.index(GAP)] if GAP in tokens else tokens

    def longest(self, window: array[int], above: int = 0) -> Occurrence:
        """Where the candidates agree with more than `above` of the last tokens of a text: the longest, of equals the
        latest.
        """
        if above >= WINDOW:
            return NO_OCCURRENCE
        buffer, older, last = self._buffer, self._older, window[-1]
        end = self._heads[_pair(window[-2], last) >> self._shift]
        best, found, value = above or 1, 0, 0
        ahead = best + 1
        wanted = window[-ahead]  # the token that a longer match has at its beginning
        for _ in range(CANDIDATES):
            if not end:
                break
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
        if found or above:
            return Occurrence(best, found) if found else NO_OCCURRENCE
        end = self._single_heads[(last * _FINALIZER & _WORD) >> self._shift]
        return Occurrence(1, end) if end and buffer[end - 1] == last else NO_OCCURRENCE


def _pair(before: int, last: int) -> int:
    """The hash of a pair of tokens. Its high bits are the slot in a table."""
    return (before * _MULTIPLIER + last) * _FINALIZER & _WORD


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens two texts begin: of a draft and what was drawn, how many drafts were right."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
