"""Kernels of one layer on a CPU: attention, experts, linear states, and what a layer costs beside its sums.

Ways take turns, so other work on the machine falls on all of them. Weights, keys and states are of several layers and
lie beyond any cache, so they come from memory as in a forward. Times are compared with the machine's limits in the same
run. Not here: whole steps (`forwards`).
"""

import heapq
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels import attention as attention_kernel
from holdfast.kernels import linear, native
from holdfast.kernels.attention import paged_attention
from holdfast.kernels.experts import Experts
from holdfast.kernels.kv import PagedBatch, page_runs
from holdfast.kernels.linear import Activation, GatedMatrix, Matrix
from holdfast.kernels.linear_state import (
    LinearShape,
    LinearStates,
    LinearWeights,
    StateBatch,
    gated_delta,
    mamba2,
    recur_torch,
)
from holdfast.loadgen.bench.forwards import StepShape, step_plan
from holdfast.loadgen.bench.harness import Row, by_turns, save_random_llama, seconds
from holdfast.loadgen.bench.kernels.linear_state import SHAPES as LINEAR_SHAPES
from holdfast.loadgen.inflate.shapes import Shape, resolve_shape
from holdfast.replicas.kv.tensors import CellShape, KVTensors
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.runner import ModelRunner

PAGE = 16
READ_BYTES = 512 << 20
MATRIX = 2048


class Limits:
    """Bytes that memory gives and floating point operations that the cores do in a second, at best.

    Measured by whatever is fastest here: torch's sum or our kernel's product of one row, and products of square
    matrices by torch or by our kernel.
    """

    def __init__(self) -> None:
        data = torch.ones(READ_BYTES // 4)
        readers: list[tuple[int, Callable[[], object]]] = [(data.nbytes, data.sum)]
        wide = data[: READ_BYTES // 8].view(torch.bfloat16).view(-1, MATRIX)
        if variant := linear.variant_for(wide):
            row = torch.ones(1, MATRIX, dtype=torch.bfloat16)
            readers.append((wide.nbytes, partial(linear.PackedMatrix(variant, wide), row)))
        self.bandwidth = max(size / min(seconds(read) for _ in range(8)) for size, read in readers)
        multipliers: list[Callable[[], object]] = []
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.randn(2, MATRIX, MATRIX).to(dtype).unbind(0)
            multipliers.append(partial(torch.matmul, a, b))
            if variant := linear.variant_for(b):
                multipliers.append(partial(linear.PackedMatrix(variant, b), a))
        quick = [multiply for multiply in multipliers if seconds(multiply) < 1]
        self.rate = 2 * MATRIX**3 / min(seconds(multiply) for multiply in quick for _ in range(5))


# ---- attention ----


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` chunks of `tokens` tokens, each after `cached` cells."""

    sequences: int
    tokens: int
    cached: int

    @property
    def name(self) -> str:
        return f"{self.sequences} x {self.tokens} at {self.cached}"

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return -(-(self.cached + self.tokens) // PAGE)


CASES = (
    *(Case(n, 1, cached) for n, cached in ((1, 3000), (8, 850), (8, 3000))),
    *(Case(n, tokens, 3000) for n in (1, 8) for tokens in (4, 8)),
    *(Case(1, tokens, 3000) for tokens in (64, 200, 256)),
)
MODEL = CellShape(20, 8, 64)  # layers, KV heads, their size
GROUP = 2  # query heads for each KV head
ATTENTION_COLUMNS = {"case": "<16", "way": ">16", "milliseconds": ">12.2f", "bandwidth": ">10.2f", "rate": ">10.2f"}


def attention(options: Namespace) -> Iterator[Row]:
    """Attention of all layers in each way: a kernel, with `/int8` behind it over a store in int8.

    `bandwidth` and `rate` are shares of what the machine gives.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    before = native.limit("auto")
    ways = options.ways.split(",") if options.ways else list(dict.fromkeys((before, "torch")))
    dtype, limits = getattr(torch, options.dtype), Limits()
    print(f"{limits.bandwidth / 1e9:.1f} GB/s, {limits.rate / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads")
    cases = [case for case in CASES if options.only in case.name]
    pages = max(case.sequences * case.pages for case in cases)
    stores = {kv: _store(pages, dtype, bool(kv)) for kv in {way.partition("/")[2] for way in ways}}
    heads = GROUP * MODEL.kv_heads
    try:
        for case in cases:
            layers = {kv: _layers(case, store, dtype) for kv, store in stores.items()}
            calls = {way: partial(_attend, way.partition("/")[0], layers[way.partition("/")[2]]) for way in ways}
            positions = case.cached + (case.tokens + 1) / 2  # that a token reads on average
            products = 4 * case.sequences * case.tokens * positions * heads * MODEL.head_dim
            for way, milliseconds in by_turns(calls, options.repeat).items():
                store, n_read = stores[way.partition("/")[2]], case.sequences * (case.cached + case.tokens)
                size = n_read * 2 * MODEL.kv_heads * store.shape[5] * store.itemsize
                shares = {"bandwidth": size / limits.bandwidth, "rate": products / limits.rate}
                shares = {name: MODEL.layers * share / milliseconds for name, share in shares.items()}
                yield {"case": case.name, "way": way, "milliseconds": milliseconds * 1e3, **shares}
    finally:
        native.limit("auto")


def _attend(kernel: str, layers: Callable[[], None]) -> None:
    native.limit(cast(native.Level, kernel))
    layers()


def _store(pages: int, dtype: torch.dtype, int8: bool) -> Tensor:
    kv = KVTensors(MODEL, pages, PAGE, dtype, kv_dtype="int8" if int8 else "auto")
    cells = torch.arange(kv.cells)
    for layer in range(MODEL.layers):
        k, v = torch.randn(2, kv.cells, MODEL.kv_heads, MODEL.head_dim).to(dtype).unbind(0)
        kv.store(layer, k, v, cells)
    return kv.data


def _layers(case: Case, kv: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """A call of attention for every layer, over one batch as in a forward."""
    table = np.arange(case.sequences * case.pages, dtype=np.int32).reshape(case.sequences, case.pages)
    tokens = case.sequences * case.tokens
    q = torch.randn(tokens, GROUP * MODEL.kv_heads, MODEL.head_dim).to(dtype)

    def run() -> None:
        batch = PagedBatch(
            page_size=PAGE,
            page_table=torch.from_numpy(table),
            rows=range(case.sequences),
            starts=[case.cached] * case.sequences,
            lengths=[case.tokens] * case.sequences,
            cells=torch.zeros(tokens, dtype=torch.int64),
            runs=[page_runs(row) for row in table],
        )
        for layer in range(MODEL.layers):
            paged_attention(q, kv, layer, batch, MODEL.head_dim**-0.5)

    return run


# ---- experts ----

EXPERT_BYTES = 500 << 20  # weights of a layer; twice that fits into a small machine
TOKENS = 256
EXPERT_COLUMNS = {"shape": "<16", "experts": ">7", "token": ">9.2f", "read": ">9.2f", "over_read": ">9.2f"}
EXPERT_COLUMNS |= {"tokens": ">9.1f", "dense": ">9.1f", "over_dense": ">10.2f"}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model's layer: `inner` numbers of each expert."""

    width: int
    inner: int
    experts: int
    chosen: int
    activation: Activation

    def bytes(self, of_weight: int) -> int:
        """Bytes of one expert."""
        return 3 * self.width * self.inner * of_weight


EXPERT_SHAPES = {
    "gpt-oss-20b": ExpertShape(2880, 2880, 32, 4, "clamped"),
    "qwen3-30b-a3b": ExpertShape(2048, 768, 128, 8, "silu"),
    "qwen3.6-35b-a3b": ExpertShape(2048, 512, 256, 8, "silu"),
    "gemma-4-26b-a4b": ExpertShape(2816, 704, 128, 8, "gelu_tanh"),
}


def experts(options: Namespace) -> Iterator[Row]:
    """Shortest milliseconds of one layer: one token beside reading its experts, many beside a dense feed-forward.

    With one thread (`OMP_NUM_THREADS=1`) times are processor time.
    """
    for name, shape in EXPERT_SHAPES.items():
        if options.only in name:
            yield {"shape": name} | _expert_times(shape, options.dtype, options.repeat)


def _expert_times(shape: ExpertShape, dtype: str, repeat: int) -> Row:
    """One token is timed 8 times as often as the rest; its experts differ in each call. The first turn warms up."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    width, inner, of_x, int8 = shape.width, shape.inner, DTYPES[dtype], dtype == "int8"
    count = min(shape.experts, max(2 * shape.chosen, EXPERT_BYTES // shape.bytes(of_x.itemsize)))
    layer = Experts(
        _random(of_x, count, 2 * inner, width), _random(of_x, count, width, inner), shape.activation, int8=int8
    )
    gated = GatedMatrix(_random(of_x, 2 * shape.chosen * inner, width), int8)  # its activation's time is nothing
    down = Matrix(_random(of_x, width, shape.chosen * inner), None, int8)
    weights = torch.zeros(count, shape.bytes(1 if int8 else of_x.itemsize) // 4)
    x = torch.randn(TOKENS, width).to(of_x)

    def choice(tokens: int) -> Tensor:
        return torch.rand(tokens, count).topk(shape.chosen).indices.int()

    def call(tokens: int) -> float:
        return seconds(partial(layer, x[:tokens], choice(tokens), torch.ones(tokens, shape.chosen)), clock)

    def read() -> float:
        chosen = choice(1)[0].tolist()
        return seconds(lambda: [weights[expert].sum() for expert in chosen], clock)

    taken: list[tuple[float, float, float, float]] = []
    for _ in range(repeat + 1):
        many, dense = call(TOKENS), seconds(lambda: down(gated(x)), clock)
        taken += [(call(1), read(), many, dense) for _ in range(8)]
    token, read_ms, tokens, dense = (min(each) * 1e3 for each in zip(*taken[8:], strict=True))
    row = {"experts": count, "token": token, "read": read_ms, "over_read": token / read_ms}
    return row | {"tokens": tokens, "dense": dense, "over_dense": tokens / dense}


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype).uniform_(-0.1, 0.1)


# ---- linear states ----

STATES_BYTES = 160 << 20
STATE_CASES = ((1, 1), (4, 1), (1, 8), (1, 64), (1, 512), (1, 2048))  # sequences, tokens of each
STATE_COLUMNS = {"shape": "<15", "case": "<10", "milliseconds": ">12.3f", "torch_milliseconds": ">18.3f"}
STATE_COLUMNS |= {"bandwidth": ">10.2f"}


def linear_states(options: Namespace) -> Iterator[Row]:
    """One layer of Gated DeltaNet or Mamba-2 beside torch's plain form, in processor time of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, shape in LINEAR_SHAPES.items():
            for sequences, tokens in STATE_CASES if options.only in name else ():
                case = {"shape": name, "case": f"{sequences} x {tokens}"}
                yield case | _state_times(shape, sequences, tokens, options.repeat)
    finally:
        torch.set_num_threads(threads)


def _state_times(shape: LinearShape, sequences: int, tokens: int, repeat: int) -> Row:
    """Medians. `bandwidth`, of a decode: the time of torch's product in place of as much memory over ours."""
    one = shape.value_heads * shape.key_dim * shape.value_dim * 4
    layers = max(1, STATES_BYTES // (one * sequences)) if tokens == 1 else 1
    states = LinearStates(shape, layers, sequences, 0, torch.bfloat16, "cpu")
    states.recurrent.normal_()
    heads, count, delta = shape.value_heads, sequences * tokens, shape.rule == "delta"
    extra = () if delta else (torch.randn(shape.channels), torch.randn(heads))
    weights = LinearWeights(torch.randn(shape.channels, shape.kernel), torch.rand(heads), torch.randn(heads), *extra)
    mixed, *gates = (torch.randn(count, width).bfloat16() for width in (shape.channels, *[heads] * shape.gates))
    rule: Callable[..., Tensor] = gated_delta if delta else mamba2
    slots, none = torch.arange(sequences, dtype=torch.int32), torch.zeros(sequences, dtype=torch.int32)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * tokens
    batch = StateBatch(starts, slots, slots, none, none, torch.zeros(0, 3, dtype=torch.int32))
    other = torch.ones(layers, one * sequences // 4)
    ours, moved, theirs = [], [], []
    for _ in range(repeat + 1):
        for layer in range(layers):
            ours.append(seconds(partial(rule, mixed, *gates, weights, states, layer, batch), time.thread_time))
            moved.append(seconds(partial(other[layer].mul_, 1.0), time.thread_time))
        call = partial(recur_torch, mixed, gates, weights, states, 0, batch)
        theirs.append(seconds(call, time.thread_time))
    ours_s, best, theirs_s = (statistics.median(row[len(row) // (repeat + 1) :]) for row in (ours, moved, theirs))
    share = {"bandwidth": best / ours_s} if tokens == 1 else {}
    return {"milliseconds": ours_s * 1e3, "torch_milliseconds": theirs_s * 1e3, **share}


# ---- beside the sums ----

LAYERS = (4, 24)
THREADS = (2, 4, 8, 16, 32, 64)
PAGES, CACHED, CONTEXT, WARM_UP = 32, 100, 512, 20
DISPATCH_COLUMNS = {"rows": ">5", "layer_ms": ">9.3f", "rest_ms": ">9.3f"}
SHARING_COLUMNS = {"work": "<24"} | {f"{n}": ">6.2f" for n in THREADS}


def dispatch(options: Namespace) -> Iterator[Row]:
    """Milliseconds that Python, torch and calls of kernels take for a layer of a forward, and outside of its layers.

    A random Llama is so narrow that its products take almost no time. The difference between many layers and few is the
    layer's. Times are processor time of one thread, the least of many forwards.
    """
    rows, threads = (1, 8), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few, many = (_forwards(layers, rows, options.repeat) for layers in LAYERS)
    finally:
        torch.set_num_threads(threads)
    for n, short, long in zip(rows, few, many, strict=True):
        layer = (long - short) / (LAYERS[1] - LAYERS[0])
        yield {"rows": n, "layer_ms": layer, "rest_ms": short - LAYERS[0] * layer}


def _forwards(layers: int, rows: Sequence[int], repeat: int) -> list[float]:
    """The least milliseconds of a forward with so many layers, for each number of rows."""
    with TemporaryDirectory() as folder:
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
        path = Path(folder)
        config = save_random_llama(path, torch.bfloat16, **sizes, **heads, max_position_embeddings=CONTEXT)
        shape = describe(config)
        assert shape is not None  # it is a Llama
        kv = KVTensors(shape.cell, PAGES, PAGE, torch.bfloat16, scratch=True)
        model = Decoder.load(folder, config, kv, CONTEXT, None)
    assert model is not None
    runner = ModelRunner(model, kv, 8, CONTEXT)
    least = []
    for n in rows:
        plan = step_plan(StepShape("", 1, n, CACHED), PAGE, PAGES)
        times = [seconds(lambda: runner.begin(plan).land(), time.thread_time) for _ in range(WARM_UP + repeat)]  # noqa: B023
        least.append(min(times[WARM_UP:]) * 1e3)
    return least


def sharing(options: Namespace) -> Iterator[Row]:
    """The share of the threads' time that has work if they draw the kernels' tasks in turn, by number of threads.

    Computed, not measured. Tasks of products are blocks of outputs, those of attention the spans of `attention.cut`.
    Synchronisation and shared memory bandwidth are left out.
    """
    shape = resolve_shape(options.shape, context=CONTEXT)
    width = shape.heads * shape.head_dim
    products = {
        "queries, keys, values": (width * (1 + shape.hybrid) + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        "attention's output": (shape.hidden, width),
        "gate and up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    if shape.linear is not None:
        values = shape.linear.value_heads * shape.linear.value_dim
        products["into linear attention"] = (shape.linear.channels + values, shape.hidden)
        products["out of linear attention"] = (shape.hidden, values)
    for name, size in products.items():
        yield {"work": name} | {f"{n}": shared(product_tasks(*size), n) for n in THREADS}
    for case in CASES:
        yield {"work": case.name} | {f"{n}": shared(attention_tasks(shape, case, n), n) for n in THREADS}


def shared(tasks: Sequence[float], threads: int) -> float:
    """The share of the threads' time that has work, if each draws the next task when it has done one."""
    ends = [0.0] * threads
    for task in tasks:
        heapq.heapreplace(ends, ends[0] + task)
    return sum(tasks) / threads / max(ends)


def product_tasks(outputs: int, inner: int) -> list[float]:
    """Weights of each task of a product with a few rows by AVX512: see product_c.c."""
    block = next(variant.block for variant in linear.VARIANTS if variant.lanes == 16)
    return [float(block * inner)] * -(-outputs // block)


def attention_tasks(shape: Shape, case: Case, threads: int) -> list[float]:
    """Positions times rows of each task, in the order in which they are drawn: see attention_c.c."""
    rows = range(case.sequences)
    lengths, starts = [case.tokens for _ in rows], [case.cached for _ in rows]
    batch = PagedBatch(PAGE, torch.empty(0), rows, starts, lengths, torch.empty(0), ())
    spans, _ = attention_kernel.cut(batch, shape.group, shape.kv_heads, 0, threads)
    tasks = []
    for span in spans.tolist():
        low, high = span[attention_kernel.LOW], span[attention_kernel.HIGH]
        work = attention_kernel._READING + span[attention_kernel.COUNT] * shape.group
        edges = [*range(low, high, attention_kernel.PART), high] if span[attention_kernel.SLOT] >= 0 else [low, high]
        for begin, end in pairwise(edges):
            tasks += [float((end - begin) * work)] * shape.kv_heads
    return tasks
