"""A rendered text to token ids in full: control tokens of the template as tokens, those of the client as text.

Not here: remembering what was tokenized before (`tokens`).
"""

import json
from typing import Any

import numpy as np

from holdfast.replicas.text.added import AddedTokens
from holdfast.replicas.tokens import TokenIds


class Encoder:
    """`backend` is a `tokenizers.Tokenizer`. For one thread."""

    def __init__(self, backend: Any, added: AddedTokens) -> None:
        self._backend = backend
        self._added = added
        self._inner: Any = None  # for text that does not begin the prompt; made when first needed

    def encode(self, text: str, mark: str = "", at_start: bool = True) -> TokenIds:
        """int32 ids of `text`, no tokens added around it.

        Where it holds `mark`, what stands between two control tokens is tokenized apart, with special tokens read as
        text. `at_start`: the prompt begins here (some tokenizers put a space before it).
        """
        if not mark or mark not in text or self._added.control is None:
            return np.array(_ids(self._backend, text), np.int32)
        ids: list[int] = []
        begun = position = 0  # text from `begun` on is not tokenized yet; `position` is the end of a control token
        ends = [(found.start(), found.end()) for found in self._added.control.finditer(text)]
        for start, end in [*ends, (len(text), len(text))]:
            if mark in text[position:start]:
                ids += _ids(self._backend, text[begun:position])
                ids += self._literal(text[position:start].replace(mark, ""), at_start and position == 0)
                begun = start
            position = end
        ids += _ids(self._backend, text[begun:])
        return np.array(ids, np.int32)

    def whole(self, text: str) -> TokenIds:
        """int32 ids of plain text with the tokens around it that the model expects; special tokens in it count."""
        return np.array(_ids(self._backend, text, around=True), np.int32)

    def _literal(self, text: str, at_start: bool) -> list[int]:
        """Ids of text in which special tokens mean nothing."""
        backend = self._backend if at_start else self._later()
        before = backend.encode_special_tokens
        backend.encode_special_tokens = True
        try:
            return _ids(backend, text)
        finally:
            backend.encode_special_tokens = before

    def _later(self) -> Any:
        """The tokenizer as it treats text after the first token: a space before the prompt is not put again."""
        if self._inner is None:
            self._inner = self._backend
            splitter = self._backend.pre_tokenizer
            if splitter is not None and '"first"' in splitter.__getstate__().decode():
                settings = json.loads(self._backend.to_str())
                _never_prepend(settings["pre_tokenizer"])
                self._inner = type(self._backend).from_str(json.dumps(settings))
        return self._inner


def _ids(backend: Any, text: str, around: bool = False) -> list[int]:
    """Ids of `text`; `around`: with the tokens around it that the model expects."""
    # Trap: `encode` holds the GIL until it is done, so that on a thread too it stops the event loop. A batch lets it
    # go; the fast one looks for no offsets, which took as long as the ids and were thrown away with the GIL held.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=around)[0].ids
    return ids


def _never_prepend(settings: dict[str, Any]) -> None:
    if settings.get("prepend_scheme") == "first":
        settings["prepend_scheme"] = "never"
    for part in settings.get("pretokenizers", ()):
        _never_prepend(part)
