"""What every room of `replicas` may know: token ids and their counts, classes of requests, cheap frozen data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

from holdfast.replicas.errors import ConfigError

T = TypeVar("T")

TokenIds: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]

NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)

_LEAST = 64  # different tokens that counts have room for at first
_COMPARED = 1 << 15  # ids that are compared at once: what differs early is found early, and the flags stay in cache


class Priority(StrEnum):
    """The class of a request: somebody waits for it, or it takes what those leave."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Origin(StrEnum):
    """Where a request comes from: a client, or the server itself, whose requests are counted apart."""

    CLIENT = "client"
    PREAMBLE = "preamble"  # shared preambles, as an engine starts
    QUESTION = "question"  # standing questions, asked in idle time
    WARM_UP = "warm_up"  # the first request to a new cluster


RANKS = tuple(Priority)  # the last one's requests give way first


def salted(tenant: str, salt: str) -> str:
    """A tenant's cache scope, or with a salt a part of it. What stands behind a NUL names the part."""
    return f"{tenant}\0salt\0{salt}" if salt else tenant


def tenant_of(scope: str) -> str:
    """The tenant of a cache scope."""
    return scope.partition("\0")[0]


@dataclass(frozen=True, slots=True)
class CellLimits:
    """What a tenant may have of the cells of each engine, as shares of all of them."""

    floor: float = 0.0  # it can always have these: others cache in what it leaves of them, and give it back
    ceiling: float = 1.0  # it has no more, cached ones counted: then its own go first, and a larger request is refused
    pinned: float = 1.0  # its sessions, and its programs whose tools run, keep no more

    def __post_init__(self) -> None:
        for name, least in (("floor", 0.0), ("ceiling", 1e-9), ("pinned", 0.0)):
            value: float = getattr(self, name)
            if not least <= value <= 1:
                raise ConfigError(f"{name} must be in {'(' if least else '['}0, 1], not {value}", name)
        if self.floor > self.ceiling:
            raise ConfigError(f"floor {self.floor} is beyond ceiling {self.ceiling}", "floor")

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.floor > 0 or self.ceiling < 1 or self.pinned < 1


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many leading ids `a` and `b` have in common."""
    n = min(len(a), len(b))
    for at in range(0, n, _COMPARED):
        end = min(at + _COMPARED, n)
        differs = a[at:end] != b[at:end]
        first = int(differs.argmax())
        if differs[first]:
            return at + first
    return n


class TokenCounts:
    """How often a sequence has each token: what penalties are computed from.

    The different tokens among those given to `add`, in the order they first came in, each with its count. A sequence
    has its new tokens added; nothing ever goes over the old ones again.
    """

    __slots__ = ("_ids", "_places", "_times", "seen")

    def __init__(self) -> None:
        self.seen = 0  # tokens that were added
        self._places: dict[int, int] = {}
        self._ids, self._times = np.zeros((2, _LEAST), np.int64)

    def add(self, tokens: TokenIds) -> None:
        """Count some more tokens."""
        for token in tokens.tolist():
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids, self._times = (np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._times))
            self._ids[place] = token
            self._times[place] += 1
        self.seen += len(tokens)

    def after(self, drafts: Sequence[int]) -> Iterator[tuple[Int64s, Int64s]]:
        """Tokens and counts as they are, then as they are with the first of `drafts` added, with the first two, ...

        Each is read before the next one is asked for. No token has a count of 0.
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
    """A slotted dataclass that nobody changes, for what is made in every step, most of it for every sequence.

    A type checker refuses to change one; the interpreter does not look, which makes it four times as fast to make as
    with `frozen=True`. All other plain frozen data is `dataclass(frozen=True, slots=True)`.
    """
    return dataclass(slots=True)(cls)
