"""A model's tokens as a grammar sees them: the bytes of each, and how forced bytes become tokens.

Control tokens are no text. Markers of tool calls are: the grammar spells them, as the reader of calls does.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from holdfast.replicas.text.pieces import Pieces

_SENTINEL = "\x02"  # put before a text where tokenizers add a space to the first word


class Vocabulary:
    """The tokens of `tokenizer` (transformers), less the `control` ids, which no grammar but the end may use.

    `eos`: ids that end a reply.
    """

    def __init__(self, tokenizer: Any, control: frozenset[int], eos: frozenset[int]) -> None:
        # A copy of its own: the text side changes settings of the other one while it tokenizes.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        pieces = Pieces(self._backend)
        self.exact = pieces.exact
        self.tokens: list[bytes] = [pieces.of(token) for token in range(len(tokenizer))]
        self.eos = sorted(eos)
        self.control = control | eos
        self._ids = {
            content: token for token, content in enumerate(self.tokens) if content and token not in self.control
        }
        self._longest = max(map(len, self._ids), default=1)
        self.encode = lru_cache(maxsize=4096)(self._encode)  # forced texts come again and again

    def knows(self, text: str) -> bool:
        """Whether `text` is one token."""
        return text.encode() in self._ids

    def _encode(self, text: str) -> Sequence[int]:
        """Tokens whose bytes are exactly `text`'s, as the model's tokenizer cuts it wherever that is possible."""
        content = text.encode()
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._spells(ids, content):
            return ids
        ids = self._backend.encode(_SENTINEL + text, add_special_tokens=False).ids
        for start in range(1, len(ids)):
            if self._spells(ids[start:], content):
                return ids[start:]
        return self._greedy(content)

    def _spells(self, ids: Sequence[int], content: bytes) -> bool:
        return not self.control.intersection(ids) and b"".join(self.tokens[token] for token in ids) == content

    def _greedy(self, content: bytes) -> Sequence[int]:
        """The longest token each time; empty where a byte has none."""
        ids: list[int] = []
        at = 0
        while at < len(content):
            for end in range(min(len(content), at + self._longest), at, -1):
                if (token := self._ids.get(content[at:end])) is not None:
                    break
            else:
                return []
            ids.append(token)
            at = end
        return ids
