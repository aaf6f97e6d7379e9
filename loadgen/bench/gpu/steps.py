"""Single steps of a model with random weights, as shares of what the device allows; nothing is on disk.

Decoding, verifying, prefilling, moves to the host and back, and the host's own share of a step of many sequences. Not
here: whole conversations (`workflows`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.ceilings import Ceilings, Clock, hold
from holdfast.kernels.linear_state import NO_STATE
from holdfast.kernels.quantized import E8M0, QuantizedWeight, Weight
from holdfast.loadgen.bench.gpu.accounting import Bounds, CountingRunner, Totals, drain
from holdfast.loadgen.bench.gpu.stage import capture_graphs
from holdfast.loadgen.bench.parts import Lines
from holdfast.loadgen.inflate.model import config_of
from holdfast.loadgen.inflate.shapes import SHAPES, Family, Shape
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.pages import PageIds, PageMoves, StateUse
from holdfast.replicas.kv.tensors import HostPages, KVTensors
from holdfast.replicas.model.decoder import rotary_tables
from holdfast.replicas.model.decoder_gpu import GpuDecoder, choose_products
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.startup import check_graphs, kept_window, make_states
from holdfast.replicas.model.weights import Part, Source, weights_from
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan
from holdfast.replicas.requests import Submit
from holdfast.replicas.types import TokenIds

WeightNumbers: TypeAlias = Literal["plain", "fp8", "mxfp4 experts"]
"""What the matrices of layers hold: numbers of 16 bits; FP8 in blocks, experts too; or MXFP4 in experts alone."""
_HELD_S = 0.04  # the host lays out and launches any step in less, also one of many launches


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What is measured, and how often. Tokens, but for `repeat`."""

    model: Any  # a configuration of transformers
    device: str
    cells: int
    numbers: WeightNumbers = "plain"
    rows: int = 64  # sequences at once, where many are
    context: int = 4096  # cached by each of them
    short: int = 1024  # cached by one alone
    chunk: int = 4096  # of a prefill
    moved_pages: int = 512  # between the device and the host
    repeat: int = 20


def full_steps() -> StepSizes:
    """Llama 3.1 8B on a large GPU."""
    return StepSizes(config_of(SHAPES["llama-3.1-8b"], max_position_embeddings=131072), "cuda", cells=300_000)


def small_steps() -> StepSizes:
    """So little that an interpreter gets through it: what it measures is that everything runs."""
    shape = Shape(Family.LLAMA, 16, 24, 1, 2, 1, 8, vocabulary=97, tied=False)
    model = config_of(shape, max_position_embeddings=48)
    return StepSizes(model, "cpu", cells=1024, rows=2, context=17, short=10, chunk=16, moved_pages=5, repeat=1)


class World:
    """The runner over random weights, with graphs where the device has any."""

    def __init__(self, sizes: StepSizes, ceilings: Ceilings) -> None:
        context = sizes.model.max_position_embeddings
        shape = describe(sizes.model)
        assert shape is not None  # all sizes are of families that the decoder knows
        self.sizes, self.shape = sizes, shape
        dtype = torch.bfloat16 if sizes.device == "cuda" else torch.float32
        kinds, rows = shape.kinds(context), sizes.rows + 1
        self.config = EngineConfig(
            cells=sizes.cells // 16 * 16,
            context_length=context,
            max_sequences=rows,
            session_rows=0,
            step_tokens=sizes.chunk,
            admission_ceiling=1.0,
            device=sizes.device,
            overlap_steps="on",
            speculation=DraftConfig(enabled=False),
            state_slots=2 * rows if shape.state is not None else 0,
            window_cells=sizes.cells // 16 * 16 if len(kinds) > 1 else 0,
        )
        pages = [sizes.cells // 16] * len(kinds)
        self.kv = KVTensors.of(kinds, pages, 16, dtype, sizes.device, scratch=True)
        kept = kept_window(kinds, self.config, on_cpu=False)
        self.window = kept.tokens if kept is not None else 0
        self.states = make_states(shape, self.config, self.config.state_slots, dtype, sizes.device)
        self.weights = RandomWeights(dtype, sizes.device, sizes.numbers)
        self.bounds = Bounds(shape, dtype.itemsize, self.kv.cell_bytes, ceilings)
        rotary = rotary_tables(sizes.model, shape, context, sizes.device)
        self.decoder = GpuDecoder(shape, weights_from(self.weights, shape), rotary, self.kv, states=self.states)
        self.runner = GpuRunner(self.decoder, self.kv, rows, context)

    def engine(self) -> tuple[Engine, CountingRunner]:
        """An engine with an empty cache over the runner, and what counts between the two."""
        counting = CountingRunner(self.runner)
        return Engine(self.config, counting, vocabulary=self.shape.vocabulary, window=self.window), counting

    def tokens(self, count: int, seed: int) -> TokenIds:
        return np.random.default_rng(seed).integers(1, self.shape.vocabulary, count).astype(np.int32)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.sizes.device == "cuda":
            torch.cuda.synchronize()

    def hold(self, seconds: float) -> None:
        """`ceilings.hold`, where there is a GPU."""
        if self.sizes.device == "cuda":
            hold(seconds)

    def seconds(self, call: Callable[[], object]) -> float:
        """What a call takes on the device."""
        return Clock().seconds(call) if self.sizes.device == "cuda" else host_seconds(call)

    def now(self) -> float:
        """Seconds, once the device has nothing left to do."""
        self.wait()
        return time.perf_counter()


class RandomWeights(Source):
    """Numbers as a fresh model has them; their size matters for speed, their values do not.

    `read`: bytes of matrices that every forward reads; `experts_read`: those of all experts.
    """

    def __init__(self, dtype: torch.dtype, device: str, numbers: WeightNumbers = "plain") -> None:
        super().__init__(dtype, device)
        self._generator = torch.Generator(device).manual_seed(0)
        self._numbers = numbers
        self.read = self.experts_read = 0

    def has(self, name: str) -> bool:
        return name.endswith("experts.gate_up_proj")  # experts come in one piece

    def tensor(self, name: str, *size: int) -> Tensor:
        weight = super().tensor(name, *size).normal_(std=0.02, generator=self._generator)
        self.read += weight.nbytes if "embed" not in name else 0
        return weight

    def floats(self, name: str, *size: int, plus: float = 0.0) -> Tensor:
        weight = super().floats(name, *size)
        self.read += weight.nbytes
        if name.endswith("gate.weight"):  # a router: tokens choose different experts
            return weight.normal_(std=0.02, generator=self._generator)
        return weight.fill_(1.0)

    def matrix(self, parts: Sequence[Part], inputs: int) -> Weight:
        outputs = sum(part.outputs for part in parts)
        if self._numbers != "fp8" or "in_proj_a" in parts[0].name or "in_proj_ba" in parts[0].name:
            return self.tensor("", outputs, inputs)
        weight = self._fp8(outputs, inputs)
        self.read += _bytes(weight)
        return weight

    def experts(self, name: str, *size: int, rows: Tensor | None = None, transposed: bool = False) -> Weight:
        weight: Weight
        if self._numbers == "fp8":
            weight = self._fp8(*size)
        elif self._numbers == "mxfp4 experts":
            count, outputs, inputs = size
            exponents = torch.full((count, outputs, -(-inputs // 32)), 120, dtype=torch.uint8, device=self.device)
            weight = QuantizedWeight("e2m1", self._codes(count, outputs, inputs // 2), exponents.view(E8M0), (1, 32))
        else:
            weight = super().tensor(name, *size).normal_(std=0.02, generator=self._generator)
        self.experts_read += _bytes(weight)
        return weight

    def _fp8(self, *size: int) -> QuantizedWeight:
        blocks = [-(-length // 128) for length in size[-2:]]
        scales = torch.full((*size[:-2], *blocks), 2.0**-10, device=self.device)
        return QuantizedWeight("e4m3", self._codes(*size) & 0xF7, scales, (128, 128))  # without the bits of NaN

    def _codes(self, *size: int) -> Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, device=self.device, generator=self._generator)


def _bytes(weight: Weight) -> int:
    tensors = (weight,) if isinstance(weight, Tensor) else weight.tensors
    return sum(each.nbytes for each in tensors if each is not None)


def decoding(world: World, rows: int, cached: int, window: int = 1, common: int = 0) -> StepPlan:
    """`rows` sequences of `cached` tokens, each with a window of tokens to verify; the first `common` pages are one."""
    pages = -(-(cached + window) // 16)
    own = min(world.kv.pages // rows, pages)  # a store too small for all lets them share their last pages
    numbers = np.arange(world.kv.pages, dtype=np.int32)
    each = [np.resize(numbers[row * own : (row + 1) * own], pages).astype(np.int32) for row in range(rows)]
    tables = [np.append(each[0][:common], mine[common:]) for mine in each]
    draw = Draw(Sampling(), 0, drafts=window - 1)
    chunks = tuple(
        Chunk(row, cached, world.tokens(window, row), draw, state=_state(world, row, held=window - 1))
        for row in range(rows)
    )
    return StepPlan(chunks, _writes(world, tables))


def _state(world: World, row: int, held: int = 0, begins: bool = False) -> StateUse | None:
    """The state of a row, in the slot of its number; None where the model has none."""
    return StateUse(NO_STATE if begins else row, row, held=held) if world.states is not None else None


def _writes(world: World, tables: Sequence[PageIds]) -> tuple[RowWrite, ...]:
    """The pages of each row, in every kind of layers."""
    kinds = range(len(world.kv.kinds))
    return tuple(RowWrite(row, 0, pages, kind) for kind in kinds for row, pages in enumerate(tables))


def timed(world: World, plan: StepPlan) -> tuple[float, float]:
    """The median seconds that a step takes on the device, and the share of the steps that ran in a graph.

    Each step begins while the device is busy with something else, so the host's time is not in it.
    """
    runner, repeat = world.runner, world.sizes.repeat
    for _ in range(min(2, repeat)):
        runner.begin(plan).land()
    plan, replayed = StepPlan(plan.chunks), runner.replayed  # its rows are written
    device = []
    for _ in range(repeat):
        world.hold(_HELD_S)
        output = runner.begin(plan).land()
        device.append(output.forward_s + output.sample_s)
    return statistics.median(device), (runner.replayed - replayed) / repeat


def host_seconds(call: Callable[[], object]) -> float:
    """What a call takes without a device."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def products(world: World) -> Lines:
    """Products of few rows by our kernels and by torch; the parts that follow take the faster."""
    for each in choose_products(world.decoder.matrices, world.seconds):
        read_s = each.outputs * each.inputs * world.bounds.item_bytes / world.bounds.ceilings.bandwidth
        ours_s = min(each.ours_s, each.tall_s)
        figures = {"ours_s": ours_s, "torchs_s": each.torchs_s, "torchs_over_ours": each.torchs_s / ours_s}
        figures |= {"ours_of_bandwidth": read_s / ours_s, "torchs_of_bandwidth": read_s / each.torchs_s}
        figures |= {"tall_over_ours": each.tall_s / each.ours_s}
        yield f"{each.rows} rows, {each.inputs} to {each.outputs}", figures


def decode_shares(world: World) -> Lines:
    """Bandwidth's share of a decode step: one sequence, and many."""
    sizes = world.sizes
    for rows, cached in ((1, sizes.short), (sizes.rows, sizes.context)):
        times = timed(world, decoding(world, rows, cached))
        yield f"decode, {rows} at {cached}", _figures(times, world.bounds.read_s(rows * cached))


def verify_cost(world: World) -> Lines:
    """A window of 8 against one token, of one sequence."""
    one, eight = (timed(world, decoding(world, 1, world.sizes.short, window)) for window in (1, 8))
    figures = {"over_one_token": eight[0] / one[0], "replayed": (one[1] + eight[1]) / 2}
    yield "verify 8 against 1", figures


def prefill_share(world: World) -> Lines:
    """The matrix rate's share of a whole chunk, and of the shorter ones that turns begin with."""
    size = world.sizes.chunk
    for part, cached in ((size, 0), (size // 8, world.sizes.context // 2), (size // 12, world.sizes.context // 2)):
        pages = np.arange(-(-(cached + part) // 16), dtype=np.int32)
        chunk = Chunk(0, cached, world.tokens(part, 1), Draw(Sampling(), 0), state=_state(world, 0, begins=not cached))
        times = timed(world, StepPlan((chunk,), _writes(world, [pages])))
        name = f"prefill {part} after {cached}" if cached else f"prefill {part}"
        yield name, _figures(times, world.bounds.compute_s(part, cached))


def host_tier(world: World) -> Lines:
    """Pages out to host memory and back: bytes a second of each way, and whether the same bits came back."""
    pages = min(world.sizes.moved_pages, world.kv.pages)
    tier = HostPages(world.kv, pages)
    moves = PageMoves(
        np.random.default_rng(0).permutation(world.kv.pages)[:pages].astype(np.int32), np.arange(pages, dtype=np.int32)
    )
    index = torch.from_numpy(moves.device.astype(np.int64)).to(world.kv.data.device)
    world.kv.data[:, :, : world.kv.pages].normal_()
    before = world.kv.data.index_select(2, index)
    began = world.now()
    tier.save(moves)
    tier.wait()
    out_s = world.now() - began
    world.kv.data.zero_()
    began = world.now()
    tier.load(moves)
    told = tier.wait()
    in_s = world.now() - began
    same = told.ok and torch.equal(world.kv.data.index_select(2, index), before)
    speeds = {"out_bytes_per_s": before.nbytes / out_s, "in_bytes_per_s": before.nbytes / in_s}
    yield f"host tier, {before.nbytes / 2**20:.0f} MiB", speeds | {"same_bits": int(same)}


def _figures(times: tuple[float, float], ideal: float) -> dict[str, float]:
    device_s, replayed = times
    return {"device_s": device_s, "ideal_s": ideal, "share": ideal / device_s, "replayed": replayed}


def host_time(world: World) -> Lines:
    """What a decode step of many sequences takes beyond the device. Raises RuntimeError where steps fail.

    A step that begins while nothing runs has the host's preparation in the device's time: that is `prepare_s`.
    """
    rows, sizes = world.sizes.rows, world.sizes
    engine, counting = world.engine()
    sampling = Sampling(4 + 2 * sizes.repeat, ignore_eos=True)
    for row in range(rows):
        engine.handle(Submit(f"{row}", tokens=world.tokens(16, row), sampling=sampling), time.perf_counter())
    while engine.stats.completion < 2 * rows:
        if not engine.busy:
            raise RuntimeError("the steps fail: the log says why")
        engine.step(time.perf_counter())
    before, steps, replayed = Totals.of(engine, counting), engine.stats.steps, world.runner.replayed
    began = world.now()
    for _ in range(sizes.repeat):
        engine.step(time.perf_counter())
    wall = world.now() - began
    total, steps = Totals.of(engine, counting).since(before), max(engine.stats.steps - steps, 1)
    replayed = world.runner.replayed - replayed
    drain(engine)
    device = total.forward_s + total.sample_s
    seconds = {
        "wall_s": wall,
        "device_s": device,
        "prepare_s": total.prepare_s,
        "plan_s": total.schedule_s,
        "commit_s": total.commit_s,
        "not_hidden_s": wall - device + total.prepare_s,
    }
    figures = {name: value / steps for name, value in seconds.items()}
    yield f"a step of {rows} sequences", figures | {"replayed": replayed / steps}


def graphs(world: World) -> Lines:
    """Capture graphs, so that the parts after this one replay them, and see whether they compute the same."""
    before, free = world.now(), _free_bytes(world)
    capture(world)
    figures = {"seconds": world.now() - before, "device_bytes": free - _free_bytes(world)}
    yield "graphs", figures | {"same_draws": int(check_graphs(world.runner, world.config))}


def capture(world: World) -> None:
    """Graphs of the model as it is now."""
    capture_graphs(world.runner, world.sizes.device, 1024 if world.sizes.device == "cuda" else 4, print)


def _free_bytes(world: World) -> int:
    """Of the device; what torch keeps for tensors to come is not free."""
    return int(torch.cuda.mem_get_info()[0]) if world.sizes.device == "cuda" else 0
