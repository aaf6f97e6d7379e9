"""How often a sequence has generated each token: what presence and frequency penalties are computed from.

A sequence owns its counts and has new tokens added to them; nothing ever goes over the old ones again.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from holdfast.replicas.types import TokenIds

Int64s = npt.NDArray[np.int64]

_LEAST = 64  # different tokens that there is room for at first


class TokenCounts:
    """The different tokens among those given to `add`, in the order they first came in, each with its count."""

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
