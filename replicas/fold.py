"""From the pieces of a reply to the whole answer."""

from collections.abc import Iterable

from holdfast.replicas.requests import (
    Answer,
    Completed,
    Errored,
    LogprobText,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)


class Fold:
    """Collects the pieces of one reply; `terminal` is set once the last one has come."""

    def __init__(self) -> None:
        self.terminal: Completed | Errored | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[LogprobText] = []
        self._calls: dict[int, ToolCallDelta] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, TextDelta):
                self._texts.append(piece.text)
                self._logprobs.extend(piece.logprobs)
            elif isinstance(piece, ReasoningDelta):
                self._reasoning.append(piece.text)
            elif isinstance(piece, ToolCallDelta):
                self._calls.setdefault(piece.index, piece)
                self._arguments.setdefault(piece.index, []).append(piece.arguments)
            else:
                self.terminal = piece

    def answer(self) -> Answer | None:
        """The whole answer, or None where the reply has not completed."""
        if not isinstance(self.terminal, Completed):
            return None
        calls = tuple(
            ToolCall(first.call_id or "", first.name or "", "".join(self._arguments[index]))
            for index, first in sorted(self._calls.items())
        )
        text = "".join(self._texts)
        return Answer(
            text=None if calls and not text else text,
            tool_calls=calls,
            logprobs=tuple(self._logprobs),
            reason=self.terminal.reason,
            usage=self.terminal.usage,
            timing=self.terminal.timing,
            called=self.terminal.called,
            reasoning="".join(self._reasoning),
        )

    def error(self) -> Errored:
        """How the reply failed. Raises ValueError for one that completed or has not ended."""
        if not isinstance(self.terminal, Errored):
            raise ValueError(f"the reply has not failed: {self.terminal}")
        return self.terminal
