"""One layer of experts with random weights: routing and products, as shares of what the device allows.

Few tokens must read the experts that they chose, many must multiply. Codes of quantised weights are random bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from holdfast.kernels.ceilings import Ceilings
from holdfast.kernels.experts import Routing
from holdfast.kernels.experts_gpu import GpuExperts, choose_experts, route_gpu
from holdfast.kernels.linear import Activation
from holdfast.kernels.quantized import E8M0, QuantizedWeight, Weight
from holdfast.loadgen.bench.parts import Figures, Lines

_FEW = 64  # tokens, up to which reading is the bound


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model's layer, and the numbers of its weights."""

    model: str
    routing: Routing
    width: int
    inner: int
    activation: Activation
    numbers: Literal["bfloat16", "fp8", "mxfp4"]

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.width * self.inner


_GPT_OSS, _QWEN = Routing(32, 4, "softmax", True), Routing(256, 8, "softmax", True)
FULL = (
    ExpertShape("gpt-oss-20b", _GPT_OSS, 2880, 2880, "clamped", "mxfp4"),
    ExpertShape("qwen3.6-35b-a3b", _QWEN, 2048, 512, "silu", "fp8"),
    ExpertShape("qwen3.6-35b-a3b", _QWEN, 2048, 512, "silu", "bfloat16"),
)
SMALL = (
    ExpertShape("small", Routing(4, 2, "softmax", True), 64, 32, "clamped", "mxfp4"),
    ExpertShape("small", Routing(4, 2, "sigmoid", True), 64, 32, "silu", "fp8"),
)


def shares(gpu: bool, ceilings: Ceilings, seconds: Callable[[Callable[[], object]], float]) -> Lines:
    """Each layer with few tokens, as a decode step or a verification has, and with many, as a prefill has."""
    device = "cuda" if gpu else "cpu"
    for shape in FULL if gpu else SMALL:
        gate_up, down = (
            _random(shape, *sizes, device) for sizes in ((2 * shape.inner, shape.width), (shape.width, shape.inner))
        )
        stored = sum(_bytes(each) for each in (gate_up, down)) / shape.routing.experts
        layer = GpuExperts(gate_up, down, shape.activation)
        del gate_up, down
        for tokens in (1, 8, _FEW, 512, 2048, 8192) if gpu else (1, _FEW + 1):
            name = f"{shape.model}, {shape.numbers}, {tokens} tokens"
            yield name, _share(shape, layer, tokens, stored, device, ceilings, seconds)
        for each in choose_experts([layer], shape.routing.chosen, seconds) if gpu else ():
            times = {"ours_s": each.ours_s, "torchs_s": each.torchs_s, "torchs_over_ours": each.torchs_s / each.ours_s}
            yield f"{shape.model}, {shape.numbers}, {each.tokens} tokens, by torch", times


def _share(
    shape: ExpertShape,
    layer: GpuExperts,
    tokens: int,
    stored: float,
    device: str,
    ceilings: Ceilings,
    seconds: Callable[[Callable[[], object]], float],
) -> Figures:
    """`stored`: bytes of an expert."""
    x = torch.randn(tokens, shape.width, device=device).to(torch.bfloat16)
    logits = torch.randn(tokens, shape.routing.experts, device=device)
    chosen, weights = route_gpu(logits, shape.routing)
    taken = seconds(partial(layer, x, chosen, weights))
    figures = {"seconds": taken, "route_s": seconds(partial(route_gpu, logits, shape.routing))}
    used = len(torch.bincount(chosen.flatten()).nonzero())
    if tokens <= _FEW:
        ideal, bound = used * stored / ceilings.bandwidth, "bandwidth"
    else:
        ideal, bound = 2.0 * chosen.numel() * shape.weights / ceilings.rate, "rate"
    return figures | {"experts": used, "ideal_s": ideal, "share": ideal / taken, "of": bound}


def _random(shape: ExpertShape, outputs: int, inputs: int, device: str) -> Weight:
    experts = shape.routing.experts
    if shape.numbers == "bfloat16":
        return torch.randn(experts, outputs, inputs, device=device, dtype=torch.bfloat16) / math.sqrt(inputs)
    bytes_of = (experts, outputs, inputs // (2 if shape.numbers == "mxfp4" else 1))
    codes = torch.randint(0, 256, bytes_of, dtype=torch.uint8, device=device)
    if shape.numbers == "fp8":  # of the bits of NaN none
        scales = torch.full((experts, -(-outputs // 128), -(-inputs // 128)), 2.0**-10, device=device)
        return QuantizedWeight("e4m3", codes & 0xF7, scales, (128, 128))
    powers = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8, device=device)
    return QuantizedWeight("e2m1", codes, powers.view(E8M0), (1, 32))


def _bytes(weight: Weight) -> int:
    tensors = weight.tensors if isinstance(weight, QuantizedWeight) else (weight,)
    return sum(each.nbytes for each in tensors if each is not None)
