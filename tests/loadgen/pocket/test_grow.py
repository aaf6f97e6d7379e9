"""A grown Pocket says what the old one says, until it is trained."""

from dataclasses import replace

import torch

from holdfast.loadgen.pocket.batches import collate, tokenized
from holdfast.loadgen.pocket.conversations import training_conversation
from holdfast.loadgen.pocket.export import WEIGHTS
from holdfast.loadgen.pocket.grow import grown
from holdfast.loadgen.pocket.model import PocketShape
from holdfast.loadgen.pocket.tokenizer import load
from holdfast.loadgen.pocket.train import TrainConfig, new_run, train_step

SMALL = PocketShape(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16)


def test_new_layers_add_nothing_and_learn() -> None:
    import random

    config = TrainConfig(warmup=1)
    old = new_run(config, replace(SMALL, num_key_value_heads=1), torch.device("cpu"))
    new = grown(old.average, old.model.shape, 2, config)
    batch = collate([tokenized(training_conversation(seed), load(WEIGHTS), random.Random(seed)) for seed in range(2)])
    with torch.no_grad():
        before = old.model.logits(batch.ids, batch.positions, batch.where)
        torch.testing.assert_close(new.model.logits(batch.ids, batch.positions, batch.where), before)
    assert new.model.shape.num_hidden_layers == 4
    train_step(new, batch)
    weights = new.model.state_dict()
    assert all(weights[f"model.layers.{n}.self_attn.o_proj.weight"].any() for n in (2, 3))
