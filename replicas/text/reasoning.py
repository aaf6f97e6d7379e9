"""Separates a model's reasoning from the content of its reply.

Thinking models write a block such as ``<think>...</think>`` first; the prompt may have opened it (`ThinkingReader`).
gpt-oss and Muse Glimmer write messages with headers (`ChannelReader`). Reasoning is neither content nor calls, and no
stop string counts in it. `TrailingCalls` finds calls at the end of the thinking: a reply that ends there meant them.
`AfterThinking` lets a grammar of the content wait for the end of the thinking.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache

import numpy as np

from holdfast.replicas.constraints.matcher import Bits, Matcher
from holdfast.replicas.requests import TextDelta
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker, Delta, MismatchError, Scan, Text, beginnings


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """The tokens around a block of thinking; `label` is a word that stands behind the opener and is no thought."""

    opener: str
    closer: str
    label: str = ""


THINK = ThinkingBlock("<think>", "</think>")
BLOCKS = (THINK, ThinkingBlock("<|channel>", "<channel|>", "thought"))
"""The blocks of all families; the second one is Gemma 4's."""

_THOUGHT = re.compile(r"[^\s<]+")  # every closer begins with the one
_SPACE, _ANY = re.compile(r"\s+"), re.compile(r"(?s:.+)")


@cache
def _patterns(block: ThinkingBlock) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Patterns of the opener, a beginning of it, a possible end of the thinking, and a beginning of that."""
    opener, closer = re.escape(block.opener), re.escape(block.closer)
    begun, label = beginnings(block.opener), ""
    if block.label:
        label = rf"(?:\s*{block.label}(?=\s))?"
        begun = rf"(?:{begun}|{opener}\s*(?:\Z|{beginnings(block.label + ' ')}))"
    return (
        re.compile(rf"\s*{opener}{label}"),
        re.compile(rf"\s*(?:\Z|{begun})"),
        re.compile(rf"(?P<closer>\s*{closer})|\s++(?!\Z)|<"),
        re.compile(rf"\s*(?:\Z|{beginnings(block.closer)})"),
    )


def thinking_reader(prompt: str, block: ThinkingBlock = THINK) -> "ThinkingReader | None":
    """A reader for the reply to the rendered `prompt`; None if the prompt ends behind a closed block.

    A template that switches thinking off writes an empty block.
    """
    end = prompt.rstrip()
    opened = end.endswith(block.opener) or (block.label and end.endswith(block.opener + block.label))
    return None if end.endswith(block.closer) else ThinkingReader(bool(opened), block)


class ThinkingReader:
    """Reads one reply, in pieces of any size. `inside`: the prompt has opened the block.

    The block comes first, white space before it aside. White space around it and inside its borders is markup.
    `skipped`: characters of the reply that are not content. `begun`: there was a block. `over`: no reasoning follows.
    """

    def __init__(self, inside: bool = False, block: ThinkingBlock = THINK) -> None:
        self.skipped = 0
        self.begun = inside
        self.over = False
        self._patterns = _patterns(block)
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
        opened, opened_begun, broken, closer_begun = self._patterns
        try:
            # A model may write the opener again though the prompt has.
            self.begun = bool((yield from t.match(opened, opened_begun))) or self.begun
            inside = self.begun
            if inside:
                yield from t.run(_SPACE, lambda _: None)
                yield from t.run(_THOUGHT, self._reasoning.append)
                while (match := (yield from t.match(broken, closer_begun))) and not match["closer"]:
                    self._reasoning.append(match[0])
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
# Calls come out as they were written, with their headers, for the tracker of calls. This is Harmony; Muse Glimmer has
# no channels, so addresses tell everything, and a call tells its name again:
#
#      to=self<|message|>...<|eom|><|start|>assistant to=name<|message|><atem:function_calls>...<|eot|>
#
# A marker that begins no message is text: models write about the format too. Models also forget `<|message|>`: where a
# message should begin, a channel begins one without it.

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
_TO = re.compile(r" to=([\w.:/-]+)")
_LONGEST_HEADER = 256  # characters


class _Kind(Enum):
    NONE = auto()  # the header of the first message is read
    THOUGHT = auto()
    CONTENT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages of one family: `end` stands behind each, and `people` are the addresses that are no tools.

    Without `people` the reader of calls needs the header of a call, and its body is JSON.
    """

    end: str
    people: Mapping[str, _Kind] = field(default_factory=dict)


_MUSE = {"self": _Kind.THOUGHT, "user": _Kind.CONTENT, "commentary": _Kind.CONTENT}
CHANNELS: Mapping[ToolFormat, Channels] = {
    ToolFormat.HARMONY: Channels("<|end|>"),
    ToolFormat.MUSE: Channels("<|eom|>", _MUSE),
}


class ChannelReader:
    """Reads one reply, as `ThinkingReader` does. `begun`: there was a message of reasoning."""

    def __init__(self, channels: Channels) -> None:
        self.skipped = 0
        self.begun = False
        self._end, self._people = channels.end, channels.people
        self._kind = _Kind.NONE
        self._reasoning: list[str] = []
        self._content: list[str] = []  # and calls, in their order
        self._held = ""  # perhaps the beginning of a header
        self._seen_kinds: set[_Kind] = set()  # kinds that have had text
        self._follows = False  # the message is not the first one of its kind, and has no text yet
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
                self._open(text[space : space + length].removeprefix(self._end))
            else:
                self._no_header(text[: space + 1])
            text = text[space + (length or 1) :]
        return self._taken(read - len(self._held))

    def flush(self) -> tuple[str, str]:
        """The reply is over. A header that is cut was markup, unless it is a call's, which the tracker judges."""
        held, self._held = self._held, ""
        begin = held[self._space(held) :]
        header = begin.removeprefix(self._end)
        if _ADDRESS in header and not self._people:
            self._kind = _Kind.CALL
            self._say(header)
        elif (match := _UNMARKED.match(header)) and not _TYPE.fullmatch(header, match.end()):
            if due := self._due(header):
                self._open(match[0])
            self._say(header[match.end() :] if due else held)
        elif not begin.startswith((self._end, "<|start|>", _CHANNEL, *([_ADDRESS[:2]] if self._people else []))):
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
        if self._kind is not _Kind.CALL or self._people:
            return at if (at := text.find("<")) >= 0 else len(text)
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
        """The length of the header at the beginning of `text`, with the end of a message before it. 0: there is none.
        None: more text is needed to decide.
        """
        header = text.removeprefix(self._end)
        starts = [_STARTED] if text.startswith(self._end) else [_STARTED, _CHANNEL]
        if self._kind is _Kind.NONE:
            starts = [_STARTED, _CHANNEL, _ADDRESS, "<|message|>"]
        if (match := _HEADER.match(header[:_LONGEST_HEADER])) and header.startswith(tuple(starts)):
            return len(text) - len(header) + match.end()
        may = any(start.startswith(header) or header.startswith(start) for start in starts)
        may = may or self._end.startswith(text)
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
        address = _TO.search(header)
        if address and (kind := self._people.get(address[1], _Kind.CALL)) is _Kind.CALL:
            self._kind = kind
            self._say("" if self._people else header)
            return
        match = _HEADER.match(header) or _UNMARKED.match(header)
        thought = kind is _Kind.THOUGHT if address else match is not None and match[1] == "analysis"
        self._kind = _Kind.THOUGHT if thought else _Kind.CONTENT
        self.begun = self.begun or thought
        self._follows = self._kind in self._seen_kinds

    def _no_header(self, text: str) -> None:
        """`text` began no message; before the first one it is content."""
        self._kind = _Kind.CONTENT if self._kind is _Kind.NONE else self._kind
        self._say(text)

    def _say(self, text: str) -> None:
        if text and self._kind is not _Kind.CALL:
            text, self._follows = _BETWEEN * self._follows + text, False
            self._seen_kinds.add(self._kind)
        (self._reasoning if self._kind is _Kind.THOUGHT else self._content).append(text)


# ---- calls and grammars behind the thinking ----


class TrailingCalls:
    """Holds back calls in the thinking until it is clear whether the thinking ends with them.

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
                match = self._marker.search(text)
                begin = match.start() if match else len(text)
                settled += text[:begin]
                if match is None or not match["marker"]:
                    self._held = text[begin:]
                    return settled
                self._calls = self._tracker()
                self._calls.feed(match["marker"])
                self._held, thought = match[0], text[match.end() :]
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


_MOST_GAPS = 2  # tokens of `AfterThinking.gaps`


@dataclass(slots=True, eq=False)
class AfterThinking:
    """The `Matcher` of a reply whose content follows `inner`. `inner` reads nothing of the thinking.

    `opener` and `closer` are the tokens around the block. `inside`: the prompt has opened it. Else the first token may
    open it, or a token behind nothing but `space` tokens, which `inner` reads as well. Inside the block the reply does
    not end with one of `ends`: these are given where content must follow. So are `gaps`, tokens of line ends: some may
    stand behind the block, as they do where the reply is free.
    """

    inner: Matcher
    opener: int
    closer: int
    inside: bool
    ends: frozenset[int]
    space: Callable[[int], bool]
    gaps: frozenset[int] = frozenset()
    budget: int = -1
    first: bool = field(init=False)  # the opener may come
    left: int = 0  # gaps that may come

    def __post_init__(self) -> None:
        self.ends = frozenset(end for end in self.ends if end < self.words * 32)  # others are forbidden anyway
        self.first = not self.inside

    @property
    def words(self) -> int:
        return self.inner.words

    @property
    def binding(self) -> bool:
        if self.inside and not self.budget:
            return True
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
        return self._read(tokens, self.inner.advance)

    def accepts(self, tokens: Sequence[int]) -> int:
        return copy(self)._read(tokens, self.inner.accepts)

    def forced(self) -> list[int]:
        if self.inside and not self.budget:
            return [self.closer]
        return [] if self._apart else self.inner.forced()

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        if not self._apart:
            self.inner.fill(drafts, out)
            return
        places, content = [copy(self)], list[int]()  # before each row, and the tokens of the content
        rows = [0]  # of the masks of the content
        for token in drafts:
            ahead = copy(places[-1])
            if (own := ahead._takes(token)) is None:
                content.append(token)
            elif not own:
                break
            places.append(ahead)
            rows.append(len(content))
        masks = np.full((len(content) + 1, self.words), -1, np.int32)
        if not all(place.inside for place in places):
            self.inner.fill(content, masks)
        out[len(places) :] = -1
        for row, place in enumerate(places):
            mask = out[row : row + 1]
            mask[:] = -1 if place.inside else masks[rows[row]]
            if place.inside and not place.budget:
                mask[:] = 0
                _allow(mask, self.closer, True)
            for token in self.ends if place.inside else self.gaps if place.left else ():
                _allow(mask, token, not place.inside)
            if place.first:
                _allow(mask, self.opener, True)

    @property
    def _apart(self) -> bool:
        """The next token may be none of the content's."""
        return self.inside or self.first or self.left > 0

    def _read(self, tokens: Sequence[int], inner: Callable[[Sequence[int]], int]) -> int:
        """Take in `tokens`, of which those of the content go to `inner`; returns how many stand."""
        places = list[int]()  # of the content
        stand = len(tokens)
        for at, token in enumerate(tokens):
            if not self._apart:
                places += range(at, len(tokens))
                break
            if (own := self._takes(token)) is None:
                places.append(at)
            elif not own:
                stand = at
                break
        taken = inner([tokens[at] for at in places]) if places else 0
        return places[taken] if taken < len(places) else stand

    def _takes(self, token: int) -> bool | None:
        """Take in a token of the thinking, or of the line ends behind it. None: it is the content's. False: the
        thinking cannot go on with it.
        """
        if self.inside:
            if token == self.closer:
                self.inside, self.left = False, _MOST_GAPS * bool(self.gaps)
                return True
            goes_on = bool(self.budget) and token not in self.ends
            self.budget -= goes_on
            return goes_on
        if self.first and token == self.opener:
            self.inside, self.first = True, False
            return True
        if self.left and token in self.gaps:
            self.left -= 1
            return True
        self.first, self.left = self.first and self.space(token), 0
        return None


def _allow(masks: Bits, token: int, allowed: bool) -> None:
    """Set or clear the bit of `token` in every row of `masks`."""
    bit = np.uint32(1 << token % 32)
    words = masks.view(np.uint32)[:, token // 32]
    words[:] = words | bit if allowed else words & ~bit
