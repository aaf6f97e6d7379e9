"""Log probabilities of a reply's tokens, which wait for the text that they come out with."""

from bisect import bisect_left
from dataclasses import replace

from holdfast.replicas.events import TokenLogprobs
from holdfast.replicas.requests import LogprobText
from holdfast.replicas.text.pieces import Pieces


class WaitingLogprobs:
    """Each with the character of the reply that its token begins at, in order."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._begins: list[int] = []
        self._entries: list[LogprobText] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, begin: int, entry: TokenLogprobs) -> None:
        top = tuple(self._one(token, logprob) for token, logprob in entry.top)
        self._begins.append(begin)
        self._entries.append(replace(self._one(entry.token, entry.logprob), top=top))

    def take(self, end: int | None = None) -> tuple[LogprobText, ...]:
        """Those of tokens that begin before character `end`, or all. They wait no longer."""
        count = len(self._begins) if end is None else bisect_left(self._begins, end)
        taken = tuple(self._entries[:count])
        del self._begins[:count], self._entries[:count]
        return taken

    def _one(self, token: int, logprob: float) -> LogprobText:
        content = self._pieces.of(token)
        return LogprobText(content.decode("utf-8", "replace"), content, logprob)
