"""How near a step comes to what the machine allows, and to llama.cpp's: ``python -m holdfast.loadgen.bench.forwards
--model DIR --peer NAME=URL``.

Each shape of step is timed by turns with a plain chain of `linear` over matrices of the model's sizes. The step is also
compared with the time of its memory traffic at the measured bandwidth: every weight once, the KV of the sequences (of
layers with a window, the last tokens), and recurrent states, read and written. Of experts, those that the tokens choose
at random. With `--beside DTYPE` the same steps in another dtype take turns. The chain of int8 is in the other
dtype; its weights are a byte each. Only models that our own decoder knows.

A peer is a running llama.cpp server of the same model. It takes its turn at every shape of one sequence, and reports
the time of its own forwards, without HTTP.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from holdfast.loadgen.bench.harness import Row, parser, report, seconds, write
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
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Runner, Sampling, StepPlan

PRECISIONS = tuple(f"{dtype}{kv}" for dtype in get_args(DType) for kv in ("", "/int8"))
COLUMNS = {"name": "<26", "step_ms": ">10.2f", "chain_ms": ">10.2f", "memory_ms": ">10.2f"}
COLUMNS |= {"over_chain": ">12.2f", "over_memory": ">12.2f"}
_BANDWIDTH_BYTES = 256 << 20  # beyond any cache
_DECODED = 9  # tokens asked of a peer where a single one is measured


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


def step_plan(shape: StepShape, page_size: int, pages: int, scattered: bool, states: bool = False) -> StepPlan:
    """The plan of a shape, over pages that hold nothing; `scattered`: no two neighbouring pages belong together.

    `states`: of a model with recurrent states; each sequence has one, and drafts leave it as it is.

    Raises ConfigError where `pages` are too few.
    """
    each = -(-(shape.context + shape.window) // page_size)
    if shape.sequences * each > pages:
        raise ConfigError(f"{shape.name!r} needs {shape.sequences * each * page_size} cells", "cells")
    order = np.random.default_rng(0).permutation(pages) if scattered else np.arange(pages)
    rows = order[: shape.sequences * each].astype(np.int32).reshape(shape.sequences, each)
    draw = Draw(Sampling(), 0, drafts=shape.window - 1 if shape.drawn else 0)
    tokens = 1 + np.arange(shape.sequences * shape.window, dtype=np.int32).reshape(shape.sequences, -1) % 250
    uses = [StateUse(row, row, held=draw.drafts) if states else None for row in range(shape.sequences)]
    chunks = tuple(Chunk(row, shape.context, tokens[row], draw, state=use) for row, use in enumerate(uses))
    return StepPlan(chunks, tuple(RowWrite(row, 0, numbers) for row, numbers in enumerate(rows)))


class Floors:
    """What a step cannot beat: matrices of the model's sizes to chain, and the device's bandwidth."""

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

    def memory_s(self, shape: StepShape) -> float:
        """Seconds for the bytes that a step has to move, from the best of five reads of a large buffer."""
        read = min(seconds(lambda: _wait(self._stream.sum())) for _ in range(5))
        return read * self.step_bytes(shape) / self._stream.nbytes

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
    """A running server of llama.cpp, asked for one forward at a time in its first slot. Raises UnavailableError."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self._url, self._rng = name, url, np.random.default_rng(0)

    def milliseconds(self, shape: StepShape) -> float | None:
        """Of one forward over a context that is computed before: of a token after a prompt, or of a window of one.

        None where it computes other tokens than these: it did not keep the context.
        A single token is the mean of eight, of which the first one, drawn from the prompt's forward, counts for none.
        """
        length = shape.context + (shape.window if shape.window > 1 else 0)
        prompt = self._rng.integers(3, 256, length).tolist()
        if shape.window == 1:
            told = self._ask(prompt, _DECODED)
            return float(told["predicted_ms"]) / (_DECODED - 1)
        if shape.context:
            self._ask(prompt[: shape.context], 1)
        told = self._ask(prompt, 1)
        return float(told["prompt_ms"]) if told["prompt_n"] == shape.window else None

    def _ask(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "id_slot": 0}
        try:
            with Client(self._url, timeout_s=300) as client:  # another one each time: it may be a while until the next
                told: dict[str, Any] = client.post("/completion", {**asked, "cache_prompt": True}, {})["timings"]
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"{self.name} tells no time of its forwards: {error!r}") from error
        return told


def measure(
    loaded: LoadedRunner,
    floors: Floors,
    shapes: Sequence[StepShape],
    repeat: int,
    scattered: bool,
    beside: LoadedRunner | None = None,
    peers: Sequence[LlamaServer] = (),
) -> Iterator[Row]:
    """Medians in milliseconds of each shape, by turns: step, chain, the step of `beside` and, after a pause, the peers.

    `memory_ms`: weights, KV and states of the step at the measured bandwidth. `peers_ms`: by name; of several sequences
    nothing. Raises UnavailableError for a peer that does not answer as llama.cpp does.
    """
    kv, states = loaded.runner.kv, loaded.config.state_slots > 0
    for shape in shapes:
        plan = step_plan(shape, kv.page_size, kv.pages, scattered, states)
        tokens = shape.sequences * shape.window
        ways: dict[str, Callable[[], object]] = {
            "step_ms": partial(_step, loaded.runner, plan),
            "chain_ms": floors.chain(tokens, tokens if shape.drawn else shape.sequences),
        }
        if beside is not None:
            ways["beside_ms"] = partial(_step, beside.runner, plan)
        times: dict[str, list[float]] = {name: [] for name in ways}
        theirs: dict[str, list[float | None]] = {peer.name: [] for peer in peers if shape.sequences == 1}
        for _ in range(repeat + 1):  # the first turn warms up
            if peers:
                time.sleep(PAUSE_S)
                _step(loaded.runner, plan)  # threads and caches as they are between steps
            for name, call in ways.items():
                times[name].append(seconds(call) * 1e3)
            for peer in peers if theirs else ():
                time.sleep(PAUSE_S)
                theirs[peer.name].append(peer.milliseconds(shape))
        row: Row = {"name": shape.name} | {name: statistics.median(each[1:]) for name, each in times.items()}
        memory = floors.memory_s(shape) * 1e3
        row |= {
            "memory_ms": memory,
            "over_chain": row["step_ms"] / row["chain_ms"],
            "over_memory": row["step_ms"] / memory,
        }
        yield row | {"peers_ms": {name: _median(each[1:]) for name, each in theirs.items()}}


def _step(runner: Runner, plan: StepPlan) -> None:
    runner.begin(plan).land()


def in_precision(config: EngineConfig, name: str) -> EngineConfig:
    """The settings with one of `PRECISIONS`: a dtype, with `/int8` behind it for KV in int8."""
    dtype, _, kv = name.partition("/")
    settings: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv or "auto"}
    return replace(config, **settings)


def _median(values: Sequence[float | None]) -> float | None:
    """None if one is missing."""
    known = [each for each in values if each is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _wait(result: Tensor) -> None:
    """Return once the device has computed `result`."""
    if result.device.type == "cuda":
        torch.cuda.synchronize()


def _parser() -> argparse.ArgumentParser:
    command = parser("forwards", "Steps of a model against the machine's floors.")
    command.add_argument("--model", required=True, help="'pocket' or a model folder")
    text = "a dtype; DTYPE/int8: with KV in int8"
    command.add_argument("--dtype", choices=PRECISIONS, default="auto", metavar="DTYPE", help=text)
    command.add_argument("--beside", choices=PRECISIONS, metavar="DTYPE", help="another one, by turns")
    command.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0: all cores")
    command.add_argument("--repeat", type=int, default=5)
    command.add_argument("--cells", type=int, default=32768)
    command.add_argument("--scattered", action="store_true", help="no two neighbouring pages belong together")
    command.add_argument("--only", default="", help="only shapes whose name has this in it")
    text = "a llama.cpp server of the same model, by turns with the steps; may come several times"
    command.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help=text)
    return command


def _columns_of(row: Row) -> Row:
    """Each peer's time, and over ours."""
    theirs: Row = row["peers_ms"]
    return theirs | {f"{name}/ours": value and value / row["step_ms"] for name, value in theirs.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit status 2 for a model that our decoder does not know.

    Raises ConfigError like `load_runner`, UnavailableError like `measure`.
    """
    options = _parser().parse_args(argv)
    peers = [LlamaServer(*parse_server(peer)) for peer in options.peer]
    slots = max(one.sequences for one in SHAPES)
    config = EngineConfig(model=options.model, threads=options.threads, cells=options.cells, state_slots=slots)
    shape = describe(inspect_model(options.model).config)
    if shape is None:
        print("bench forwards: our decoder does not know this model", file=sys.stderr)
        return 2
    # Slots for states have room for drafts only where there may be some.
    config = replace(config, speculation=DraftConfig(enabled=shape.state is not None))
    loaded = load_runner(in_precision(config, options.dtype))
    beside = load_runner(in_precision(config, options.beside)) if options.beside else None
    dtype = loaded.runner.kv.dtype
    weight_bytes = 1 if loaded.config.dtype == "int8" else dtype.itemsize
    floors = Floors(shape, dtype, loaded.config.device, weight_bytes, loaded.runner.kv.data.dtype)
    print(f"{loaded.config.dtype}, KV {loaded.config.kv_dtype}, {loaded.config.threads} threads")
    columns = COLUMNS | ({"beside_ms": ">10.2f"} if beside else {})
    for peer in peers:
        columns |= {peer.name: ">13.2f", f"{peer.name}/ours": ">13.2f"}
    shapes = [one for one in SHAPES if options.only in one.name]
    timed = measure(loaded, floors, shapes, options.repeat, options.scattered, beside, peers)
    rows = report((row | _columns_of(row) for row in timed), columns, None)
    precision = {"dtype": loaded.config.dtype, "kv_dtype": loaded.config.kv_dtype}
    head = {"model": options.model, "threads": loaded.config.threads} | precision
    write(options.json, head | {"steps": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
