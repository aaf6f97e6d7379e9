"""The tokens a vocabulary has beside its BPE pieces, and where they stand in a text.

The library cuts a text at added tokens before anything else, so no BPE merge crosses the beginning of one.
"""

import re
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Patterns over a text.

    `all` finds every added token; the ones in `starts` (text to id) begin where a text may be cut in two that are
    tokenized apart. `control` finds the special ones, with the white space they swallow; `control_word` finds their
    contents alone, as they stand inside JSON text. Patterns are None where there is no such token.
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
        all=_any_of({token.content for _, token in tokens}),
        control=_with_space([token for _, token in special]),
        control_word=_any_of({token.content for _, token in special}),
    )


def _with_space(tokens: list[Any]) -> re.Pattern[str] | None:
    """The longest of `tokens` (longest first), with the white space that it swallows."""
    if not any(token.lstrip or token.rstrip for token in tokens):
        return _any_of({token.content for token in tokens})
    space = {False: "", True: r"\s*"}
    patterns = [space[token.lstrip] + re.escape(token.content) + space[token.rstrip] for token in tokens]
    return re.compile("|".join(patterns))


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """The longest of `texts`."""
    return re.compile(_spelled(texts)) if texts else None


def _spelled(texts: set[str]) -> str:
    """A pattern for the longest of `texts` that branches where they part.

    Trap: one branch per text tries all of them wherever one might begin. With Gemma's six thousand added tokens that
    is seconds for a text of many lines.
    """
    head = commonprefix(list(texts))  # noqa: RUF071 - of characters, not of paths
    rest: dict[str, set[str]] = {}
    for text in texts:
        rest.setdefault(text[len(head) :][:1], set()).add(text[len(head) :])
    may_end = rest.pop("", None) is not None
    branches = f"(?:{'|'.join(map(_spelled, rest.values()))})" if rest else ""
    return re.escape(head) + branches + ("?" if rest and may_end else "")
