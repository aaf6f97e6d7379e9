"""Runs step plans on a model: page copies, page table writes, one forward, sampling. Knows no requests.

`load_runner` makes one from an engine configuration: load, resolve, allocate, check.

A step that fails leaves the page table and the store in use: writes are done by then, and the cells it was to fill hold
nothing that anyone may read yet.
"""

import os
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.replicas.config import EngineConfig, Hardware, resolve
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.kv.host_pages import HostPages
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.any_model import AnyModel
from holdfast.replicas.model.batch import StepBatch, build_batch
from holdfast.replicas.model.check import check_model
from holdfast.replicas.model.cost import measure_cost
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.page_table import PageTable
from holdfast.replicas.model.probe import faster_dtype
from holdfast.replicas.model.sampler import sample
from holdfast.replicas.model.weights import ModelInfo, eos_ids, inspect_model, load_model, load_tokenizer, served_name
from holdfast.replicas.scheduling.plan import StepOutput, StepPlan
from holdfast.replicas.speculation.gate import VerificationCost

# What torch and numpy raise for a step that cannot be run: shapes, indices, memory.
_STEP_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)


class Model(Protocol):
    """What the runner needs of a model: logits [R, vocabulary] of the drawn tokens, KV stored on the way."""

    def forward(self, batch: StepBatch) -> Tensor: ...


class ModelRunner:
    """`scheduling.plan.Runner` over a model and a KV store; owns the page table."""

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        max_rows: int,
        context_length: int,
        device_sampling: bool = True,
        host: HostPages | None = None,
    ) -> None:
        self._model = model
        self._host = host
        self._device_sampling = device_sampling
        self.kv = kv
        device = kv.data.device
        slots = -(-context_length // kv.page_size)
        self._table = PageTable(max_rows, slots, kv.page_size, kv.pages, device)
        self._cuda = device.type == "cuda"

    def run(self, plan: StepPlan) -> StepOutput:
        """Run one step. Raises EngineError when it fails; the runner can be used again."""
        try:
            return self._run(plan)
        except _STEP_ERRORS as error:
            raise EngineError(f"a step of {len(plan.chunks)} chunks failed: {error}") from error

    def _run(self, plan: StepPlan) -> StepOutput:
        if not plan.moves:
            return self._compute(plan)
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

    def _prepare(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.kv.copy_page(copy.source, copy.target, copy.cells)
        for write in plan.writes:
            self._table.write(write)

    def _compute(self, plan: StepPlan) -> StepOutput:
        begin = time.perf_counter()
        self._prepare(plan)
        if not plan.chunks:
            return StepOutput(())
        logits = self._model.forward(build_batch(plan.chunks, self._table))
        forwarded = self._clock()
        drawn = sample(logits if self._device_sampling else logits.cpu(), plan.chunks)
        return StepOutput(drawn, forward_s=forwarded - begin, sample_s=self._clock() - forwarded)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner, the configuration with nothing left open, and what others need to know of the model."""

    config: EngineConfig
    runner: ModelRunner
    eos: frozenset[int]
    vocabulary: int
    tokenizer: PreTrainedTokenizerBase
    cost: VerificationCost | None = None  # None: speculation is off, or not measured


def load_runner(config: EngineConfig) -> LoadedRunner:
    """Load the configured model and allocate its KV. Sets torch's thread count, which is process-wide.

    Raises ConfigError, naming the field: a model that is missing, damaged or cannot be served, or settings that do
    not fit the model or the machine.
    """
    info = inspect_model(config.model)
    machine = hardware()
    torch.set_num_threads(config.threads or machine.cores)
    if config.dtype == "auto" and (config.device == "cpu" or not machine.cuda):
        machine = replace(machine, cpu_dtype=faster_dtype(info.config, info.shape.checkpoint_dtype))
    resolved = resolve(config, machine, info.shape)
    resolved = replace(resolved, served_name=config.served_name or served_name(config.model))
    if resolved.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU", "device")
    tokenizer = load_tokenizer(info)
    dtype = getattr(torch, resolved.dtype)
    kv = KVTensors(info.cell, resolved.cells // resolved.page_size, resolved.page_size, dtype, resolved.device)
    model = _load_model(info, resolved, kv)
    host = HostPages(kv, resolved.host_cells // resolved.page_size) if resolved.host_cells else None
    runner = ModelRunner(
        model, kv, resolved.max_sequences, resolved.context_length, device_sampling=resolved.device_sampling, host=host
    )
    cost = measure_cost(runner, resolved) if resolved.speculation.enabled else None
    return LoadedRunner(resolved, runner, eos_ids(info), info.vocabulary, tokenizer, cost)


def _load_model(info: ModelInfo, config: EngineConfig, kv: KVTensors) -> Model:
    """Our own decoder where it is wanted and knows the model, else transformers' model, checked against itself."""
    if config.decoder != "transformers":
        decoder = _decoder(config.device).load(info.path, info.config, kv, config.context_length)
        if decoder is not None:
            return decoder
        if config.decoder == "own":
            raise ConfigError(f"our decoder does not know {info.config.model_type} with these options", "decoder")
    loaded = load_model(info, config.dtype, config.device)
    check_model(loaded, kv)
    return AnyModel(loaded.module, kv)


def _decoder(device: str) -> type[Decoder]:
    """Our decoder for a device. The one for a GPU needs Triton, which a torch for CPUs comes without."""
    if device == "cpu":
        return Decoder
    from holdfast.replicas.model.decoder_gpu import GpuDecoder

    return GpuDecoder


def hardware() -> Hardware:
    """This machine: the cores this process may use, and whether there is a GPU."""
    return Hardware(cuda=torch.cuda.is_available(), cores=len(os.sched_getaffinity(0)))
