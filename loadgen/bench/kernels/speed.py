"""How fast the kernels are: each at the sizes of an 8B model, as a share of what the machine allows.

Shapes: 32 query heads over 8 KV heads of 128, bfloat16. A share of bandwidth counts the bytes that must be read and
written, a share of the rate the multiplications that a causal mask leaves. Products with the model's matrices, which
take most of a step, are compared with torch's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, pad, scaled_dot_product_attention, scaled_mm

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.ceilings import Ceilings, Clock, measure_ceilings
from holdfast.kernels.experts import Routing
from holdfast.kernels.experts_gpu import GpuExperts, route_gpu
from holdfast.kernels.kv import FP8 as FP8_STORE
from holdfast.kernels.linear import Activation
from holdfast.kernels.linear_state import LinearShape
from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, Weight, quantized, quantized_reference
from holdfast.kernels.quantized_gpu import MOST_STREAMED, QuantizedMatrix
from holdfast.kernels.sampling_gpu import cutoffs
from holdfast.kernels.stream_gpu import MOST_ROWS, streamed
from holdfast.loadgen.bench.kernels import linear_state
from holdfast.loadgen.bench.kernels.paged import paged
from holdfast.loadgen.bench.parts import Deadline, Figures, Lines, Once, Report

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCABULARY = 32, 8, 128, 4096, 14336, 128256
_SCALE = DIM**-0.5
_PART_S = 30.0

Measure: TypeAlias = Callable[[Clock, Ceilings], Figures]

DECODES = {  # sequences of (cached, new), cells of a page, cells that all have in common
    "decode, 1 at 1k": ([(1023, 1)], 16, 0),
    "decode, 1 at 4k": ([(4095, 1)], 16, 0),
    "decode, 64 at 4k": ([(4095, 1)] * 64, 16, 0),
    "decode, 16 at 8k": ([(8191, 1)] * 16, 16, 0),
    "decode, 16 at 32k": ([(32767, 1)] * 16, 16, 0),
    "decode, 16 at 32k, pages of 1": ([(32767, 1)] * 16, 1, 0),
    "verify 8, 1 at 4k": ([(4088, 8)], 16, 0),
    "verify 8, 16 at 32k": ([(32760, 8)] * 16, 16, 0),
    "verify 16, 16 at 8k": ([(8176, 16)] * 16, 16, 0),
    "verify 17, 16 at 8k": ([(8175, 17)] * 16, 16, 0),
    "decode, 32 at 8k, 7k in common": ([(8191, 1)] * 32, 16, 7168),
}


WIDTHS = {
    "query, key, value": (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
    "output of attention": (HEADS * DIM, HIDDEN),
    "gate and up": (HIDDEN, 2 * INNER),
    "down": (INNER, HIDDEN),
    "output layer": (HIDDEN, VOCABULARY),
}
QUANTISED = {
    "FP8 blocks": partial(quantized, numbers="e4m3", block=(128, 128)),
    "MXFP4": partial(quantized, numbers="e2m1", block=(1, 32), scales=E8M0),
    "NVFP4": partial(quantized, numbers="e2m1", block=(1, 16), scales=FP8),
    "int4 in groups": partial(quantized, numbers="uint4", block=(1, 128), scales=torch.float16, asymmetric=True),
}
QUANTISED_WIDTHS = {"gate and up": (5120, 34816), "down": (17408, 5120)}  # of a 27B


EXPERTS: dict[
    str, tuple[Routing, int, int, Activation, str]
] = {  # routing, width, inner width, activation, numbers of the weights
    "gpt-oss-20b": (Routing(32, 4, "softmax", True), 2880, 2880, "clamped", "mxfp4"),
    "qwen3.6-35b-a3b": (Routing(256, 8, "softmax", True), 2048, 512, "silu", "fp8"),
    "qwen3.6-35b-a3b in bfloat16": (Routing(256, 8, "softmax", True), 2048, 512, "silu", "bfloat16"),
}


def time_kernels(report: Report, words: Sequence[str] = ("",)) -> None:
    """Measure the ceilings, then every kernel whose name contains one of these words, each as a part of its own."""
    clock = Once(Clock)

    def ceilings(deadline: Deadline) -> Lines:
        yield "ceilings", asdict(measure_ceilings(clock()))

    def part(name: str, measure: Measure, deadline: Deadline) -> Lines:
        yield name, measure(clock(), Ceilings(**report.found["parts"]["ceilings"]["ceilings"]))

    report.run("ceilings", ceilings, _PART_S)
    for name, measure in timings():
        if any(word in name for word in words):
            report.run(name, partial(part, name, measure), _PART_S)


def timings() -> Iterator[tuple[str, Measure]]:
    """Every timing by name."""
    for name, case in DECODES.items():
        yield f"attention, {name}", partial(_decode, *case)
    for name in ("decode, 1 at 4k", "decode, 64 at 4k", "decode, 16 at 32k", "verify 8, 16 at 32k"):
        yield f"attention, {name}, FP8 pages", partial(_decode, *DECODES[name], stored=FP8_STORE)
    for cached, new in ((0, 8192), (0, 2048), (28672, 4096), (3000, 64), (3000, 256)):
        yield f"attention, {new} over {cached}", partial(_chunk, cached, new)
    for rows, (name, (inputs, outputs)) in product((1, 8, 16, 64, 4096), WIDTHS.items()):
        if rows <= 64 or outputs != VOCABULARY:  # a chunk draws once
            by = "product" if rows <= MOST_ROWS else "product by torch"
            yield f"{by}, {name}, {rows} rows", partial(_product, rows, inputs, outputs)
    for form, rows, (name, (inputs, outputs)) in product(QUANTISED, (1, 16, 128, 2048), QUANTISED_WIDTHS.items()):
        yield f"product with {form}, {name}, {rows} rows", partial(_quantised, form, rows, inputs, outputs)
    for (model, shape), (name, work) in product(linear_state.SHAPES.items(), linear_state.WORKS.items()):
        yield f"linear layer, {model}, {name}", partial(_linear_layer, shape, work)
    for (model, layer), tokens in product(EXPERTS.items(), (1, 8, 64, 512, 2048, 8192)):
        yield f"experts, {model}, {tokens} tokens", partial(_experts, *layer, tokens)
    yield "cutoffs of 64 rows, top_k and top_p", partial(_cut, 50)
    yield "cutoffs of 64 rows, top_p", partial(_cut, 0)


def _of_bandwidth(seconds: float, moved: float, ceilings: Ceilings) -> Figures:
    return {"seconds": seconds, "share": moved / seconds / ceilings.bandwidth, "of": "bandwidth"}


def _of_rate(seconds: float, operations: float, ceilings: Ceilings) -> Figures:
    return {"seconds": seconds, "share": operations / seconds / ceilings.rate, "of": "rate"}


def _attend(
    spans: list[tuple[int, int]], page_size: int = 16, common: int = 0, stored: torch.dtype = torch.bfloat16
) -> Callable[[], Tensor]:
    world = paged(spans, KV_HEADS, HEADS // KV_HEADS, DIM, torch.bfloat16, "cuda", page_size, common, stored)
    return lambda: attend_gpu(world.q, world.kv, 0, world.batch, _SCALE, 0, 0.0)


def _decode(
    spans: list[tuple[int, int]],
    page_size: int,
    common: int,
    clock: Clock,
    ceilings: Ceilings,
    stored: torch.dtype = torch.bfloat16,
) -> Figures:
    """Decoding and verifying read every cached key and value once, those in common once for all."""
    cells = sum(start + length - common for start, length in spans) + common
    moved = 2 * stored.itemsize * KV_HEADS * DIM * cells
    return _of_bandwidth(clock.seconds(_attend(spans, page_size, common, stored)), moved, ceilings)


def _chunk(cached: int, new: int, clock: Clock, ceilings: Ceilings) -> Figures:
    """Chunks are bound by the matrix units; compared with torch's own attention over the same tensors, not paged."""
    seconds = clock.seconds(_attend([(cached, new)]))
    figures = _of_rate(seconds, 4.0 * HEADS * DIM * (new * cached + new * (new + 1) / 2), ceilings)
    if cached:
        return figures
    q = torch.randn(1, HEADS, new, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, KV_HEADS, new, DIM, dtype=torch.bfloat16, device="cuda").unbind(0)
    torchs = clock.seconds(partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True))
    return figures | {"torchs_seconds": torchs, "over_torch": seconds / torchs}


def _product(rows: int, inputs: int, outputs: int, clock: Clock, ceilings: Ceilings) -> Figures:
    """Few rows read the matrix, many multiply. The share is ours up to the rows that our kernel takes, then torch's."""
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
    torchs = clock.seconds(lambda: linear(x, weight))
    if rows > 64:
        return _of_rate(torchs, 2.0 * rows * inputs * outputs, ceilings)
    if rows > MOST_ROWS:
        return _of_bandwidth(torchs, weight.nbytes, ceilings)
    ours = clock.seconds(lambda: streamed(x, weight))
    beside = {"torchs_share": weight.nbytes / torchs / ceilings.bandwidth, "over_torch": ours / torchs}
    return _of_bandwidth(ours, weight.nbytes, ceilings) | beside


def _quantised(form: str, rows: int, inputs: int, outputs: int, clock: Clock, ceilings: Ceilings) -> Figures:
    """A product with quantised weights beside torch's in bfloat16 and, in FP8, beside torch's own product."""
    weight = QUANTISED[form](torch.randn(outputs, inputs, device="cuda"))
    matrix, plain = QuantizedMatrix(weight), weight.dequantized(torch.bfloat16)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
    ours, torchs = clock.seconds(lambda: matrix(x)), clock.seconds(lambda: linear(x, plain))
    beside = {"torchs_seconds": torchs, "over_torch": ours / torchs}
    if form == "FP8 blocks":
        beside |= _scaled(x, weight, clock, ours)
    if rows <= MOST_STREAMED:
        read = sum(each.nbytes for each in weight.tensors if each is not None)
        return _of_bandwidth(ours, read, ceilings) | beside
    return _of_rate(ours, 2.0 * rows * inputs * outputs, ceilings) | beside


def _scaled(x: Tensor, weight: QuantizedWeight, clock: Clock, ours: float) -> Figures:
    """torch's product of FP8 blocks with activations in groups, which has to quantise these; its error, too."""
    padded = pad(weight.scales, (0, -weight.scales.shape[1] % 4)).T  # as cuBLAS wants it: in fours

    def multiplied() -> Tensor:
        groups = x.float().view(len(x), -1, 128)
        scale = groups.abs().amax(-1) / torch.finfo(FP8).max
        numbers = (groups / scale[..., None]).to(FP8).view(x.shape)
        by_group = (scale.T.contiguous().T, ScalingType.BlockWise1x128)
        return scaled_mm(numbers, weight.codes.view(FP8).T, *by_group, padded, ScalingType.BlockWise128x128)

    try:
        exact = quantized_reference(x[:16], weight)
        error = float((multiplied()[:16].double() - exact.double()).norm() / exact.double().norm())
        seconds = clock.seconds(multiplied)
    except (RuntimeError, ValueError) as error_of:  # not on this device
        return {"scaled_failed": f"{error_of}"[:200]}
    return {"scaled_seconds": seconds, "over_scaled": ours / seconds, "scaled_error": error}


def _linear_layer(shape: LinearShape, work: linear_state.Work, clock: Clock, ceilings: Ceilings) -> Figures:
    """Gated DeltaNet or Mamba-2, beside fla-core where it is installed and torch's plain form."""
    return linear_state.beside(shape, work, "cuda", torch.bfloat16, clock.seconds)


def _experts(
    routing: Routing,
    width: int,
    inner: int,
    activation: Activation,
    numbers: str,
    tokens: int,
    clock: Clock,
    ceilings: Ceilings,
) -> Figures:
    """Routing and a layer of experts. Few tokens must read the experts that they chose, many must multiply."""
    gate_up, down = (
        _expert_weights(routing.experts, *sizes, numbers) for sizes in ((2 * inner, width), (width, inner))
    )
    layer = GpuExperts(gate_up, down, activation)
    x = torch.randn(tokens, width, device="cuda").to(torch.bfloat16)
    logits = torch.randn(tokens, routing.experts, device="cuda")
    chosen, weights = route_gpu(logits, routing)
    seconds = clock.seconds(partial(layer, x, chosen, weights))
    route = {"route_s": clock.seconds(partial(route_gpu, logits, routing))}
    if tokens > 64:
        return _of_rate(seconds, 2.0 * chosen.numel() * 3 * width * inner, ceilings) | route
    used = len(torch.bincount(chosen.flatten()).nonzero())
    stored = sum(tensor.nbytes for each in (gate_up, down) for tensor in _tensors(each) if tensor is not None)
    return _of_bandwidth(seconds, used * stored / routing.experts, ceilings) | route | {"experts": used}


def _expert_weights(experts: int, outputs: int, inputs: int, numbers: str) -> Weight:
    """Random weights; of quantised ones the codes are random bits."""
    if numbers == "bfloat16":
        plain: Tensor = torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        return plain
    size = (experts, outputs, inputs // (2 if numbers == "mxfp4" else 1))
    codes = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    if numbers == "fp8":  # without the bits of NaN
        scales = torch.full((experts, -(-outputs // 128), -(-inputs // 128)), 2.0**-10, device="cuda")
        return QuantizedWeight("e4m3", codes & 0xF7, scales, (128, 128))
    powers = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8, device="cuda")
    return QuantizedWeight("e2m1", codes, powers.view(E8M0), (1, 32))


def _tensors(weight: Weight) -> Sequence[Tensor | None]:
    return weight.tensors if isinstance(weight, QuantizedWeight) else (weight,)


def _cut(k: int, clock: Clock, ceilings: Ceilings) -> Figures:
    rows, logits = 64, torch.randn(64, VOCABULARY, device="cuda")
    top_k = torch.full((rows,), k, dtype=torch.int32, device="cuda")
    settings = (top_k, torch.full((rows,), 0.8, device="cuda"), torch.zeros(rows, device="cuda"))
    ours = clock.seconds(partial(cutoffs, logits, *settings))
    return {"seconds": ours, "over_torchs_sort": ours / clock.seconds(lambda: logits.sort(dim=-1, descending=True))}
