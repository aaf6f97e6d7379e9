"""Basic types of `replicas`: token ids and their counts, the form of KV, classes of requests, tenants' cell limits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

from holdfast.replicas.errors import ConfigError

T = TypeVar("T")

TokenIds: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
KVDType: TypeAlias = Literal["auto", "int8", "fp8"]

NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)

_LEAST = 64  # initial capacity of counts, in different tokens
_COMPARED = 1 << 15  # ids compared at once: an early difference ends it, and the flags stay in the processor's cache


class Priority(StrEnum):
    """The class of a request: a user waits for it, or it uses the remaining capacity."""

    INTERACTIVE = "interactive"
    BATCH = "batch"

    __hash__ = str.__hash__  # that of `Enum` is a call in Python for each look-up


class Origin(StrEnum):
    """The source of a request. Requests of the server itself are counted separately."""

    CLIENT = "client"
    PREAMBLE = "preamble"  # shared preambles, as an engine starts
    QUESTION = "question"  # standing questions, asked in idle time
    WARM_UP = "warm_up"  # the first request to a new cluster
    EARLY_STOP = "early_stop"  # what a reply that early stop ended would have gone on with


RANKS = tuple(Priority)  # requests of the last one give way first


def salted(tenant: str, salt: str) -> str:
    """A tenant's cache scope, or with a salt a part of it. The text after a NUL names the part."""
    return f"{tenant}\0salt\0{salt}" if salt else tenant


def tenant_of(scope: str) -> str:
    """The tenant of a cache scope."""
    return scope.partition("\0")[0]


@dataclass(frozen=True, slots=True)
class CellLimits:
    """A tenant's limits in the cells of each engine, as shares of all cells."""

    floor: float = 0.0  # always available to it: others may cache in the unused part, and return it
    ceiling: float = 1.0  # the most, cached cells included: its own are then evicted, and larger requests refused
    pinned: float = 1.0  # kept for its sessions and for its programs between turns

    def __post_init__(self) -> None:
        for name, least in (("floor", 0.0), ("ceiling", 1e-9), ("pinned", 0.0)):
            value: float = getattr(self, name)
            if not least <= value <= 1:
                raise ConfigError(f"{name} must be in {'(' if least else '['}0, 1], not {value}", name)
        if self.floor > self.ceiling:
            raise ConfigError(f"floor {self.floor} is beyond ceiling {self.ceiling}", "floor")

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return self.floor > 0 or self.ceiling < 1 or self.pinned < 1


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Number of leading ids that `a` and `b` have in common."""
    n = min(len(a), len(b))
    for at in range(0, n, _COMPARED):
        end = min(at + _COMPARED, n)
        differs = a[at:end] != b[at:end]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
    return n


class TokenCounts:
    """How often a sequence contains each token; penalties need it.

    Tokens are in the order of their first occurrence. Only new tokens are added; old ones are never counted again.
    """

    __slots__ = ("_ids", "_places", "_times", "seen")

    def __init__(self) -> None:
        self.seen = 0  # tokens that were added
        self._places: dict[int, int] = {}
        self._ids, self._times = np.zeros((2, _LEAST), np.int64)

    def add(self, tokens: TokenIds) -> None:
        """Count further tokens."""
        for token in tokens.tolist():
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids, self._times = (np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._times))
            self._ids[place] = token
            self._times[place] += 1
        self.seen += len(tokens)

    def after(self, drafts: Sequence[int]) -> Iterator[tuple[Int64s, Int64s]]:
        """Tokens and counts now, then with the first of `drafts` added, with the first two, and so on.

        Read each one before the next. No token has a count of 0.
        """
        places, size = self._places, len(self._places)
        yield self._ids[:size], self._times[:size]
        if not drafts:
            return
        new = list(dict.fromkeys(draft for draft in drafts if draft not in places))
        ids = np.concatenate((self._ids[:size], np.array(new, np.int64)))
        times = np.concatenate((self._times[:size], np.zeros(len(new), np.int64)))
        at = {token: size + i for i, token in enumerate(new)}
        for draft in drafts:
            place = places.get(draft, -1)
            if place < 0:
                place = at[draft]
                size = max(size, place + 1)
            times[place] += 1
            yield ids[:size], times[:size]


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A frozen slotted dataclass for values made in every step.

    Only the type checker enforces that it is frozen, which makes construction four times as fast as `frozen=True`.
    """
    return dataclass(slots=True)(cls)


def window_pages(window: int, page_size: int) -> int:
    """Most window pages that a sequence needs for one token more: those of its window and of a token in flight, and of
    the copy that it begins with.
    """
    return (window + page_size) // page_size + 2
