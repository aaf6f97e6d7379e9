"""Loading a model: everything between a configuration and a runner that is ready, in the order it happens.

`load_runner` reads the checkpoint, resolves the configuration, allocates the KV store and makes the runner. On the way
it measures and checks, over steps without requests:

- Which of float32 and bfloat16 a CPU computes the model in faster (`faster_dtype`).
- Whether a model of transformers computes the same over paged KV as by itself (`check_model`).
- How much memory a GPU has left for KV beside the model and its largest step (`fill_memory`).
- Whether steps draw the same in CUDA graphs as without (`check_graphs`).
- What verifying drafts costs (`measure_cost`).
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from holdfast.kernels import attention, layer, linear, linear_state, native
from holdfast.kernels.attention_plan import SPLIT
from holdfast.kernels.kv import FP8
from holdfast.kernels.linear import Matrix, variant_for
from holdfast.kernels.linear_state import NO_STATE, LinearStates
from holdfast.replicas.config import (
    BYTES,
    LEAST_SLOTS,
    CpuKernels,
    DType,
    EngineConfig,
    Hardware,
    ModelShape,
    WindowShape,
    resolve,
    split_memory,
)
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.kv.tensors import HostPages, HostStates, HostWindow, KVKind, KVTensors
from holdfast.replicas.memory import memory
from holdfast.replicas.model.any_model import ATTENTION, AnyModel
from holdfast.replicas.model.decoder import STEP_ERRORS, Decoder, Model, PageTable, build_batch
from holdfast.replicas.model.description import (
    Description,
    ModelInfo,
    inspect_model,
    sliding_window,
    with_next_token,
)
from holdfast.replicas.model.files import has_safetensors, stored_tensors
from holdfast.replicas.model.folder import cannot_serve, served_name
from holdfast.replicas.model.graphs import MOST_DRAWS, gpu_capture, room_for
from holdfast.replicas.model.progress import Tell
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.model.smoothing import sample_tokens, smooth
from holdfast.replicas.model.weights import eos_ids, load_model, load_tokenizer, sampling_defaults
from holdfast.replicas.plan import (
    Chunk,
    Draw,
    RowWrite,
    Runner,
    Sampling,
    StepCost,
    StepOutput,
    StepPlan,
    step_cost,
)
from holdfast.replicas.types import TokenIds

if TYPE_CHECKING:
    from holdfast.replicas.model.runner_gpu import GpuRunner  # needs Triton

log = logging.getLogger(__name__)

# dtype
_ROWS = (1, 8)  # a decode step, and a verification window
_MATRICES_BYTES = 64 << 20  # of bfloat16 to stream: more than most caches hold
_CACHED_BYTES = 1 << 20  # smaller matrices stay in a cache
_GAIN = 1.2  # least speed-up at which bfloat16 is chosen
# paged KV
_PROBE = 8  # tokens of the prompt
_LIKENESS = {torch.float32: 0.9999, torch.bfloat16: 0.98, torch.float16: 0.99, torch.int8: 0.98, FP8: 0.98}
"""Least cosine between the logits of both ways, by the dtype in which KV is computed and in which it is stored."""
# graphs
_GRAPH_TOKENS = 1024  # a step of more takes the device longer than the host needs to launch it
_PARTIALS = 256 << 20  # bytes for partial results of split sequences
_LAUNCHES = 256 << 20  # bytes for the graphs themselves, and what their forwards compute with
_CLOSE = 0.25  # largest difference of log probabilities that rounding to 16 bits explains
# verifying
_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 4), (8, 8), (8, 16))  # (sequences, tokens of each)
_CONTEXT = 256  # tokens each sequence has in its cache
_ROUNDS = 3
_BUDGET_S = 5.0  # no wider step is measured where all rounds would take longer


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, the resolved configuration, and what others need to know of the model."""

    config: EngineConfig
    runner: ModelRunner
    eos: frozenset[int]
    vocabulary: int
    tokenizer: PreTrainedTokenizerBase
    cost: StepCost | None = None  # None: speculation is off, or there was no room to measure
    defaults: Mapping[str, float] = field(default_factory=dict)  # the checkpoint's sampling settings
    window: int = 0  # tokens that a sequence keeps in layers with window pages; 0: there are none


def load_runner(config: EngineConfig, tell: Tell | None = None) -> LoadedRunner:
    """Load the configured model and allocate its KV. Sets torch's threads and a CPU's kernels for the whole process.

    `tell`: called with how far the reading of weights is, now and then.

    Raises ConfigError, naming the field: the model is missing, damaged or cannot be served, or settings do not fit the
    model or the machine.
    """
    info = inspect_model(config.model)
    stored = stored_tensors(config.model, Path(info.path))  # what is missing is named before memory is taken
    if config.speculation.enabled and config.speculation.mtp:
        info = info if config.decoder == "transformers" else with_next_token(info, stored)
        if info.description is None or info.description.next_token is None:
            log.warning("speculation.mtp changes nothing: there is no such layer that our decoder runs")
    machine = hardware()
    torch.set_num_threads(config.threads or machine.cores)
    on_cpu = config.device == "cpu" or not machine.cuda
    if on_cpu:
        config = replace(config, cpu_kernels=_kernels(config.cpu_kernels))
    if on_cpu and config.dtype in ("auto", "int8"):
        machine = replace(machine, cpu_dtype=faster_dtype(info.config, info.shape.checkpoint_dtype))
    kinds = kinds_of(info, config)
    shape = _with_states(info, config, machine.cpu_dtype if on_cpu else info.shape.checkpoint_dtype)
    if (window := kept_window(kinds, config, on_cpu)) is not None:
        shape = replace(shape, cell_values=kinds[0].cell.values, head_dim=kinds[0].cell.head_dim, window=window)
    resolved = resolve(config, machine, shape)
    resolved = replace(resolved, served_name=config.served_name or served_name(config.model))
    if resolved.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU", "device")
    tokenizer = load_tokenizer(info, config.chat_template)
    dtype = getattr(torch, machine.cpu_dtype if resolved.dtype == "int8" else resolved.dtype)
    on_gpu = resolved.device != "cpu"
    profiled = on_gpu and not config.cells
    cells = resolved.cells, resolved.window_cells
    pages = [pages_to_measure(resolved) if profiled else each // resolved.page_size for each in cells]
    of_kinds = kinds, pages[: len(kinds)], resolved.page_size, dtype, resolved.device
    kv = KVTensors.of(*of_kinds, scratch=on_gpu, kv_dtype=resolved.kv_dtype)
    if resolved.kv_dtype == "fp8" and any(name.endswith((".k_scale", ".v_scale")) for name in stored):
        log.warning("KV in FP8 is stored without the checkpoint's k_scale and v_scale")
    states = None
    if info.description is not None:
        slots = LEAST_SLOTS if profiled else resolved.state_slots
        states = make_states(info.description, resolved, slots, dtype, resolved.device)
    model = _load_model(info, resolved, kv, tokenizer, states, tell)
    if on_gpu:
        _choose_products(model, resolved)
    if profiled:
        resolved = replace(resolved, state_slots=config.state_slots, window_cells=config.window_cells)
        resolved = fill_memory(resolved, model, kv, GpuMemory(), shape, states)
    host = None
    if resolved.host_cells:
        checkpoints: HostStates | HostWindow | None = None
        if states is not None:
            checkpoints = HostStates(states, resolved.host_slots)
        elif kv.window is not None:
            checkpoints = HostWindow(kv.window, resolved.host_window_cells // resolved.page_size)
        host = HostPages(kv, resolved.host_cells // resolved.page_size, checkpoints=checkpoints)
    runner = _runner(resolved, model, kv, host)
    if on_gpu:
        _capture(runner, resolved)
    cost = measure_cost(runner, resolved) if resolved.speculation.enabled else None
    defaults = sampling_defaults(info.path)
    kept = window.tokens if window is not None else 0
    return LoadedRunner(resolved, runner, eos_ids(info), info.vocabulary, tokenizer, cost, defaults, kept)


def kinds_of(info: ModelInfo, config: EngineConfig) -> tuple[KVKind, ...]:
    """The kinds of layers with attention. A model that transformers runs has one store for all."""
    if info.description is None or config.decoder == "transformers" or not has_safetensors(Path(info.path)):
        return (KVKind(info.cell),)
    return info.description.kinds(config.context_length or info.shape.context_length)


def kept_window(kinds: Sequence[KVKind], config: EngineConfig, on_cpu: bool) -> WindowShape | None:
    """The layers with window pages. A sequence keeps some tokens more than they see: kernels read positions from a
    multiple of 2 on, and on a GPU with `batch_invariant` from one of `SPLIT` on.
    """
    window = kinds[-1].window
    if window is None:
        return None
    more = SPLIT - 1 if config.batch_invariant and not on_cpu else 1
    cell = kinds[-1].cell
    return WindowShape(window + more, cell.values, cell.head_dim)


def make_states(
    description: Description, config: EngineConfig, slots: int, dtype: torch.dtype, device: str
) -> LinearStates | None:
    """Slots for the states of the linear layers; None where there are none.

    A slot's window holds the longest window of drafts, and the token before them: it may be computed again.
    """
    if description.state is None:
        return None
    window = 1 + config.speculation.max_draft  # what a grammar forces is drafted though speculation is off
    return LinearStates(description.state, description.linear_layers, slots, window, dtype, device)


def _with_states(info: ModelInfo, config: EngineConfig, default: DType) -> ModelShape:
    """The model's sizes, with the bytes of a state. `default`: the dtype where `config` names none."""
    if info.description is None:
        return info.shape
    dtype = getattr(torch, config.dtype if config.dtype in BYTES else default)
    states = make_states(info.description, config, 1, dtype, "meta")
    return replace(info.shape, state_bytes=states.slot_bytes if states is not None else 0)


def hardware() -> Hardware:
    """This machine: the cores this process may use, and whether there is a GPU."""
    cores = len(os.sched_getaffinity(0))
    return Hardware(cuda=torch.cuda.is_available(), cores=cores, free_memory=memory()[1])


def _kernels(requested: CpuKernels) -> CpuKernels:
    """Choose the instructions of the CPU kernels in this process. The log names kernels that torch replaces.

    Raises ConfigError for instructions that the processor or the installation lacks.
    """
    try:
        level = native.limit(requested)
    except ValueError as error:
        raise ConfigError(f"cpu_kernels: {error}", "cpu_kernels") from error
    libraries = {
        "attention": attention,
        "products": linear,
        "norms and rotary embedding": layer,
        "linear layers": linear_state,
    }
    for library, kernel in libraries.items():
        missing = kernel.LIBRARY.missing
        if missing and requested not in ("auto", "torch"):
            raise ConfigError(f"cpu_kernels: no kernel for {library}: {missing}", "cpu_kernels")
        if missing and level != "torch":
            log.warning("%s on the CPU by torch, which is slower: %s", library, missing)
    if level == "torch" and requested == "auto":
        log.warning("everything on the CPU by torch, which is several times slower: this processor has no AVX2")
    log.info("kernels on the CPU by %s", level)
    return level


def _load_model(
    info: ModelInfo,
    config: EngineConfig,
    kv: KVTensors,
    tokenizer: PreTrainedTokenizerBase,
    states: LinearStates | None = None,
    tell: Tell | None = None,
) -> Model:
    """Our own decoder where it is allowed and knows the model, else transformers' model, checked against itself."""
    int8 = config.dtype == "int8"
    if config.decoder != "transformers":
        smoothed = None
        if int8 or config.kv_dtype == "int8":
            sample = sample_tokens(tokenizer, info.vocabulary)
            keys = config.kv_dtype == "int8"
            smoothed = partial(smooth, sample=sample, dtype=kv.dtype, products=int8, keys=keys)
        kind = Decoder
        if config.device != "cpu":
            from holdfast.replicas.model.decoder_gpu import GpuDecoder  # needs Triton

            kind = GpuDecoder
        try:
            sizes, described = (kv, config.context_length), info.description
            decoder = kind.load(info.path, info.config, *sizes, smoothed, int8, states, tell, described)
        except torch.OutOfMemoryError as error:
            message = f"the weights do not fit on the GPU: use a smaller model or dtype ({error})"
            raise ConfigError(message, "model") from error
        if decoder is not None:
            return decoder
        if config.decoder == "own":
            raise ConfigError(f"our decoder does not know {info.config.model_type} with these options", "decoder")
    if states is not None:
        why = "a model with linear layers runs on our own decoder, which reads safetensors files"
        raise ConfigError(f"{why}: set decoder to auto", "decoder")
    if int8:
        why = "is set to transformers" if config.decoder == "transformers" else "does not know this model"
        raise ConfigError(f"int8 products are those of our own decoder, and decoder {why}: set another dtype", "dtype")
    module = load_model(info, config.dtype, config.device)
    check_model(module, info, kv, config.context_length)
    return AnyModel(module, kv)


def _choose_products(model: Model, config: EngineConfig) -> None:
    """Give each product the fastest kernel, or with `batch_invariant` one order of sums. Raises ConfigError where that
    is impossible.
    """
    from holdfast.kernels.ceilings import Clock
    from holdfast.kernels.experts_gpu import choose_experts
    from holdfast.replicas.model.decoder_gpu import GpuDecoder, choose_products

    if config.batch_invariant:
        if not isinstance(model, GpuDecoder):
            raise ConfigError("batch_invariant on a GPU needs our own decoder", "batch_invariant")
        if model.states is not None:
            why = "linear layers compute a prompt in chunks, whose borders change the last bits"
            raise ConfigError(f"batch_invariant on a GPU: {why}", "batch_invariant")
        try:
            model.keep_order(most_rows(config), most_draws(config))
        except STEP_ERRORS as error:
            raise ConfigError(f"this model does not support batch_invariant: {error}", "batch_invariant") from error
    elif isinstance(model, GpuDecoder):
        try:
            choose_products(model.matrices, Clock().seconds)
            for chosen, layers in model.experts.items():
                choose_experts(layers, chosen, Clock().seconds)
        except STEP_ERRORS:
            log.exception("products are left to torch: ours could not be timed")


def _runner(config: EngineConfig, model: Model, kv: KVTensors, host: HostPages | None = None) -> ModelRunner:
    rows, context = config.max_sequences, config.context_length
    if config.device == "cpu" or not config.has("device_sampling"):
        return ModelRunner(model, kv, rows, context, host, config.has("device_sampling"), config.overlap_steps == "on")
    from holdfast.replicas.model.runner_gpu import GpuRunner  # needs Triton, which a torch for CPUs comes without

    return GpuRunner(model, kv, rows, context, host)


def _capture(runner: ModelRunner, config: EngineConfig) -> None:
    """Capture graphs of short steps and check them. Without graphs steps are only slower."""
    from holdfast.replicas.model.runner_gpu import GpuRunner

    tokens, shapes = graph_tokens(config), runner.model.attention
    if not shapes or not tokens or not isinstance(runner, GpuRunner):
        return
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    try:
        runner.capture(gpu_capture(), room_for(tokens, shapes, processors), log.info)
    except STEP_ERRORS:
        log.exception("steps run without CUDA graphs: they could not be captured")
        return
    check_graphs(runner, config)


# ---- dtype of a CPU ----


def faster_dtype(config: Any, checkpoint: DType) -> DType:
    """float32 or bfloat16, for the transformers configuration and the dtype of a checkpoint.

    Products of the model's sizes are timed. float32 is more exact, and these stay in it untimed: models whose matrices
    stay in a cache, checkpoints in another dtype than bfloat16, and processors without our kernels. Takes about a
    second on one thread: on a busy machine several threads wait for each other, and then all dtypes look alike.
    """
    if checkpoint != "bfloat16":
        return "float32"
    text = config.get_text_config(decoder=True)
    outputs, inputs = getattr(text, "intermediate_size", 0), getattr(text, "hidden_size", 0)
    matrix = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    if matrix.nbytes < _CACHED_BYTES or variant_for(matrix) is None:
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
    """Products of `_ROWS` rows with more matrices [outputs, inputs] than the caches hold; the least of four."""
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


# ---- transformers' model over paged KV ----


def check_model(module: nn.Module, info: ModelInfo, kv: KVTensors, context_length: int) -> None:
    """Switch a model to paged attention and compare its logits before and after. Writes the store's first cells.

    A short prompt runs by transformers alone, then through pages in two steps. A model that keeps state outside its
    attention, or whose attention is unusual, fails here and does not answer wrongly later. The prompt is shorter than
    any sliding window. So a window that the model applies in its mask alone, invisible to paged attention, is found by
    another sign: no layer asks for it.

    Raises ConfigError for a model that cannot be switched, or would compute something else in `context_length` tokens.
    """
    name = info.path
    tokens = np.arange(1, 1 + min(_PROBE, kv.cells), dtype=np.int32) % info.vocabulary
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
    window = sliding_window(info.config)
    if window and window < context_length and not model.windowed:
        why = f"its sliding window of {window} does not reach its attention"
        raise ConfigError(f"{why}: set context_length to {window} or less", "context_length")


def _paged_logits(model: AnyModel, kv: KVTensors, tokens: TokenIds) -> Tensor:
    """Logits after the last token; the others are a first chunk."""
    used = -(-len(tokens) // kv.page_size)
    table = PageTable.of(kv, 1, len(tokens))
    table.write(RowWrite(0, 0, np.arange(used, dtype=np.int32)))
    cut = len(tokens) - 1
    if cut:
        model.forward(build_batch((Chunk(0, 0, tokens[:cut]),), table))
    return model.forward(build_batch((Chunk(0, cut, tokens[cut:], Draw(Sampling(), 0)),), table))[0]


# ---- a GPU's memory ----


def pages_to_measure(config: EngineConfig) -> int:
    """Pages of the store under the largest step."""
    return -(-_prefilled(config) // config.page_size) + 1


def largest_step(config: EngineConfig, slots: int = 0, kinds: int = 1) -> StepPlan:
    """A step that takes as much memory as any: all tokens of a prefill, and every other row draws with a filter.

    `slots`: how many states there are. Rows may share them here: what they compute is not used. `kinds`: of layers.
    """
    size = _prefilled(config)
    pages = np.arange(pages_to_measure(config), dtype=np.int32)
    draw = Draw(Sampling(temperature=1.0, top_p=0.9), 0)
    others = range(1, config.max_sequences)
    writes = (RowWrite(0, 0, pages[:-1]), *(RowWrite(row, 0, pages[-1:]) for row in others))
    prefill = Chunk(0, 0, np.ones(size, np.int32), draw, state=_state(0, slots))
    each = (Chunk(row, 0, np.ones(1, np.int32), draw, state=_state(row, slots)) for row in others)
    return StepPlan((prefill, *each), _of_kinds(writes, kinds))


def _of_kinds(writes: Sequence[RowWrite], kinds: int) -> tuple[RowWrite, ...]:
    """The pages in the page table of each kind of layers."""
    return tuple(replace(write, kind=kind) for kind in range(kinds) for write in writes)


def _state(row: int, slots: int, window: int = 0, begins: bool = True) -> StateUse | None:
    """The state of a row in a step of our own: its slot has the row's number, among `slots`; 0: the model has none.

    `window`: tokens of the chunk that leave the state as it is. It `begins`, or goes on after one such token.
    """
    return StateUse(NO_STATE if begins else row % slots, row % slots, int(not begins), window) if slots else None


def _prefilled(config: EngineConfig) -> int:
    return min(config.step_tokens, config.context_length)


class GpuMemory:
    """The memory of the current CUDA device, in bytes."""

    def total(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def others(self) -> int:
        """Used by anything but this process's tensors."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    def taken(self) -> int:
        """Used by this process's tensors now."""
        return int(torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most that this process reserved for tensors since `reset_peak`."""
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_reserved())


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes, without KV. `weights`: the model. `step`: the peak of its largest step, over a store of a few pages."""

    total: int
    others: int
    weights: int
    step: int


def measure(source: GpuMemory, kv_bytes: int, largest_step: Callable[[], object]) -> MemoryUse:
    """Run the largest step over a store of `kv_bytes`. Raises ConfigError, for `step_tokens`, when memory runs out."""
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


def bytes_left(use: MemoryUse, share: float, reserve: int, least: int) -> int:
    """Bytes for KV and states that fit into `share` of the memory beside `reserve` bytes for graphs.

    Raises ConfigError, naming the setting to change, where they are fewer than `least`.
    """
    allowed = int(use.total * share) - use.others
    left = allowed - use.weights - use.step - reserve
    if left >= least:
        return left
    of_it = f"of {_gib(use.total)}, {_gib(use.others)} are taken by others and gpu_memory allows {share:g}"
    if use.weights >= use.total - use.others:
        raise ConfigError(f"the weights take {_gib(use.weights)}; {of_it}: use a smaller model or dtype", "model")
    if use.weights + reserve >= allowed:
        raise ConfigError(f"the weights take {_gib(use.weights)}; {of_it}: raise gpu_memory", "gpu_memory")
    message = f"weights take {_gib(use.weights)} and the largest step {_gib(use.step)}; {of_it}: lower step_tokens"
    raise ConfigError(f"{message} or raise gpu_memory", "step_tokens")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def fill_memory(
    config: EngineConfig,
    model: Model,
    kv: KVTensors,
    source: GpuMemory,
    shape: ModelShape,
    states: LinearStates | None = None,
) -> EngineConfig:
    """Give the store and the states the memory that the model and its largest step leave. Returns the configuration
    with its cells and slots.

    `config.state_slots`: as asked for. Raises ConfigError, naming the setting to change, where nothing is left.
    """
    runner = _runner(config, model, kv)
    slots = states.slots if states is not None else 0
    taken = sum(each.data.nbytes for each in kv.kinds) + slots * shape.state_bytes
    use = measure(source, taken, lambda: runner.begin(largest_step(config, slots, len(kv.kinds))).land())
    reserve = graph_bytes(config, model.vocabulary, kv.dtype.itemsize)
    window_bytes = kv.window.cell_bytes if kv.window is not None else 0
    least = kv.cell_bytes * kv.page_size + slots * shape.state_bytes
    left = bytes_left(use, config.gpu_memory, reserve, least)
    cells, slots, window = split_memory(replace(config, cells=0), shape, kv.cell_bytes, left, window_bytes)
    if cells < kv.page_size:
        if window:
            raise ConfigError(f"{_gib(window * window_bytes)} for windows leave no memory for KV", "window_cells")
        raise ConfigError(f"{slots} states of {_gib(shape.state_bytes)} leave no memory for KV", "state_slots")
    for each, n in zip(kv.kinds, (cells, window), strict=False):
        each.resize(n // each.page_size)
    if states is not None:
        states.resize(slots)
    held = sum(each.data.nbytes for each in kv.kinds) / 2**30
    log.info("%d cells of KV and %d of windows, %.1f GiB, and %d states", cells, window, held, slots)
    return replace(config, cells=cells, state_slots=slots, window_cells=window)


# ---- graphs ----


def graph_tokens(config: EngineConfig) -> int:
    """Tokens of the largest step that runs in a graph; 0: no graphs."""
    if not config.has("cuda_graphs") or config.device == "cpu":
        return 0
    return min(_GRAPH_TOKENS, most_rows(config))


def most_draws(config: EngineConfig) -> int:
    """Rows that the largest step draws from."""
    return config.max_sequences * (1 + (config.speculation.max_draft if config.speculation.enabled else 0))


def most_rows(config: EngineConfig) -> int:
    """Tokens of the largest step."""
    return most_draws(config) + _prefilled(config)


def graph_bytes(config: EngineConfig, vocabulary: int, item: int) -> int:
    """Memory reserved for graphs; `item`: bytes of one of the model's numbers."""
    tokens = graph_tokens(config)
    logits = item * min(tokens, MOST_DRAWS) * vocabulary  # those that are kept, and those of a forward
    return _PARTIALS + _LAUNCHES + 2 * logits if tokens else 0


def check_graphs(runner: "GpuRunner", config: EngineConfig) -> bool:
    """Drop a runner's graphs unless steps draw the same in them as without. Whether they are kept."""
    graphs, plans = runner.graphs, plans_to_compare(config)
    if graphs is None:
        return False
    try:
        replayed = [runner.begin(plan).land() for plan in plans]
        runner.graphs = None
        launched = [runner.begin(plan).land() for plan in plans]
    except EngineError:
        log.exception("steps run without CUDA graphs: one failed")
        runner.graphs = None
        return False
    if not alike(replayed, launched):
        log.error("steps run without CUDA graphs: one computed something else")
        return False
    runner.graphs = graphs
    return True


def plans_to_compare(config: EngineConfig) -> list[StepPlan]:
    """Steps of single tokens and of windows, each after one that computes their contexts, as far as there is room."""
    plans = []
    for sequences, window, context in ((1, 1, 40), (2, 1, 300), (1, 5, 40), (3, 9, 20)):
        if writes := _writes(config, sequences, context + window):
            draw, tokens = Draw(Sampling(logprobs=0), 0, drafts=window - 1), np.arange(1, window + 1, dtype=np.int32)
            before = np.arange(1, context + 1, dtype=np.int32)
            rows, slots = range(sequences), config.state_slots
            first = (Chunk(row, 0, (before + row) % 50, state=_state(row, slots, 1)) for row in rows)
            then = (Chunk(row, context, tokens, draw, state=_state(row, slots, window, begins=False)) for row in rows)
            plans += [StepPlan(tuple(first), writes), StepPlan(tuple(then))]
    return plans


def _writes(config: EngineConfig, sequences: int, length: int) -> tuple[RowWrite, ...]:
    """Pages for so many sequences of one length; none where they do not fit."""
    pages, kinds = -(-length // config.page_size), 1 + (config.window_cells > 0)
    cells = min(config.cells, config.window_cells or config.cells)
    fits = sequences <= config.max_sequences and sequences * pages <= cells // config.page_size
    if not fits or length > config.context_length:
        return ()
    numbers = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    return _of_kinds([RowWrite(row, 0, numbers[row]) for row in range(sequences)], kinds)


def alike(some: Sequence[StepOutput], others: Sequence[StepOutput]) -> bool:
    """Whether steps drew the same tokens, or others nearly as likely: compares log probabilities of first tokens."""
    for a, b in zip(some, others, strict=True):
        for one, other in zip(a.drawn, b.drawn, strict=True):
            if one is None or other is None:  # a chunk that draws nothing
                continue
            difference = abs(one.logprobs[0].logprob - other.logprobs[0].logprob)
            if not difference <= _CLOSE:  # nor a NaN
                return False
    return True


# ---- verifying ----


def measure_cost(runner: Runner, config: EngineConfig) -> StepCost | None:
    """Time decode steps of several widths over pages that hold nothing yet. None where there is no room.

    Single sequences give the narrow widths, several with windows of drafts the wide ones, as in real steps. Each round
    times all widths, and a figure is the least of three rounds. Other load on the machine only adds, and what comes in
    bursts does not fall on one width alone. The gate corrects the figures with every step.
    """
    plans = list[StepPlan]()
    began = time.perf_counter()
    for sequences, window in _SHAPES:
        context = min(_CONTEXT, config.context_length - window)
        writes = _writes(config, sequences, context + window) if context > 0 else ()
        if not writes or (len(plans) >= 2 and time.perf_counter() - began > _BUDGET_S / _ROUNDS):
            break
        draw = Draw(Sampling(), 0, drafts=window - 1)
        tokens = np.ones(window, np.int32)
        chunks = tuple(
            Chunk(row, context, tokens, draw, state=_state(row, config.state_slots, window, begins=False))
            for row in range(sequences)
        )
        plans.append(StepPlan(chunks, writes))
        _timed(runner, plans[-1])  # warms up
    if len(plans) < 2:
        return None
    rounds = [[_timed(runner, plan) for plan in plans] for _ in range(_ROUNDS)]
    rows = [sum(len(chunk.tokens) for chunk in plan.chunks) for plan in plans]
    return step_cost(rows, np.min(rounds, axis=0).tolist())


def _timed(runner: Runner, plan: StepPlan) -> float:
    began = time.perf_counter()
    runner.begin(plan).land()
    return time.perf_counter() - began
