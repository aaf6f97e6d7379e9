"""One engine step as data: frozen plans from the scheduler to the runner, and the runner's results.

The scheduler knows pages and tokens and no tensors; the runner knows tensors and no requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.kv.pages import NO_MOVES, PageCopy, PageIds, PageMoves, StateUse
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
    bare: bool = field(init=False)  # it takes the likeliest tokens by the model's own logits, and nothing else
    plain: bool = field(init=False)  # it draws one token, and the next step can be planned without knowing that token

    def __post_init__(self) -> None:
        sampling = self.sampling
        edits = sampling.temperature > 0 or sampling.logit_bias or sampling.logprobs is not None or self.least
        free = self.counts is None and self.masks is None and self.seen is None
        object.__setattr__(self, "bare", free and not edits)
        object.__setattr__(self, "plain", free and self.drafts == 0)


@record
class RowWrite:
    """Put `pages` into page-table row `row`, from page slot `first` on: one device operation, any length.

    `kind`: 0, or 1 for the layers whose window has pages of its own.
    """

    row: int
    first: int
    pages: PageIds
    kind: int = 0


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
    state: StateUse | None = None  # of a model with a recurrent state
    following: int = 0  # the prompt's token after it, where it draws nothing

    @property
    def decodes(self) -> bool:
        """Whether its sequence gets one more token from it, with drafts or without."""
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
    checkpoint_saves: PageMoves = NO_MOVES  # of state slots, or window pages
    checkpoint_loads: PageMoves = NO_MOVES

    @property
    def states_written(self) -> set[int]:
        """The state slots that its chunks write."""
        uses = [chunk.state for chunk in self.chunks if chunk.state is not None]
        return {use.target for use in uses} | {slot for use in uses for _, slot in use.marks}

    @property
    def moves(self) -> bool:
        """Whether pages or checkpoints go from one tier to the other."""
        return len(self.saves) > 0 or len(self.loads) > 0 or len(self.checkpoint_saves) > 0

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
    predicted: int | None = None  # the token after these, by the model's layer that predicts one further


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


# ---- what a step costs ----

VERIFY_ROWS = 256  # rows of a step with drafts: with more, steps wait for arithmetic and drafts no longer pay

StepCost: TypeAlias = tuple[float, ...]
"""Seconds of a decode step by its number of rows, from 0 to `VERIFY_ROWS`."""


def step_cost(rows: Sequence[int], seconds: Sequence[float]) -> StepCost:
    """The cost of every width from a few measured ones (at least two, rising), on straight lines between them.

    A wider step never costs less: where it was measured so, something else delayed the narrower one.
    """
    rising = np.minimum.accumulate(np.asarray(seconds)[::-1])[::-1]
    slope = (rising[-1] - rising[-2]) / (rows[-1] - rows[-2])
    width = np.arange(VERIFY_ROWS + 1)
    return tuple((np.interp(width, rows, rising) + slope * np.maximum(width - rows[-1], 0)).tolist())


# ---- the seed a prompt gives itself ----

OFFSET_BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3
_BLOCK = 1 << 15  # bytes hashed at a time; the powers of PRIME are kept for one block

_POWERS: npt.NDArray[np.uint64] = np.cumprod(
    np.full(_BLOCK, PRIME, dtype=np.uint64), dtype=np.uint64
)  # PRIME^1, PRIME^2, ...


def prompt_seed(tokens: TokenIds) -> int:
    """FNV-1a, 64 bits, over the token ids as little-endian uint32 bytes: in [0, 2^64).

    FNV-1a is h = (h ^ byte) * P modulo 2^64, byte after byte, which no array library can do as it stands. But only the
    low byte of h meets the XOR, and it evolves by itself modulo 256. Once the low bytes are known, h ^ byte is h plus a
    known small number, the whole is linear in h, and the result is a dot product with the powers of P. The low bytes
    come bit by bit: bit k of the next state is bit k of this one, XOR the byte's bit, XOR a carry out of the bits
    below, so each bit is one cumulative XOR over the message. A long prompt takes a third of the time of a plain loop.
    """
    message = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8)
    state = OFFSET_BASIS
    for first in range(0, len(message), _BLOCK):
        state = _hash_block(state, message[first : first + _BLOCK])
    return state


def _hash_block(state: int, message: npt.NDArray[np.uint8]) -> int:
    """FNV-1a of one block, from `state` on."""
    low = _low_bytes(state & 0xFF, message)
    step = (low ^ message).astype(np.int64) - low  # h ^ byte == h + step
    powers = _POWERS[: len(message)]
    total = int(np.dot(step.astype(np.uint64), powers[::-1]))
    return (state * int(powers[-1]) + total) % (1 << 64)


def _low_bytes(start: int, message: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The low byte of the state before each byte of the message."""
    low = np.zeros(len(message), dtype=np.uint8)
    for bit in range(8):
        # Bits below `bit` of `low` are right by now; the product's bit `bit` is this bit XOR what they carry into it.
        known = (low ^ message) & np.uint8((1 << bit) - 1)
        change = ((known * np.uint8(PRIME & 0xFF)) ^ message) >> np.uint8(bit) & np.uint8(1)
        before = np.empty_like(change)
        before[0] = start >> bit & 1
        before[1:] = change[:-1]
        low |= np.bitwise_xor.accumulate(before) << np.uint8(bit)
    return low
