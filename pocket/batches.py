"""Training batches: conversations of one seed range as padded rows, with skipped positions and marked targets.

Batches come in pools, which worker processes may make ahead. The number of workers does not change the batches.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from holdfast.loadgen.bench.conversations import Conversation, spans
from pocket.conversations import MOST_TOOLS, training_conversation
from pocket.drills import drill
from pocket.pointing import HEADS, Choices, Pointing, collate_pointing, row_choices
from pocket.tokenizer import CONTEXT, load
from pocket.words import Lexicon, Split

POOL_BATCHES = 64
"""Batches in a pool. They are cut together, so that a batch has rows of similar length."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenized conversation: tokens, rotary positions, the assistant's tokens, and the targets of pointing."""

    ids: list[int]
    positions: list[int]
    learned: list[bool]
    choices: Choices = field(default_factory=lambda: {name: [] for name in HEADS})


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch: ``ids`` and ``positions`` are ``[rows, length]``.

    ``where`` are flat indices of the predicting tokens, and ``targets`` the tokens they predict. ``pointing`` has the
    targets of each of ``HEADS``.
    """

    ids: Tensor
    positions: Tensor
    where: Tensor
    targets: Tensor
    pointing: dict[str, Pointing]

    @property
    def tokens(self) -> int:
        """Tokens in the batch, padding included."""
        return self.ids.numel()

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``."""
        ids, positions, where, targets = (
            each.to(device) for each in (self.ids, self.positions, self.where, self.targets)
        )
        pointing = {name: each.to(device) for name, each in self.pointing.items()}
        return Batch(ids, positions, where, targets, pointing)


def tokenized(conversation: Conversation, tokenizer: Tokenizer, rng: random.Random, context: int = CONTEXT) -> Row:
    """The conversation as a row. In half of the rows, positions jump ahead at random span borders.

    The jumps give short rows every rotary distance up to the context, without the cost of long rows.
    """
    pieces = spans(conversation)
    encoded = tokenizer.encode_batch([span.text for span in pieces])
    ids: list[int] = []
    positions: list[int] = []
    learned: list[bool] = []
    total = sum(len(piece.ids) for piece in encoded)
    spare = context - total if rng.random() < 0.5 else 0
    at = 0
    for span, piece in zip(pieces, encoded, strict=True):
        if spare > 0 and not span.learned and rng.random() < 0.4:
            jump = int(rng.random() ** 3 * spare)
            at, spare = at + jump, spare - jump
        ids += piece.ids
        positions += range(at, at + len(piece.ids))
        learned += [span.learned] * len(piece.ids)
        at += len(piece.ids)
    choices = {
        name: [choice for choice in head_choices if choice.at < context]
        for name, head_choices in row_choices(conversation, pieces, encoded).items()
    }
    return Row(ids[:context], positions[:context], learned[:context], choices)


def collate(rows: list[Row]) -> Batch:
    """Pad rows on the right to a multiple of 32. Causal attention never reads the padding."""
    length = -(-max(len(row.ids) for row in rows) // 32) * 32
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    where: list[int] = []
    targets: list[int] = []
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        positions[index, : len(row.ids)] = torch.tensor(row.positions)
        for at in range(1, len(row.ids)):
            if row.learned[at]:
                where.append(index * length + at - 1)
                targets.append(row.ids[at])
    pointing = {name: collate_pointing([row.choices[name] for row in rows]) for name in HEADS}
    return Batch(ids, positions, torch.tensor(where), torch.tensor(targets), pointing)


def word_pieces(tokenizer: Tokenizer) -> list[str]:
    """The tokens of lower-case letters only, in a fixed order."""
    return sorted(token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha() and token.islower())


@dataclass(frozen=True, slots=True)
class Mix:
    """The kinds of conversations in a pool. The share ``narrow_share`` draws from few words each."""

    most_tools: int = MOST_TOOLS
    long_share: float = 0.0
    echo_share: float = 0.02
    drill_share: float = 0.0
    narrow_share: float = 0.6

    def draw(self, rng: random.Random, lex: Lexicon) -> Conversation:
        """The next conversation."""
        seed = rng.getrandbits(60)
        if rng.random() < self.narrow_share:
            lex = lex.narrowed(rng)
        if self.drill_share and rng.random() < self.drill_share:
            return drill(random.Random(seed), lex, self.most_tools)
        return training_conversation(
            seed, lex, most_tools=self.most_tools, long_share=self.long_share, echo_share=self.echo_share
        )


def batches(tokenizer: Tokenizer, seed: int, pool: int, tokens: int, mix: Mix = Mix()) -> Iterator[Batch]:
    """The batches of one pool. ``(seed, pool)`` determines them, so training can resume anywhere."""
    rng = random.Random(f"{seed}/{pool}")
    lex = Lexicon(Split.TRAIN, word_pieces(tokenizer))
    rows: list[Row] = []
    missing = POOL_BATCHES * tokens
    while missing > 0:
        row = tokenized(mix.draw(rng, lex), tokenizer, rng)
        rows.append(row)
        missing -= len(row.ids)
    rows.sort(key=lambda row: len(row.ids))
    groups: list[list[Row]] = [[]]
    for row in rows:
        if groups[-1] and (len(groups[-1]) + 1) * len(row.ids) > tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    for group in groups:
        yield collate(group)


@dataclass(frozen=True, slots=True)
class Pool:
    """The description of a pool: everything that determines its batches, except the tokenizer."""

    seed: int
    number: int
    tokens: int
    mix: Mix


def feed(pools: Iterable[Pool], folder: Path, workers: int) -> Iterator[list[Batch]]:
    """The batches of every pool, in order. ``folder`` has the tokenizer.

    Without workers a pool is made on demand. With workers, each makes one pool, and one more waits.
    """
    if not workers:
        tokenizer = load(folder)
        for pool in pools:
            yield pool_batches(pool, tokenizer)
        return
    # Not forked: the parent may have started CUDA.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (folder,)) as executor:
        waiting: deque[Future[list[Batch]]] = deque()
        try:
            for pool in pools:
                waiting.append(executor.submit(_make, pool))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def pool_batches(pool: Pool, tokenizer: Tokenizer) -> list[Batch]:
    """The batches of one pool."""
    return list(batches(tokenizer, pool.seed, pool.number, pool.tokens, pool.mix))


_tokenizers: list[Tokenizer] = []
"""The tokenizer of a worker process."""


def _start(folder: Path) -> None:
    torch.set_num_threads(1)
    _tokenizers.append(load(folder))


def _make(pool: Pool) -> list[Batch]:
    return pool_batches(pool, _tokenizers[0])
