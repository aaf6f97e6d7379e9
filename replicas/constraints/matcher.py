"""The engine's view of a constrained reply: the tokens that may come next, as bits. Not here: libraries, and grammars
other than that of a given text.

A matcher belongs to one sequence. The text side makes it; from then on only the engine's thread uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.replicas.types import TokenIds

Bits = npt.NDArray[np.int32]


class Matcher(Protocol):
    """The place of a reply in its grammar, which depends only on the tokens that the matcher was given.

    Noise belongs to position and token. So a token that was drawn freely and is allowed is the one that would have been
    drawn under the mask, and masks cost nothing while the model keeps to its grammar. Filters see unmasked logits.
    """

    @property
    def words(self) -> int:
        """Width of a mask in int32 words. Tokens beyond it are forbidden."""

    @property
    def binding(self) -> bool:
        """The next token is drawn under a mask. Otherwise it is drawn freely, and `advance` tells whether it stands."""

    @property
    def finished(self) -> bool:
        """Only the end of the reply may follow."""
        return False

    @property
    def failed(self) -> bool:
        """The grammar grew beyond its limits, and no mask can be made any more."""
        return False

    @property
    def given_up(self) -> bool:
        """As `failed`, for a grammar that nobody has asked for: the rest of the reply is free."""
        return False

    def copy(self) -> "Matcher":
        """An independent matcher at the same place."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Take in `tokens`, drawn one after another; returns how many of them stand.

        The first that does not stand is drawn again, under a mask. With a finished matcher the reply ends before it.
        """

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, may follow."""

    def forced(self) -> list[int]:
        """The tokens that must follow here, whatever the model says; often none."""

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        """Write masks to `out` [len(drafts) + 1, words]: of the next token, and of the token after each draft.

        Bit i % 32 of word i // 32 is set if token i is allowed. Rows after a draft that may not follow have every bit
        set: nothing is drawn from them.
        """


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """The masks of one chunk's drawn rows. They are worked out when asked for, while the forward runs."""

    matcher: Matcher
    drafts: tuple[int, ...] = ()

    def fill(self, out: Bits) -> None:
        """`out` is [len(drafts) + 1, matcher.words]."""
        self.matcher.fill(self.drafts, out)


class AnyTokens(Matcher):
    """A free reply. `vocabulary`: the number of tokens that the model has."""

    __slots__ = ("_words",)

    def __init__(self, vocabulary: int) -> None:
        self._words = -(-vocabulary // 32)

    @property
    def words(self) -> int:
        return self._words

    @property
    def binding(self) -> bool:
        return False

    def copy(self) -> "AnyTokens":
        return self

    def advance(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def accepts(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def forced(self) -> list[int]:
        return []

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        out[:] = -1


class ForcedTokens(Matcher):
    """A reply that must be exactly `tokens`, so that a given text is scored like any reply.

    `vocabulary`: the number of tokens that the model has.
    """

    __slots__ = ("_at", "_tokens", "_vocabulary")

    def __init__(self, tokens: TokenIds, vocabulary: int, at: int = 0) -> None:
        self._tokens, self._vocabulary, self._at = tokens, vocabulary, at

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

    def copy(self) -> "ForcedTokens":
        return ForcedTokens(self._tokens, self._vocabulary, self._at)

    def advance(self, tokens: Sequence[int]) -> int:
        stand = min(len(tokens), len(self._tokens) - self._at)
        self._at += stand
        return stand

    def accepts(self, tokens: Sequence[int]) -> int:
        follow = self._tokens[self._at : self._at + len(tokens)].tolist()
        return next((i for i, (a, b) in enumerate(zip(tokens, follow, strict=False)) if a != b), len(follow))

    def forced(self) -> list[int]:
        return list(self._tokens[self._at :].tolist())

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        follow = self._tokens[self._at : self._at + self.accepts(drafts) + 1]
        out[: len(follow)], out[len(follow) :] = 0, -1
        out.view(np.uint32)[np.arange(len(follow)), follow // 32] = np.uint32(1) << (follow % 32).astype(np.uint32)
