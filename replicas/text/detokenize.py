"""Token ids to text as they come, never half a character.

Bytes go through an incremental UTF-8 decoder: its state is at most three bytes, and its result is that of decoding
all bytes at once, invalid ones included. (The tokenizers library's `DecodeStream` decodes a window again for every
token, holds invalid bytes back until valid ones follow and has no flush; it serves the decoders whose tokens have no
bytes of their own.)
"""

import codecs
from collections.abc import Iterable

from tokenizers.decoders import DecodeStream

from holdfast.replicas.text.pieces import Pieces


class StreamDecoder:
    """Decodes one stream. `hidden` ids leave no text: end of sequence and other control tokens.

    `continues`: the text goes on from a prompt, so a space it begins with stays.
    """

    def __init__(self, pieces: Pieces, hidden: frozenset[int] = frozenset(), continues: bool = False) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces.strips and not continues
        self._window = None if pieces.exact else _Window(pieces)

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete; "" while they are inside a character."""
        shown = [token for token in tokens if token not in self._hidden]
        if self._window is not None:
            return "".join(map(self._window.step, shown))
        text = self._utf8.decode(b"".join(map(self._pieces.of, shown)))
        if text and self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """The stream is over: a character it broke off in comes out as U+FFFD."""
        if self._window is not None:
            return self._window.flush()
        return self._utf8.decode(b"", final=True)


class _Window:
    """A stream through the library's own decoding, for tokens that are not bytes."""

    def __init__(self, pieces: Pieces) -> None:
        self._backend = pieces.backend
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def step(self, token: int) -> str:
        self._held.append(token)
        text: str | None = self._stream.step(self._backend, token)
        if text:
            self._held.clear()
        return text or ""

    def flush(self) -> str:
        held, self._held = self._held, []
        return str(self._backend.decode(held, skip_special_tokens=False)) if held else ""
