"""Agreement of greedy turns: an inflated Pocket writes what Pocket writes, a damaged one does not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.loadgen.inflate import WEIGHTS
from holdfast.loadgen.inflate.model import inflate
from pocket.agreement import agreement, main

SHAPE = {"model_type": "llama", "vocab_size": 1536, "tie_word_embeddings": True}
SHAPE |= {"hidden_size": 256, "intermediate_size": 448, "num_hidden_layers": 8}
SHAPE |= {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return inflate("pocket", str(folder), folder / "large", dtype=torch.float32)


def test_an_inflated_model_writes_the_same(inflated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(inflated), "--count", "3", "--device", "cpu"]) == 0
    assert "3 of 3 turns are the same" in capsys.readouterr().out


def test_a_damaged_model_differs(inflated: Path) -> None:
    path = inflated / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(weights, path, {"format": "pt"})
    result = agreement(inflated, WEIGHTS, 2)
    assert result.same < result.count
    assert result.first_difference is not None
