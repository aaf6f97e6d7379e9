"""Texts for prompts of which a trace has only lengths.

A block's text depends on its id alone, so prompts share what they shared in the recording.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from holdfast.loadgen.program import Messages, Program, Sized, Turn
from holdfast.replicas.errors import ConfigError

BLOCK = 512  # tokens, in Mooncake's traces

_COMMON = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
WORDS = tuple(_COMMON.split())
"""Common words: with the space before it, each is one token of a large vocabulary."""


@dataclass(frozen=True, slots=True)
class Wording:
    """Makes texts of lengths, a word a token; ``scale`` is for a smaller context than recorded.

    The chat template's own tokens come on top of the recorded length. No repetition's prompts begin as another's do:
    texts are drawn anew, and from the second one on prompts that the trace has in full open with a session.
    Raises ConfigError.
    """

    seed: int = 0
    repetition: int = 0
    block: int = BLOCK
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < inf:
            raise ConfigError("scale must be a number above 0", "scale")

    def words(self, tokens: int) -> int:
        """The number of words of a prompt of `tokens` tokens, at least one."""
        return max(1, round(tokens * self.scale))

    def text(self, sized: Sized, label: str) -> str:
        """A text of that length; what no block covers is drawn for ``about``, shared with nothing."""
        n_words, block_words = self.words(sized.tokens), self.words(self.block)
        words: list[str] = []
        for block in sized.blocks or ():
            words += _draw(f"{self.seed}/{self.repetition}/block/{block}", block_words)
        if len(words) < n_words:
            words += _draw(f"{self.seed}/{self.repetition}/rest/{label}", n_words - len(words))
        return " ".join(words[:n_words])

    def opened(self, messages: Messages) -> Messages:
        """A whole prompt of the trace, behind a session of this repetition; as it was in the first one."""
        if not self.repetition or not messages:
            return messages
        opening = f"Session {self.seed}/{self.repetition}. "
        content = messages[0].get("content") or ""
        said = opening + content if isinstance(content, str) else [{"type": "text", "text": opening}, *content]
        return ({**messages[0], "content": said}, *messages[1:])


def worded(program: Program, wording: Wording) -> Program:
    """The program with a message of the user for every prompt that was only a length, and outputs scaled alike.

    Whole prompts of the trace are opened as ``wording`` says. Deterministic, and for one program at a time: the texts
    of a production trace do not fit into memory at once.
    """
    turns = tuple(_worded(turn, program.id, index, wording) for index, turn in enumerate(program.turns))
    return replace(program, turns=turns)


def _worded(turn: Turn, program: str, index: int, wording: Wording) -> Turn:
    if not isinstance(turn.prompt, Sized):
        return turn if index and not turn.whole else replace(turn, prompt=wording.opened(turn.prompt))
    output = turn.output
    if output.tokens:
        output = replace(output, tokens=max(1, round(output.tokens * wording.scale)))
    return replace(
        turn, prompt=({"role": "user", "content": wording.text(turn.prompt, f"{program}/{index}")},), output=output
    )


@lru_cache(maxsize=4096)
def _draw(label: str, words: int) -> tuple[str, ...]:
    return tuple(random.Random(label).choices(WORDS, k=words))
