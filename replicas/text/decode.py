"""From token ids to bytes and text, read from the tokenizer's decoder.

Byte-level BPE (GPT-2's alphabet: Llama 3, Qwen, Mistral's tekken) and sentencepiece with byte fallback (Llama 2,
Mistral v0.x, Gemma) map every token to bytes of its own. A stream of them goes through an incremental UTF-8 decoder,
whose state is at most three bytes. Its result is that of decoding all bytes at once, invalid ones included.

Other decoders join tokens by rules of their own, and their streams go through the tokenizers library's `DecodeStream`.
It decodes a window again for every token, holds invalid bytes back until valid ones follow, and has no flush.
"""

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers.decoders import DecodeStream


class Pieces:
    """The bytes of each token, remembered. `backend` is a `tokenizers.Tokenizer`.

    `exact`: every token has bytes of its own. `strips`: decoding a text drops the space at its beginning.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        kinds = _kinds(decoder)
        self.byte_level = "ByteLevel" in kinds
        self.exact = self.byte_level or (bool(kinds) and kinds <= _SENTENCEPIECE)
        self.strips = not self.byte_level and ("Strip" in kinds or _prepends(decoder))
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The token's bytes; none for an id that the vocabulary does not have."""
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def text(self, tokens: list[int]) -> str:
        """All of `tokens` as text, special ones too, nothing stripped."""
        if not self.exact:
            return str(self.backend.decode(tokens, skip_special_tokens=False))
        return b"".join(map(self.of, tokens)).decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        word: str | None = self.backend.id_to_token(token)
        if word is None:
            return b""
        if self.byte_level:
            try:
                return bytes(map(_ALPHABET.__getitem__, word))
            except KeyError:  # an added token, which is text as it stands
                return word.encode()
        if not self.exact:
            return str(self.backend.decode([token], skip_special_tokens=False)).encode()
        byte = _BYTE.fullmatch(word)
        return bytes([int(byte[1], 16)]) if byte else word.replace("▁", " ").encode()


class StreamDecoder:
    """Decodes one stream, never half a character. `hidden` ids, such as the end of sequence, leave no text.

    `continues`: the text continues a prompt, so a space at its beginning stays.
    """

    def __init__(self, pieces: Pieces, hidden: frozenset[int] = frozenset(), continues: bool = False) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces.strips and not continues
        self._stream = None if pieces.exact else DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []  # tokens without text so far

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete; "" while they are inside a character."""
        shown = [token for token in tokens if token not in self._hidden]
        if self._stream is not None:
            return "".join(self._step(self._stream, token) for token in shown)
        text = self._utf8.decode(b"".join(map(self._pieces.of, shown)))
        if text and self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """End the stream: an incomplete character becomes U+FFFD."""
        if self._stream is not None:
            return str(self._pieces.backend.decode(self._held, skip_special_tokens=False)) if self._held else ""
        return self._utf8.decode(b"", final=True)

    def _step(self, stream: DecodeStream, token: int) -> str:
        self._held.append(token)
        text: str | None = stream.step(self._pieces.backend, token)
        if text:
            self._held.clear()
        return text or ""


_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """The types of a decoder's parts."""
    if decoder.get("type") == "Sequence":
        return set().union(*(_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]} if decoder else set()


def _prepends(decoder: dict[str, Any]) -> bool:
    """Whether the tokenizer puts a space before words, which decoding removes from the first word."""
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts)
