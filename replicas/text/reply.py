"""One reply on its way from token ids to the pieces a client sees.

    ids -> StreamDecoder -> ThinkingReader -> StopStrings -> CallTracker -> pieces
           characters       or ChannelReader  the text up    text and calls
                            the reasoning     to one
                            set apart

Each stage passes on what it is sure of and holds the rest back; `Reply.finish` empties them. The log probabilities of
tokens wait in `WaitingLogprobs` for the text that they come out with.

Not here: the decoder (`decode`), thinking (`thinking`, `channels`), calls (`calls`), and what makes the stages for a
request (`conversation`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.events import FinishReason
from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import LogprobText, ReasoningDelta, ReplyReason, TextDelta, ToolCallDelta
from holdfast.replicas.text.calls.tracker import CallTracker, Delta, merged
from holdfast.replicas.text.decode import Pieces, StreamDecoder
from holdfast.replicas.text.reasoning import ChannelReader, ThinkingReader, TrailingCalls
from holdfast.replicas.types import TokenIds

ReplyDelta: TypeAlias = Delta | ReasoningDelta


class StopStrings:
    """Cuts a text before the stop string that is complete first (of those ending together, the longest).

    Nothing that may be the beginning of one is let out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.passed = 0  # characters let out: where there was a stop string, its beginning
        self.stopped = False
        self.reached = ""  # the stop string

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string was reached; after that, nothing more."""
        if self.stopped:
            return "", True
        if not self._stops:
            self.passed += len(text)
            return text, False
        text = self._held + text
        first = self._first(text)
        if first is not None:
            cut, self.reached = first
            self.stopped, self._held = True, ""
            self.passed += cut
            return text[:cut], True
        safe = len(text) - self._suffix(text)
        self._held = text[safe:]
        self.passed += safe
        return text[:safe], False

    def skip(self, text: str) -> str:
        """Let out a text in which no stop string counts."""
        self.passed += len(text)
        return text

    def flush(self) -> str:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        self.passed += len(held)
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that ends first begins, and which it is."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _suffix(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class WaitingLogprobs:
    """Log probabilities, each with the character of the reply that its token begins at, in order.

    `hidden` tokens leave no text.
    """

    def __init__(self, pieces: Pieces, hidden: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._begins: list[int] = []
        self._entries: list[LogprobText] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, begin: int, entry: TokenLogprobs) -> None:
        self._begins.append(begin)
        self._entries.append(logprob_text(self._pieces, entry, self._hidden))

    def take(self, end: int | None = None) -> tuple[LogprobText, ...]:
        """Those of tokens that begin before character `end`, or all. They wait no longer."""
        count = len(self._begins) if end is None else bisect_left(self._begins, end)
        taken = tuple(self._entries[:count])
        del self._begins[:count], self._entries[:count]
        return taken


def logprob_text(pieces: Pieces, entry: TokenLogprobs, hidden: frozenset[int] = frozenset()) -> LogprobText:
    """Log probabilities with the texts of their tokens; `hidden` tokens have no bytes, as they leave no text."""

    def one(token: int, logprob: float, top: tuple[LogprobText, ...] = ()) -> LogprobText:
        content = pieces.of(token)
        text = content.decode("utf-8", "backslashreplace")
        return LogprobText(text, b"" if token in hidden else content, logprob, top)

    return one(entry.token, entry.logprob, tuple(one(*other) for other in entry.top))


@dataclass(frozen=True, slots=True)
class Stages:
    """What a reply goes through. `hidden` tokens leave no text. `thinking`: None where the
    reply is all content. `trailing` holds back calls at the end of the thinking; None where no call can be.
    """

    decoder: StreamDecoder
    stops: StopStrings
    calls: CallTracker
    pieces: Pieces
    hidden: frozenset[int]
    thinking: ThinkingReader | ChannelReader | None = None
    trailing: TrailingCalls | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """A reply that goes on from its first `tokens`, under `matcher`: what came after them is withdrawn."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    matcher: Matcher


class Reply:
    """`remember_turn` takes the ids and the text of everything generated, once the reply is over.

    `declared` is a matcher of calls of declared tools. Given one, a call of another tool is not sent but asked for
    again: `rewrite` says from where. `runs_on`: calls do not end it; what follows them is still generated, counted and
    not sent. Stop strings count in the text after `least` tokens.
    """

    def __init__(
        self,
        stages: Stages,
        remember_turn: Callable[[TokenIds, str], None],
        declared: Matcher | None = None,
        runs_on: bool = False,
        least: int = 0,
    ) -> None:
        self._stages = stages
        self._remember_turn = remember_turn
        self._declared = declared
        self._runs_on = runs_on
        self._least = least
        self._tokens: list[int] = []
        self._read = 0  # characters of all tokens
        self._skipped = 0  # of these, before the content
        self._reasoning: list[str] = []  # that has not been given out
        self._waiting = WaitingLogprobs(stages.pieces, stages.hidden)
        self.reasoning_tokens = 0  # those up to and with the end of the thinking, less content before it
        self._thought = 0  # tokens up to there
        self._told_apart = 0  # tokens of which it is known whether they are thinking
        self.empty = True  # no content but white space, and no call, has been given out
        self.rewrite: Rewrite | None = None
        # With `declared` only: the characters up to and with each token, and their log probabilities.
        self._ends: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        if declared is not None:
            stages.calls.on_unguarded = self._ask_again

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[ReplyDelta]:
        """The pieces these tokens complete. `logprobs` is empty or as long as `tokens`."""
        deltas: list[Delta] = []
        for index, token in enumerate(tokens):
            if self.done:
                break
            deltas += self._token(token, logprobs[index] if index < len(logprobs) else None)
        return self._after_reasoning(merged(deltas))

    def finish(self, reason: FinishReason) -> tuple[list[ReplyDelta], ReplyReason]:
        """What was held back, and why the reply ended: `reason` is the engine's. Call once.

        A reply of calls that have all closed has ended for them, whatever ended its text: the client can run them.
        Where the model ended the reply with calls in its thinking, without content, these are the reply's.
        Log probabilities of tokens that no text followed come with an empty text.
        """
        stages = self._stages
        deltas: list[Delta] = []
        if not self.done:
            rest = stages.decoder.flush()
            if reason == "length":
                rest = rest.rstrip("\ufffd")  # of a character that was cut nothing is shown
            deltas += self._through(rest, last=True)
        deltas += stages.calls.feed(stages.stops.flush())
        if stages.trailing is not None:
            if reason == "stop" and not self.done:
                deltas += stages.calls.feed(stages.trailing.take())
            self._reasoning.append(stages.trailing.release())
        ended: ReplyReason = "stop" if self.done else reason
        deltas += stages.calls.finish(cut=reason == "length" or stages.stops.stopped)
        deltas = self._with_logprobs(deltas)
        if waiting := self._waiting.take(self._passed if stages.stops.stopped else None):
            deltas.append(TextDelta("", waiting))
        if self.calls and not self.unfinished:
            ended = "tool_calls"
        return self._after_reasoning(merged(deltas)), ended

    def remember(self) -> None:
        """Keep the finished turn, so that the next one continues the ids as they were generated."""
        self._remember_turn(np.array(self._tokens, np.int32), self._stages.pieces.text(self._tokens))

    @property
    def done(self) -> bool:
        """The text has come to its end (a stop string, or tool calls): generation may stop."""
        return self._stages.stops.stopped or self.calls_done

    @property
    def calls_done(self) -> bool:
        """The tool calls have come to their end: the model might have written on."""
        return self._stages.calls.stopped and (not self._runs_on or self.rewrite is not None)

    @property
    def completion_tokens(self) -> int:
        """Tokens up to and with the one that ended the text; later ones are not counted."""
        return len(self._tokens)

    def may_close(self, tokens: Sequence[int]) -> bool:
        """Whether these, which have not been read yet, may close a call: somebody may wait for that, to run it."""
        stages = self._stages
        return any(stages.calls.may_close(stages.pieces.of(token)) for token in tokens)

    @property
    def calls(self) -> tuple[str, ...]:
        """The tools called so far, by name."""
        return tuple(call.name for call in self._stages.calls.calls)

    @property
    def stop(self) -> str:
        """The stop string that ended the text, "" where none did."""
        return self._stages.stops.reached

    @property
    def unfinished(self) -> bool:
        """A call was sent that has not closed."""
        return self._stages.calls.n_sent > len(self._stages.calls.calls)

    @property
    def content(self) -> str:
        """What was generated after the thinking, calls and markup included."""
        return self._stages.pieces.text(self._tokens[self._thought :])

    def _token(self, token: int, logprob: TokenLogprobs | None) -> list[Delta]:
        """One token through all stages."""
        stages, thinking = self._stages, self._stages.thinking
        self._tokens.append(token)
        if logprob is not None:
            self._waiting.add(self._read, logprob)
        text = stages.decoder.feed((token,))
        self._read += len(text)
        if self._declared is not None:
            self._ends.append(self._read)
            if logprob is not None:
                self._logprobs.append(logprob)
        may_think = thinking is not None and not thinking.over
        deltas = self._with_logprobs(self._through(text)) if text else []
        if thinking is not None and (thinking.begun or thinking.over):
            if may_think and thinking.begun:
                self._thought = len(self._tokens)
                self.reasoning_tokens += self._thought - self._told_apart
            self._told_apart = len(self._tokens)
        return deltas

    def _through(self, text: str, last: bool = False) -> list[Delta]:
        """Decoded text through the later stages; `last`: there is no more, so no thinking is held back."""
        thinking = self._stages.thinking
        if thinking is not None:
            reasoning, text = thinking.feed(text)
            if last:
                held, rest = thinking.flush()
                reasoning, text = reasoning + held, text + rest
            if self._stages.trailing is not None:
                reasoning = self._stages.trailing.feed(reasoning)
                if text:
                    reasoning += self._stages.trailing.release()
            if reasoning:
                self._reasoning.append(reasoning)
            self._skipped = thinking.skipped
            if thinking.begun or self._skipped:  # its tokens have no log probabilities, nor has markup
                self._waiting.take(self._skipped if thinking.over else None)
        stops = self._stages.stops
        safe = stops.skip(text) if len(self._tokens) <= self._least else stops.feed(text)[0]
        return self._stages.calls.feed(safe)

    def _with_logprobs(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas` with what waits, as far as stop strings let its tokens out, put on the first text among them."""
        if not self._waiting:
            return deltas
        for index, delta in enumerate(deltas):
            if isinstance(delta, TextDelta):
                deltas[index] = replace(delta, logprobs=self._waiting.take(self._passed))
                break
        return deltas

    def _after_reasoning(self, deltas: list[Delta]) -> list[ReplyDelta]:
        """`deltas`, and before them the reasoning that came meanwhile."""
        self.empty = self.empty and not any(isinstance(each, ToolCallDelta) or each.text.strip() for each in deltas)
        reasoning, self._reasoning = "".join(self._reasoning), []
        return [ReasoningDelta(reasoning), *deltas] if reasoning else [*deltas]

    @property
    def _passed(self) -> int:
        """Characters up to where no stop string can begin any more; after one, up to its beginning."""
        return self._skipped + self._stages.stops.passed

    def _ask_again(self, opened: int, begun: int) -> bool:
        """Whether a call of an undeclared tool, its marker at character `opened`, can be written again.

        Kept are the tokens up to the first one that a call of a declared tool could not have: those before it would be
        drawn again as they are. They must hold what was sent, all before character `begun`.
        """
        assert self._declared is not None
        opened, begun = opened + self._skipped, begun + self._skipped
        first = bisect_right(self._ends, opened)
        while first < len(self._tokens) and self._stages.pieces.text(self._tokens[first : first + 1]).isspace():
            first += 1
        matcher = self._declared.copy()
        tokens = self._tokens[first:]
        kept = first + matcher.accepts(tokens)
        if kept == len(self._tokens) or (self._ends[kept - 1] if kept else 0) < begun:
            return False
        matcher.advance(self._tokens[first:kept])
        self.rewrite = Rewrite(tuple(self._tokens[:kept]), tuple(self._logprobs[:kept]), matcher)
        return True
