"""One reply on its way from token ids to the pieces a client sees.

    ids -> StreamDecoder -> ThinkingReader -> StopStrings -> CallTracker -> pieces
           characters       or ChannelReader  the text up    text and calls
                            the reasoning     to a stop
                            set apart         string

Each stage passes on text that is settled and holds the rest back; `Reply.finish` empties them. The log probabilities
of a token wait for its text.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import FinishReason, LogprobText, ReasoningDelta, ReplyReason, TextDelta, ToolCallDelta
from holdfast.replicas.text.calls.tracker import CallTracker, Delta, merged
from holdfast.replicas.text.decode import Pieces, StreamDecoder
from holdfast.replicas.text.reasoning import ChannelReader, ThinkingReader, TrailingCalls
from holdfast.replicas.types import TokenIds

ReplyDelta: TypeAlias = Delta | ReasoningDelta


class StopStrings:
    """Cuts a text before the stop string that is complete first (of those ending together, the longest).

    A possible beginning of one is held back. `passed`: characters let out; behind them begins a stop string that was
    `reached`.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.passed = 0
        self.stopped = False
        self.reached = ""

    def feed(self, text: str) -> str:
        """The text that is safe to send; nothing once a stop string was reached."""
        if self.stopped:
            return ""
        if not self._stops:
            return self.skip(text)
        text = self._held + text
        if ends := [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            _, safe, self.reached = min(ends)
            self.stopped, self._held = True, ""
        else:
            tails = (text[-length:] for length in range(min(self._longest - 1, len(text)), 0, -1))
            self._held = next((tail for tail in tails if any(stop.startswith(tail) for stop in self._stops)), "")
            safe = len(text) - len(self._held)
        return self.skip(text[:safe])

    def skip(self, text: str) -> str:
        """Let out a text in which no stop string counts."""
        self.passed += len(text)
        return text

    def flush(self) -> str:
        """The text is over. Returns the text that was held back."""
        held, self._held = self._held, ""
        return self.skip(held)


def logprob_text(pieces: Pieces, entry: TokenLogprobs, hidden: Collection[int] = ()) -> LogprobText:
    """Log probabilities with the texts of their tokens. `hidden` tokens leave no text, so they have no bytes."""

    def one(token: int, logprob: float, top: tuple[LogprobText, ...] = ()) -> LogprobText:
        content = pieces.of(token)
        text = content.decode("utf-8", "backslashreplace")
        return LogprobText(text, b"" if token in hidden else content, logprob, top)

    return one(entry.token, entry.logprob, tuple(one(*other) for other in entry.top))


def prompt_logprobs(
    tokens: Sequence[TokenLogprobs], text: bytes, pieces: Pieces, hidden: Collection[int]
) -> tuple[LogprobText, ...]:
    """The tokens of a prompt, each with its bytes in `text`.

    Tokens that the tokenizer puts around a text have no bytes in it, nor has the space that some put before it.
    """
    end, result = 0, list[LogprobText]()
    for each in tokens:
        entry = logprob_text(pieces, each)
        content = entry.bytes
        if not text.startswith(content, end):
            content = b"" if each.token in hidden else content.removeprefix(b" " if not end else b"")
        end += len(content)
        result.append(replace(entry, bytes=content))
    return tuple(result)


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """A reply that continues from its first `tokens`, under `matcher`. The tokens after these are withdrawn."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    matcher: Matcher


class Reply:
    """Reads one reply. `hidden` tokens leave no text; without `thinking` all of it is content.

    `trailing` holds back calls at the end of the thinking. `remember_turn` takes the ids and the text of the whole
    reply once it is over. `declared` matches calls of declared tools: if given, a call of another tool is not sent, and
    `rewrite` says from where the reply is drawn again. `runs_on`: calls do not end the reply; text behind them is
    generated and counted, but not sent. Stop strings count in the text after `least` tokens.
    """

    def __init__(
        self,
        pieces: Pieces,
        decoder: StreamDecoder,
        stops: StopStrings,
        tracker: CallTracker,
        remember_turn: Callable[[TokenIds, str], None],
        *,
        hidden: frozenset[int],
        thinking: ThinkingReader | ChannelReader | None,
        trailing: TrailingCalls | None,
        declared: Matcher | None,
        runs_on: bool,
        least: int,
    ) -> None:
        self._pieces, self._decoder, self._stops, self._tracker = pieces, decoder, stops, tracker
        self._remember_turn = remember_turn
        self._hidden, self._thinking, self._trailing = hidden, thinking, trailing
        self._declared, self._runs_on, self._least = declared, runs_on, least
        self._tokens: list[int] = []
        self._read = 0  # characters of all tokens
        self._skipped = 0  # of these, before the content
        self._reasoning: list[str] = []  # not given out yet
        self._waiting: list[tuple[int, LogprobText]] = []  # with the character that the token begins at, in order
        self.reasoning_tokens = 0  # those up to and with the end of the thinking, less content before it
        self._thought = 0  # tokens up to there
        self._told_apart = 0  # tokens that are known to be thinking or not
        self.empty = True  # no content but white space, and no call, has been given out
        self.rewrite: Rewrite | None = None
        # With `declared` only: the characters up to and with each token, and their log probabilities.
        self._ends: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        if declared is not None:
            tracker.on_unguarded = self._may_rewrite

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[ReplyDelta]:
        """The pieces these tokens complete. `logprobs` is empty or as long as `tokens`."""
        deltas: list[Delta] = []
        for index, token in enumerate(tokens):
            if self.done:
                break
            deltas += self._token(token, logprobs[index] if index < len(logprobs) else None)
        return self._after_reasoning(deltas)

    def finish(self, reason: FinishReason) -> tuple[list[ReplyDelta], ReplyReason]:
        """The pieces that were held back, and why the reply ended: `reason` is the engine's. Call once.

        If all calls have closed, the reply ended for its calls, whatever ended its text: the client can run them. If
        the model ended it with calls in its thinking and without content, these are the reply's calls. Log
        probabilities of tokens without text after them come with an empty text.
        """
        deltas: list[Delta] = []
        if not self.done:
            rest = self._decoder.flush()
            # A character that was cut is not shown.
            deltas += self._through(rest.rstrip("\ufffd") if reason == "length" else rest, last=True)
        deltas += self._tracker.feed(self._stops.flush())
        if self._trailing is not None:
            if reason == "stop" and not self.done:
                deltas += self._tracker.feed(self._trailing.take())
            self._reasoning.append(self._trailing.release())
        ended: ReplyReason = "stop" if self.done else reason
        deltas += self._tracker.finish(cut=reason == "length" or self._stops.stopped)
        deltas = self._with_logprobs(deltas)
        if waiting := self._logprobs_before(self._passed if self._stops.stopped else None):
            deltas.append(TextDelta("", waiting))
        if self.calls and not self.unfinished:
            ended = "tool_calls"
        return self._after_reasoning(deltas), ended

    def remember(self) -> None:
        """Keep the finished turn, so that the next one continues the ids as they were generated."""
        self._remember_turn(np.array(self._tokens, np.int32), self._pieces.text(self._tokens))

    @property
    def done(self) -> bool:
        """Whether the text has ended (at a stop string, or with its tool calls): generation may stop."""
        return self._stops.stopped or self.calls_done

    @property
    def calls_done(self) -> bool:
        """Whether the tool calls have ended. The model might have written more."""
        return self._tracker.stopped and (not self._runs_on or self.rewrite is not None)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens up to and including the one that ended the text."""
        return tuple(self._tokens)

    @property
    def completion_tokens(self) -> int:
        """The number of `tokens`."""
        return len(self._tokens)

    def may_close(self, tokens: Sequence[int]) -> bool:
        """Whether unread `tokens` may close a call that a client waits for."""
        return any(self._tracker.may_close(self._pieces.of(token)) for token in tokens)

    @property
    def calls(self) -> tuple[str, ...]:
        """The tools called so far, by name."""
        return tuple(call.name for call in self._tracker.calls)

    @property
    def stop(self) -> str:
        """The stop string that ended the text; "" if none did."""
        return self._stops.reached

    @property
    def unfinished(self) -> bool:
        """Whether a call was sent that has not closed."""
        return self._tracker.n_sent > len(self._tracker.calls)

    @property
    def content(self) -> str:
        """The text after the thinking, calls and markup included."""
        return self._pieces.text(self._tokens[self._thought :])

    def _token(self, token: int, logprob: TokenLogprobs | None) -> list[Delta]:
        """One token through all stages."""
        thinking = self._thinking
        self._tokens.append(token)
        if logprob is not None:
            self._waiting.append((self._read, logprob_text(self._pieces, logprob, self._hidden)))
        text = self._decoder.feed((token,))
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
        """Decoded text through the later stages. `last`: no more follows, so no reasoning is held back."""
        thinking = self._thinking
        if thinking is not None:
            reasoning, text = thinking.feed(text)
            if last:
                held, rest = thinking.flush()
                reasoning, text = reasoning + held, text + rest
            if self._trailing is not None:
                reasoning = self._trailing.feed(reasoning)
                if text:
                    reasoning += self._trailing.release()
            self._reasoning.append(reasoning)
            self._skipped = thinking.skipped
            if thinking.begun or self._skipped:  # its tokens have no log probabilities, nor has markup
                self._logprobs_before(self._skipped if thinking.over else None)
        safe = self._stops.skip(text) if len(self._tokens) <= self._least else self._stops.feed(text)
        return self._tracker.feed(safe)

    def _logprobs_before(self, end: int | None) -> tuple[LogprobText, ...]:
        """Log probabilities of tokens that begin before character `end`, or all. They wait no longer."""
        count = len(self._waiting) if end is None else bisect_left(self._waiting, end, key=lambda each: each[0])
        taken = tuple(entry for _, entry in self._waiting[:count])
        del self._waiting[:count]
        return taken

    def _with_logprobs(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas`, the first text among them with the log probabilities of tokens that stop strings let out."""
        if not self._waiting:
            return deltas
        for index, delta in enumerate(deltas):
            if isinstance(delta, TextDelta):
                deltas[index] = replace(delta, logprobs=self._logprobs_before(self._passed))
                break
        return deltas

    def _after_reasoning(self, deltas: list[Delta]) -> list[ReplyDelta]:
        """`deltas` merged, behind the reasoning since the last call."""
        self.empty = self.empty and not any(isinstance(each, ToolCallDelta) or each.text.strip() for each in deltas)
        reasoning, self._reasoning = "".join(self._reasoning), []
        return [ReasoningDelta(reasoning), *merged(deltas)] if reasoning else [*merged(deltas)]

    @property
    def _passed(self) -> int:
        """Characters before which no stop string can begin any more; after a stop string, characters before it."""
        return self._skipped + self._stops.passed

    def _may_rewrite(self, opened: int, begun: int) -> bool:
        """Whether a call of an undeclared tool, its marker at character `opened`, can be written again.

        Tokens are kept up to the first that no call of a declared tool could have: the others would be drawn again as
        they are. All text that was sent, up to character `begun`, must be among them.
        """
        assert self._declared is not None
        opened, begun = opened + self._skipped, begun + self._skipped
        first = bisect_right(self._ends, opened)
        while first < len(self._tokens) and self._pieces.text(self._tokens[first : first + 1]).isspace():
            first += 1
        matcher = self._declared.copy()
        kept = first + matcher.accepts(self._tokens[first:])
        if kept == len(self._tokens) or (self._ends[kept - 1] if kept else 0) < begun:
            return False
        matcher.advance(self._tokens[first:kept])
        self.rewrite = Rewrite(tuple(self._tokens[:kept]), tuple(self._logprobs[:kept]), matcher)
        return True
