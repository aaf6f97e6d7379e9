"""What a thinking model writes before its answer: text in `<think>` and `</think>`, told apart from the content.

The block comes first in a reply, or the prompt has opened it already. What stands in it is neither content nor calls,
and no stop string counts there. White space around the block and inside its borders is markup: templates write it.
"""

from enum import Enum, auto

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
        return held.rstrip(), ""

    def _split(self, text: str) -> tuple[str, str]:
        self._held = ""
        if self._state is _State.BEGIN:
            if len(text) < len(OPENER) and OPENER.startswith(text):
                self._held = text
                return "", ""
            self.begun = self.begun or text.startswith(OPENER)
            self._state = _State.INSIDE if self.begun else _State.CONTENT
            text = text.removeprefix(OPENER)
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
