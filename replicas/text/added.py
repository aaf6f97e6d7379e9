"""The tokens a vocabulary has beside its BPE pieces, and where they stand in a text.

The library cuts a text at added tokens before anything else, so no BPE merge crosses the beginning of one.
"""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Patterns over a text.

    `all` finds every added token; the ones in `starts` (text to id) begin where a text may be cut in two that are
    tokenized apart. `control` finds the special ones, with the white space they swallow; `control_json` finds their
    strings inside JSON text. Patterns are None where there is no such token.
    """

    ids: dict[str, int]
    special_ids: frozenset[int]
    starts: dict[str, int]
    all: re.Pattern[str] | None
    control: re.Pattern[str] | None
    control_word: re.Pattern[str] | None

    def start_at(self, text: str, position: int) -> bool:
        """Whether `text` may be cut at `position` because an added token begins there."""
        found = self.all.match(text, position) if self.all else None
        return found is not None and found[0] in self.starts


def read_added_tokens(backend: Any) -> AddedTokens:
    """What the `tokenizers.Tokenizer` `backend` has been given."""
    tokens = sorted(backend.get_added_tokens_decoder().items(), key=lambda item: -len(item[1].content))
    special = [(index, token) for index, token in tokens if token.special and len(token.content) > 1]
    plain_normal = backend.normalizer is None
    return AddedTokens(
        ids={token.content: index for index, token in tokens},
        special_ids=frozenset(index for index, token in tokens if token.special),
        starts={
            token.content: index
            for index, token in tokens
            if not (token.lstrip or token.single_word) and (plain_normal or not token.normalized)
        },
        all=_any_of([re.escape(token.content) for _, token in tokens]),
        control=_any_of([_with_space(token) for _, token in special]),
        control_word=_any_of([re.escape(token.content) for _, token in special]),
    )


def _with_space(token: Any) -> str:
    before, after = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
    return f"{before}{re.escape(token.content)}{after}"


def _any_of(patterns: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(patterns)) if patterns else None
