"""Whether the kernels are right: each at odd sizes, against the same maths in float64.

`paged` makes the sequences in a paged store that the cases, and the timings of `speed`, are about.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.attention import paged_attention_reference
from holdfast.kernels.attention_gpu import attend_gpu, launch_items
from holdfast.kernels.attention_plan import make_plan
from holdfast.kernels.experts import Routing, experts_reference, route
from holdfast.kernels.experts_gpu import GpuExperts, route_gpu
from holdfast.kernels.kv import FP8 as FP8_STORE
from holdfast.kernels.kv import PagedBatch, in_numbers, in_store, page_runs
from holdfast.kernels.layer import add_norm_reference, rotate_and_store_reference, silu_and_mul_reference
from holdfast.kernels.layer_gpu import add_norm, rotate_and_store, silu_and_mul
from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, Weight, concatenated, quantized, quantized_reference
from holdfast.kernels.quantized_gpu import QuantizedMatrix
from holdfast.kernels.sampling import Filters, filter_logits, gumbel_argmax_reference, row_keys
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify, draw_and_verify_reference
from holdfast.kernels.stream_gpu import streamed, streamed_reference
from holdfast.loadgen.bench.kernels import linear_state
from holdfast.loadgen.bench.parts import Figures

TOLERANCES = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
QUANTISED = {
    "FP8 blocks": partial(quantized, numbers="e4m3", block=(128, 128)),
    "MXFP4": partial(quantized, numbers="e2m1", block=(1, 32), scales=E8M0),
    "NVFP4": partial(quantized, numbers="e2m1", block=(1, 16), scales=FP8),
    "int4 in groups": partial(quantized, numbers="uint4", block=(1, 128), scales=torch.float16, asymmetric=True),
}

Calls = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""The kernel's call and the exact one."""
Named = tuple[str, Callable[[], Calls]]


@dataclass(frozen=True, slots=True)
class Case:
    """`make` returns the kernel's call and the exact one. It makes the tensors, so that each case fails by itself."""

    name: str
    tolerance: float
    make: Callable[[], Calls]

    def verify(self) -> Figures:
        """Run twice and compare. A NaN, or other bits in the second call, is wrong."""
        call, exact = self.make()
        first, second = call(), call()
        error, same_bits = relative_error(first, exact()), torch.equal(first, second)
        verdict = "ok" if error <= self.tolerance and same_bits else "WRONG"
        return {"verdict": verdict, "error": error, "tolerance": self.tolerance, "same_bits": int(same_bits)}


def cases(device: str, large: bool) -> Iterator[Case]:
    """All of them: those of bfloat16 first, which is what models run in. In the interpreter those of float32 only."""
    for dtype, tolerance in TOLERANCES.items():
        if not large and dtype == torch.bfloat16:
            continue
        made = (
            *_attention_cases(dtype, device, large),
            *_layer_cases(dtype, device),
            *_expert_cases(dtype, device, large),
            *linear_state.cases(dtype, device, large),
        )
        for name, make in made:
            yield Case(f"{name}, {str(dtype).removeprefix('torch.')}", tolerance, make)
    yield Case("draw and verify", 0.0, partial(_draw, device))
    yield Case("cutoffs of top_k, top_p and min_p", 0.0, partial(_cut, device))


# ---- sequences in a paged store ----


@dataclass(slots=True)
class Paged:
    """Sequences in a store: queries of the tokens of a step, and where everything lies."""

    q: Tensor
    kv: Tensor
    batch: PagedBatch


def paged(
    spans: Sequence[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    page_size: int = 16,
    common: int = 0,
    stored: torch.dtype | None = None,
) -> Paged:
    """Sequences of (cached, new) tokens over pages in random order; cells nobody wrote hold NaN.

    The first `common` cells are the same pages for all. `stored`: the dtype of the store; None: `dtype`.
    """
    rng = np.random.default_rng(0)
    used = [-(-(start + length) // page_size) for start, length in spans]
    order = rng.permutation(sum(used) + 3).astype(np.int32)
    table = np.full((len(spans), max(used)), order[-1], np.int32)
    at = 0
    for row, (count, (start, _)) in enumerate(zip(used, spans, strict=True)):
        table[row, :count] = order[at : at + count]
        shared = min(common, start) // page_size
        table[row, :shared] = order[:shared]
        at += count
    torch.manual_seed(0)
    kv = torch.full((1, 2, len(order), page_size, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    for row, (start, length) in enumerate(spans):
        cells = _cells(table[row], np.arange(start + length), page_size, device)
        kv[0].flatten(1, 2)[:, cells] = torch.randn(2, start + length, kv_heads, dim, device=device).to(dtype)
    new = [
        _cells(table[row], np.arange(start, start + length), page_size, device)
        for row, (start, length) in enumerate(spans)
    ]
    tokens = sum(length for _, length in spans)
    batch = PagedBatch(
        page_size=page_size,
        page_table=torch.from_numpy(table).to(device),
        rows=range(len(spans)),
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        cells=torch.cat(new),
        runs=[page_runs(table[row, :count]) for row, count in enumerate(used)],
    )
    return Paged(
        torch.randn(tokens, kv_heads * group, dim, device=device).to(dtype), in_store(kv, stored or dtype), batch
    )


def _cells(row: "np.ndarray[tuple[int], np.dtype[np.int32]]", positions: object, size: int, device: str) -> Tensor:
    where = np.asarray(positions)
    return torch.from_numpy(row[where // size].astype(np.int64) * size + where % size).to(device)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Of the whole tensor, by norm."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


# ---- attention ----


def _attention_cases(dtype: torch.dtype, device: str, large: bool) -> Iterator[Named]:
    scale = 8 if large else 1
    mixed = [(37 * scale, 1), (300 * scale, 1), (0, 41 * scale), (90 * scale, 7), (5, 1)]
    common = [(620, 1), (700, 1), (530, 3)]
    spans: dict[str, tuple[list[tuple[int, int]], dict[str, Any], int, float]] = {
        "mixed": (mixed, {"page_size": 16}, 0, 0.0),
        "pages of 1": (mixed, {"page_size": 1}, 0, 0.0),
        "window": (mixed, {}, 33, 0.0),
        "softcap": (mixed, {}, 0, 5.0),
        "sinks": (mixed, {}, 0, 0.0),
        "prefix in common": (common, {"common": 512}, 0, 0.0),
        "FP8 pages": (mixed, {"stored": FP8_STORE}, 0, 0.0),
        "FP8 pages, window": (mixed, {"stored": FP8_STORE}, 33, 0.0),
    }
    yield "attention, every number of FP8", partial(_codes, dtype, device)
    for shape in ((2, 4, 128), (3, 1, 64)) if large else ((1, 3, 16),):
        for name, (each, how, window, softcap) in spans.items():
            full = f"attention, {name}, {' x '.join(map(str, shape))}"
            made = partial(paged, each, *shape, dtype, device, **how)
            yield full, partial(_attention, made, window, softcap, False, name == "sinks")
            if not window and not softcap and (large or name == "mixed"):
                yield f"{full}, as in a graph", partial(_attention, made, 0, 0.0, True)


def _attention(
    make: Callable[[], Paged], window: int, softcap: float, in_a_graph: bool, with_sinks: bool = False
) -> Calls:
    world = make()
    sinks = torch.randn(world.q.shape[1], device=world.q.device) if with_sinks else None

    def call() -> Tensor:
        if in_a_graph:
            return _as_in_a_graph(world)
        return attend_gpu(world.q, world.kv, 0, world.batch, 0.2, window, softcap, sinks)

    def exact() -> Tensor:
        return paged_attention_reference(
            world.q, world.kv, 0, world.batch, 0.2, window or None, softcap or None, torch.float64, sinks
        )

    return call, exact


def _codes(dtype: torch.dtype, device: str) -> Calls:
    """A token that sees itself alone, so that its value comes out as it is: each number over what it should be."""
    world = paged([(0, 1)], 1, 1, 256, dtype, device, stored=FP8_STORE)
    codes = torch.arange(256, dtype=FP8_STORE, device=device)
    world.kv[0, 1].flatten(0, 1)[world.batch.cells, 0] = codes.where(codes & 127 != 127, 1)
    value = in_numbers(world.kv[0, 1].flatten(0, 1)[world.batch.cells, 0], torch.float64)
    known = value.where(value != 0, 1.0)
    return lambda: attend_gpu(world.q, world.kv, 0, world.batch, 1.0, 0, 0.0)[:, 0] / known, lambda: value / known


def _as_in_a_graph(world: Paged) -> Tensor:
    """Attention with room for more items and merges than there are, and few programs that share them."""

    plan = make_plan(world.q, world.batch, world.kv.shape[4], 0)
    counts = [
        torch.tensor([len(items)], dtype=torch.int32, device=world.q.device) for items in (plan.narrow, plan.wide)
    ]
    more = torch.full((5, 6), 1 << 20, dtype=torch.int32, device=world.q.device)  # would lead far outside
    plan.narrow, plan.wide = torch.cat((plan.narrow, more)), torch.cat((plan.wide, more))
    plan.merges = torch.cat((plan.merges, torch.zeros_like(plan.merges[:1]).expand(3, -1)))
    plan.counts, plan.programs = (counts[0], counts[1]), (3, 3)
    out = torch.full_like(world.q, torch.nan)
    launch_items(world.q, world.kv, 0, world.batch, plan, out, 0.2, 0, 0.0)
    return out


# ---- what is around it ----


def _layer_cases(dtype: torch.dtype, device: str) -> Iterator[Named]:
    yield "norm of a sum", partial(_norm, dtype, device)
    yield "silu and multiply", partial(_silu, dtype, device)
    yield "rotate and store", partial(_rotate, dtype, device, False)
    yield "rotate and store, normed", partial(_rotate, dtype, device, True)
    yield "rotate and store in FP8", partial(_rotate, dtype, device, False, FP8_STORE)
    for rows in (1, 5, 16):
        yield f"product of {rows} rows", partial(_product, dtype, device, rows)
    for name in QUANTISED:
        for rows in (1, 16, 100):
            yield f"product of {rows} rows with {name}", partial(_quantised, dtype, device, rows, name)


def _norm(dtype: torch.dtype, device: str) -> Calls:
    x, change = torch.randn(2, 13, 1000, device=device).to(dtype).unbind(0)
    weight = torch.randn(1000, device=device).to(dtype)

    def normed(how: Callable[..., Tensor]) -> Tensor:
        residual = change.clone()
        return torch.cat([how(x, residual, weight, 1e-6), residual])

    return partial(normed, add_norm), partial(normed, add_norm_reference)


def _silu(dtype: torch.dtype, device: str) -> Calls:
    x = torch.randn(13, 1000, device=device).to(dtype)
    return partial(silu_and_mul, x), partial(silu_and_mul_reference, x)


def _rotate(dtype: torch.dtype, device: str, normed: bool, stored_in: torch.dtype | None = None) -> Calls:
    world = paged([(40, 9), (3, 4)], 2, 3, 64, dtype, device, stored=stored_in)
    qkv = torch.randn(13, 10, 64, device=device).to(dtype)
    cos, sin = torch.randn(2, 64, 32, device=device).unbind(0)
    positions = torch.tensor([*range(40, 49), *range(3, 7)], device=device)
    weights = (torch.randn(64, device=device).to(dtype), torch.randn(64, device=device).to(dtype))

    def stored(how: Callable[..., Tensor]) -> Tensor:
        norms = weights if normed else None
        q = how(qkv.clone(), 6, cos, sin, positions, world.kv, 0, world.batch.cells, norms, 1e-6)
        return torch.cat([q.flatten(), in_numbers(world.kv[0].flatten(1, 2)[:, world.batch.cells], dtype).flatten()])

    return partial(stored, rotate_and_store), partial(stored, rotate_and_store_reference)


def _product(dtype: torch.dtype, device: str, rows: int) -> Calls:
    x = torch.randn(rows, 300, device=device).to(dtype)
    weight = (torch.randn(40, 300, device=device) * 300**-0.5).to(dtype)
    bias = torch.randn(40, device=device).to(dtype)
    return partial(streamed, x, weight, bias), partial(streamed_reference, x, weight, bias)


def _quantised(dtype: torch.dtype, device: str, rows: int, name: str) -> Calls:
    x = torch.randn(rows, 2112, device=device).to(dtype)  # programs share so many inputs
    weight = QUANTISED[name](torch.randn(200, 2112, device=device))
    return partial(QuantizedMatrix(weight), x), partial(quantized_reference, x, weight)


# ---- experts ----


def _expert_cases(dtype: torch.dtype, device: str, large: bool) -> Iterator[Named]:
    """A layer with 1, with some and with many pairs to an expert, over each kind of weights."""
    for kind in ("plain", "FP8", "MXFP4"):
        for tokens in (3, 40, 300) if large else (3,):
            yield f"experts, {kind}, {tokens} tokens", partial(_experts, dtype, device, kind, tokens)
    if dtype == torch.bfloat16:
        yield "experts, grouped product of torch", partial(_experts, dtype, device, "plain", 3, True)
    yield "routing", partial(_route, device)


def _experts(dtype: torch.dtype, device: str, kind: str, tokens: int, grouped: bool = False) -> Calls:
    def made(outputs: int, inputs: int) -> Weight:
        plain = torch.randn(4, outputs, inputs, device=device) / math.sqrt(inputs)
        if kind == "plain":
            return plain.to(dtype)
        how = ("e4m3", (128, 128), torch.float32) if kind == "FP8" else ("e2m1", (1, 32), E8M0)
        return concatenated([quantized(each, *how) for each in plain], experts=True)  # type: ignore[arg-type]

    def exact(weight: Weight) -> Tensor:
        return weight.dequantized(torch.float64) if isinstance(weight, QuantizedWeight) else weight

    gate_up, down = made(2 * 96, 160), made(160, 96)
    biases = (torch.randn(4, 192, device=device).to(dtype), torch.randn(4, 160, device=device).to(dtype))
    x = torch.randn(tokens, 160, device=device).to(dtype)
    chosen = torch.rand(tokens, 4, device=device).topk(2).indices.int()
    weights = torch.rand(tokens, 2, device=device)
    layer = GpuExperts(gate_up, down, "clamped", *biases)
    layer.grouped_from = 0 if grouped else tokens + 1
    return partial(layer, x, chosen, weights), lambda: experts_reference(
        x, chosen, weights, exact(gate_up), exact(down), "clamped", *biases
    )


def _route(device: str) -> Calls:
    logits, correction = torch.randn(7, 100, device=device), torch.randn(100, device=device)
    routing = Routing(100, 6, "sigmoid", True, scale=2.5, softcap=3.0)

    def call(how: Callable[..., tuple[Tensor, Tensor]], logits: Tensor) -> Tensor:
        return torch.cat(how(logits, routing, correction))

    return partial(call, route_gpu, logits), partial(call, route, logits)


# ---- drawing ----


def _logits() -> Tensor:
    return 3 * torch.randn(7, 5000, generator=torch.Generator().manual_seed(1))


def _draw(device: str) -> Calls:
    """Drawn tokens and accepted drafts."""
    logits, hot, seeds = _logits(), torch.tensor([0.7, 0.9, 1.3, 0.7, 1.0, 0.5, 2.0]), list(range(7))
    keys = torch.from_numpy(row_keys(seeds, seeds))
    first = torch.tensor([0, 1, 4, 7], dtype=torch.int32)
    drawn = gumbel_argmax_reference(logits, hot[:, None], keys).int()
    drafts = drawn.clone()
    drafts[2] += 1

    def draw() -> Tensor:
        settings = (hot.to(device), keys.to(device))
        return torch.cat(draw_and_verify(logits.to(device), first.to(device), drafts.to(device), *settings)).double()

    def exact() -> Tensor:
        scores = torch.nn.functional.one_hot(drawn.long(), 5000).float()
        return torch.cat(draw_and_verify_reference(logits, first, drafts, scores)).to(device).double()

    return draw, exact


def _cut(device: str) -> Calls:
    """How many tokens the filters keep, against a sort."""
    logits = _logits()
    top_k, top_p = torch.tensor([0, 3, 50, 0, 1, 0, 9]), torch.tensor([1.0, 1.0, 0.8, 0.5, 0.9, 0.2, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.3])

    def kept() -> Tensor:
        found = cutoffs(logits.to(device), *(each.to(device) for each in (top_k.int(), top_p, min_p)))
        return (logits.to(device) >= found[:, None]).sum(1).double()

    def sorted_kept() -> Tensor:
        filters = Filters(top_k[:, None], top_p[:, None], min_p[:, None])
        return filter_logits(logits, filters).isfinite().sum(1).to(device).double()

    return kept, sorted_kept
