"""Runs made from others: a merged run is a mean, and a deeper run writes the same text as the old one."""

import random
import shutil
from pathlib import Path

import torch

from holdfast.loadgen.inflate import WEIGHTS
from pocket.batches import Batch, collate, tokenized
from pocket.checkpoints import grown, main
from pocket.conversations import training_conversation
from pocket.model import PocketShape
from pocket.tokenizer import load
from pocket.train import Run, TrainConfig, new_run, open_run, save, train_step

SMALL = PocketShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
)
CONFIG = TrainConfig(warmup=1)
CPU = torch.device("cpu")


def batch(seeds: range) -> Batch:
    tokenizer = load(WEIGHTS)
    return collate([tokenized(training_conversation(seed), tokenizer, random.Random(seed)) for seed in seeds])


def grown_apart(folder: Path) -> tuple[Run, list[Run]]:
    """A run of one step and two that continue it, each saved in a folder of its own."""
    base = new_run(CONFIG, SMALL, CPU)
    train_step(base, batch(range(1)))
    runs = []
    for name, seeds in (("base", range(0)), ("one", range(1, 2)), ("other", range(2, 4))):
        (folder / name).mkdir()
        shutil.copy(WEIGHTS / "tokenizer.json", folder / name)
        save(base, folder / name)
        run = open_run(CONFIG, None, folder / name, CPU)
        if seeds:
            train_step(run, batch(seeds))
            save(run, folder / name)
        runs.append(run)
    return runs[0], runs[1:]


def test_weights_and_moments_are_means_by_tokens(tmp_path: Path) -> None:
    base, (one, other) = grown_apart(tmp_path)
    options = [part for name in ("one", "other") for part in ("--checkpoint", str(tmp_path / name))]
    main(["merge", "--base", str(tmp_path / "base"), *options, "--out", str(tmp_path / "new")])
    run = open_run(CONFIG, None, tmp_path / "new", CPU)
    seen = [each.tokens - base.tokens for each in (one, other)]
    assert seen[0] != seen[1]
    assert (run.tokens, run.step) == (base.tokens + sum(seen), one.step)
    share = seen[0] / sum(seen)
    for name, weight in run.model.state_dict().items():
        parts = [each.model.state_dict()[name] for each in (one, other)]
        torch.testing.assert_close(weight, share * parts[0] + (1 - share) * parts[1])
    moments = [each.optimizers[0].state_dict()["state"][0]["momentum_buffer"] for each in (run, one, other)]
    torch.testing.assert_close(moments[0], share * moments[1] + (1 - share) * moments[2])
    train_step(run, batch(range(4, 5)))


def test_new_layers_add_nothing_and_learn() -> None:
    old = new_run(CONFIG, SMALL, CPU)
    new = grown(old.average, old.model.shape, 2, CONFIG)
    learned = batch(range(2))
    with torch.no_grad():
        before = old.model.logits(learned.ids, learned.positions, learned.where)
        torch.testing.assert_close(new.model.logits(learned.ids, learned.positions, learned.where), before)
    assert new.model.shape.num_hidden_layers == 4
    train_step(new, learned)
    weights = new.model.state_dict()
    assert all(weights[f"model.layers.{n}.self_attn.o_proj.weight"].any() for n in (2, 3))
