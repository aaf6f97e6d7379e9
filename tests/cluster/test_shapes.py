"""The sizes of models: against transformers' own modules, what was published, and what the engine's tensors take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from holdfast.cluster import shapes
from holdfast.cluster.known_models import MODELS
from holdfast.kernels.linear_state import LinearShape, LinearStates
from holdfast.replicas.errors import ConfigError

PUBLISHED = {  # parameters in billions, by the models' own cards; with vision towers where the card counts them
    "Qwen3-0.6B": 0.6,
    "Qwen3-4B": 4.0,
    "Qwen2.5-7B": 7.61,
    "Mistral-7B-v0.3": 7.25,
    "Llama-3.1-8B": 8.03,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Llama-3.1-70B": 70.6,
    "Qwen3.5-9B": 9.0,
    "Qwen3.5-27B": 27.0,
    "Qwen3.6-35B-A3B": 35.0,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-Coder-Next": 80.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "Gemma-3-270M": 0.27,
    "Gemma-3-1B": 1.0,
    "Gemma-4-26B-A4B": 25.2,
    "Gemma-4-31B": 30.7,
    "Laguna-XS-2.1": 33.0,
    "Nemotron-3-Nano-30B-A3B": 31.6,
    "Nemotron-3-Super-120B-A12B": 120.6,
    "GLM-4.5-Air": 106.0,
    "GLM-4.7": 355.0,
    "GLM-4.7-Flash": 30.0,
    "MiniMax-M2": 229.0,
    "Mistral-Small-4-119B": 119.0,
    "DeepSeek-V3.2": 671.0,
    "GLM-5": 744.0,
    "Kimi-K2": 1026.0,
}
LAYERS = 8  # at least one of each kind in every family
BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types")


def test_parameters_are_those_that_were_published() -> None:
    for name, billions in PUBLISHED.items():
        assert MODELS[name].shape.parameters / 1e9 == pytest.approx(billions, rel=0.013), name


@pytest.mark.parametrize("name", {known.config["model_type"]: name for name, known in MODELS.items()}.values())
def test_parameters_are_those_of_transformers(name: str) -> None:
    """Those of a model's first layers, and of these the experts', by a module without memory."""
    config = dict(MODELS[name].config)
    config |= {key: config[key][:LAYERS] for key in BY_LAYER if key in config}
    if "layers_block_type" not in config:
        config["num_hidden_layers"] = min(LAYERS, config["num_hidden_layers"])
    own = AutoConfig.for_model(**config)
    with torch.device("meta"):
        module = AutoModel.from_config(own)
    parts = {name: each.numel() for name, each in module.named_parameters()}
    experts = sum(count for name, count in parts.items() if ".experts." in name and "bias" not in name)
    shape = shapes.shape_of(config)
    assert shape.parameters == pytest.approx(sum(parts.values()) + (0 if shape.tied else shape.table), rel=1e-3)
    assert shape.experts == experts
    assert (experts == 0) == (shape.chosen == 0)


def test_active_parameters_are_those_that_a_token_meets() -> None:
    """As the names of the models say, about."""
    for name, billions in {"Qwen3-30B-A3B": 3, "gpt-oss-120b": 5.1, "Gemma-4-26B-A4B": 3.8, "GLM-4.5-Air": 12}.items():
        assert MODELS[name].shape.active / 1e9 == pytest.approx(billions, rel=0.07), name
    dense = MODELS["Qwen3-8B"].shape
    assert dense.active == dense.parameters - dense.table


@pytest.mark.parametrize(("name", "layers"), [("Qwen3.5-27B", 17), ("GLM-4.5-Air", 47), ("Qwen3-Coder-Next", 13)])
def test_a_layer_for_multi_token_prediction_counts_where_it_drafts(name: str, layers: int) -> None:
    config = MODELS[name].config
    plain, more = shapes.shape_of(config), shapes.shape_of(config, mtp=True)
    assert sum(each.layers for each in more.kv) == layers
    assert more.cell_bytes() * (layers - 1) == plain.cell_bytes() * layers
    assert more.parameters > plain.parameters + 2 * plain.hidden**2
    assert shapes.shape_of(MODELS["Qwen3-8B"].config, mtp=True) == MODELS["Qwen3-8B"].shape


def test_windows_have_kv_of_their_own() -> None:
    full, window = sorted(MODELS["Gemma-4-31B"].shape.kv, key=lambda kv: kv.layers)
    assert (full.layers, full.bytes(), full.window) == (10, 10 * 2 * 4 * 512 * 2, 0)
    assert (window.layers, window.bytes(), window.window) == (50, 50 * 2 * 16 * 256 * 2, 1024)
    shape = MODELS["Gemma-4-31B"].shape
    assert shape.sequence_bytes(1000) == 1000 * shape.cell_bytes()
    assert shape.sequence_bytes(9000) == 9000 * full.bytes() + 1024 * window.bytes()
    assert full.bytes(2, "int8") == full.bytes(2, "fp8") + 10 * 2 * 4 * 4 == 10 * 2 * 4 * (512 + 4)


@pytest.mark.parametrize(
    ("name", "layers", "linear"),
    [
        ("Qwen3.5-27B", 48, LinearShape(16, 48, 128, 128, kernel=4)),
        ("Nemotron-3-Nano-30B-A3B", 23, LinearShape(8, 64, 128, 64, kernel=4, rule="mamba2")),
    ],
)
def test_states_are_as_large_as_their_tensors(name: str, layers: int, linear: LinearShape) -> None:
    slots = LinearStates(linear, layers=1, slots=1, window=17, dtype=torch.bfloat16, device="meta")
    assert MODELS[name].shape.state_bytes() == layers * slots.slot_bytes


def test_the_shipped_model_is_its_file() -> None:
    from safetensors import safe_open

    from holdfast.cluster import model_files

    folder = model_files.model_folder("pocket")
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert shapes.shape_of(shapes.read_config(folder)).parameters == pytest.approx(stored, rel=0.01)


def test_what_a_configuration_leaves_out_is_its_classs_default() -> None:
    """A Gemma 3 with a vision tower writes hardly any number, and older ones no types of layers."""
    given = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 12},
    }
    shape = shapes.shape_of({**given, "tie_word_embeddings": True})
    assert [(each.layers, each.window) for each in shape.kv] == [(10, 4096), (2, 0)]
    assert shape.vocabulary == 262208


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda config: config.clear(), "does not describe a decoder"),
        (lambda config: config.update(num_attention_heads="many"), "does not describe a decoder"),
        (lambda config: config.update(model_type="deepseek_v4"), "deepseek_v4 are not sized"),
    ],
)
def test_what_is_no_decoder_is_refused(wrong: Callable[[dict[str, Any]], None], words: str) -> None:
    config = dict(MODELS["Llama-3.1-8B"].config)
    wrong(config)
    with pytest.raises(ConfigError, match=words):
        shapes.shape_of(config)


@pytest.mark.parametrize(
    ("given", "format"),
    [
        ({}, "bf16"),
        ({"torch_dtype": "float32"}, "fp32"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
                }
            },
            "fp8",
        ),
    ],
)
def test_the_format_is_that_of_the_configuration(given: dict[str, Any], format: str) -> None:
    assert shapes.format_of(given) == format


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match="quantized by aqlm are not sized"):
        shapes.format_of({"quantization_config": {"quant_method": "aqlm"}})


def test_bytes_of_weights_by_format() -> None:
    shape = MODELS["gpt-oss-120b"].shape
    assert shape.stored_bytes("bf16") == 2 * shape.parameters
    assert shape.stored_bytes("mxfp4") == pytest.approx(65.2e9, rel=0.01)  # its files, by its card
    assert shape.stored_bytes("fp32") == 4 * shape.parameters
    tied = MODELS["Qwen3-4B"].shape
    assert tied.int8_bytes(2) == tied.dense + 2 * tied.table


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        shapes.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="no JSON object"):
        shapes.read_config(tmp_path)
