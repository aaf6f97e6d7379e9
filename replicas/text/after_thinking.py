"""A grammar that waits for a thinking model: until `</think>` it says nothing, and has read nothing."""

from collections.abc import Sequence

import numpy as np

from holdfast.replicas.constraints.matcher import Bits, Matcher


class AfterThinking:
    """`constraints.matcher.Matcher` of a reply whose content follows `inner`.

    `opener` and `closer` are the tokens around the block. `inside`: the prompt has opened it; else the first token may.
    """

    __slots__ = ("_closer", "_first", "_inner", "_inside", "_opener")

    def __init__(self, inner: Matcher, opener: int, closer: int, inside: bool) -> None:
        self._inner, self._opener, self._closer = inner, opener, closer
        self._inside = inside
        self._first = not inside  # the opener may come

    @property
    def words(self) -> int:
        return self._inner.words

    @property
    def finished(self) -> bool:
        return not self._inside and self._inner.finished

    @property
    def failed(self) -> bool:
        return self._inner.failed

    def copy(self) -> "AfterThinking":
        other = AfterThinking(self._inner.copy(), self._opener, self._closer, self._inside)
        other._first = self._first
        return other

    def advance(self, token: int) -> None:
        opens = self._first and token == self._opener
        if not (opens or self._inside):
            self._inner.advance(token)
        self._inside = opens or (self._inside and token != self._closer)
        self._first = False

    def accepts(self, tokens: Sequence[int]) -> int:
        thought = self._thought(tokens)
        return thought + self._inner.accepts(tokens[thought:])

    def forced(self) -> list[int]:
        return [] if self._inside or self._first else self._inner.forced()

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        thought = self._thought(drafts)
        open_ended = thought == len(drafts) and (drafts[-1] != self._closer if thought else self._inside)
        out[:thought] = -1
        if open_ended:
            out[thought:] = -1
        else:
            self._inner.fill(drafts[thought:], out[thought:])
        if self._first:
            if thought:
                self._inner.fill((), out[:1])  # it does not depend on the drafts
            out[0].view(np.uint32)[self._opener // 32] |= np.uint32(1 << self._opener % 32)

    def _thought(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` belong to the block, its markers too."""
        if not (self._inside or (self._first and tokens and tokens[0] == self._opener)):
            return 0
        return next((i + 1 for i, token in enumerate(tokens) if token == self._closer), len(tokens))
