"""N-gram look-up: where the end of each sequence occurred before, and what followed there.

A chain of equal pairs of tokens, as in LZ77: a table leads from the hash of a pair to where it was last, and from there
to the occurrence before. A look-up walks a bounded number of candidates and measures each one that can be longer than
the best so far. Where no pair is found, another table has the latest place of the last token.

`NGramIndex` is the index of one text. `DraftTable` looks up all sequences of a step in one call, and takes in what a
step drew for all of them in another. Both run in C (`kernels/ngrams_c.c`). What to do with drafts is decided in
`drafter`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.kernels import native
from holdfast.replicas.types import TokenIds

LIBRARY = native.Library("ngrams", plain=True)

WINDOW = 32
"""Longest match that is measured, in tokens."""
CANDIDATES = 128
"""Of a chain a look-up compares at most so many, latest first."""
GAP = -1
"""Stands between texts that do not continue each other; nothing is drafted across it."""
NOT_PREDICTED = -1

_MIN_BITS, _MAX_BITS = 8, 16  # of a table; 2**16 heads are 256 KiB
_SLOTS = 64  # of a new table

Doubles = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class _Index(ctypes.Structure):
    """`Index` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "older", "pairs", "singles")),
        *((name, ctypes.c_int64) for name in ("length", "room", "shift")),
    ]


class _Drafts(ctypes.Structure):
    """`Drafts` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("index", "drafts", "lengths", "matched", "predicted")),
        *((name, ctypes.c_void_p) for name in ("acceptance", "predictions")),
        ("most", ctypes.c_int64),
        ("weight", ctypes.c_double),
        ("by_match", ctypes.c_void_p),
    ]


@functools.cache
def _kernel(name: str) -> Callable[..., int]:
    """A function of the library. It keeps the interpreter lock: taking it again would cost more than the call."""
    pointer, count, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    arguments = {
        "extend": (pointer, pointer, count),
        "learn": (pointer, count, pointer, pointer, pointer, pointer),
        "draft": (pointer, count, pointer, pointer, pointer, count, pointer, pointer, pointer),
        "gate": (count, pointer, pointer, count, pointer, count, real, real, real, pointer, pointer, pointer),
    }
    return ctypes.PYFUNCTYPE(count, *arguments[name])((f"ngrams_{name}", LIBRARY.loaded))


def _at(array: npt.NDArray[np.generic]) -> int:
    """The address of an array's memory, which the caller keeps alive."""
    return int(array.__array_interface__["data"][0])


class NGramIndex:
    """A token sequence that grows at its end, and the chain over it. An append is the same small work for any length.

    A pair enters its chain when a token follows it: the end itself has no continuation.
    """

    __slots__ = ("_capacity", "_heads", "_index", "_older", "_tokens", "address")

    def __init__(self, tokens: TokenIds, capacity: int = 0, room: int = 0) -> None:
        """Index `tokens`. `capacity`: how many it is going to hold, which sizes the tables and bounds nothing.

        `room`: the most it can hold before its memory moves.
        """
        bits = min(max(max(len(tokens), capacity).bit_length() + 1, _MIN_BITS), _MAX_BITS)
        self._capacity = 1 << (bits - 1) if bits < _MAX_BITS else sys.maxsize
        self._heads = np.zeros((2, 1 << bits), np.int32)
        self._index = _Index(pairs=_at(self._heads[0]), singles=_at(self._heads[1]), shift=32 - bits)
        self.address = ctypes.addressof(self._index)
        self._tokens: Int32s = np.empty(0, np.int32)
        self._older = self._tokens
        self._move(max(room, len(tokens)))
        self.extend(tokens)

    def __len__(self) -> int:
        return int(self._index.length)

    @property
    def crowded(self) -> bool:
        """Whether it holds more than its tables were sized for; building it anew would make look-ups faster."""
        return len(self) > self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, the tables and the chain."""
        return self._tokens.nbytes + self._older.nbytes + self._heads.nbytes

    def tokens(self, start: int = 0) -> TokenIds:
        """A copy of the tokens from `start` on, int32."""
        return self._tokens[start : len(self)].copy()

    def extend(self, tokens: TokenIds) -> None:
        """Add tokens at the end."""
        needed = len(self) + len(tokens)
        if needed > len(self._tokens):
            self._move(needed + needed // 8)
        tokens = np.ascontiguousarray(tokens, np.int32)
        _kernel("extend")(self.address, _at(tokens), len(tokens))

    def _move(self, room: int) -> None:
        """Into memory for so many tokens."""
        length = len(self)
        tokens, older = np.empty(room, np.int32), np.empty(room, np.int32)
        tokens[:length], older[:length] = self._tokens[:length], self._older[:length]
        self._tokens, self._older = tokens, older
        self._index.tokens, self._index.older, self._index.room = _at(tokens), _at(older), room


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How acceptance is estimated: by the bit length of a match's length, from `unknown` for a new sequence, and with
    `weight` for each draft that was compared.
    """

    by_match: tuple[float, ...]
    unknown: float
    weight: float


@dataclass(frozen=True, slots=True)
class Offers:
    """Row i: the draft of sequence i, `lengths[i]` of `tokens[i]`, and the `chances[i]` of each of its tokens.

    The next look-up writes over it.
    """

    tokens: Int32s
    lengths: Int32s
    chances: Doubles


class DraftTable:
    """Drafts of at most `most` tokens for the sequences that have a slot, and how often they came true.

    A slot has an index, the draft that its sequence was last given, the token that the model predicted, and the
    estimated acceptance of both.
    """

    def __init__(self, most: int, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._by_match = np.array(acceptance.by_match)
        self._held: list[NGramIndex | None] = []  # by slot
        self._free: list[int] = []
        self._index: Int64s = np.zeros(0, np.int64)  # addresses
        self._drafts: Int32s = np.zeros((0, most), np.int32)
        self._lengths, self._matched, self._predicted = (np.zeros(0, np.int32) for _ in range(3))
        self._own, self._predictions = (np.zeros(0) for _ in range(2))
        self._call = _Drafts(most=most, weight=acceptance.weight, by_match=_at(self._by_match))
        self._address = ctypes.addressof(self._call)
        self._offers = Offers(np.empty((0, most), np.int32), np.empty(0, np.int32), np.empty(0))
        self._into = (0, 0, 0)  # their addresses
        # What was drawn and is not learned yet, by sequence.
        self._drawn, self._slots, self._ends, self._next = array("i"), array("q"), array("q"), array("i")

    def add(self, index: NGramIndex) -> int:
        """A slot for a sequence."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._held[slot], self._index[slot] = index, index.address
        self._lengths[slot] = self._matched[slot] = 0
        self._predicted[slot] = NOT_PREDICTED
        self._own[slot] = self._predictions[slot] = self._acceptance.unknown
        return slot

    def remove(self, slot: int) -> None:
        """The sequence is over. It has learned all that was drawn."""
        self._held[slot] = None
        self._free.append(slot)

    def drawn(self, slot: int, tokens: Sequence[int], predicted: int | None) -> None:
        """Note what a step drew for a sequence, for `learn`."""
        self._drawn.extend(tokens)
        self._slots.append(slot)
        self._ends.append(len(self._drawn))
        self._next.append(NOT_PREDICTED if predicted is None else predicted)

    def learn(self) -> None:
        """Compare all that was noted with the drafts, and index it. Raises ValueError for an index that is full."""
        if not self._slots:
            return
        noted = self._slots, self._ends, self._drawn, self._next
        addresses = [each.buffer_info()[0] for each in noted]
        whole = _kernel("learn")(self._address, len(self._slots), *addresses)
        for each in noted:
            del each[:]
        if not whole:
            raise ValueError("there is no room for the tokens that were drawn")

    def draft(
        self, slots: Sequence[int], limits: Sequence[int], memories: Sequence[NGramIndex | None], least: int
    ) -> Offers:
        """Drafts of at most `limits[i]` tokens for the sequence in `slots[i]`, after the longest match, of equals the
        latest: in its own text or, where one of at least `least` tokens is longer, in `memories[i]`.
        """
        count = len(slots)
        if count > len(self._offers.lengths):
            self._offers = Offers(
                np.empty((count, self._call.most), np.int32), np.empty(count, np.int32), np.empty(count)
            )
            self._into = _at(self._offers.tokens), _at(self._offers.lengths), _at(self._offers.chances)
        inputs = [
            array("q", slots),
            array("q", limits),
            array("q", [0 if memory is None else memory.address for memory in memories]),
        ]
        addresses = [each.buffer_info()[0] for each in inputs]
        _kernel("draft")(self._address, count, *addresses, least, *self._into)
        offers = self._offers
        return Offers(offers.tokens[:count], offers.lengths[:count], offers.chances[:count])

    def _grow(self) -> None:
        """Room for twice as many sequences."""
        before = len(self._held)
        more = max(before, _SLOTS)
        self._held += [None] * more
        self._free += range(before + more - 1, before - 1, -1)
        for name in ("index", "drafts", "lengths", "matched", "predicted", "own", "predictions"):
            old = getattr(self, f"_{name}")
            new = np.concatenate((old, np.zeros((more, *old.shape[1:]), old.dtype)))
            setattr(self, f"_{name}", new)
            setattr(self._call, "acceptance" if name == "own" else name, _at(new))


def gate(
    acceptances: Doubles,
    offered: Int32s,
    decoding: int,
    cost: Doubles,
    extra_s: float,
    unlikely: float,
    worth: float,
) -> list[int]:
    """`drafter.draft_lengths`: none less likely than `unlikely`, and none unless the gain is `worth` it."""
    count = len(offered)
    lengths, given, rights = array("i", bytes(4 * count)), array("i", bytes(4 * count)), array("d", bytes(8 * count))
    inputs = _at(acceptances), _at(offered), decoding, _at(cost), len(cost) - 1
    room = [each.buffer_info()[0] for each in (lengths, given, rights)]
    _kernel("gate")(count, *inputs, extra_s, unlikely, worth, *room)
    return lengths.tolist()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens two texts begin: of a draft and what was drawn, how many drafts were right."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
