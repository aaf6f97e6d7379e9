"""Cells by model and GPU: the shapes are those of the published models, and the formula is the simulator's."""

import json
from pathlib import Path

import pytest
import torch

from holdfast.cluster import cli, sizing
from holdfast.cluster.sizing import GB, MODELS, Shape
from holdfast.kernels.linear_state import LinearShape, LinearStates
from holdfast.loadgen.simulator import machines
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError

PUBLISHED = {  # parameters in billions, by the models' own cards
    "Qwen3-0.6B": 0.6,
    "Qwen3-4B": 4.0,
    "Qwen2.5-7B": 7.61,
    "Mistral-7B-v0.3": 7.25,
    "Llama-3.1-8B": 8.03,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3.5-9B": 9.0,
    "Qwen3.5-27B": 27.0,
    "Llama-3.1-70B": 70.6,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_were_published(name: str) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_cells_are_what_the_simulator_counts() -> None:
    profile = machines.profile("8b-h200")
    assert sizing.fit(MODELS["Llama-3.1-8B"], 141 * GB).cells == pytest.approx(profile.cells, rel=0.001)


def test_the_shipped_models_shape_is_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    from holdfast.cluster import checks

    folder = checks.model_folder("pocket")
    shape = sizing.read_shape(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert shape.parameters == pytest.approx(stored, rel=0.01)
    assert cli.main(["sizing", "pocket", "--gpu-memory", "1"]) == 0
    assert "KiB beside 0.0 GiB of weights, in 0.9 of" in capsys.readouterr().out


def test_a_model_that_does_not_fit_has_no_cells() -> None:
    assert sizing.fit(MODELS["Llama-3.1-70B"], 80 * GB).cells == 0
    assert "too large" in sizing.advice(MODELS["Llama-3.1-70B"], 80 * GB)
    rows = sizing.table(MODELS, {"H100": 80})
    assert rows[0] == ("model", "weights", "a cell", "a state", "H100 80")
    assert rows[-1][-1] == "-"


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": "many"}, {"num_experts": 8}])
def test_what_is_no_dense_decoder_is_refused(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        sizing.read_shape(tmp_path)


def test_a_shape_is_read_as_transformers_writes_it() -> None:
    config = {
        "num_attention_heads": 16,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    assert sizing.shape_of(config) == MODELS["Qwen3-0.6B"]
    assert sizing.shape_of({"text_config": config, "tie_word_embeddings": True}) == MODELS["Qwen3-0.6B"]
    del config["head_dim"], config["num_key_value_heads"]
    assert sizing.shape_of(config) == Shape(28, 1024, 3072, 16, 16, 64, 151936, tied=True)


def test_a_hybrid_shares_its_memory_between_cells_and_states() -> None:
    config = {
        "num_attention_heads": 24,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "intermediate_size": 17408,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    shape = sizing.shape_of({"text_config": config})
    assert shape == MODELS["Qwen3.5-27B"]
    assert shape.cell_bytes() == 2 * 16 * 4 * 256 * 2
    linear = LinearShape(16, 48, 128, 128, kernel=4)
    slots = LinearStates(linear, layers=1, slots=1, window=17, dtype=torch.bfloat16, device="meta")
    assert shape.state_bytes() == 48 * slots.slot_bytes
    held = sizing.fit(shape, 80 * GB)
    used = held.cells * shape.cell_bytes() + held.slots * shape.state_bytes()
    left = 0.9 * 80 * GB - shape.weight_bytes()
    assert left - shape.state_bytes() < used <= left
    told = sizing.advice(shape, 80 * GB)
    assert f"{held.slots:,} states of 163 MiB for about {held.slots // 4} programs" in told


def test_the_page_has_the_table_of_today_and_the_example_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "sizing.md").read_text()
    assert cli.main(["sizing", "--markdown"]) == 0
    assert page.split("<!-- sizing -->\n")[1].split("<!-- /sizing -->")[0] == capsys.readouterr().out
    held = sizing.fit(MODELS["Llama-3.1-8B"], 80 * GB).cells
    ceiling = EngineConfig().admission_ceiling
    programs = (held * ceiling - 4000) / 26000
    assert f"({held / 1000:.0f}k x {ceiling:g} - 4k) / 26k, about {programs:.0f} programs" in page
