"""Pointing: the loss of a head is the attention that looks elsewhere, row by row."""

import random

import torch
from tokenizers import Tokenizer

from holdfast.loadgen.pocket.batches import Row, collate, tokenized
from holdfast.loadgen.pocket.conversations import Conversation, lexicon, training_conversation
from holdfast.loadgen.pocket.drills import drill
from holdfast.loadgen.pocket.export import WEIGHTS
from holdfast.loadgen.pocket.pointing import HEADS, pointing_loss, pointing_losses
from holdfast.loadgen.pocket.tokenizer import load
from holdfast.loadgen.pocket.words import Split

TOKENIZER: Tokenizer = load(WEIGHTS)


def drawn(seed: int) -> Conversation:
    rng = random.Random(seed)
    return drill(rng, lexicon(Split.TRAIN), 8) if rng.random() < 0.5 else training_conversation(seed)


def row_of(conversation: Conversation, context: int = 8192) -> Row:
    return tokenized(conversation, TOKENIZER, random.Random(3), context)


def test_the_loss_is_the_attention_that_looks_elsewhere() -> None:
    torch.manual_seed(5)
    drawn_rows = [row_of(drawn(seed)) for seed in range(6)]
    batch = collate(drawn_rows)
    rows, length = batch.ids.shape
    q, k = torch.randn(rows, length, 16), torch.randn(rows, length, 16)
    for which in HEADS:
        right = []
        for row, choices in enumerate(found.choices[which] for found in drawn_rows):
            for choice in choices:
                attention = (k[row, : choice.at + 1] @ q[row, choice.at] / 4).softmax(-1)
                right.append(attention[list(choice.tokens)].sum())
        torch.testing.assert_close(pointing_loss(q, k, batch.pointing[which]), -torch.stack(right).log().mean())


def test_a_model_of_one_layer_points_with_the_one_it_has() -> None:
    batch = collate([row_of(drawn(4))])
    seen = torch.randn(2, 1, 3, batch.ids.shape[1], 16).unbind(0)
    losses = pointing_losses([seen], batch.pointing)
    expected = [
        pointing_loss(seen[0][:, head], seen[1][:, head], batch.pointing[name]) for name, (_, head) in HEADS.items()
    ]
    torch.testing.assert_close(losses, expected)


def test_a_batch_without_tools_has_no_loss() -> None:
    batch = collate([Row([1, 2], [0, 1], [False, True])])
    assert pointing_loss(torch.ones(1, 32, 8), torch.ones(1, 32, 8), batch.pointing["tools"]) == 0
