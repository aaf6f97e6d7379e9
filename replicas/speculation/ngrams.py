"""Where in a token sequence the end of a text occurred before: an index that grows with the sequence.

Chains of equal n-grams, as in LZ77: a table leads from the hash of n tokens to where they were last, and from there
to the occurrence before. A look-up walks a bounded number of candidates and measures each one's whole match. What to
do with a match is decided in `drafter`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np

from holdfast.replicas.tokens import TokenIds

WINDOW = 32
"""Longest match that is measured, in tokens."""
GAP = -1
"""Stands between texts that do not continue each other; nothing is drafted across it."""

_PAD, _CONTEXT_PAD = -2, -3  # before the first token, in an index and in a context: unequal, so no match
TOKEN_BYTES = 4
SPAN = WINDOW * TOKEN_BYTES
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x9E3779B1
_FINALIZER = 0x85EBCA6B  # the high bits of a product with it are well mixed
_MIN_BITS, _MAX_BITS = 8, 16  # of a chain's table; 2**16 heads are 256 KiB


class Match(NamedTuple):
    """`length` tokens before byte `end` of an index's buffer equal the end of a context. Length 0: none."""

    length: int
    end: int


NO_MATCH = Match(0, 0)


@dataclass(frozen=True, slots=True)
class Order:
    """One chain: n-grams of `n` tokens, of which a look-up compares at most `candidates`, latest first."""

    n: int
    candidates: int


ORDERS = (Order(6, 32), Order(2, 64), Order(1, 1))
"""Longest first: a shorter n-gram is looked up only where no longer one was found."""

_LONGEST = ORDERS[0].n
_POWERS = tuple(pow(_MULTIPLIER, k, _WORD + 1) for k in reversed(range(_LONGEST)))
_UNPACK_TAIL = struct.Struct(f"<{_LONGEST}I").unpack_from


class Context(NamedTuple):
    """The end of a text to look up: its last `WINDOW` tokens as bytes, and the hash of its last n for each order."""

    window: bytes
    hashes: tuple[int, ...]

    def then(self, tokens: Sequence[int]) -> Context:
        """This context with `tokens` behind it."""
        window = (self.window + array("i", tokens).tobytes())[-SPAN:]
        tail = _UNPACK_TAIL(window, SPAN - _LONGEST * TOKEN_BYTES)
        return Context(window, tuple([_hash(tail[-order.n :], order.n) for order in ORDERS]))


class NGramIndex:
    """A token sequence that grows at its end, and the chains over it.

    Building takes a few numpy passes over the tokens, an append the same small work for any length. The buffer
    begins with padding, so that comparing backwards needs no check of bounds.
    """

    __slots__ = ("_buffer", "_capacity", "_chains")

    def __init__(self, tokens: TokenIds, capacity: int = 0) -> None:
        """Index `tokens`. `capacity`: how many it is going to hold, which sizes the tables and bounds nothing."""
        padded = np.full(WINDOW + len(tokens), _PAD, np.int32)
        padded[WINDOW:] = tokens
        self._buffer = bytearray(padded.tobytes())
        bits = min(max(max(len(tokens), capacity).bit_length() + 1, _MIN_BITS), _MAX_BITS)
        self._capacity = 1 << (bits - 1) if bits < _MAX_BITS else sys.maxsize
        self._chains = tuple(_Chain(order, padded, bits) for order in ORDERS)

    def __len__(self) -> int:
        return len(self._buffer) // TOKEN_BYTES - WINDOW

    @property
    def crowded(self) -> bool:
        """Whether it holds more than its tables were sized for; building it anew would make look-ups faster."""
        return len(self) > self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes held by the tokens and the chains."""
        return len(self._buffer) + sum(chain.nbytes for chain in self._chains)

    def tokens(self, start: int = 0) -> TokenIds:
        """A copy of the tokens from `start` on, int32."""
        return np.frombuffer(bytes(self._buffer[SPAN + start * TOKEN_BYTES :]), np.int32)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        buffer = self._buffer
        end = len(buffer) // TOKEN_BYTES
        buffer += array("i", tokens).tobytes()
        recent = memoryview(bytes(buffer[(end - _LONGEST) * TOKEN_BYTES :])).cast("I").tolist()
        for chain in self._chains:
            chain.extend(recent, end)

    def window(self) -> bytes:
        """The last `WINDOW` tokens, int32, padded before the first."""
        window = bytes(self._buffer[-SPAN:])
        missing = WINDOW - len(self)
        if missing > 0:
            window = array("i", [_CONTEXT_PAD] * missing).tobytes() + window[missing * TOKEN_BYTES :]
        return window

    def context(self) -> Context:
        """The sequence's own end, as `longest` takes it."""
        return Context(self.window(), tuple([chain.hash for chain in self._chains]))

    def after(self, match: Match, limit: int) -> array[int]:
        """At most `limit` tokens that came after `match`, up to the end or a gap."""
        found = array("i", self._buffer[match.end : match.end + limit * TOKEN_BYTES])
        return found[: found.index(GAP)] if GAP in found else found

    def longest(self, context: Context, own: bool = False, above: int = 0) -> Match:
        """Among the candidates the longest match of `context` with more than `above` tokens, of equals the latest.

        `own`: the context is this sequence's own end, which must not match itself.
        """
        if above >= WINDOW:
            return NO_MATCH
        buffer, window, value = self._buffer, context.window, 0
        for chain, hashed in zip(self._chains, context.hashes, strict=True):
            older, n, left, at = chain.older, chain.n, chain.candidates, 0
            end = older[-1] if own else chain.heads[(hashed * _FINALIZER & _WORD) >> chain.shift]
            best = max(above, n - 1)
            longer = window[-(best + 1) * TOKEN_BYTES :]  # what a better candidate ends with
            while end and left:
                if buffer.startswith(longer, (end - best - 1) * TOKEN_BYTES):
                    # Read big-endian the last token is lowest: the lowest bit that differs says how many agree.
                    value = value or int.from_bytes(window, "big")
                    stop = end * TOKEN_BYTES
                    differs = value ^ int.from_bytes(buffer[stop - SPAN : stop], "big")
                    if not differs:
                        return Match(WINDOW, stop)
                    best, at = ((differs & -differs).bit_length() - 1) // (8 * TOKEN_BYTES), stop
                    longer = window[-(best + 1) * TOKEN_BYTES :]
                end = older[end]
                left -= 1
            if at:
                return Match(best, at)
            if n <= above + 1:  # a shorter n-gram would not lead to a longer match
                break
        return NO_MATCH


class _Chain:
    """Occurrences of one order's n-grams by hash: the latest in `heads`, from each the next older in `older`.

    An occurrence is where it ends, in tokens from the buffer's beginning; 0: none. `hash` is of the sequence's end.
    """

    __slots__ = ("_drop", "candidates", "hash", "heads", "n", "older", "shift")

    def __init__(self, order: Order, padded: TokenIds, bits: int) -> None:
        self.n, self.candidates, self.shift = order.n, order.candidates, 32 - bits
        self._drop = pow(_MULTIPLIER, order.n, _WORD + 1)  # what a token leaving the hash was multiplied with
        self.hash = _hash(padded.view(np.uint32)[-order.n :].tolist(), order.n)
        slots = _slots(padded, order.n, self.shift)
        by_slot = np.argsort(slots, kind="stable")  # 16-bit keys: a radix sort
        ordered, ends = slots[by_slot], (by_slot + (WINDOW + 1)).astype(np.int32)
        same = ordered[1:] == ordered[:-1]
        older = np.zeros(len(slots) + WINDOW + 1, np.int32)
        older[ends[1:][same]] = ends[:-1][same]
        heads = np.zeros(1 << bits, np.int32)
        latest = np.append(~same, True)[: len(slots)]
        heads[ordered[latest]] = ends[latest]
        self.heads, self.older = array("i", heads.tobytes()), array("i", older.tobytes())

    @property
    def nbytes(self) -> int:
        return (len(self.heads) + len(self.older)) * TOKEN_BYTES

    def extend(self, recent: list[int], end: int) -> None:
        """Index the n-grams that end after `end`; `recent` are the tokens from the `_LONGEST` before it on."""
        heads, older, value, shift, drop, n = self.heads, self.older, self.hash, self.shift, self._drop, self.n
        # The polynomial hash rolls: the new token comes in, the one n before it drops out.
        for i in range(_LONGEST, len(recent)):
            end += 1
            value = (value * _MULTIPLIER + recent[i] - recent[i - n] * drop) & _WORD
            slot = (value * _FINALIZER & _WORD) >> shift
            older.append(heads[slot])
            heads[slot] = end
        self.hash = value


def _hash(tokens: Sequence[int], n: int) -> int:
    """A polynomial of the n tokens, the last one with power 0."""
    value: int = sum(map(mul, tokens, _POWERS[-n:]))
    return value & _WORD


def _slots(padded: TokenIds, n: int, shift: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The slot of the n-gram that ends at each token after the padding: that of `_hash`, for all at once."""
    tokens = padded.view(np.uint32)[WINDOW - n + 1 :]
    count = len(padded) - WINDOW
    value = np.zeros(count, np.uint32)
    for k in range(n):
        value = value * np.uint32(_MULTIPLIER) + tokens[k : k + count]
    return ((value * np.uint32(_FINALIZER)) >> np.uint32(shift)).astype(np.uint16)
