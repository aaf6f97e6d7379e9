"""How fast the kernels are: each at the sizes of an 8B model, as a share of what the machine allows.

Shapes: 32 query heads over 8 KV heads of 128, bfloat16. A share of bandwidth counts the bytes that must be read and
written, a share of the rate the multiplications that a causal mask leaves. Products with the model's matrices, which
take most of a step, are compared with torch's.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, pad, scaled_dot_product_attention, scaled_mm

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.ceilings import Ceilings, Clock, measure_ceilings
from holdfast.kernels.linear_state import LinearShape
from holdfast.kernels.quantized import FP8, QuantizedWeight, quantized_reference
from holdfast.kernels.quantized_gpu import MOST_STREAMED, QuantizedMatrix
from holdfast.kernels.sampling_gpu import cutoffs
from holdfast.kernels.stream_gpu import MOST_ROWS, streamed
from holdfast.loadgen.bench.kernels import linear_state
from holdfast.loadgen.bench.kernels.correctness import QUANTISED, Paged, paged, relative_error
from holdfast.loadgen.bench.parts import Deadline, Figures, Lines, Report

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


def time_kernels(report: Report) -> None:
    """Measure the ceilings, then every kernel, each as a part of its own."""
    clocks: list[Clock] = []

    def clock() -> Clock:
        if not clocks:
            clocks.append(Clock())
        return clocks[0]

    def ceilings(deadline: Deadline) -> Lines:
        yield "ceilings", asdict(measure_ceilings(clock()))

    def part(name: str, measure: Measure, deadline: Deadline) -> Lines:
        yield name, measure(clock(), Ceilings(**report.found["parts"]["ceilings"]["ceilings"]))

    report.run("ceilings", ceilings, _PART_S)
    for name, measure in (
        *_decodes(),
        *_chunks(),
        *_products(),
        *_quantised(),
        *_linear_layers(),
        *_cuts(),
    ):
        report.run(name, partial(part, name, measure), _PART_S)


def _world(spans: list[tuple[int, int]], page_size: int = 16, common: int = 0) -> Paged:
    return paged(spans, KV_HEADS, HEADS // KV_HEADS, DIM, torch.bfloat16, "cuda", page_size, common)


def _read(spans: list[tuple[int, int]], common: int = 0) -> int:
    """Bytes of keys and values, those in common once."""
    return 4 * KV_HEADS * DIM * (sum(start + length - common for start, length in spans) + common)


def _multiplied(cached: int, new: int) -> float:
    return 4.0 * HEADS * DIM * (new * cached + new * (new + 1) / 2)


def _attend(world: Paged) -> Callable[[], Tensor]:
    return lambda: attend_gpu(world.q, world.kv, 0, world.batch, _SCALE, 0, 0.0)


def _of_bandwidth(seconds: float, moved: float, ceilings: Ceilings) -> Figures:
    return {"seconds": seconds, "share": moved / seconds / ceilings.bandwidth, "of": "bandwidth"}


def _of_rate(seconds: float, operations: float, ceilings: Ceilings) -> Figures:
    return {"seconds": seconds, "share": operations / seconds / ceilings.rate, "of": "rate"}


def _decodes() -> Iterator[tuple[str, Measure]]:
    """Decoding and verifying read every cached key and value once."""
    for name, (spans, page_size, common) in DECODES.items():

        def measure(
            clock: Clock,
            ceilings: Ceilings,
            spans: list[tuple[int, int]] = spans,
            page_size: int = page_size,
            common: int = common,
        ) -> Figures:
            seconds = clock.seconds(_attend(_world(spans, page_size, common)))
            return _of_bandwidth(seconds, _read(spans, common), ceilings)

        yield f"attention, {name}", measure


def _chunks() -> Iterator[tuple[str, Measure]]:
    """Chunks are bound by the matrix units; compared with torch's own attention over the same tensors, not paged."""
    for cached, new in ((0, 8192), (0, 2048), (28672, 4096), (3000, 64), (3000, 256)):

        def measure(clock: Clock, ceilings: Ceilings, cached: int = cached, new: int = new) -> Figures:
            seconds = clock.seconds(_attend(_world([(cached, new)])))
            figures = _of_rate(seconds, _multiplied(cached, new), ceilings)
            return figures if cached else figures | _by_torch(clock, new, seconds)

        yield f"attention, {new} over {cached}", measure


def _by_torch(clock: Clock, new: int, ours: float) -> dict[str, Any]:
    q = torch.randn(1, HEADS, new, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, KV_HEADS, new, DIM, dtype=torch.bfloat16, device="cuda").unbind(0)
    torchs = clock.seconds(partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True))
    return {"torchs_seconds": torchs, "over_torch": ours / torchs}


def _products() -> Iterator[tuple[str, Measure]]:
    """Products with the matrices of a layer and the output layer: few rows read them, many multiply.

    The share is ours up to the rows that our kernel takes, beyond it is torch's.
    """
    widths = {
        "query, key, value": (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
        "output of attention": (HEADS * DIM, HIDDEN),
        "gate and up": (HIDDEN, 2 * INNER),
        "down": (INNER, HIDDEN),
        "output layer": (HIDDEN, VOCABULARY),
    }
    for rows in (1, 8, 16, 64, 4096):
        for name, (inputs, outputs) in widths.items():
            if rows > 64 and outputs == VOCABULARY:
                continue  # a chunk draws once

            def measure(
                clock: Clock, ceilings: Ceilings, rows: int = rows, inputs: int = inputs, outputs: int = outputs
            ) -> Figures:
                weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
                x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
                torchs = clock.seconds(lambda: linear(x, weight))
                if rows > 64:
                    return _of_rate(torchs, 2.0 * rows * inputs * outputs, ceilings)
                if rows > MOST_ROWS:
                    return _of_bandwidth(torchs, weight.nbytes, ceilings)
                ours = clock.seconds(lambda: streamed(x, weight))
                share = weight.nbytes / torchs / ceilings.bandwidth
                return _of_bandwidth(ours, weight.nbytes, ceilings) | {
                    "torchs_share": share,
                    "over_torch": ours / torchs,
                }

            yield f"product{'' if rows <= MOST_ROWS else ' by torch'}, {name}, {rows} rows", measure


def _quantised() -> Iterator[tuple[str, Measure]]:
    """Products with quantised weights of a 27B, compared with torch's in bfloat16 and, in FP8, with its own product."""
    for form, rows, (name, (inputs, outputs)) in product(
        QUANTISED, (1, 16, 128, 2048), {"gate and up": (5120, 34816), "down": (17408, 5120)}.items()
    ):

        def measure(
            clock: Clock,
            ceilings: Ceilings,
            form: str = form,
            rows: int = rows,
            inputs: int = inputs,
            outputs: int = outputs,
        ) -> Figures:
            weight = QUANTISED[form](torch.randn(outputs, inputs, device="cuda"))
            matrix, plain = QuantizedMatrix(weight), weight.dequantized(torch.bfloat16)
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            ours, torchs = clock.seconds(lambda: matrix(x)), clock.seconds(lambda: linear(x, plain))
            found = {"torchs_seconds": torchs, "over_torch": ours / torchs}
            if form == "FP8 blocks":
                found |= _scaled(x, weight, clock, ours)
            if rows <= MOST_STREAMED:
                read = sum(each.nbytes for each in weight.tensors if each is not None)
                return _of_bandwidth(ours, read, ceilings) | found
            return _of_rate(ours, 2.0 * rows * inputs * outputs, ceilings) | found

        yield f"product with {form}, {name}, {rows} rows", measure


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
        error = relative_error(multiplied()[:16], exact)
        seconds = clock.seconds(multiplied)
    except (RuntimeError, ValueError) as error_of:  # not on this device
        return {"scaled_failed": f"{error_of}"[:200]}
    return {"scaled_seconds": seconds, "over_scaled": ours / seconds, "scaled_error": error}


def _linear_layers() -> Iterator[tuple[str, Measure]]:
    """Gated DeltaNet and Mamba-2, beside fla-core where it is installed and torch's plain form."""
    for model, shape in linear_state.SHAPES.items():
        for name, work in linear_state.WORKS.items():

            def measure(
                clock: Clock, ceilings: Ceilings, shape: LinearShape = shape, work: linear_state.Work = work
            ) -> Figures:
                return linear_state.beside(shape, work, "cuda", torch.bfloat16, clock.seconds)

            yield f"linear layer, {model}, {name}", measure


def _cuts() -> Iterator[tuple[str, Measure]]:
    """Filters, compared with torch's sort of the same logits."""
    yield "cutoffs of 64 rows, top_k and top_p", partial(_cut, 50)
    yield "cutoffs of 64 rows, top_p", partial(_cut, 0)


def _cut(k: int, clock: Clock, ceilings: Ceilings) -> Figures:
    rows, logits = 64, torch.randn(64, VOCABULARY, device="cuda")
    top_k = torch.full((rows,), k, dtype=torch.int32, device="cuda")
    settings = (top_k, torch.full((rows,), 0.8, device="cuda"), torch.zeros(rows, device="cuda"))
    ours = clock.seconds(partial(cutoffs, logits, *settings))
    return {"seconds": ours, "over_torchs_sort": ours / clock.seconds(lambda: logits.sort(dim=-1, descending=True))}
