"""Steps and turns of a model against the limits of the machine: `bench forwards` and `bench efficiency`.

A step is timed by turns with a plain chain of `linear` over matrices of the model's sizes, and with a read of a large
buffer. The latter gives the time of its memory traffic: every weight once, the KV of the sequences (of layers with a
window, the last tokens), and recurrent states, read and written. Of experts, those that the tokens choose at random.
The chain of int8 is in the other dtype; its weights are a byte each. Only models that our own decoder knows.

A peer is a running llama.cpp server of the same model. It takes its turn at every shape of one sequence, and reports
the time of its own forwards, without HTTP.

The efficiency of a turn is its ideal time over its measured time:

    ideal = (forwards x weights + KV read) / bandwidth + operations of the new tokens / product rate

The forwards are those that the engine did, so the tokens that drafts save are not in it.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from holdfast.kernels.linear_state import LinearStates
from holdfast.loadgen.bench.gpu.accounting import matrix_sizes
from holdfast.loadgen.bench.harness import Row, seconds
from holdfast.loadgen.client import Client
from holdfast.loadgen.options import PAUSE_S, parse_server
from holdfast.replicas.config import SCALE_BYTES, DraftConfig, DType, EngineConfig
from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.model.description import (
    DenseAndExperts,
    Description,
    MixtureOfExperts,
    describe,
    inspect_model,
)
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Runner, Sampling, StepPlan
from holdfast.replicas.types import KVDType

CELLS = 32768
PRECISIONS = tuple(
    f"{dtype}{kv}" for dtype in get_args(DType) for kv in ("", *(f"/{kv}" for kv in get_args(KVDType)[1:]))
)
COLUMNS = {"name": "<26", "step_ms": ">10.2f", "chain_ms": ">10.2f", "memory_ms": ">10.2f"}
COLUMNS |= {"over_chain": ">12.2f", "over_memory": ">12.2f"}
_BANDWIDTH_BYTES = 256 << 20  # beyond any cache
_DECODED = 9  # tokens requested from a peer when one is measured


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `sequences` chunks of `window` tokens, each after `context` cached ones.

    `drawn`: every token is drawn from, as in decoding and verifying; else the last one only, as in a prefill.
    """

    name: str
    sequences: int
    window: int
    context: int
    drawn: bool = True


SHAPES = (
    StepShape("decode, 300 cached", 1, 1, 300),
    StepShape("decode, 3000 cached", 1, 1, 3000),
    *(StepShape(f"verify {n}, 300 cached", 1, n, 300) for n in (4, 8, 16)),
    StepShape("decode, 2050 cached", 1, 1, 2050),
    StepShape("verify 8, 2050 cached", 1, 8, 2050),
    StepShape("prefill 200, 1850 cached", 1, 200, 1850, drawn=False),
    StepShape("verify 8, 3000 cached", 1, 8, 3000),
    StepShape("8 decode, 300 cached", 8, 1, 300),
    StepShape("8 decode, 3000 cached", 8, 1, 3000),
    StepShape("8 verify 4, 300 cached", 8, 4, 300),
    StepShape("8 verify 8, 300 cached", 8, 8, 300),
    *(StepShape(f"prefill {n}", 1, n, 0, drawn=False) for n in (64, 256, 1024)),
    StepShape("prefill 64, 3000 cached", 1, 64, 3000, drawn=False),
)


def step_plan(shape: StepShape, page_size: int, pages: int, states: bool = False) -> StepPlan:
    """The plan of a shape, over pages that hold nothing. Raises ConfigError where `pages` are too few.

    `states`: the model has recurrent states; each sequence has one, and drafts leave it as it is.
    """
    pages_each = -(-(shape.context + shape.window) // page_size)
    if shape.sequences * pages_each > pages:
        raise ConfigError(f"{shape.name!r} needs {shape.sequences * pages_each * page_size} cells", "cells")
    rows = np.arange(shape.sequences * pages_each, dtype=np.int32).reshape(shape.sequences, pages_each)
    draw = Draw(Sampling(), 0, drafts=shape.window - 1 if shape.drawn else 0)
    tokens = 1 + np.arange(shape.sequences * shape.window, dtype=np.int32).reshape(shape.sequences, -1) % 250
    uses = [StateUse(row, row, held=draw.drafts) if states else None for row in range(shape.sequences)]
    chunks = tuple(Chunk(row, shape.context, tokens[row], draw, state=use) for row, use in enumerate(uses))
    return StepPlan(chunks, tuple(RowWrite(row, 0, numbers) for row, numbers in enumerate(rows)))


class Floors:
    """The lower bounds of a step: a chain of matrices of the model's sizes, and the device's bandwidth."""

    def __init__(self, shape: Description, dtype: torch.dtype, device: str, weight_bytes: int, kv: torch.dtype) -> None:
        """`weight_bytes`: of each weight, as the model holds it; `kv`: the dtype of keys and values."""
        self._shape, self._weight_bytes, self._kv = shape, weight_bytes, kv
        self._state_bytes = 0
        if shape.state is not None:
            states = LinearStates(shape.state, shape.linear_layers, slots=1, window=0, dtype=dtype, device="meta")
            self._state_bytes = states.slot_bytes
        self._layers = [torch.full(size, 0.01, dtype=dtype, device=device) for size in matrix_sizes(shape)]
        self._head = torch.full((shape.vocabulary, shape.hidden), 0.01, dtype=dtype, device=device)
        self._stream = torch.ones(_BANDWIDTH_BYTES // 4, dtype=torch.float32, device=device)

    def chain(self, tokens: int, drawn: int) -> Callable[[], None]:
        """One product with every matrix, of `tokens` rows; with the head of `drawn`."""
        widths = {weight.shape[1] for weight in (*self._layers, self._head)}
        x = {width: self._head.new_ones((tokens, width)) for width in widths}

        @torch.inference_mode()
        def run() -> None:
            for weight in self._layers:
                linear(x[weight.shape[1]], weight)
            _wait(linear(x[self._head.shape[1]][:drawn], self._head))

        return run

    def read(self) -> None:
        """Read `read_bytes` that are in no cache."""
        _wait(self._stream.sum())

    @property
    def read_bytes(self) -> int:
        return self._stream.nbytes

    def step_bytes(self, shape: StepShape) -> int:
        """Bytes that a step has to move: it reads every weight once, of experts those that its tokens choose, and for
        each sequence reads the KV before its tokens, and reads and writes its state.
        """
        weights = sum(weight.numel() for weight in (*self._layers, self._head))
        for block in self._shape.blocks:
            op = block.op.experts if isinstance(block.op, DenseAndExperts) else block.op
            if isinstance(op, MixtureOfExperts):
                count, chosen = op.routing.experts, op.routing.chosen
                read = count * (1 - (1 - chosen / count) ** (shape.sequences * shape.window))
                weights += round((read - chosen) * (op.latent or self._shape.hidden) * (op.width + op.inner))
        cached = 0
        for each in self._shape.attentions:
            cell = 2 * each.kv_heads * (each.head_dim * self._kv.itemsize + SCALE_BYTES * (self._kv == torch.int8))
            cached += cell * min(shape.context, each.window or shape.context)
        return weights * self._weight_bytes + shape.sequences * (cached + 2 * self._state_bytes)


class LlamaServer:
    """A running server of llama.cpp that does one forward at a time in its first slot. Raises UnavailableError."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self._url, self._rng = name, url, np.random.default_rng(0)

    def milliseconds(self, shape: StepShape) -> float | None:
        """Time of one forward over a context that is computed before; None if the server did not keep the context.

        A single token is the mean of eight after the one that is drawn from the prompt's own forward.
        """
        length = shape.context + (shape.window if shape.window > 1 else 0)
        prompt = self._rng.integers(3, 256, length).tolist()
        if shape.window == 1:
            return float(self._complete(prompt, _DECODED)["predicted_ms"]) / (_DECODED - 1)
        if shape.context:
            self._complete(prompt[: shape.context], 1)
        timings = self._complete(prompt, 1)
        return float(timings["prompt_ms"]) if timings["prompt_n"] == shape.window else None

    def _complete(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "id_slot": 0}
        try:
            with Client(self._url, timeout_s=300) as client:  # a new connection: the next request may be far off
                timings: dict[str, Any] = client.post("/completion", {**body, "cache_prompt": True}, {})["timings"]
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"{self.name} reports no time of its forwards: {error!r}") from error
        return timings


def in_precision(config: EngineConfig, name: str) -> EngineConfig:
    """The settings with one of `PRECISIONS`: a dtype, with `/int8` or `/fp8` behind it for KV in that."""
    dtype, _, kv = name.partition("/")
    settings: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv or "auto"}
    return replace(config, **settings)


def forwards(options: Namespace) -> Iterator[Row]:
    """Median milliseconds of each shape, by turns: step, the step of `--beside`, chain, memory and, after a pause, the
    peers.

    Raises ConfigError for a model that our decoder does not know, UnavailableError like `LlamaServer`.
    """
    peers = [LlamaServer(*parse_server(peer)) for peer in options.peer]
    config = EngineConfig(model=options.model, threads=options.threads, cells=CELLS)
    model = described(options.model)
    # Slots for states have room for drafts only where there may be some.
    speculation = DraftConfig(enabled=model.state is not None)
    config = replace(config, state_slots=max(one.sequences for one in SHAPES), speculation=speculation)
    loaded = load_runner(in_precision(config, options.dtype))
    runners = {"step_ms": loaded.runner}
    if options.beside:
        runners["beside_ms"] = load_runner(in_precision(config, options.beside)).runner
    kv, dtype = loaded.runner.kv, loaded.config.dtype
    weight_bytes = 1 if dtype == "int8" else kv.dtype.itemsize
    floors = Floors(model, kv.dtype, loaded.config.device, weight_bytes, kv.data.dtype)
    print(f"{dtype}, KV {loaded.config.kv_dtype}, {loaded.config.threads} threads")
    for shape in SHAPES:
        if options.only in shape.name:
            plan = step_plan(shape, kv.page_size, kv.pages, loaded.config.state_slots > 0)
            yield _timed(shape, plan, runners, floors, peers if shape.sequences == 1 else [], options.repeat)


def _timed(
    shape: StepShape,
    plan: StepPlan,
    runners: Mapping[str, Runner],
    floors: Floors,
    peers: Sequence[LlamaServer],
    repeat: int,
) -> Row:
    tokens = shape.sequences * shape.window
    ways: dict[str, Callable[[], object]] = {name: partial(_step, runner, plan) for name, runner in runners.items()}
    ways["chain_ms"] = floors.chain(tokens, tokens if shape.drawn else shape.sequences)
    ways["memory_ms"] = floors.read
    times: dict[str, list[float]] = {name: [] for name in ways}
    theirs: dict[str, list[float | None]] = {peer.name: [] for peer in peers}
    for _ in range(repeat + 1):  # the first turn warms up
        if peers:
            time.sleep(PAUSE_S)
            _step(runners["step_ms"], plan)  # threads and caches as they are between steps
        for name, call in ways.items():
            times[name].append(seconds(call) * 1e3)
        for peer in peers:
            time.sleep(PAUSE_S)
            theirs[peer.name].append(peer.milliseconds(shape))
    row: Row = {"name": shape.name} | {name: statistics.median(row_s[1:]) for name, row_s in times.items()}
    row["memory_ms"] *= floors.step_bytes(shape) / floors.read_bytes
    row |= {f"over_{floor}": row["step_ms"] / row[f"{floor}_ms"] for floor in ("chain", "memory")}
    for name, peer_times in theirs.items():
        values = [value for value in peer_times[1:] if value is not None]
        row[name] = statistics.median(values) if len(values) == repeat else None
        row[f"{name}/ours"] = row[name] and row[name] / row["step_ms"]
    return row


def forward_columns(options: Namespace) -> dict[str, str]:
    """The columns of `forwards`, with those of the peers."""
    columns = COLUMNS | ({"beside_ms": ">10.2f"} if options.beside else {})
    names = [parse_server(peer)[0] for peer in options.peer]
    return columns | {column: ">13.2f" for name in names for column in (name, f"{name}/ours")}


def _step(runner: Runner, plan: StepPlan) -> None:
    runner.begin(plan).land()


def _wait(result: Tensor) -> None:
    """Return once the device has computed `result`."""
    if result.device.type == "cuda":
        torch.cuda.synchronize()


def described(model: str) -> Description:
    """The model, as our own decoder describes it. Raises ConfigError where it does not know it."""
    shape = describe(inspect_model(model).config)
    if shape is None:
        raise ConfigError("our own decoder does not know this model", "model")
    return shape
