"""What the engine knows of a constrained reply: which tokens may come next, as bits. No library, and no grammar but
that of a text that is given.

A matcher belongs to one sequence. It is made by the text side, and from then on used by the engine's thread alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.replicas.types import TokenIds

Bits = npt.NDArray[np.int32]


class Matcher(Protocol):
    """Where a reply stands in its grammar. What is allowed depends on the tokens it was given and on nothing else.

    A token that was drawn freely and is allowed is the one that would have been drawn under the mask (the noise belongs
    to position and token), so masks cost nothing where the model does what it may. Filters see what is not masked yet.
    """

    @property
    def words(self) -> int:
        """Width of a mask in int32 words; tokens beyond it are forbidden."""

    @property
    def binding(self) -> bool:
        """The next token is drawn under a mask. Else it is drawn freely, and `advance` says whether it may stand."""

    @property
    def finished(self) -> bool:
        """Nothing but the end of the reply may follow."""
        return False

    @property
    def failed(self) -> bool:
        """The grammar grew beyond its limits: nothing can be said of the next token. For good."""
        return False

    @property
    def given_up(self) -> bool:
        """As `failed`, of a grammar that nobody has asked for: the rest of the reply is free. For good."""
        return False

    def copy(self) -> "Matcher":
        """Another one at the same place, independent of this."""

    def advance(self, tokens: Sequence[int]) -> int:
        """`tokens` were drawn, one behind the other; how many of them stand.

        The first that does not has to be drawn again, and from here on the matcher is binding, unless it is finished:
        then the reply ends before it.
        """

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, may follow."""

    def forced(self) -> list[int]:
        """The tokens that must follow here whatever the model says; often none."""

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        """Masks into `out` [len(drafts) + 1, words]: of the next token, and of those after each draft.

        Bit i % 32 of word i // 32 is set where token i is allowed. Rows after a draft that may not follow have every
        bit set: nothing is drawn from them.
        """


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """The masks of one chunk's drawn rows, worked out when they are asked for: once the forward has been started."""

    matcher: Matcher
    drafts: tuple[int, ...] = ()

    def fill(self, out: Bits) -> None:
        """`out` is [len(drafts) + 1, matcher.words]."""
        self.matcher.fill(self.drafts, out)


class GivenTokens(Matcher):
    """The grammar of one text, so that it is scored like any reply: each token is the next of `tokens`.

    They are ids of a model with a `vocabulary` of so many.
    """

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

    def copy(self) -> "GivenTokens":
        return GivenTokens(self._tokens, self._vocabulary, self._at)

    def advance(self, tokens: Sequence[int]) -> int:
        stand = min(len(tokens), len(self._tokens) - self._at)
        self._at += stand
        return stand

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
