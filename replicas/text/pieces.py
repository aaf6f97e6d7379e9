"""What bytes a token stands for, read from the tokenizer's decoder.

Byte-level BPE (GPT-2's alphabet: Llama 3, Qwen, Mistral's tekken) and sentencepiece with byte fallback (Llama 2,
Mistral v0.x, Gemma) map every token to bytes of its own. Other decoders join tokens by rules of their own;
`Pieces.exact` is False for them.
"""

import json
import re
from typing import Any

_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Pieces:
    """Token id to bytes, remembered. `backend` is a `tokenizers.Tokenizer`.

    `strips`: decoding a text drops the space it begins with.
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
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._bytes(token)
        return found

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
            if all(char in _ALPHABET for char in word):
                return bytes(_ALPHABET[char] for char in word)
            return word.encode()
        if not self.exact:
            return str(self.backend.decode([token], skip_special_tokens=False)).encode()
        byte = _BYTE.fullmatch(word)
        return bytes([int(byte[1], 16)]) if byte else word.replace("▁", " ").encode()


def _kinds(decoder: dict[str, Any]) -> set[str]:
    if decoder.get("type") == "Sequence":
        return set().union(*(_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]} if decoder else set()


def _prepends(decoder: dict[str, Any]) -> bool:
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts)
