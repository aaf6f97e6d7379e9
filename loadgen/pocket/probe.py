"""A quick score while training: the share of held-out assistant turns that greedy decoding would reproduce exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from holdfast.loadgen.pocket.batches import Row, collate, tokenized
from holdfast.loadgen.pocket.conversations import lexicon, write
from holdfast.loadgen.pocket.model import Pocket
from holdfast.loadgen.pocket.words import Split


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """Mean loss and shares of exactly right turns; a turn is right when every token of it is the most likely one."""

    loss: float
    calls: float
    texts: float


def probe_rows(tokenizer: Tokenizer, count: int, seed: int) -> list[Row]:
    """Held-out conversations with one to eight tools."""
    rng = random.Random(seed)
    lex = lexicon(Split.HELD_OUT)
    return [
        tokenized(write(rng, lex, tools=rng.randint(1, 8), turns=rng.randint(2, 8)), tokenizer, rng)
        for _ in range(count)
    ]


@torch.no_grad()
def probe(model: Pocket, rows: list[Row], tokenizer: Tokenizer) -> ProbeScore:
    """Score ``rows`` in one teacher-forced pass."""
    mark = tokenizer.token_to_id("<tool_call>")
    right: dict[bool, list[bool]] = {True: [], False: []}
    losses: list[float] = []
    device = next(model.parameters()).device
    for row in rows:
        batch = collate([row]).to(device)
        logits = model.logits(batch.ids, batch.positions, batch.where)
        losses.append(float(torch.nn.functional.cross_entropy(logits, batch.targets)))
        hits = (logits.argmax(-1) == batch.targets).tolist()
        turn_hits: list[bool] = []
        wrote: list[int] = []
        for index, (at, target) in enumerate(zip(batch.where.tolist(), batch.targets.tolist(), strict=True)):
            turn_hits.append(hits[index])
            wrote.append(target)
            if index + 1 == len(hits) or batch.where[index + 1] != at + 1:
                right[wrote[0] == mark].append(all(turn_hits))
                turn_hits, wrote = [], []
    return ProbeScore(sum(losses) / len(losses), _share(right[True]), _share(right[False]))


def _share(values: list[bool]) -> float:
    return sum(values) / max(1, len(values))
