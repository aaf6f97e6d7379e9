"""What a thinking model writes before its answer: text in `<think>` and `</think>`, told apart from the content.

The block comes first in a reply, white space before it aside, or the prompt has opened it already. What stands in it is
neither content nor calls, and no stop string counts there. White space around the block and inside its borders is
markup: templates write it. `ThinkingReader` reads it, and `AfterThinking` lets a grammar of the content wait until it
is over. `TrailingCalls` finds calls at the end of the thinking: a reply that ends there meant them.
"""

import re
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

import numpy as np

from holdfast.replicas.constraints.matcher import Bits, Matcher
from holdfast.replicas.requests import TextDelta
from holdfast.replicas.text.calls.tracker import CallTracker, Delta

OPENER, CLOSER = "<think>", "</think>"


class Opening(Enum):
    """Where a prompt leaves the model: inside of a block, behind one, or free to open one."""

    OPEN = auto()
    CLOSED = auto()
    FREE = auto()


def opening(prompt: str) -> Opening:
    """How a reply to the rendered `prompt` begins. A template that switches thinking off writes an empty block."""
    end = prompt.rstrip()
    if end.endswith(OPENER):
        return Opening.OPEN
    return Opening.CLOSED if end.endswith(CLOSER) else Opening.FREE


class _State(Enum):
    BEGIN = auto()  # an opener may come
    INSIDE = auto()
    BEHIND = auto()  # white space after the block
    CONTENT = auto()


class ThinkingReader:
    """Reads one reply, in pieces of any size. `inside`: the prompt has opened the block.

    `skipped`: characters of the reply that were no content. `begun`: there was a block.
    """

    def __init__(self, inside: bool = False) -> None:
        self.skipped = 0
        self.begun = inside
        self._state = _State.BEGIN
        self._held = ""  # what may be the beginning of a marker, and white space before it
        self._said = False

    @property
    def over(self) -> bool:
        """No reasoning will follow."""
        return self._state in (_State.BEHIND, _State.CONTENT)

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that `text` settles."""
        if self._state is _State.CONTENT:
            return "", text
        read = len(self._held) + len(text)
        reasoning, content = self._split(self._held + text)
        self.skipped += read - len(self._held) - len(content)
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """The reply is over: a block that is still open is all reasoning."""
        held, self._held = self._held, ""
        if not self.begun:
            return "", held
        self.skipped += len(held)
        return held.rstrip() if self._said else held.strip(), ""

    def _split(self, text: str) -> tuple[str, str]:
        self._held = ""
        if self._state is _State.BEGIN:
            begin = text.lstrip()
            if len(begin) < len(OPENER) and OPENER.startswith(begin):
                self._held = text
                return "", ""
            self.begun = self.begun or begin.startswith(OPENER)
            self._state = _State.INSIDE if self.begun else _State.CONTENT
            text = begin.removeprefix(OPENER) if self.begun else text
        reasoning = ""
        if self._state is _State.INSIDE:
            reasoning, text = self._inside(text)
        if self._state is _State.BEHIND and (text := text.lstrip()):
            self._state = _State.CONTENT
        return reasoning, text

    def _inside(self, text: str) -> tuple[str, str]:
        """Reasoning up to the closer, and what stands behind that."""
        if not self._said:
            text = text.lstrip()
        body, closer, rest = text.partition(CLOSER)
        if closer:
            self._state = _State.BEHIND
            return body.rstrip(), rest
        partial = next((n for n in range(min(len(CLOSER) - 1, len(text)), 0, -1) if text.endswith(CLOSER[:n])), 0)
        body = text[: len(text) - partial].rstrip()
        self._held = text[len(body) :]
        self._said = self._said or bool(body)
        return body, ""


class TrailingCalls:
    """Holds back the calls that a reply's thinking ends with, until it is known whether anything follows them.

    `markers` begin calls, and `parser` makes a reader of a text that begins with one.
    """

    def __init__(self, markers: Collection[str], parser: Callable[[], CallTracker]) -> None:
        beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._marker = re.compile(rf"\s*(?P<marker>{_any_of(markers)})|\s*(?:{_any_of(beginnings)})\Z")
        self._parser = parser
        self._held = ""  # ends with what may be the beginning of a marker, or begins with white space and a marker
        self._calls: CallTracker | None = None  # of a marker that is held, and what follows it

    def feed(self, thought: str) -> str:
        """The reasoning that `thought`, the next of it, settles."""
        told = ""
        while thought:
            if self._calls is None:
                text, self._held = self._held + thought, ""
                found = self._marker.search(text)
                begin = found.start() if found else len(text)
                told += text[:begin]
                if found is None or not found["marker"]:
                    self._held = text[begin:]
                    return told
                self._calls = self._parser()
                self._calls.feed(found["marker"])
                self._held, thought = found[0], text[found.end() :]
            elif self._goes_on(self._calls.feed(thought[0])):
                self._held, thought = self._held + thought[0], thought[1:]
            else:  # the character may begin a marker
                told, self._held, self._calls = told + self._held, "", None
        return told

    def release(self) -> str:
        """What is held is reasoning."""
        held, self._held, self._calls = self._held, "", None
        return held

    def take(self) -> str:
        """The calls that the reasoning ends with; "" where it does not end with whole ones."""
        calls = self._calls
        if calls is None or not self._goes_on(calls.finish()) or not 0 < calls.n_sent == len(calls.calls):
            return ""
        return self.release().lstrip()

    @staticmethod
    def _goes_on(deltas: Sequence[Delta]) -> bool:
        """Whether nothing but calls and white space has been read."""
        return not any(isinstance(delta, TextDelta) and delta.text.strip() for delta in deltas)


def _any_of(texts: Collection[str]) -> str:
    """A pattern that finds the longest of `texts`."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


class AfterThinking:
    """`constraints.matcher.Matcher` of a reply whose content follows `inner`, which reads nothing of the thinking.

    `opener` and `closer` are the tokens around the block. `inside`: the prompt has opened it; else the first token may,
    or one behind nothing but tokens that are `space`, which `inner` reads as well. The reply does not end inside the
    block with one of `ends`: where content is asked for, there will be some.
    """

    __slots__ = ("_closer", "_ends", "_first", "_inner", "_inside", "_opener", "_space")

    def __init__(
        self,
        inner: Matcher,
        opener: int,
        closer: int,
        inside: bool,
        ends: frozenset[int] = frozenset(),
        space: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._inner, self._opener, self._closer, self._space = inner, opener, closer, space
        self._ends = frozenset(end for end in ends if end < inner.words * 32)  # others are forbidden anyway
        self._inside = inside
        self._first = not inside  # the opener may come

    @property
    def words(self) -> int:
        return self._inner.words

    @property
    def binding(self) -> bool:
        if self._inside or self._first:
            return bool(self._ends) or (self._first and self._inner.binding)
        return self._inner.binding

    @property
    def finished(self) -> bool:
        return not self._inside and self._inner.finished

    @property
    def failed(self) -> bool:
        return self._inner.failed

    @property
    def given_up(self) -> bool:
        return self._inner.given_up

    def copy(self) -> "AfterThinking":
        other = AfterThinking(self._inner.copy(), self._opener, self._closer, self._inside, self._ends, self._space)
        other._first = self._first
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        begin, end = self._block(tokens)
        content = [*tokens[:begin], *tokens[end:]]
        if begin < end:
            self._inside = tokens[end - 1] != self._closer
        if content or begin < end:
            self._first = self._first and begin == end and all(map(self._space, tokens))
        taken = self._inner.advance(content) if content else 0
        return taken if taken < begin else taken + end - begin

    def accepts(self, tokens: Sequence[int]) -> int:
        begin, end = self._block(tokens)
        taken = self._inner.accepts([*tokens[:begin], *tokens[end:]])
        if taken < begin:
            return taken
        ended = self._end(tokens[begin:end])
        return begin + ended if ended < end - begin else taken + end - begin

    def forced(self) -> list[int]:
        return [] if self._inside or self._first else self._inner.forced()

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        begin, end = self._block(drafts)
        opened = begin < end and self._first
        goes_on = end == len(drafts) and (drafts[-1] != self._closer if begin < end else self._inside)
        ended = begin + self._end(drafts[begin:end])
        if not goes_on and ended == end:
            self._inner.fill([*drafts[:begin], *drafts[end:]], out[end - begin :])
        inside = out[begin + opened : end + goes_on]  # the rows of tokens in the block
        inside[:] = -1
        for token in self._ends:
            _allow(inside, token, False)
        if ended < end:
            out[ended + 1 :] = -1
        if opened:
            self._inner.fill(drafts[:begin], out[: begin + 1])
        if self._first:
            spaces = begin if opened else self._spaces(drafts)
            _allow(out[: spaces + 1], self._opener, True)

    def _block(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the block begins and ends in `tokens`, its markers included; both are 0 where it does not occur."""
        begin = 0
        if not self._inside:
            begin = self._spaces(tokens) if self._first else len(tokens)
            if begin == len(tokens) or tokens[begin] != self._opener:
                return 0, 0
        closers = (at + 1 for at in range(begin, len(tokens)) if tokens[at] == self._closer)
        return begin, next(closers, len(tokens))

    def _spaces(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` are white space before anything else."""
        return next((at for at, token in enumerate(tokens) if not self._space(token)), len(tokens))

    def _end(self, thought: Sequence[int]) -> int:
        """The place of the first of `ends` in the block; its length where there is none."""
        return next((i for i, token in enumerate(thought) if token in self._ends), len(thought))


def _allow(masks: Bits, token: int, allowed: bool) -> None:
    """Set or clear the bit of `token` in every row of `masks`."""
    bit = np.uint32(1 << token % 32)
    words = masks.view(np.uint32)[:, token // 32]
    words[:] = words | bit if allowed else words & ~bit
