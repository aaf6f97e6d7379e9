"""Formats of checkpoints, against formulas that are written for one weight at a time."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf

from holdfast.kernels.quantized import QuantizedWeight
from holdfast.replicas.model.formats import UNUSED, Format
from pocket.quantize import RECIPES

OUT, IN = 136, 192
NAME = "model.layers.0.mlp.up_proj.weight"


def stored(recipe, name=NAME):
    torch.manual_seed(1)
    weight = recipe.quantized(torch.randn(OUT, IN) * (0.1 + torch.rand(OUT, 1)))
    return {name.removesuffix("weight") + part: each.contiguous() for part, each in recipe.store(weight).items()}


def read(form, name, tensors, inputs=IN):
    return form.read(name, {part: tensors[stored] for part, stored in form.stored(name, tensors).items()}, inputs)


def config_of(settings):
    return SimpleNamespace(quantization_config=settings)


# ---- one number


def e4m3(code):
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code):
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def byte(tensor, *place):
    return int(tensor.view(torch.uint8)[place])


def nibble(tensor, o, k):
    return byte(tensor, o, k // 2) >> 4 * (k % 2) & 15


def field(word, bits, place):
    return (int(word) & 0xFFFFFFFF) >> bits * place & (1 << bits) - 1


def packed(t, o, k, bits, group):
    each = 32 // bits
    zero = 1 << bits - 1
    if "weight_zero_point" in t:
        zero = field(t["weight_zero_point"][o // each, k // group], bits, o % each)
    return (field(t["weight_packed"][o, k // each], bits, k % each) - zero) * float(t["weight_scale"][o, k // group])


def awq(t, o, k):
    place = [0, 4, 1, 5, 2, 6, 3, 7][o % 8]
    code, zero = field(t["qweight"][k, o // 8], 4, place), field(t["qzeros"][k // 64, o // 8], 4, place)
    return (code - zero) * float(t["scales"][k // 64, o])


def gptq(t, o, k):
    group = int(t["g_idx"][k])
    code, zero = field(t["qweight"][k // 8, o], 4, k % 8), field(t["qzeros"][group, o // 8], 4, o % 8) + 1
    return (code - zero) * float(t["scales"][group, o])


FORMULAS = {
    "fp8": lambda t, o, k: e4m3(byte(t["weight"], o, k)) * float(t["weight_scale_inv"][o // 128, k // 128]),
    "fp8-channel": lambda t, o, k: e4m3(byte(t["weight"], o, k)) * float(t["weight_scale"][o, 0]),
    "fp8-tensor": lambda t, o, k: e4m3(byte(t["weight"], o, k)) * float(t["weight_scale"]),
    "mxfp4": lambda t, o, k: (
        e2m1(nibble(t["weight_packed"], o, k)) * 2.0 ** (byte(t["weight_scale"], o, k // 32) - 127)
    ),
    "nvfp4": lambda t, o, k: (
        e2m1(nibble(t["weight_packed"], o, k))
        * e4m3(byte(t["weight_scale"], o, k // 16))
        * float(1 / t["weight_global_scale"])
    ),
    "nvfp4-modelopt": lambda t, o, k: (
        e2m1(nibble(t["weight"], o, k)) * e4m3(byte(t["weight_scale"], o, k // 16)) * float(t["weight_scale_2"])
    ),
    "int8": lambda t, o, k: packed(t, o, k, 8, IN),
    "int4": lambda t, o, k: packed(t, o, k, 4, 64),
    "int4-asymmetric": lambda t, o, k: packed(t, o, k, 4, 32),
    "awq": awq,
    "gptq": gptq,
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_that_of_the_formula(name):
    recipe = RECIPES[name]
    tensors = stored(recipe)
    form = Format.of(config_of(recipe.config))
    weight = read(form, NAME, tensors)
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == (OUT, IN)
    found = weight.dequantized(torch.float64)
    parts = {part.removeprefix(NAME.removesuffix("weight")): each for part, each in tensors.items()}
    places = [(0, 0), (OUT - 1, IN - 1), *np.random.default_rng(0).integers(0, (OUT, IN), (400, 2)).tolist()]
    for o, k in places:
        assert found[o, k].item() == FORMULAS[name](parts, o, k)
    used = set(form.stored(NAME, tensors).values())
    assert all(UNUSED.search(each) for each in tensors.keys() - used)


def test_experts_are_read_together():
    """As gpt-oss stores them in MXFP4, and others in FP8, with scales of all kinds."""
    codes, scales = (torch.randint(0, 256, size, dtype=torch.uint8) for size in ((3, 40, 2, 16), (3, 40, 2)))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": codes, f"{name}_scales": scales % 60 + 90, f"{name}_bias": torch.zeros(3, 40)}
    weight = read(Format.of(config_of({"quant_method": "mxfp4"})), name, tensors)
    assert weight.shape == (3, 40, 64)
    assert weight.dequantized(torch.float64)[2, 7, 37] == e2m1(int(codes[2, 7, 1, 2]) >> 4) * 2.0 ** (
        int(scales[2, 7, 1]) % 60 - 37
    )
    numbers = torch.randn(3, 256, 128).to(torch.float8_e4m3fn)
    form = Format.of(config_of(RECIPES["fp8"].config))
    for shape in ((3,), (3, 1, 1), (3, 256), (3, 256, 1), (3, 2, 1), (3, 2, 1, 1, 1), (3, 4, 2)):
        scale = torch.rand(shape)
        found = read(form, name, {name: numbers, f"{name}_scale": scale}).dequantized(torch.float32)
        rows = {(3,): 1, (3, 256): 256}.get(shape, shape[1] if len(shape) > 1 else 1)
        columns = shape[2] if len(shape) == 3 else 1
        whole = scale.view(3, rows, 1, columns, 1).expand(3, rows, 256 // rows, columns, 128 // columns)
        assert torch.equal(found, numbers.float() * whole.reshape(3, 256, 128))


def test_inputs_ordered_by_activations_keep_their_groups():
    """GPTQ with `desc_act`: `g_idx` is in no order."""
    recipe = RECIPES["gptq"]
    tensors = stored(recipe)
    order = torch.randperm(IN)
    module = NAME.removesuffix("weight")
    tensors[module + "g_idx"] = tensors[module + "g_idx"][order]
    found = read(Format.of(config_of(recipe.config | {"desc_act": True})), NAME, tensors).dequantized(torch.float64)
    parts = {part.removeprefix(module): each for part, each in tensors.items()}
    for o, k in np.random.default_rng(0).integers(0, (OUT, IN), (200, 2)).tolist():
        assert found[o, k].item() == gptq(parts, o, k)


def test_integers_of_8_bits_and_other_versions_of_gptq():
    words = torch.tensor(struct.unpack("<2i", bytes([3, 250, 128, 127, 1, 2, 3, 4])), dtype=torch.int32)
    settings = {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}
    tensors = {
        "x.qweight": words.view(2, 1).repeat(1, 4),
        "x.qzeros": torch.tensor(struct.unpack("<i", bytes([128, 127, 0, 255])), dtype=torch.int32).view(1, 1),
        "x.scales": torch.ones(1, 4, dtype=torch.float16),
    }
    found = read(Format.of(config_of(settings)), "x.weight", tensors).dequantized(torch.float32)
    codes, zeros = torch.tensor([3, 250, 128, 127, 1, 2, 3, 4]), torch.tensor([128, 127, 0, 255])
    assert torch.equal(found, (codes - zeros[:, None]).float())
    ints = {"x.weight": torch.tensor([[-128, 127, 0, 5]], dtype=torch.int8), "x.weight_scale": torch.full((1, 1), 0.5)}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    form = Format.of(config_of(settings))
    assert read(form, "x.weight", ints).dequantized(torch.float32).tolist() == [[-64.0, 63.5, 0.0, 2.5]]
    ints["x.weight_zero_point"] = torch.full((1, 1), 3, dtype=torch.int8)
    assert read(form, "x.weight", ints).dequantized(torch.float32).tolist() == [[-65.5, 62.0, -1.5, 1.0]]


def test_plain_weights_stay_plain_and_halves_are_errors():
    form = Format.of(tf.LlamaConfig())
    plain = torch.randn(4, 4)
    assert read(form, "x.weight", {"x.weight": plain}) is plain
    assert not form.stored("x.weight", {})
    for name, recipe in RECIPES.items():
        tensors = stored(recipe)
        needed = Format.of(config_of(recipe.config)).stored(NAME, tensors).values()
        optional = ("g_idx", "zero_point", "qzeros", "weight_shape") if name != "gptq" else ("g_idx",)
        for missing in needed:
            if not missing.endswith(optional):
                rest = {part: each for part, each in tensors.items() if part != missing}
                with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj"):
                    read(Format.of(config_of(recipe.config)), NAME, rest)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weights quantized by bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "weights quantized by awq with version: gemv"),
        ({"quant_method": "awq", "bits": 3}, "weights quantized by awq with bits: 3"),
        ({"quant_method": "gptq", "bits": 2}, "weights quantized by gptq with bits: 2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "by modelopt with quant_algo: NVFP4_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "with format: marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
            },
            "with num_bits: 3",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
            "with transform_config",
        ),
    ],
)
def test_what_is_unknown_is_refused_by_its_name(settings, why):
    with pytest.raises(ValueError, match=why):
        Format.of(config_of(settings))
