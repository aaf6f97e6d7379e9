"""What a model writes in channels (OpenAI's Harmony format): its messages told apart, reasoning, content and calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt has begun the first message, up to `<|start|>assistant`. A header tells the channel, and whom a message is
for: `analysis` is reasoning, one that is for somebody (`to=functions.name`) is a call, everything else content. Calls
come out as they were written, header included, for their own reader (`calls.tracker`). A marker that does not begin
what it should is text: models write about the format as well; where a message should begin, a channel with no
`<|message|>` behind it begins one all the same, as the models forget that marker. Not here: the tokens that end a reply
and leave no text.
"""

import re
from enum import Enum, auto

_END = "<|end|>"
_STARTED = "<|start|>assistant"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ADDRESS = " to="
_BETWEEN = "\n\n"  # where one message of a kind follows another

_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=[\w.:/-]+)?(?:<\|channel\|>(\w+)(?: to=[\w.:/-]+)?)?"
    r"(?: ?(?:<\|constrain\|>)? ?\w+)?<\|message\|>"
)
_UNMARKED = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>(analysis|commentary|final)[ \n]+(?!to=|<)")
_TYPE = re.compile(r"\w*")  # of what is in a message, the last word of a header
_BEGUN = re.compile(r"(?:<\|(?:start|channel|constrain)\|>|[\w .=:/-])*(?:<(?:\|\w*\|?)?)?")  # what may become one
_LONGEST = 256  # characters of a header


class _Kind(Enum):
    HEADER = auto()  # of the first message
    THOUGHT = auto()
    CONTENT = auto()
    CALL = auto()


class ChannelReader:
    """Reads one reply, in pieces of any size, as `thinking.ThinkingReader` does.

    `skipped`: characters of the reply that were no content. `begun`: there was a message of reasoning.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.begun = False
        self._kind = _Kind.HEADER
        self._out: dict[_Kind, list[str]] = {}  # what a piece has settled
        self._held = ""  # what may be the beginning of a header
        self._said: set[_Kind] = set()  # kinds of which there was text
        self._follows = False  # the message is not the first one of its kind, and nothing of it was said
        self._quoted = self._escaped = False  # inside of a string, in a call

    @property
    def over(self) -> bool:
        """What comes is no reasoning, as far as is known."""
        return self._kind in (_Kind.CONTENT, _Kind.CALL)

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that `text` settles."""
        read = len(self._held) + len(text)
        text, self._held = self._held + text, ""
        while text:
            at = self._plain(text)
            self._say(text[:at])
            text = text[at:]
            if not text:
                break
            space = self._space(text)
            length = self._header(text[space:])
            if length is None:
                self._held = text
                break
            if length:
                self._open(text[space : space + length].removeprefix(_END))
            else:
                self._kind = _Kind.CONTENT if self._kind is _Kind.HEADER else self._kind
                self._say(text[: space + 1])
            text = text[space + (length or 1) :]
        return self._taken(read - len(self._held))

    def flush(self) -> tuple[str, str]:
        """The reply is over: a header that is cut was markup, but where it is a call's, which its reader judges."""
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
            self._kind = _Kind.CONTENT if self._kind is _Kind.HEADER else self._kind
            self._say(held)
        return self._taken(len(held))

    def _taken(self, read: int) -> tuple[str, str]:
        """The reasoning and the content of `read` characters."""
        out, self._out = self._out, {}
        content = "".join(out.get(_Kind.CONTENT, ()))  # calls stand in it, in their order
        self.skipped += read - len(content)
        return "".join(out.get(_Kind.THOUGHT, ())), content

    def _plain(self, text: str) -> int:
        """How many characters of `text` begin no header."""
        if self._kind is _Kind.HEADER:
            return 0
        if self._kind is not _Kind.CALL:
            return found if (found := text.find("<")) >= 0 else len(text)
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == "<":
                return at
            else:
                self._quoted = char == '"'
        return len(text)

    def _space(self, text: str) -> int:
        """How many characters of `text` are white space before the first header, which may begin with a space too."""
        if self._kind is not _Kind.HEADER:
            return 0
        space = len(text) - len(text.lstrip())
        return space - 1 if text[:space].endswith(" ") and _ADDRESS.startswith(text[space - 1 : space + 3]) else space

    def _header(self, text: str) -> int | None:
        """The length of the header that `text` begins with, and of the end of a message before it; 0: there is none,
        None: that cannot be told yet.
        """
        header = text.removeprefix(_END)
        starts: tuple[str, ...] = (_STARTED,) if text.startswith(_END) else (_STARTED, _CHANNEL)
        if self._kind is _Kind.HEADER:
            starts = (_CHANNEL, _ADDRESS, _STARTED, _MESSAGE)
        if (found := _HEADER.match(header[:_LONGEST])) and header.startswith(starts):
            return len(text) - len(header) + found.end()
        may = any(start.startswith(header) or header.startswith(start) for start in starts) or _END.startswith(text)
        if may and len(header) < _LONGEST and _BEGUN.fullmatch(header):
            return None
        unmarked = _UNMARKED.match(header) if self._due(header) else None
        return len(text) - len(header) + unmarked.end() if unmarked else 0

    def _due(self, header: str) -> bool:
        """Whether a message begins with `header`, though its last marker may lack."""
        return self._kind is _Kind.HEADER or header.startswith(_STARTED)

    def _open(self, header: str) -> None:
        """A message begins."""
        found = _HEADER.match(header) or _UNMARKED.match(header)
        self._quoted = self._escaped = False
        if _ADDRESS in header:
            self._kind = _Kind.CALL
            self._say(header)
            return
        thought = found is not None and found[1] == "analysis"
        self._kind = _Kind.THOUGHT if thought else _Kind.CONTENT
        self.begun = self.begun or thought
        self._follows = self._kind in self._said

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._kind is _Kind.CALL:
            self._out.setdefault(_Kind.CONTENT, []).append(text)
            return
        if self._follows:
            text, self._follows = _BETWEEN + text, False
        self._said.add(self._kind)
        self._out.setdefault(self._kind, []).append(text)
