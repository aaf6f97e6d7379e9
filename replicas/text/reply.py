"""One reply on its way from token ids to the pieces a client sees.

tokens -> characters -> before the stop string -> text and tool calls. What any of these holds back, and the log
probabilities of its tokens, come out with a later piece or at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.replicas.events import FinishReason, TokenIds, TokenLogprobs
from holdfast.replicas.requests import LogprobText, ReplyReason, TextDelta
from holdfast.replicas.text.detokenize import StreamDecoder
from holdfast.replicas.text.pieces import Pieces
from holdfast.replicas.text.stops import StopMatcher
from holdfast.replicas.text.tool_calls import ToolCallParser, merged
from holdfast.replicas.text.tracker import Delta


@dataclass(frozen=True, slots=True)
class Stages:
    """What a reply goes through. `hidden` tokens leave no text and no log probability."""

    decoder: StreamDecoder
    stops: StopMatcher
    calls: ToolCallParser
    pieces: Pieces
    hidden: frozenset[int]


class Reply:
    """`remember_turn` takes the ids and the text of everything generated, once the reply is over."""

    def __init__(self, stages: Stages, remember_turn: Callable[[TokenIds, str], None]) -> None:
        self._stages = stages
        self._remember_turn = remember_turn
        self._tokens: list[int] = []
        self._logprobs: list[LogprobText] = []

    @property
    def done(self) -> bool:
        """The text has come to its end (a stop string, or tool calls): generation may stop."""
        return self._stages.stops.stopped or self._stages.calls.should_stop

    @property
    def completion_tokens(self) -> int:
        """Tokens up to and with the one that ended the text; later ones are not counted."""
        return len(self._tokens)

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[Delta]:
        """The pieces these tokens complete. `logprobs` is empty or as long as `tokens`."""
        deltas: list[Delta] = []
        for index, token in enumerate(tokens):
            if self.done:
                break
            self._tokens.append(token)
            if index < len(logprobs) and token not in self._stages.hidden:
                self._logprobs.append(self._logprob_text(logprobs[index]))
            text = self._stages.decoder.feed((token,))
            if text:
                deltas += self._with_logprobs(self._through(text))
        return merged(deltas)

    def finish(self, reason: FinishReason) -> tuple[list[Delta], ReplyReason]:
        """What was held back, and why the reply ended: `reason` is the engine's. Call once.

        Log probabilities of tool call tokens that no text followed come with an empty text.
        """
        deltas: list[Delta] = []
        if not self.done:
            deltas += self._through(self._stages.decoder.flush())
        deltas += self._stages.calls.feed(self._stages.stops.flush())
        done = self.done
        deltas += self._stages.calls.finish()
        deltas = self._with_logprobs(deltas)
        if self._logprobs:
            deltas.append(TextDelta("", tuple(self._logprobs)))
            self._logprobs.clear()
        ended = "stop" if done else reason
        return merged(deltas), "tool_calls" if ended == "stop" and self._stages.calls.announced else ended

    def remember(self) -> None:
        """Keep the finished turn, so that the next one continues the ids as they were generated."""
        self._remember_turn(np.array(self._tokens, np.int32), self._stages.pieces.text(self._tokens))

    def _through(self, text: str) -> list[Delta]:
        """Text through the stop strings and the tool call parser."""
        safe, _ = self._stages.stops.feed(text)
        return self._stages.calls.feed(safe)

    def _with_logprobs(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas` with all that waits put on the first text among them."""
        if not self._logprobs:
            return deltas
        for index, delta in enumerate(deltas):
            if isinstance(delta, TextDelta):
                deltas[index] = replace(delta, logprobs=tuple(self._logprobs))
                self._logprobs.clear()
                break
        return deltas

    def _logprob_text(self, entry: TokenLogprobs) -> LogprobText:
        top = tuple(self._one(token, logprob) for token, logprob in entry.top)
        return replace(self._one(entry.token, entry.logprob), top=top)

    def _one(self, token: int, logprob: float) -> LogprobText:
        content = self._stages.pieces.of(token)
        return LogprobText(content.decode("utf-8", "replace"), content, logprob)
