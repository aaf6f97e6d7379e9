"""A minute of training: the loss falls, a run continues from its checkpoint, and the export equals the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pocket.export import export, main
from pocket.model import PocketShape
from pocket.tokenizer import load
from pocket.train import Run, TrainConfig, train

TINY = PocketShape(
    hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
SCHEDULE = {"steps": 16, "tokens_per_step": 512, "rate": 1e-2, "warmup": 4, "decay": 4}
CONFIG = TrainConfig(**SCHEDULE, tokenizer_conversations=40, checkpoint_every=8, probe_every=8, probe_count=2)
CPU = torch.device("cpu")
Trained = tuple[Path, Run, Run]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The folder, the run when it stopped, and the run that went on there."""
    folder = tmp_path_factory.mktemp("train")
    return folder, train(replace(CONFIG, steps=8, decay=0), TINY, folder, CPU), train(CONFIG, TINY, folder, CPU)


def test_loss_falls(trained: Trained) -> None:
    lines = [json.loads(line) for line in (trained[0] / "log.jsonl").open()]
    losses, probes = ([line[name] for line in lines if name in line] for name in ("loss", "held_out_loss"))
    assert losses[-1] < losses[0] - 0.3
    assert probes[-1] < probes[0]


def test_a_run_goes_on_where_it_stopped(trained: Trained) -> None:
    _, stopped, resumed = trained
    assert (stopped.step, stopped.used) == (8, 8)
    assert (resumed.step, resumed.used, resumed.pool) == (CONFIG.steps, CONFIG.steps, stopped.pool)


def test_export_is_the_trained_model(trained: Trained, tmp_path: Path) -> None:
    folder, _, run = trained
    weights = {name: p.detach() for name, p in run.model.named_parameters()}
    export(weights, TINY, folder, tmp_path / "out", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.tensor([load(folder).encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").ids])
    positions = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        ours = run.model.logits(ids, positions, torch.arange(ids.shape[1]))
        torch.testing.assert_close(model(ids).logits[0], ours, rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id[0] == tokenizer.eos_token_id
    assert model.config.max_position_embeddings >= 8192


def test_export_replaces_exports_and_nothing_else(trained: Trained, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    out.mkdir()
    given = ["--checkpoint", str(trained[0]), "--out", str(out)]
    assert main(given) == 0
    (out / "README.md").write_text("card")
    assert main(given) == 0
    assert {"README.md", "config.json"} < {file.name for file in out.iterdir()}
    (out / "notes").write_text("mine")
    assert main(given) == 2
    assert "notes" in capsys.readouterr().err
    assert (out / "notes").read_text() == "mine"
    file = tmp_path / "file"
    file.touch()
    assert main([*given[:3], str(file)]) == 2
