"""Formats of quantised checkpoints: which stored tensors make one weight, and how.

| method, format | of a weight `x.weight` are stored | becomes |
|---|---|---|
| fp8; float-quantized, mxfp8-quantized; FP8, MXFP8 | `weight`, `weight_scale_inv` or `weight_scale` | e4m3 |
| mxfp4 (gpt-oss), of a weight `x` | `x_blocks`, `x_scales` | e2m1, scales in e8m0 |
| mxfp4-pack-quantized | `weight_packed`, `weight_scale` | the same |
| nvfp4-pack-quantized | `weight_packed`, `weight_scale`, `weight_global_scale` (divides) | e2m1, scales in e4m3 |
| NVFP4 | `weight`, `weight_scale`, `weight_scale_2` (multiplies) | the same |
| int-quantized | `weight`, `weight_scale`, `weight_zero_point` | uint8 |
| pack-quantized | `weight_packed`, `_scale`, `_shape`, `_zero_point`, `_g_idx` | uint4, uint8 |
| awq, gptq | `qweight`, `qzeros`, `scales`, `g_idx` | uint4, uint8 |

Lower case: `quant_method`, or `format` of compressed-tensors; capitals: `quant_algo` of ModelOpt. The stored tensors
decide, weight by weight, so lists of modules that are not quantised need not be read, and formats can be mixed. Files
are not opened here. Activations are never quantised, whatever the configuration says.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.kernels.quantized import E8M0, FP8, MIDDLE, Numbers, QuantizedWeight, Weight

UNUSED: Final = re.compile(
    r"(\.|_)(input_scale|input_global_scale|[qkv]_scale|output_scale|prob_output_scale|kv_scale)$"
)
"""Names of scales for activations, KV and attention, which our products do not need."""

_BEHIND: Final = ("", "_packed", "_blocks", "_scale_inv", "_scale", "_scales", "_scale_2", "_global_scale")
_BEHIND_TOO: Final = ("_zero_point", "_shape", "_g_idx")  # of the name of a weight
_BESIDE: Final = ("qweight", "qzeros", "scales", "g_idx")  # in place of `weight`
_COMPRESSED: Final = (
    *("dense", "mixed-precision", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_MODELOPT: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION")
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs
_INTEGERS: Final[dict[int, Numbers]] = {4: "uint4", 8: "uint8"}


@dataclass(frozen=True, slots=True)
class Format:
    """How a checkpoint stores its weights.

    `method`: its name, empty of one that is not quantised. `block`: of FP8, as far as the sizes of scales do not tell.
    `group`: inputs with one scale, 0 where the configuration has no number. `more_zero`: added to GPTQ's zero points.
    `activations`: the configuration asks for quantised ones, too.
    """

    method: str = ""
    bits: int = 4
    block: tuple[int, int] = (128, 128)
    group: int = 0
    more_zero: int = 0
    activations: bool = False

    @staticmethod
    def of(config: Any) -> "Format":
        """The format in a model's configuration. Raises ValueError for an unknown method or option, naming it."""
        raw_settings = getattr(config, "quantization_config", None) or {}
        settings: dict[str, Any] = raw_settings if isinstance(raw_settings, dict) else raw_settings.to_dict()
        method = str(settings.get("quant_method", "")) if settings else ""
        if not settings or method == "mxfp4":
            return Format(method)
        reader = {
            "fp8": _fp8,
            "compressed-tensors": _compressed,
            "modelopt": _modelopt,
            "modelopt_fp4": _modelopt,
            "modelopt_mixed": _modelopt,
            "awq": _integers,
            "gptq": _integers,
        }.get(method)
        if reader is None:
            raise ValueError(f"weights quantized by {method or 'an unnamed method'}")
        return reader(method, settings)

    def stored(self, name: str, names: Container[str]) -> dict[str, str]:
        """The stored tensors of the weight `name`: the name of each by its part. Empty if there are none."""
        names_by_part = {part: name + part for part in (*_BEHIND, *_BEHIND_TOO) if name + part in names}
        if name.endswith(".weight"):
            module = name.removesuffix("weight")
            names_by_part |= {part: module + part for part in _BESIDE if module + part in names}
        return names_by_part

    def read(self, name: str, parts: Mapping[str, Tensor], inputs: int) -> Weight:
        """The weight `name` of the tensors of `stored`: as it is where it is one, else a quantised weight.

        `inputs`: of the weight, which not every format stores. Tensors may be on the device "meta".
        Raises ValueError for one that is not whole or of unknown kind.
        """
        try:
            return self._read(parts, inputs)
        except KeyError as error:
            raise ValueError(f"weight {name} is stored without its {str(error.args[0]).lstrip('_')}") from error
        except ValueError as error:
            raise ValueError(f"weight {name}: {error}") from error

    def _read(self, parts: Mapping[str, Tensor], inputs: int) -> Weight:
        if "qweight" in parts:
            return self._awq(parts) if self.method == "awq" else self._gptq(parts)
        if "_blocks" in parts:
            return _e2m1(parts["_blocks"].flatten(-2), parts["_scales"].view(E8M0))
        if "_packed" in parts:
            if parts["_packed"].dtype == torch.int32:
                return self._packed(parts, inputs)
            scale = parts["_scale"]
            if scale.dtype == torch.uint8:
                return _e2m1(parts["_packed"], scale.view(E8M0))
            return _e2m1(parts["_packed"], scale, 1 / parts["_global_scale"].float())
        weight = parts[""]
        if weight.dtype == torch.uint8:
            return _e2m1(weight, parts["_scale"], parts["_scale_2"].float())
        if weight.dtype in (FP8, torch.int8):
            return self._bytes(weight, parts)
        if len(parts) > 1:
            raise ValueError(f"{weight.dtype} with {', '.join(sorted(part for part in parts if part))} is unknown")
        return weight

    def _bytes(self, weight: Tensor, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """FP8 and int8: a scale for each weight, output, block or group of inputs."""
        scale = parts["_scale_inv"] if "_scale_inv" in parts else parts["_scale"]
        scale = scale.view(E8M0) if scale.dtype == torch.uint8 else scale
        *leading, outputs, inputs = weight.shape
        experts = weight[..., 0, 0].numel()
        if scale.numel() == experts:
            scale = scale.reshape(*leading, 1, 1).expand(*leading, outputs, 1).contiguous()
        elif scale.shape == weight.shape[:-1]:
            scale = scale[..., None]
        elif scale.ndim == len(leading) + 4:  # ModelOpt's blocks: [rows, 1, columns, 1]
            scale = scale.flatten(-2).flatten(-3, -2)
        rows, columns = scale.shape[-2:]
        block = _length(outputs, rows, self.block[0]), _length(inputs, columns, self.block[1])
        if weight.dtype == FP8:
            return QuantizedWeight("e4m3", weight.view(torch.uint8), scale, block)
        zero = parts.get("_zero_point")
        zero = None if zero is None else _unsigned(zero.to(torch.int8)).reshape(scale.shape)
        return QuantizedWeight("uint8", _unsigned(weight), scale, block, zero)

    def _packed(self, parts: Mapping[str, Tensor], inputs: int) -> QuantizedWeight:
        """compressed-tensors' integers in words of 32 bits: along the inputs, zero points along the outputs."""
        scale, outputs = parts["_scale"], parts["_packed"].shape[0]
        bits = parts["_packed"].shape[-1] * 32 // inputs
        codes = _unpacked(parts["_packed"], bits)[..., :inputs]
        scale = scale.reshape(outputs, -1)
        zero = parts.get("_zero_point")
        if zero is not None:
            if zero.dtype != torch.int32:
                raise ValueError(f"zero points in {zero.dtype}")
            zero = _unpacked(zero.T, bits).T[:outputs]
        return self._grouped(bits, codes, scale, zero, parts.get("_g_idx"))

    def _awq(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Words of eight outputs in an order of their own."""
        order = torch.tensor(_AWQ_ORDER)

        def outputs_first(words: Tensor) -> Tensor:
            return _unpacked(words, 4).view(*words.shape, 8)[..., order].flatten(-2).mT

        zero = outputs_first(parts["qzeros"]) if "qzeros" in parts else None
        return self._grouped(4, outputs_first(parts["qweight"]), parts["scales"].mT, zero, None)

    def _gptq(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """Words of inputs, zero points in words of outputs."""
        codes = _unpacked(parts["qweight"].mT, self.bits)
        zero = (_unpacked(parts["qzeros"], self.bits).mT + self.more_zero) & (2**self.bits - 1)
        return self._grouped(self.bits, codes, parts["scales"].mT, zero, parts.get("g_idx"))

    def _grouped(
        self, bits: int, codes: Tensor, scale: Tensor, zero: Tensor | None, groups: Tensor | None
    ) -> QuantizedWeight:
        """Integers [..., out, in] with groups of inputs, or with the group of each input [in]."""
        numbers = _INTEGERS.get(bits)
        if numbers is None or (bits == 4 and codes.shape[-1] % 2):
            raise ValueError(f"{bits} bits for each of {codes.shape[-1]} inputs")
        length = _length(codes.shape[-1], scale.shape[-1], self.group)
        if groups is not None and not groups.is_meta and not _in_order(groups, length):
            # Inputs were ordered by activations: each has its own copy of its group's numbers.
            scale, zero, length = scale[..., groups], None if zero is None else zero[..., groups], 1
        if zero is not None and not zero.is_meta and bool((zero == MIDDLE[numbers]).all()):
            zero = None
        packed = codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes
        zero = None if zero is None else zero.contiguous()
        return QuantizedWeight(numbers, packed.contiguous(), scale.contiguous(), (1, length), zero)


PLAIN: Final = Format()
"""Of checkpoints in 16 and 32 bits."""


def _fp8(method: str, settings: dict[str, Any]) -> Format:
    rows, columns = settings.get("weight_block_size") or (128, 128)
    return Format(method, block=(rows, columns), activations=settings.get("activation_scheme") is not None)


def _compressed(method: str, settings: dict[str, Any]) -> Format:
    groups = [group for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
    weights = [group["weights"] for group in groups]
    for name in {settings.get("format", "dense"), *(group.get("format") or "dense" for group in groups)}:
        _known(method, "format", name, _COMPRESSED)
    for bits in (each.get("num_bits", 8) for each in weights):
        _known(method, "num_bits", bits, (4, 8))
    _known(method, "sparsity_config.format", (settings.get("sparsity_config") or {}).get("format", "dense"), ("dense",))
    _known(method, "transform_config", settings.get("transform_config") or {}, ({},))
    blocks = {tuple(each["block_structure"]) for each in weights if each.get("block_structure")} or {(128, 128)}
    sizes = {each.get("group_size") or 0 for each in weights}
    return Format(
        method,
        block=min(blocks),
        group=max(0, sizes.pop()) if len(sizes) == 1 else 0,
        activations=any(group.get("input_activations") for group in groups),
    )


def _modelopt(method: str, settings: dict[str, Any]) -> Format:
    algorithm = str(settings.get("quant_algo")).upper()
    _known(method, "quant_algo", algorithm, _MODELOPT)
    return Format(method, activations=not algorithm.startswith(("W4A16", "FP8_PB_WO")))


def _integers(method: str, settings: dict[str, Any]) -> Format:
    bits = settings.get("bits", settings.get("w_bit", 4))
    _known(method, "bits", bits, (4,) if method == "awq" else (4, 8))
    group = settings.get("group_size", settings.get("q_group_size", 128))
    if method == "awq":
        _known(method, "version", str(settings.get("version", "gemm")).lower(), ("gemm",))
        return Format(method, group=max(0, group))
    form = settings.get("checkpoint_format") or "gptq"
    _known(method, "checkpoint_format", form, ("gptq", "gptq_v2"))
    _known(method, "dynamic", settings.get("dynamic") or {}, ({},))
    return Format(method, bits, group=max(0, group), more_zero=int(form == "gptq"))


def _known(method: str, option: str, value: object, known: Container[Any]) -> None:
    if value not in known:
        raise ValueError(f"weights quantized by {method} with {option}: {value}")


def _e2m1(codes: Tensor, scale: Tensor, global_scale: Tensor | None = None) -> QuantizedWeight:
    *leading, outputs, _ = codes.shape
    if global_scale is not None:
        global_scale = global_scale.reshape(*leading, 1, 1).expand(*leading, outputs, 1).contiguous()
    return QuantizedWeight("e2m1", codes, scale, (1, codes.shape[-1] * 2 // scale.shape[-1]), None, global_scale)


def _length(size: int, blocks: int, length: int) -> int:
    """The length of so many blocks of a dimension: `length` where that fits, else all alike."""
    if length and -(-size // length) == blocks:
        return length
    if size % blocks:
        raise ValueError(f"{blocks} scales for {size} rows or columns")
    return size // blocks


def _in_order(groups: Tensor, length: int) -> bool:
    return torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // length)


def _unsigned(x: Tensor) -> Tensor:
    """int8 as bytes with 128 for 0."""
    return x.view(torch.uint8) ^ 128


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Words of 32 bits [..., n] as their numbers of so many bits [..., 32 n / bits], the lowest bits first."""
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    halves = words.contiguous().view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
