"""What one engine step does: frozen data from the scheduler to the runner, and the runner's answer.

The scheduler knows pages and tokens and no tensors; the runner knows tensors and no requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.kv.pages import NO_MOVES, PageCopy, PageIds, PageMoves
from holdfast.replicas.types import TokenCounts, TokenIds, record


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy, for the engine's own callers."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None  # None: the FNV-1a hash of the prompt's token ids, so equal prompts give equal outputs
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely ones
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()  # besides the model's own end-of-sequence ids
    ignore_eos: bool = False
    choice: int = 0  # number of this answer among several to one request; each but the first derives its own seed
    repetition_penalty: float = 1.0  # divides positive logits of tokens in prompt and reply, multiplies negative ones
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()  # tokens not drawn before `min_tokens`, unless nothing else is allowed


@dataclass(frozen=True, slots=True)
class Draw:
    """Choose tokens after a chunk. The key of the noise is (seed, absolute position, token id).

    With `drafts` > 0 the chunk's last `drafts` tokens are unverified: every position from the one before them on is
    drawn, and the output is the accepted drafts plus one token.
    """

    sampling: Sampling
    seed: int
    drafts: int = 0
    counts: TokenCounts | None = None  # of the tokens generated before the drafts; only where a penalty needs them
    masks: RowMasks | None = None  # which tokens a constrained sequence may draw
    seen: TokenCounts | None = None  # of all tokens before the drafts; only where the repetition penalty needs them
    least: int = 0  # before this absolute position none of `sampling.ends` is drawn

    @property
    def plain(self) -> bool:
        """Whether it draws one token, and the next step can be planned without knowing that token."""
        return self.drafts == 0 and self.counts is None and self.masks is None and self.seen is None


@record
class RowWrite:
    """Put `pages` into page-table row `row`, from page slot `first` on: one device operation, any length."""

    row: int
    first: int
    pages: PageIds


@record
class Chunk:
    """One sequence's query tokens, at absolute positions [start, start + len(tokens)).

    Their KV is written to the pages of `row` at those positions; they attend to everything before.
    """

    row: int
    start: int
    tokens: TokenIds
    draw: Draw | None = None  # None: a part of a prompt that is not its last
    follows: int | None = None  # its only token is the one that this chunk of the step before draws (`Draw.plain`)

    @property
    def decodes(self) -> bool:
        """Whether it takes its sequence one token further, with drafts or without."""
        return self.draw is not None and len(self.tokens) == self.draw.drafts + 1


@record
class StepPlan:
    """One step. Order of effects: saves, copies, row writes, then loads beside one forward over all chunks.

    `saves` go from the device to the host, `loads` back; nothing in the same step reads what is loaded.
    """

    chunks: tuple[Chunk, ...]
    writes: tuple[RowWrite, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    saves: PageMoves = NO_MOVES
    loads: PageMoves = NO_MOVES

    @property
    def moves(self) -> bool:
        """Whether pages go from one tier to the other."""
        return len(self.saves) > 0 or len(self.loads) > 0

    @property
    def busy(self) -> bool:
        """Whether it has work that cannot wait for the next step."""
        return len(self.chunks) > 0 or self.moves

    @property
    def prefills(self) -> bool:
        """Whether it has a part of a prompt. The scheduler puts these behind the chunks that decode."""
        return not all(chunk.decodes for chunk in reversed(self.chunks))

    @property
    def decodes(self) -> bool:
        """Whether it takes each of its sequences one token further, and does nothing else that takes time."""
        return len(self.chunks) > 0 and not self.moves and not self.prefills

    @property
    def plain(self) -> bool:
        """Whether the next step can be planned before this one's tokens are known."""
        return not self.moves and all(chunk.draw is None or chunk.draw.plain for chunk in self.chunks)

    def after(self, drawn: "Sequence[Drawn | None]") -> "StepPlan":
        """The plan with the tokens that the step before drew in place of `follows`; 0 where that step failed."""
        if all(chunk.follows is None for chunk in self.chunks):
            return self
        known = {i: each.tokens[-1] for i, each in enumerate(drawn) if each is not None}
        chunks = tuple(
            chunk
            if chunk.follows is None
            else replace(chunk, tokens=np.array([known.get(chunk.follows, 0)], np.int32), follows=None)
            for chunk in self.chunks
        )
        return replace(self, chunks=chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a chosen token, and of the most likely ones, before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@record
class Drawn:
    """Tokens drawn for one chunk: accepted drafts, then the next token. Never empty.

    The simulator's runner draws the tokens of further steps behind these, where it has allocated their cells.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@record
class StepOutput:
    """`drawn[i]` belongs to `plan.chunks[i]`; None where the chunk draws nothing."""

    drawn: tuple[Drawn | None, ...]
    forward_s: float = 0.0
    sample_s: float = 0.0
    moved: bool = True  # False: copies between the tiers failed, and what they wrote is unknown
    load_s: float = 0.0  # of the loads, beside the forward


class Flight(Protocol):
    """A step that has begun."""

    def land(self) -> StepOutput:
        """Wait for the step. Called once. Raises whatever made the step fail."""


class Runner(Protocol):
    """Runs steps on a model, in the order in which they are begun. A step that fails leaves the runner usable.

    A step may begin while the one before it still runs. A runner that cannot overlap them computes a step at once, in
    `begin`, and returns a `Landed`.
    """

    def begin(self, plan: StepPlan) -> Flight:
        """Begin a step. Raises whatever keeps it from beginning."""


@record
class Landed:
    """The flight of a step that was over when `begin` returned."""

    output: StepOutput

    def land(self) -> StepOutput:
        return self.output
