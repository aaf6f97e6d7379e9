"""Running step plans on a model: page copies, page table writes, one forward, sampling. Knows no requests.

`load_runner` makes a `ModelRunner` from an engine configuration: load, resolve, allocate, check. It runs steps in one
of two ways. `DirectRunner` waits for what it does: on a CPU, or where tokens are drawn on the host; a thread around it,
`ThreadedRunner`, lets the next step be planned meanwhile. `GpuPipeline` gives steps to a GPU and waits when they are
landed (`pipeline_gpu`).

A step that fails leaves the page table and the store in use: writes are done by then, and the cells it was to fill hold
nothing that anyone may read yet.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from holdfast.kernels import attention_c, layer_c, native, product_c
from holdfast.replicas.config import CpuKernels, EngineConfig, Hardware, resolve
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.kv.tensors import HostPages, KVTensors
from holdfast.replicas.model import startup
from holdfast.replicas.model.any_model import AnyModel
from holdfast.replicas.model.batch import STEP_ERRORS, Model, PageTable, build_batch
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.folder import served_name
from holdfast.replicas.model.graphs import Capture, CudaGraphs, GraphRoom, gpu_capture, room_for
from holdfast.replicas.model.sampler import sample
from holdfast.replicas.model.smoothing import sample_tokens
from holdfast.replicas.model.weights import (
    ModelInfo,
    eos_ids,
    inspect_model,
    load_model,
    load_tokenizer,
    sampling_defaults,
)
from holdfast.replicas.plan import Drawn, Flight, PipelinedRunner, Runner, StepOutput, StepPlan
from holdfast.replicas.speculation.gate import VerificationCost

log = logging.getLogger(__name__)


class DirectRunner:
    """A `Runner` that does everything in order and waits for it. Not thread-safe."""

    def __init__(
        self, model: Model, kv: KVTensors, table: PageTable, host: HostPages | None, device_sampling: bool
    ) -> None:
        self._model = model
        self._kv = kv
        self._table = table
        self._host = host
        self._device_sampling = device_sampling
        self._cuda = table.device.type == "cuda"

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step. Raises EngineError when it fails; the runner can be used again."""
        try:
            return self._move_and_compute(plan) if plan.moves else self._compute(plan)
        except STEP_ERRORS as error:
            raise EngineError(f"a step of {len(plan.chunks)} chunks failed: {error}") from error

    def _move_and_compute(self, plan: StepPlan) -> StepOutput:
        if self._host is None:
            raise EngineError("a plan moves pages to or from a host tier that there is not")
        self._host.save(plan.saves)
        self._prepare(plan)
        self._host.load(plan.loads)
        try:
            output = self._compute(StepPlan(plan.chunks))
        finally:  # nothing is written once the step is over, however it ends
            moved = self._host.wait()
        return replace(output, moved=moved.ok, load_s=moved.load_s)

    def _compute(self, plan: StepPlan) -> StepOutput:
        begin = time.perf_counter()
        self._prepare(plan)
        if not plan.chunks:
            return StepOutput(())
        logits = self._model.forward(build_batch(plan.chunks, self._table))
        forwarded = self._clock()
        drawn = sample(logits if self._device_sampling else logits.cpu(), plan.chunks)
        return StepOutput(drawn, forward_s=forwarded - begin, sample_s=self._clock() - forwarded)

    def _prepare(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self._kv.copy_page(copy.source, copy.target, copy.cells)
        for write in plan.writes:
            self._table.write(write)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class ThreadedRunner:
    """A `PipelinedRunner` over any runner: a thread runs the steps, one after the other in the order of `begin`.

    So the next step is planned while one runs on a CPU: torch lets go of the interpreter while it computes. Whether
    that pays depends on cores to spare.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._drawn: tuple[Drawn | None, ...] = ()  # by the last step; the thread's own

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step, after those that have begun."""
        return self.begin(plan).land()

    def begin(self, plan: StepPlan) -> "ThreadFlight":
        """Begin a step; what it raises is raised by `land`."""
        return ThreadFlight(self._executor.submit(self._step, plan))

    def _step(self, plan: StepPlan) -> StepOutput:
        before, self._drawn = self._drawn, ()  # nothing, should this step fail
        output = self._runner.run(plan.after(before))
        self._drawn = output.drawn
        return output


@dataclass(frozen=True, slots=True)
class ThreadFlight:
    """A step that the thread runs, or will run."""

    future: "Future[StepOutput]"

    def land(self) -> StepOutput:
        """Wait for the step. Raises what it raised."""
        return self.future.result()


class ModelRunner:
    """The `PipelinedRunner` of a model and a KV store; owns the page table."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        max_rows: int,
        context_length: int,
        device_sampling: bool = True,
        host: HostPages | None = None,
        on_device: bool | None = None,
    ) -> None:
        """`on_device`: steps are begun and landed as on a GPU; None: on a GPU, where tokens are drawn there."""
        self.kv = kv
        self._model = model
        device = kv.data.device
        self._table = PageTable(max_rows, -(-context_length // kv.page_size), kv.page_size, kv.pages, device)
        self._gpu = None
        self._direct: Runner
        self._pipeline: PipelinedRunner
        if on_device is None:
            on_device = device.type == "cuda" and device_sampling
        if on_device:
            from holdfast.replicas.model.pipeline_gpu import GpuPipeline  # Triton comes with torch for a GPU alone

            self._gpu = self._direct = self._pipeline = GpuPipeline(model, kv, self._table, host)
        else:
            self._direct = DirectRunner(model, kv, self._table, host, device_sampling)
            self._pipeline = ThreadedRunner(self._direct)

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step, while no other has begun. Raises EngineError when it fails; the runner can be used again."""
        return self._direct.run(plan)

    def begin(self, plan: StepPlan) -> Flight:
        """Begin a step, behind those that were begun before. Raises EngineError for one that cannot be."""
        return self._pipeline.begin(plan)

    def capture(self, capture: Capture, room: GraphRoom, say: Callable[[str], None]) -> bool:
        """Capture the forwards of decoding and verifying as graphs; False where this model or store has none."""
        shape, scratch = self._model.attention, self.kv.scratch_cell
        if self._gpu is None or shape is None or scratch is None:
            return False
        graphs = CudaGraphs(self._model, shape, self._table, scratch, self.kv.dtype, room)
        graphs.capture(capture, say)
        self._gpu.graphs = graphs
        return True

    def check_graphs(self, config: EngineConfig) -> bool:
        """Keep the graphs if steps draw the same in them as without; whether they do."""
        gpu = self._gpu
        if gpu is None or gpu.graphs is None:
            return False
        plans, graphs = startup.plans_to_compare(config), gpu.graphs
        try:
            replayed = [gpu.run(plan) for plan in plans]
            gpu.graphs = None
            launched = [gpu.run(plan) for plan in plans]
        except EngineError:
            log.exception("steps run without CUDA graphs: one failed")
            gpu.graphs = None
            return False
        if not startup.alike(replayed, launched):
            log.error("steps run without CUDA graphs: one computed something else")
            return False
        gpu.graphs = graphs
        return True

    @property
    def model(self) -> Model:
        """What computes the logits."""
        return self._model

    @property
    def replayed(self) -> int:
        """Steps that ran in a graph so far."""
        return self._gpu.replayed if self._gpu is not None else 0


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, the configuration with nothing left open, and what others need to know of the model."""

    config: EngineConfig
    runner: ModelRunner
    eos: frozenset[int]
    vocabulary: int
    tokenizer: PreTrainedTokenizerBase
    cost: VerificationCost | None = None  # None: speculation is off, or not measured
    defaults: Mapping[str, float] = field(default_factory=dict)  # of sampling, as the checkpoint has them


def load_runner(config: EngineConfig) -> LoadedRunner:
    """Load the configured model and allocate its KV. Sets torch's threads and a CPU's kernels, for the process.

    Raises ConfigError, naming the field: a model that is missing, damaged or cannot be served, or settings that do
    not fit the model or the machine.
    """
    info = inspect_model(config.model)
    machine = hardware()
    torch.set_num_threads(config.threads or machine.cores)
    on_cpu = config.device == "cpu" or not machine.cuda
    if on_cpu:
        config = replace(config, cpu_kernels=_kernels(config.cpu_kernels))
    if on_cpu and config.dtype in ("auto", "int8"):
        machine = replace(machine, cpu_dtype=startup.faster_dtype(info.config, info.shape.checkpoint_dtype))
    resolved = resolve(config, machine, info.shape)
    resolved = replace(resolved, served_name=config.served_name or served_name(config.model))
    if resolved.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU", "device")
    tokenizer = load_tokenizer(info, config.chat_template)
    dtype = getattr(torch, machine.cpu_dtype if resolved.dtype == "int8" else resolved.dtype)
    on_gpu = resolved.device != "cpu"
    profiled = on_gpu and not config.cells
    pages = startup.pages_to_measure(resolved) if profiled else resolved.cells // resolved.page_size
    int8_kv = resolved.kv_dtype == "int8"
    kv = KVTensors(info.cell, pages, resolved.page_size, dtype, resolved.device, scratch=on_gpu, int8=int8_kv)
    model = _load_model(info, resolved, kv, tokenizer)
    if on_gpu:
        _choose_ways(model, resolved)
    if profiled:
        resolved = fill_memory(resolved, model, kv, startup.GpuMemory())
    host = HostPages(kv, resolved.host_cells // resolved.page_size) if resolved.host_cells else None
    runner = ModelRunner(
        model, kv, resolved.max_sequences, resolved.context_length, device_sampling=resolved.device_sampling, host=host
    )
    if on_gpu:
        _capture(runner, model, resolved)
    cost = startup.measure_cost(runner, resolved) if resolved.speculation.enabled else None
    defaults = sampling_defaults(info.path)
    return LoadedRunner(resolved, runner, eos_ids(info), info.vocabulary, tokenizer, cost, defaults)


def hardware() -> Hardware:
    """This machine: the cores this process may use, and whether there is a GPU."""
    return Hardware(cuda=torch.cuda.is_available(), cores=len(os.sched_getaffinity(0)))


def _kernels(asked: CpuKernels) -> CpuKernels:
    """Choose the instructions that kernels on a CPU use in this process, and say what torch computes for want of one.

    Raises ConfigError for what the processor or the installation does not have.
    """
    try:
        level = native.limit(asked)
    except ValueError as error:
        raise ConfigError(f"cpu_kernels: {error}", "cpu_kernels") from error
    attention_c.use()
    lost = {"attention": attention_c, "products": product_c, "norms and rotary embedding": layer_c}
    for what, kernel in lost.items():
        missing = kernel.library_missing()
        if missing and asked not in ("auto", "torch"):
            raise ConfigError(f"cpu_kernels: no kernel for {what}: {missing}", "cpu_kernels")
        if missing and level != "torch":
            log.warning("%s on the CPU by torch, which is slower: %s", what, missing)
    if level == "torch" and asked == "auto":
        log.warning("everything on the CPU by torch, which is several times slower: this processor has no AVX2")
    log.info("kernels on the CPU by %s", level)
    return level


def _load_model(info: ModelInfo, config: EngineConfig, kv: KVTensors, tokenizer: PreTrainedTokenizerBase) -> Model:
    """Our own decoder where it is wanted and knows the model, else transformers' model, checked against itself."""
    int8 = config.dtype == "int8"
    if config.decoder != "transformers":
        sample = sample_tokens(tokenizer, info.vocabulary) if int8 or config.kv_dtype == "int8" else None
        try:
            decoder = _decoder(config.device).load(info.path, info.config, kv, config.context_length, sample, int8)
        except torch.OutOfMemoryError as error:
            message = f"the weights do not fit on the GPU: use a smaller model or dtype ({error})"
            raise ConfigError(message, "model") from error
        if decoder is not None:
            return decoder
        if config.decoder == "own":
            raise ConfigError(f"our decoder does not know {info.config.model_type} with these options", "decoder")
    if int8:
        why = "is set to transformers" if config.decoder == "transformers" else "does not know this model"
        raise ConfigError(f"int8 products are those of our own decoder, and decoder {why}: set another dtype", "dtype")
    loaded = load_model(info, config.dtype, config.device)
    startup.check_model(loaded, kv, config.context_length)
    return AnyModel(loaded.module, kv)


def _decoder(device: str) -> type[Decoder]:
    """Our decoder for a device. The one for a GPU needs Triton, which a torch for CPUs comes without."""
    if device == "cpu":
        return Decoder
    from holdfast.replicas.model.decoder_gpu import GpuDecoder

    return GpuDecoder


def _choose_ways(model: Model, config: EngineConfig) -> None:
    """Time products and let them take the faster way, or torch's where ours fails; or have all keep one order of sums.

    Raises ConfigError where that cannot be had.
    """
    from holdfast.kernels.ceilings import Clock
    from holdfast.replicas.model.decoder_gpu import GpuDecoder, choose_ways

    if config.batch_invariant:
        if not isinstance(model, GpuDecoder):
            raise ConfigError("batch_invariant on a GPU needs our own decoder", "batch_invariant")
        try:
            model.keep_order(startup.most_rows(config), startup.most_draws(config))
        except STEP_ERRORS as error:
            raise ConfigError(f"batch_invariant cannot be had with this model: {error}", "batch_invariant") from error
        return
    if not isinstance(model, GpuDecoder):
        return
    try:
        choose_ways(model, Clock().seconds)
    except STEP_ERRORS:
        log.exception("products are left to torch: ours could not be timed")


def fill_memory(config: EngineConfig, model: Model, kv: KVTensors, source: startup.MemorySource) -> EngineConfig:
    """Give the store what the device has left beside the model and its largest step; the configuration with its cells.

    Raises ConfigError, naming the setting to change, where that is nothing.
    """
    runner = ModelRunner(model, kv, config.max_sequences, config.context_length, config.device_sampling)
    use = startup.measure(source, kv.data.nbytes, lambda: runner.run(startup.largest_step(config)))
    reserve = startup.graph_bytes(config, model.vocabulary, kv.dtype.itemsize)
    cells = startup.cells_left(use, config.gpu_memory, reserve, kv.cell_bytes, kv.page_size)
    kv.resize(cells // kv.page_size)
    log.info("%d cells of KV, %.1f GiB", cells, kv.data.nbytes / 2**30)
    return replace(config, cells=cells)


def _capture(runner: ModelRunner, model: Model, config: EngineConfig) -> None:
    """Capture graphs for decoding and verifying, and go on without where that fails: they are only faster."""
    tokens = startup.graph_tokens(config)
    if model.attention is None or not tokens:
        return
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    try:
        captured = runner.capture(gpu_capture(), room_for(tokens, model.attention, processors), log.info)
    except STEP_ERRORS:
        log.exception("steps run without CUDA graphs: they could not be captured")
        return
    if captured:
        runner.check_graphs(config)
