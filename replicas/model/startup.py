"""What is measured and checked when a model is loaded, in the order it happens. `runner` decides what is done with it.

- Which of float32 and bfloat16 a CPU computes the model in faster (`faster_dtype`).
- Whether a model of transformers computes the same over paged KV as by itself (`check_model`).
- How much memory a GPU has left for KV beside the model and the largest step (`largest_step`, `measure`, `cells_left`).
- Whether steps draw the same in CUDA graphs as without (`plans_to_compare`, `alike`).
- What verifying drafts costs (`measure_cost`).

Nothing here knows requests. What has to run steps is given a runner, or a call.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.linear import PACKED_BYTES, Matrix, reordered
from holdfast.replicas.config import DType, EngineConfig
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.any_model import ATTENTION, AnyModel
from holdfast.replicas.model.batch import PageTable, build_batch
from holdfast.replicas.model.folder import cannot_serve
from holdfast.replicas.model.graphs import MOST_DRAWS
from holdfast.replicas.model.weights import LoadedModel
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Runner, Sampling, StepOutput, StepPlan
from holdfast.replicas.speculation.gate import VerificationCost
from holdfast.replicas.types import TokenIds

# dtype
_ROWS = (1, 8)  # a decode step, and a verification window
_MATRICES_BYTES = 64 << 20  # so much of bfloat16 is streamed, beyond most caches
_GAIN = 1.2  # what bfloat16 must be faster by
# paged KV
_PROBE = 8  # tokens of the prompt
_LIKENESS = {torch.float32: 0.9999, torch.bfloat16: 0.98, torch.float16: 0.99, torch.int8: 0.98}
"""Least cosine between the two ways' logits, by how KV is computed and how it is stored."""
# graphs
_GRAPH_TOKENS = 1024  # more take the device longer than the host to launch
_PARTIALS = 256 << 20  # bytes for partial results of split sequences
_LAUNCHES = 256 << 20  # bytes for the graphs themselves, and what their forwards compute with
_CLOSE = 0.25  # how far log probabilities of the same tokens may lie apart, by what 16 bits round
# verifying
_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 4), (8, 8), (8, 16))  # (sequences, tokens of each)
_CONTEXT = 256  # tokens each sequence has in its cache
_BUDGET_S = 5.0  # a model so slow that its steps take longer is measured at fewer widths


def faster_dtype(config: Any, checkpoint: DType) -> DType:
    """float32 or bfloat16, for the transformers configuration and the dtype of a checkpoint.

    Products of the model's sizes are timed, where both dtypes are the numbers that the checkpoint has, and only for
    models that wait for memory: a small one stays in float32, the more exact, and so does every checkpoint that is not
    in bfloat16. Takes about a second on one thread: several wait for each other where others use the machine, and then
    all dtypes look alike.
    """
    if checkpoint != "bfloat16":
        return "float32"
    text = config.get_text_config(decoder=True)
    outputs, inputs = getattr(text, "intermediate_size", 0), getattr(text, "hidden_size", 0)
    if 2 * outputs * inputs < PACKED_BYTES or not reordered(torch.empty(outputs, inputs, dtype=torch.bfloat16)):
        return "float32"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gain = _seconds(outputs, inputs, torch.float32) / _seconds(outputs, inputs, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    return "bfloat16" if gain > _GAIN else "float32"


@torch.inference_mode()
def _seconds(outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Products of `_ROWS` rows each with enough matrices [outputs, inputs] to leave the caches; least of four."""
    count = max(2, _MATRICES_BYTES // (2 * outputs * inputs))
    matrices = [Matrix(torch.full((outputs, inputs), 0.01, dtype=dtype)) for _ in range(count)]
    batches = [torch.ones(rows, inputs, dtype=dtype) for rows in _ROWS]
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        for x in batches:
            for matrix in matrices:
                matrix(x)
        taken.append(time.perf_counter() - began)
    return min(taken)


def check_model(loaded: LoadedModel, kv: KVTensors, context_length: int) -> None:
    """Switch the model to paged attention and compare it with what it computed before. Writes the store's first cells.

    A short prompt runs twice, once in transformers' own way and once through pages in two steps. A model that keeps
    state outside its attention, or whose attention is not the usual one, is refused here and does not answer wrongly
    later. The prompt is shorter than sliding windows are: a window that the model applies in its mask alone, which
    paged attention does not see, shows in that no layer asks for it.

    Raises ConfigError for a model that cannot be switched or computes something else then, in contexts of up to
    `context_length` tokens.
    """
    module, name = loaded.module, loaded.info.path
    tokens = np.arange(1, 1 + min(_PROBE, kv.cells), dtype=np.int32) % loaded.info.vocabulary
    device = kv.data.device
    with torch.inference_mode():
        plain = module(input_ids=torch.from_numpy(tokens).long().to(device)[None], use_cache=False).logits[0, -1]
    module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    if module.config._attn_implementation != ATTENTION:  # type: ignore[union-attr]
        raise cannot_serve(name, "its attention cannot be replaced")
    model = AnyModel(module, kv)
    try:
        paged = _paged_logits(model, kv, tokens)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise cannot_serve(name, f"it does not run on paged KV ({error})") from error
    likeness = torch.cosine_similarity(plain.double(), paged.double(), dim=0).item()
    if not likeness >= min(_LIKENESS[kv.dtype], _LIKENESS[kv.data.dtype]):
        raise cannot_serve(name, "on paged KV it computes something else")
    window = _window(loaded.info.config)
    if window and window < context_length and not model.windowed:
        why = f"its sliding window of {window} does not reach its attention"
        raise ConfigError(f"{why}: set context_length to {window} or less", "context_length")


def _window(config: Any) -> int:
    """Tokens of the sliding window that a transformers configuration asks for; 0: none."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if not getattr(text, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return 0
    return getattr(text, "sliding_window", None) or 0


def _paged_logits(model: AnyModel, kv: KVTensors, tokens: TokenIds) -> Tensor:
    """Logits after the last token, all but that one in a first chunk."""
    used = -(-len(tokens) // kv.page_size)
    table = PageTable(1, used, kv.page_size, kv.pages, kv.data.device)
    table.write(RowWrite(0, 0, np.arange(used, dtype=np.int32)))
    cut = len(tokens) - 1
    if cut:
        model.forward(build_batch((Chunk(0, 0, tokens[:cut]),), table))
    return model.forward(build_batch((Chunk(0, cut, tokens[cut:], Draw(Sampling(), 0)),), table))[0]


def pages_to_measure(config: EngineConfig) -> int:
    """Pages of the store that the largest step runs over."""
    return -(-_prefilled(config) // config.page_size) + 1


def largest_step(config: EngineConfig) -> StepPlan:
    """A step that takes as much memory as any: all the tokens of a prefill, and every other row draws, filtered."""
    size = _prefilled(config)
    pages = np.arange(pages_to_measure(config), dtype=np.int32)
    draw = Draw(Sampling(temperature=1.0, top_p=0.9), 0)
    others = range(1, config.max_sequences)
    writes = (RowWrite(0, 0, pages[:-1]), *(RowWrite(row, 0, pages[-1:]) for row in others))
    prefill = Chunk(0, 0, np.ones(size, np.int32), draw)
    return StepPlan((prefill, *(Chunk(row, 0, np.ones(1, np.int32), draw) for row in others)), writes)


def _prefilled(config: EngineConfig) -> int:
    return min(config.step_tokens, config.context_length)


class MemorySource(Protocol):
    """A device's memory, in bytes."""

    def total(self) -> int: ...

    def others(self) -> int:
        """What is taken, but not by tensors of this process."""

    def taken(self) -> int:
        """What tensors of this process take now."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """The most that this process had reserved for tensors since `reset_peak`."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. `weights`: the model; `step`: what its largest step takes besides, at its peak; no KV in either.

    Measured once, while the largest step that the configuration allows runs over a store of a few pages.
    """

    total: int
    others: int
    weights: int
    step: int


def measure(source: MemorySource, kv_bytes: int, largest_step: Callable[[], object]) -> MemoryUse:
    """Run the largest step and see what it takes; `kv_bytes` are those of the store it runs over.

    Raises ConfigError, for `step_tokens`, when there is no memory for it.
    """
    weights = source.taken() - kv_bytes
    source.reset_peak()
    try:
        largest_step()
    except (EngineError, RuntimeError) as error:
        if "out of memory" not in str(error).lower():
            raise
        message = f"the largest step does not fit on the GPU beside {_gib(weights)} of weights: lower step_tokens"
        raise ConfigError(message, "step_tokens") from error
    step = max(source.peak() - kv_bytes - weights, 0)
    return MemoryUse(source.total(), source.others(), weights, step)


def cells_left(use: MemoryUse, share: float, reserve: int, cell_bytes: int, page_size: int) -> int:
    """Cells in whole pages that fit into `share` of the memory, with `reserve` bytes kept for graphs.

    Raises ConfigError, naming the setting to change, where not a page is left.
    """
    allowed = int(use.total * share) - use.others
    left = allowed - use.weights - use.step - reserve
    pages = left // (cell_bytes * page_size)
    if pages >= 1:
        return pages * page_size
    of_it = f"of {_gib(use.total)}, {_gib(use.others)} are taken by others and gpu_memory allows {share:g}"
    if use.weights >= use.total - use.others:
        raise ConfigError(f"the weights take {_gib(use.weights)}; {of_it}: use a smaller model or dtype", "model")
    if use.weights + reserve >= allowed:
        raise ConfigError(f"the weights take {_gib(use.weights)}; {of_it}: raise gpu_memory", "gpu_memory")
    message = f"weights take {_gib(use.weights)} and the largest step {_gib(use.step)}; {of_it}: lower step_tokens"
    raise ConfigError(f"{message} or raise gpu_memory", "step_tokens")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


class GpuMemory:
    """The memory of the current CUDA device."""

    def total(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def others(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    def taken(self) -> int:
        return int(torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_reserved())


def graph_tokens(config: EngineConfig) -> int:
    """Tokens of the largest step that is to run in a graph; 0: none."""
    if not config.cuda_graphs or config.device == "cpu":
        return 0
    return min(_GRAPH_TOKENS, most_rows(config))


def most_draws(config: EngineConfig) -> int:
    """Rows that the largest step draws from."""
    return config.max_sequences * (1 + (config.speculation.max_draft if config.speculation.enabled else 0))


def most_rows(config: EngineConfig) -> int:
    """Tokens of the largest step."""
    return most_draws(config) + _prefilled(config)


def graph_bytes(config: EngineConfig, vocabulary: int, item: int) -> int:
    """Memory to keep for graphs; `item`: bytes of one of the model's numbers."""
    tokens = graph_tokens(config)
    logits = item * min(tokens, MOST_DRAWS) * vocabulary  # those that are kept, and those of a forward
    return _PARTIALS + _LAUNCHES + 2 * logits if tokens else 0


def plans_to_compare(config: EngineConfig) -> list[StepPlan]:
    """Steps of single tokens and of windows, each after one that computes their contexts, as far as there is room."""
    plans = []
    for sequences, window, context in ((1, 1, 40), (2, 1, 300), (1, 5, 40), (3, 9, 20)):
        end = context + window
        pages = -(-end // config.page_size)
        if end > config.context_length or sequences * pages * config.page_size > config.cells:
            continue
        if sequences > config.max_sequences:
            continue
        numbers = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
        writes = tuple(RowWrite(row, 0, numbers[row]) for row in range(sequences))
        tokens = np.arange(1, window + 1, dtype=np.int32)
        draw = Draw(Sampling(logprobs=0), 0, drafts=window - 1)
        before = np.arange(1, context + 1, dtype=np.int32)
        plans.append(StepPlan(tuple(Chunk(row, 0, (before + row) % 50) for row in range(sequences)), writes))
        plans.append(StepPlan(tuple(Chunk(row, context, tokens, draw) for row in range(sequences))))
    return plans


def alike(some: Sequence[StepOutput], others: Sequence[StepOutput]) -> bool:
    """Whether steps drew the same tokens, or others nearly as likely.

    What each chunk drew first is compared, by its log probability.
    """
    for a, b in zip(some, others, strict=True):
        for one, other in zip(a.drawn, b.drawn, strict=True):
            if one is None or other is None:  # a chunk that draws nothing
                continue
            difference = abs(one.logprobs[0].logprob - other.logprobs[0].logprob)
            if not difference <= _CLOSE:  # nor a NaN
                return False
    return True


def measure_cost(runner: Runner, config: EngineConfig) -> VerificationCost | None:
    """Time decode steps of several widths, over pages that hold nothing yet; None where there is no room for it.

    Single sequences give the narrow widths, several with windows of drafts the wide ones, as steps have them. The
    figures are the least of three, since what else runs on the machine only adds; the gate corrects them with every
    step.
    """
    rows: list[int] = []
    seconds: list[float] = []
    began = time.perf_counter()
    for sequences, window in _SHAPES:
        plans = list(_plans_to_time(config, sequences, window))
        if not plans or (len(rows) >= 2 and time.perf_counter() - began > _BUDGET_S):
            break
        rows.append(sequences * window)
        seconds.append(min([_timed(runner, plan) for plan in plans][1:]))
    return VerificationCost(tuple(rows), tuple(seconds)) if len(rows) >= 2 else None


def _plans_to_time(config: EngineConfig, sequences: int, window: int) -> Iterator[StepPlan]:
    """The same step four times, the first to warm up; nothing where cache or context are too small."""
    context = min(_CONTEXT, config.context_length - window)
    pages = -(-(context + window) // config.page_size)
    if context < 1 or sequences * pages > config.cells // config.page_size or sequences > config.max_sequences:
        return
    numbers = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    writes = tuple(RowWrite(row, 0, numbers[row]) for row in range(sequences))
    draw = Draw(Sampling(), 0, drafts=window - 1)
    chunks = tuple(Chunk(row, context, np.ones(window, np.int32), draw) for row in range(sequences))
    for _ in range(4):
        yield StepPlan(chunks, writes)


def _timed(runner: Runner, plan: StepPlan) -> float:
    began = time.perf_counter()
    runner.run(plan)
    return time.perf_counter() - began
