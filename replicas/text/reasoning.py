"""Separates a model's reasoning from the content of its reply.

Thinking models write ``<think>...</think>`` first; the prompt may have opened the block (`ThinkingReader`). gpt-oss
writes messages in channels, OpenAI's Harmony format (`ChannelReader`). Reasoning is neither content nor calls, and no
stop string counts in it. `TrailingCalls` finds calls at the end of the thinking: a reply that ends there meant them.
`AfterThinking` lets a grammar of the content wait for the end of the thinking.
"""

import re
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from holdfast.replicas.constraints.matcher import Bits, Matcher
from holdfast.replicas.requests import TextDelta
from holdfast.replicas.text.calls.tracker import CallTracker, Delta, MismatchError, Scan, Text, beginnings

OPENER, CLOSER = "<think>", "</think>"
_OPENED = re.compile(rf"\s*{OPENER}")
_OPENED_BEGUN = re.compile(rf"\s*(?:\Z|{beginnings(OPENER)})")
_THOUGHT = re.compile(r"[^\s<]+")
_BREAK = re.compile(rf"(?P<closer>\s*{CLOSER})|\s++(?!\Z)|<")
_CLOSER_BEGUN = re.compile(rf"\s*(?:\Z|{beginnings(CLOSER)})")
_SPACE, _ANY = re.compile(r"\s+"), re.compile(r"(?s:.+)")


def thinking_reader(prompt: str) -> "ThinkingReader | None":
    """A reader for the reply to the rendered `prompt`; None if the prompt ends behind a closed block.

    A template that switches thinking off writes an empty block.
    """
    end = prompt.rstrip()
    return None if end.endswith(CLOSER) else ThinkingReader(inside=end.endswith(OPENER))


class ThinkingReader:
    """Reads one reply, in pieces of any size. `inside`: the prompt has opened the block.

    The block comes first, white space before it aside. White space around it and inside its borders is markup.
    `skipped`: characters of the reply that are not content. `begun`: there was a block. `over`: no reasoning follows.
    """

    def __init__(self, inside: bool = False) -> None:
        self.skipped = 0
        self.begun = inside
        self.over = False
        self._text = Text()
        self._scan = self._read(self._text)
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that `text` settles."""
        self._text.add(text)
        before = self._text.position
        next(self._scan, None)
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        self.skipped += self._text.position - before - len(content)
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """The reply is over: a block that is still open is all reasoning."""
        self._text.over = True
        return self.feed("")

    def _read(self, t: Text) -> Scan[None]:
        inside = False  # of the block, behind its opener
        try:
            # A model may write the opener again though the prompt has.
            self.begun = bool((yield from t.match(_OPENED, _OPENED_BEGUN))) or self.begun
            inside = self.begun
            if inside:
                yield from t.run(_SPACE, lambda _: None)
                yield from t.run(_THOUGHT, self._reasoning.append)
                while (found := (yield from t.match(_BREAK, _CLOSER_BEGUN))) and not found["closer"]:
                    self._reasoning.append(found[0])
                    yield from t.run(_THOUGHT, self._reasoning.append)
        except MismatchError as end:
            if self.begun:
                self._reasoning.append(end.undecided.rstrip() if inside else end.undecided.strip())
            else:
                self._content.append(end.undecided)
            return
        self.over = True
        if inside:
            yield from t.run(_SPACE, lambda _: None)
        yield from t.run(_ANY, self._content.append)


# ---- channels ----

#     <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
#
# The prompt has begun the first message, up to `<|start|>assistant`. The header of a message tells its channel and whom
# it is for: `analysis` is reasoning, a message with an address (`to=functions.name`) is a call, all else is content.
# Calls come out as they were written, with their headers, for the tracker of calls.
#
# A marker that begins no message is text: models write about the format too. Models also forget `<|message|>`: where a
# message should begin, a channel begins one without it.

_END = "<|end|>"
_STARTED = "<|start|>assistant"
_CHANNEL = "<|channel|>"
_ADDRESS = " to="
_BETWEEN = "\n\n"  # where one message of a kind follows another

_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=[\w.:/-]+)?(?:<\|channel\|>(\w+)(?: to=[\w.:/-]+)?)?"
    r"(?: ?(?:<\|constrain\|>)? ?\w+)?<\|message\|>"
)
_UNMARKED = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>(analysis|commentary|final)[ \n]+(?!to=|<)")
_TYPE = re.compile(r"\w*")  # the last word of a header, which may be cut
_HEADER_BEGUN = re.compile(r"(?:<\|(?:start|channel|constrain)\|>|[\w .=:/-])*(?:<(?:\|\w*\|?)?)?")
_LONGEST_HEADER = 256  # characters


class _Kind(Enum):
    NONE = auto()  # the header of the first message is read
    THOUGHT = auto()
    CONTENT = auto()
    CALL = auto()


class ChannelReader:
    """Reads one reply, as `ThinkingReader` does. `begun`: there was a message of reasoning."""

    def __init__(self) -> None:
        self.skipped = 0
        self.begun = False
        self._kind = _Kind.NONE
        self._reasoning: list[str] = []
        self._content: list[str] = []  # and calls, in their order
        self._held = ""  # perhaps the beginning of a header
        self._said: set[_Kind] = set()  # kinds of which there was text
        self._follows = False  # the message is not the first one of its kind, and nothing of it was said
        self._quoted = ""  # in a call: the quote inside a string, a backslash behind one

    @property
    def over(self) -> bool:
        """No reasoning follows, as far as is known."""
        return self._kind in (_Kind.CONTENT, _Kind.CALL)

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that `text` settles."""
        text, self._held = self._held + text, ""
        read = len(text)
        while text:
            at = self._plain(text)
            self._say(text[:at])
            text = text[at:]
            space = self._space(text)
            length = self._header(text[space:]) if text else 0
            if length is None:
                self._held = text
                break
            if length:
                self._open(text[space : space + length].removeprefix(_END))
            else:
                self._no_header(text[: space + 1])
            text = text[space + (length or 1) :]
        return self._taken(read - len(self._held))

    def flush(self) -> tuple[str, str]:
        """The reply is over. A header that is cut was markup, unless it is a call's, which the tracker judges."""
        held, self._held = self._held, ""
        begin = held[self._space(held) :]
        header = begin.removeprefix(_END)
        if _ADDRESS in header:
            self._kind = _Kind.CALL
            self._say(header)
        elif (found := _UNMARKED.match(header)) and not _TYPE.fullmatch(header, found.end()):
            if due := self._due(header):
                self._open(found[0])
            self._say(header[found.end() :] if due else held)
        elif not begin.startswith((_END, "<|start|>", _CHANNEL)):
            self._no_header(held)
        return self._taken(len(held))

    def _taken(self, read: int) -> tuple[str, str]:
        """The reasoning and the content of `read` characters."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        self.skipped += read - len(content)
        return reasoning, content

    def _plain(self, text: str) -> int:
        """How many characters of `text` begin no header."""
        if self._kind is _Kind.NONE:
            return 0
        if self._kind is not _Kind.CALL:
            return found if (found := text.find("<")) >= 0 else len(text)
        for at, char in enumerate(text):
            if self._quoted == "\\":
                self._quoted = '"'
            elif self._quoted:
                self._quoted = {'"': "", "\\": char}.get(char, '"')
            elif char == "<":
                return at
            elif char == '"':
                self._quoted = char
        return len(text)

    def _space(self, text: str) -> int:
        """Length of the white space before the first header, which may begin with a space itself."""
        if self._kind is not _Kind.NONE:
            return 0
        space = len(text) - len(text.lstrip())
        return space - 1 if text[:space].endswith(" ") and _ADDRESS.startswith(text[space - 1 : space + 3]) else space

    def _header(self, text: str) -> int | None:
        """The length of the header that `text` begins with, and of the end of a message before it; 0: there is none,
        None: that cannot be told yet.
        """
        header = text.removeprefix(_END)
        starts = [_STARTED] if text.startswith(_END) else [_STARTED, _CHANNEL]
        if self._kind is _Kind.NONE:
            starts = [_STARTED, _CHANNEL, _ADDRESS, "<|message|>"]
        if (found := _HEADER.match(header[:_LONGEST_HEADER])) and header.startswith(tuple(starts)):
            return len(text) - len(header) + found.end()
        may = any(start.startswith(header) or header.startswith(start) for start in starts) or _END.startswith(text)
        if may and len(header) < _LONGEST_HEADER and _HEADER_BEGUN.fullmatch(header):
            return None
        unmarked = _UNMARKED.match(header) if self._due(header) else None
        return len(text) - len(header) + unmarked.end() if unmarked else 0

    def _due(self, header: str) -> bool:
        """Whether a message begins with `header` even if its `<|message|>` is missing."""
        return self._kind is _Kind.NONE or header.startswith(_STARTED)

    def _open(self, header: str) -> None:
        """A message begins."""
        self._quoted = ""
        if _ADDRESS in header:
            self._kind = _Kind.CALL
            self._say(header)
            return
        found = _HEADER.match(header) or _UNMARKED.match(header)
        thought = found is not None and found[1] == "analysis"
        self._kind = _Kind.THOUGHT if thought else _Kind.CONTENT
        self.begun = self.begun or thought
        self._follows = self._kind in self._said

    def _no_header(self, text: str) -> None:
        """`text` began no message; before the first one it is content."""
        self._kind = _Kind.CONTENT if self._kind is _Kind.NONE else self._kind
        self._say(text)

    def _say(self, text: str) -> None:
        if text and self._kind is not _Kind.CALL:
            text, self._follows = _BETWEEN * self._follows + text, False
            self._said.add(self._kind)
        (self._reasoning if self._kind is _Kind.THOUGHT else self._content).append(text)


# ---- calls and grammars behind the thinking ----


class TrailingCalls:
    """Holds back calls in the thinking until it is known whether they end it.

    `markers` begin calls; `tracker` makes a tracker for a text that begins with one.
    """

    def __init__(self, markers: Collection[str], tracker: Callable[[], CallTracker]) -> None:
        whole = "|".join(map(re.escape, markers))
        self._marker = re.compile(rf"\s*(?P<marker>{whole})|\s*{beginnings(*markers)}")
        self._tracker = tracker
        self._held = ""  # white space and a marker, with the text behind it; or perhaps the beginning of a marker
        self._calls: CallTracker | None = None  # reads the held text from its marker on

    def feed(self, thought: str) -> str:
        """The reasoning that is settled once `thought` follows."""
        settled = ""
        while thought:
            if self._calls is None:
                text, self._held = self._held + thought, ""
                found = self._marker.search(text)
                begin = found.start() if found else len(text)
                settled += text[:begin]
                if found is None or not found["marker"]:
                    self._held = text[begin:]
                    return settled
                self._calls = self._tracker()
                self._calls.feed(found["marker"])
                self._held, thought = found[0], text[found.end() :]
            elif _goes_on(self._calls.feed(thought[0])):
                self._held, thought = self._held + thought[0], thought[1:]
            else:  # the character may begin a marker
                settled += self.release()
        return settled

    def release(self) -> str:
        """The held text is reasoning."""
        held, self._held, self._calls = self._held, "", None
        return held

    def take(self) -> str:
        """The calls at the end of the reasoning; "" if it does not end with whole calls."""
        calls = self._calls
        if calls is None or not _goes_on(calls.finish()) or not 0 < calls.n_sent == len(calls.calls):
            return ""
        return self.release().lstrip()


def _goes_on(deltas: Sequence[Delta]) -> bool:
    """Whether nothing but calls and white space has been read."""
    return not any(isinstance(delta, TextDelta) and delta.text.strip() for delta in deltas)


@dataclass(slots=True, eq=False)
class AfterThinking:
    """The `Matcher` of a reply whose content follows `inner`. `inner` reads nothing of the thinking.

    `opener` and `closer` are the tokens around the block. `inside`: the prompt has opened it. Else the first token may
    open it, or a token behind nothing but `space` tokens, which `inner` reads as well. Inside the block the reply does
    not end with one of `ends`: these are given where content must follow.
    """

    inner: Matcher
    opener: int
    closer: int
    inside: bool
    ends: frozenset[int]
    space: Callable[[int], bool]
    first: bool = field(init=False)  # the opener may come

    def __post_init__(self) -> None:
        self.ends = frozenset(end for end in self.ends if end < self.words * 32)  # others are forbidden anyway
        self.first = not self.inside

    @property
    def words(self) -> int:
        return self.inner.words

    @property
    def binding(self) -> bool:
        return (bool(self.ends) and (self.inside or self.first)) or (not self.inside and self.inner.binding)

    @property
    def finished(self) -> bool:
        return not self.inside and self.inner.finished

    @property
    def failed(self) -> bool:
        return self.inner.failed

    @property
    def given_up(self) -> bool:
        return self.inner.given_up

    def copy(self) -> "AfterThinking":
        other = copy(self)
        other.inner = self.inner.copy()
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        begin, end = self._block(tokens)
        content = [*tokens[:begin], *tokens[end:]]
        if begin < end:
            self.inside = tokens[end - 1] != self.closer
        self.first = self.first and begin == end and all(map(self.space, tokens))
        taken = self.inner.advance(content) if content else 0
        return taken if taken < begin else taken + end - begin

    def accepts(self, tokens: Sequence[int]) -> int:
        begin, end = self._block(tokens)
        taken = self.inner.accepts([*tokens[:begin], *tokens[end:]])
        ended = self._end(tokens, begin, end)
        return taken if taken < begin else ended if ended < end else taken + end - begin

    def forced(self) -> list[int]:
        return [] if self.inside or self.first else self.inner.forced()

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        begin, end = self._block(drafts)
        opened = begin < end and self.first
        goes_on = end == len(drafts) and (drafts[-1] != self.closer if begin < end else self.inside)
        ended = self._end(drafts, begin, end)
        if not goes_on and ended == end:
            self.inner.fill([*drafts[:begin], *drafts[end:]], out[end - begin :])
        inside = out[begin + opened : end + goes_on]  # the rows of tokens in the block
        inside[:] = -1
        for token in self.ends:
            _allow(inside, token, False)
        if ended < end:
            out[ended + 1 :] = -1
        if opened:
            self.inner.fill(drafts[:begin], out[: begin + 1])
        if self.first:
            spaces = begin if opened else self._spaces(drafts)
            _allow(out[: spaces + 1], self.opener, True)

    def _block(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the block begins and ends in `tokens`, its markers included; both 0 if there is none."""
        begin = 0
        if not self.inside:
            begin = self._spaces(tokens) if self.first else len(tokens)
            if begin == len(tokens) or tokens[begin] != self.opener:
                return 0, 0
        return begin, next((at + 1 for at in range(begin, len(tokens)) if tokens[at] == self.closer), len(tokens))

    def _spaces(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` are white space at the beginning."""
        return next((at for at, token in enumerate(tokens) if not self.space(token)), len(tokens))

    def _end(self, tokens: Sequence[int], begin: int, end: int) -> int:
        """The place of the first of `ends` in the block between `begin` and `end`; `end` if there is none."""
        return next((at for at in range(begin, end) if tokens[at] in self.ends), end)


def _allow(masks: Bits, token: int, allowed: bool) -> None:
    """Set or clear the bit of `token` in every row of `masks`."""
    bit = np.uint32(1 << token % 32)
    words = masks.view(np.uint32)[:, token // 32]
    words[:] = words | bit if allowed else words & ~bit
