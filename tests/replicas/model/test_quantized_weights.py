"""Quantised checkpoints: what is read is what transformers reads, or the dequantised weights, on a CPU and a GPU."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from families import paged_logits, plain_logits
from on_device import DEVICE, device_of
from safetensors.torch import load_file, save_file

from holdfast.kernels.linear_state import LinearStates
from holdfast.kernels.quantized import QuantizedWeight, concatenated
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import describe, why_not
from holdfast.replicas.model.smoothing import smooth
from holdfast.replicas.model.weights import read_weights
from pocket.quantize import RECIPES, save_quantized

SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
HYBRID = SIZES | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "qwen3": lambda: tf.Qwen3Config(**SIZES),
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(**HYBRID),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**HYBRID, num_experts=0),
}
TOKENS = np.random.default_rng(1).integers(0, 97, 18).astype(np.int32)


def save(family: str, folder: Path, form: str = "fp8") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A random model, quantised on disk. Returns it as it was before, and with the weights that stand on disk."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_((weight.shape[1] ** -0.5 * torch.randn_like(weight)).bfloat16())
    model.save_pretrained(folder / "plain")
    found = save_quantized(folder / "plain", folder, RECIPES[form])
    stored = deepcopy(model)
    stored.load_state_dict({name: weight.dequantized(torch.float32) for name, weight in found.items()}, strict=False)
    return model, stored


def logits(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    kind: type[Decoder] = Decoder,
    tokens: np.ndarray = TOKENS,
) -> torch.Tensor:
    """Of our decoder, for every token."""
    config = tf.AutoConfig.from_pretrained(folder)
    described = describe(config)
    kinds = described.kinds(128)
    kv = KVTensors.of(kinds, [8] * len(kinds), 16, dtype, device_of(kind))
    states = None
    if described.state is not None:
        states = LinearStates(described.state, described.linear_layers, 1, len(tokens), dtype, device_of(kind))
    smoothed = partial(smooth, sample=torch.arange(40), dtype=dtype) if int8 else None
    decoder = kind.load(str(folder), config, kv, 128, smoothed, int8, states)
    return paged_logits(decoder, kv, tokens, state=StateUse(-1, 0, held=len(tokens) - 1) if states else None)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_are_what_transformers_reads(family, tmp_path):
    save(family, tmp_path)
    settings = tf.FineGrainedFP8Config(dequantize=True)
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=settings)
    assert torch.allclose(logits(tmp_path), plain_logits(theirs.float().eval(), TOKENS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", RECIPES)
def test_every_format_is_read_and_multiplied_with(form, tmp_path):
    """By our decoder on a CPU, which dequantises, and on a GPU if there is one. The kernels' tests have all formats."""
    _, stored = save("llama", tmp_path, form)
    config = tf.AutoConfig.from_pretrained(tmp_path)
    weights = read_weights(str(tmp_path), describe(config), torch.float32, "cpu", keep=True)
    assert all(isinstance(block.op.out, QuantizedWeight) for block in list(weights.blocks)[::2])
    assert torch.allclose(logits(tmp_path), plain_logits(stored, TOKENS), atol=1e-4, rtol=1e-4)
    if DEVICE != "cpu":
        assert torch.allclose(logits(tmp_path, kind=GpuDecoder), plain_logits(stored, TOKENS), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_the_error_of_fp8_is_small_beside_the_model_in_bfloat16(family, tmp_path, record_property, caplog):
    """Of the logits' norm, of random weights: 10 to 12 % by the 3 bits of e4m3 in every product; what bfloat16 and
    int8 add to that.
    """
    exact = plain_logits(save(family, tmp_path)[0], TOKENS)
    with caplog.at_level("INFO"):
        found = {
            "fp8": off(logits(tmp_path), exact),
            "fp8 in bfloat16": off(logits(tmp_path, torch.bfloat16), exact),
            "fp8 in int8": off(logits(tmp_path, int8=True), exact),
        }
    for name, error in found.items():
        record_property(f"{family}: {name}", f"{error:.3f}")
    assert "quantised weights are turned into bfloat16" in caplog.text
    assert 0.05 < found["fp8"] < 0.13
    assert found["fp8 in bfloat16"] < found["fp8"] + 0.005
    assert found["fp8 in int8"] < found["fp8"] + 0.02


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_matrices_of_other_parts_and_orders_stay_as_they_are_on_a_gpu(family, tmp_path):
    """In `qwen3_next` here the parts of each key head are half a block: blocks become lower."""
    save(family, tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path)
    weights = read_weights(str(tmp_path), describe(config), torch.float32, "cpu", keep=True)
    kept = {
        name: each.block[0]
        for block in weights.blocks
        for name in block.op.__slots__
        if isinstance(each := getattr(block.op, name), QuantizedWeight)
    }
    assert kept == {"qkv": 128, "out": 128, "first": 128, "down": 128, "qkvz": 64 if family == "qwen3_next" else 128}
    if family == "qwen3_next":
        ours, plain = (logits(tmp_path, kind=kind, tokens=TOKENS[:4]) for kind in (GpuDecoder, Decoder))
        assert torch.allclose(ours, plain, atol=2e-4, rtol=1e-4)


def test_scales_may_be_in_another_file(tmp_path):
    save("qwen3", tmp_path)
    expected = logits(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: "a.safetensors" if "scale" in name else "b.safetensors" for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, tmp_path / file, {"format": "pt"})
    assert torch.equal(logits(tmp_path), expected)


def test_experts_in_mxfp4_are_read_as_gpt_oss_stores_them(tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = tf.AutoModelForCausalLM.from_config(tf.GptOssConfig(**sizes, sliding_window=16), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = concatenated([RECIPES["mxfp4"].quantized(each.T) for each in weights.pop(name)], experts=True)
        count, outputs, inputs = experts.shape
        weights[f"{name}_blocks"] = experts.codes.view(count, outputs, inputs // 32, 16)
        weights[f"{name}_scales"] = experts.scales.view(torch.uint8)
        model.get_parameter(name).data = experts.dequantized(torch.float32).mT.contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    for kind in (Decoder, GpuDecoder):
        assert torch.allclose(logits(tmp_path, kind=kind), plain_logits(model, TOKENS), atol=1e-3, rtol=1e-3)


def test_formats_can_be_mixed_and_scales_of_activations_and_kv_are_left(tmp_path, caplog):
    _, stored = save("llama", tmp_path, "nvfp4")
    weights, other = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn."
    for each in "qk":  # queries and keys in other formats than values: one product, which is dense
        found = RECIPES["fp8-tensor" if each == "q" else "int4"].quantized(
            stored.get_parameter(f"{other}{each}_proj.weight").detach()
        )
        for name in [name for name in weights if name.startswith(f"{other}{each}_proj.")]:
            del weights[name]
        parts = RECIPES["fp8-tensor" if each == "q" else "int4"].store(found)
        weights |= {f"{other}{each}_proj.{part}": tensor for part, tensor in parts.items()}
        stored.get_parameter(f"{other}{each}_proj.weight").data = found.dequantized(torch.float32)
    weights[f"{other}k_scale"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level("INFO"):
        assert torch.allclose(logits(tmp_path, kind=GpuDecoder), plain_logits(stored, TOKENS), atol=1e-3, rtol=1e-3)
    assert "2 scales of activations, keys and values are not used" in caplog.text


@pytest.mark.parametrize("end", ["weight", "weight_scale_inv"])
def test_half_of_a_weight_is_an_error_that_names_it(end, tmp_path):
    save("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights[f"model.layers.1.mlp.up_proj.{end}"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as raised:
        logits(tmp_path)
    assert raised.value.field == "model"


def test_other_formats_are_not_ours():
    config = CONFIGS["qwen3"]()
    config.quantization_config = {"quant_method": "awq", "bits": 3}
    assert describe(config) is None
    assert why_not(config) == "weights quantized by awq with bits: 3"
