"""The grammar of one text: each token is the next of those that were given. So a text is scored like any reply."""

from collections.abc import Sequence

import numpy as np

from holdfast.replicas.constraints.matcher import Bits
from holdfast.replicas.types import TokenIds


class GivenTokens:
    """`constraints.matcher.Matcher` of exactly `tokens`, ids of a model with a `vocabulary` of so many."""

    __slots__ = ("_at", "_tokens", "_vocabulary")

    def __init__(self, tokens: TokenIds, vocabulary: int, at: int = 0) -> None:
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._at = at

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def words(self) -> int:
        return -(-self._vocabulary // 32)

    @property
    def binding(self) -> bool:
        return True

    @property
    def finished(self) -> bool:
        return self._at >= len(self._tokens)

    @property
    def failed(self) -> bool:
        return False

    @property
    def given_up(self) -> bool:
        return False

    def copy(self) -> "GivenTokens":
        return GivenTokens(self._tokens, self._vocabulary, self._at)

    def advance(self, token: int) -> bool:
        self._at += 1
        return True

    def accepts(self, tokens: Sequence[int]) -> int:
        follow = self._tokens[self._at : self._at + len(tokens)].tolist()
        return next((i for i, (a, b) in enumerate(zip(tokens, follow, strict=False)) if a != b), len(follow))

    def forced(self) -> list[int]:
        rest: list[int] = self._tokens[self._at :].tolist()
        return rest

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        known = self.accepts(drafts)
        out[:] = -1
        follow = self._tokens[self._at : self._at + known + 1]
        rows = np.arange(len(follow))
        out[: len(follow)] = 0
        out.view(np.uint32)[rows, follow // 32] = np.uint32(1) << (follow % 32).astype(np.uint32)
