"""Write a model folder with the matrices of its layers quantised, each rounded to nearest.

``python -m pocket.quantize DIR --format nvfp4 [--source pocket]``

The tensors have the layout of each format's own tools, so the folder is a small stand-in for a real checkpoint.
Embeddings, head, norms and biases stay as they are. There is no calibration: real 4-bit checkpoints lose less accuracy.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.kernels.quantized import E8M0, FP8, MIDDLE, Numbers, QuantizedWeight, quantized
from holdfast.loadgen.inflate import WEIGHTS

Parts: TypeAlias = dict[str, Tensor]
"""Stored tensors of one weight, by the suffix that replaces `weight` in its name."""

_UNQUANTISED = (
    "in_proj_a.",
    "in_proj_b.",
    "in_proj_ba.",
    "mlp.gate.",
)  # small matrices that checkpoints do not quantise
_ALL = 1 << 30  # a block of all inputs
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each place of a word


@dataclass(frozen=True, slots=True)
class Recipe:
    """One format: its part of config.json, the rounding of a weight, and its storage."""

    config: dict[str, Any]
    store: Callable[[QuantizedWeight], Parts]
    numbers: Numbers
    block: tuple[int, int]
    scales: torch.dtype = torch.float32
    asymmetric: bool = False

    def quantized(self, weight: Tensor) -> QuantizedWeight:
        return quantized(weight, self.numbers, self.block, self.scales, self.asymmetric)


def _compressed(form: str, bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": kind, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def _fp8(weight: QuantizedWeight) -> Parts:
    return {"weight": weight.codes.view(FP8), "weight_scale_inv": weight.scales}


def _fp8_channels(weight: QuantizedWeight) -> Parts:
    return {"weight": weight.codes.view(FP8), "weight_scale": weight.scales}


def _fp8_tensor(weight: QuantizedWeight) -> Parts:
    return {"weight": weight.codes.view(FP8), "weight_scale": weight.scales[0, 0], "input_scale": torch.tensor(1.0)}


def _mxfp4(weight: QuantizedWeight) -> Parts:
    return {"weight_packed": weight.codes, "weight_scale": weight.scales.view(torch.uint8)}


def _nvfp4(weight: QuantizedWeight) -> Parts:
    assert weight.global_scale is not None
    divisor = 1 / weight.global_scale[0]
    return {"weight_packed": weight.codes, "weight_scale": weight.scales, "weight_global_scale": divisor}


def _nvfp4_modelopt(weight: QuantizedWeight) -> Parts:
    assert weight.global_scale is not None
    return {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": weight.global_scale[0, 0]}


def _words(x: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits, one a byte [..., n], in words of 32 bits [..., n bits / 32]."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % (32 // bits)))
    return (x[..., ::2] | x[..., 1::2] << 4 if bits == 4 else x).contiguous().view(torch.int32)


def _integers(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes [out, in] and zero points [out, groups], one a byte."""
    codes = weight.codes
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    zero = torch.full_like(weight.scales, MIDDLE[weight.numbers], dtype=torch.uint8)
    return codes, zero if weight.zero_points is None else weight.zero_points


def _packed(weight: QuantizedWeight) -> Parts:
    codes, zero = _integers(weight)
    parts = {
        "weight_packed": _words(codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts if weight.zero_points is None else parts | {"weight_zero_point": _words(zero.T, weight.bits).T}


def _awq(weight: QuantizedWeight) -> Parts:
    codes, zero = (
        _words(each.T.reshape(each.shape[1], -1, 8)[..., _AWQ_ORDER].flatten(1), 4) for each in _integers(weight)
    )
    return {"qweight": codes, "qzeros": zero, "scales": weight.scales.T}


def _gptq(weight: QuantizedWeight) -> Parts:
    codes, zero = _integers(weight)
    return {
        "qweight": _words(codes, weight.bits).T,
        "qzeros": _words(zero.T - 1, weight.bits),
        "scales": weight.scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // weight.block[1]).int(),
    }


RECIPES: Final[dict[str, Recipe]] = {
    "fp8": Recipe({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8, "e4m3", (128, 128)),
    "fp8-channel": Recipe(_compressed("float-quantized", 8, "float"), _fp8_channels, "e4m3", (1, _ALL)),
    "fp8-tensor": Recipe({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_tensor, "e4m3", (_ALL, _ALL)),
    "mxfp4": Recipe(_compressed("mxfp4-pack-quantized", 4, "float"), _mxfp4, "e2m1", (1, 32), E8M0),
    "nvfp4": Recipe(_compressed("nvfp4-pack-quantized", 4, "float"), _nvfp4, "e2m1", (1, 16), FP8),
    "nvfp4-modelopt": Recipe(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4_modelopt, "e2m1", (1, 16), FP8
    ),
    "int8": Recipe(_compressed("pack-quantized", 8, "int"), _packed, "uint8", (1, _ALL), torch.bfloat16),
    "int4": Recipe(_compressed("pack-quantized", 4, "int", group_size=64), _packed, "uint4", (1, 64), torch.bfloat16),
    "int4-asymmetric": Recipe(
        _compressed("pack-quantized", 4, "int", group_size=32, symmetric=False),
        _packed,
        "uint4",
        (1, 32),
        torch.bfloat16,
        True,
    ),
    "awq": Recipe(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        _awq,
        "uint4",
        (1, 64),
        torch.float16,
        True,
    ),
    "gptq": Recipe(
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}, _gptq, "uint4", (1, 64), torch.float16
    ),
}


def save_quantized(source: Path, target: Path, recipe: Recipe) -> dict[str, QuantizedWeight]:
    """Copy a model folder of one file and quantise the matrices of its layers. Returns these by name."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    weights: dict[str, QuantizedWeight] = {}
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim == 2 and ".layers." in name and not any(each in name for each in _UNQUANTISED):
            weights[name] = recipe.quantized(tensor)
            parts = recipe.store(weights[name])
            stored |= {name.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": recipe.config}, indent=2))
    return weights


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="pocket quantize", description="Write a model folder in a quantised format.")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--format", choices=RECIPES, required=True)
    parser.add_argument("--source", default="pocket", help="'pocket' or a model folder of one safetensors file")
    options = parser.parse_args(argv)
    source = WEIGHTS if options.source == "pocket" else Path(options.source)
    save_quantized(source, options.target, RECIPES[options.format])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
