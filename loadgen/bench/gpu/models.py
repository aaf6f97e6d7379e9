"""The models that agents run, at their own sizes and with the numbers of their checkpoints: steps, and turns alone.

Weights are random, so no draft would come true and none is made. A share is the ideal time of a step over its time. The
ideal of a decode step is the bytes that it has to move over the bandwidth: matrices once, of experts those that its
tokens choose at random, keys and values that it sees, and states, read and written. Of a prefill it is operations over
the rate of a product in 16 bits.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from holdfast.kernels.ceilings import Ceilings
from holdfast.kernels.experts_gpu import choose_experts
from holdfast.loadgen.bench.gpu.accounting import Bounds
from holdfast.loadgen.bench.gpu.stage import Exchange, capture_graphs
from holdfast.loadgen.bench.gpu.steps import StepSizes, WeightNumbers, World, decoding, prefill_share, timed
from holdfast.loadgen.bench.gpu.workflows import Player, summary
from holdfast.loadgen.bench.parts import Figures, Lines, Once, Report, free_device
from holdfast.loadgen.inflate.model import config_of
from holdfast.loadgen.inflate.shapes import SHAPES, Experts, Shape, Window
from holdfast.replicas.model.decoder_gpu import choose_products
from holdfast.replicas.model.description import DenseAndExperts, MixtureOfExperts
from holdfast.replicas.model.startup import check_graphs

NUMBERS: dict[str, WeightNumbers] = {
    "qwen3.5-27b": "fp8",
    "gpt-oss-20b": "mxfp4 experts",
    "qwen3.6-35b-a3b": "fp8",
}
"""The shapes by name, and what their checkpoints hold."""
_PART_S = 40.0
_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What is measured of each model. `cached` by each of `rows` sequences; `turns` of a program alone."""

    shapes: dict[str, Shape]
    device: str
    rows: tuple[int, ...] = (1, 32)
    cached: int = 2048
    chunk: int = 4096
    turns: int = 6
    reply: int = 40
    graph_tokens: int = 64
    repeat: int = 10


def full_models() -> ModelSizes:
    """On a large GPU."""
    return ModelSizes({name: SHAPES[name] for name in NUMBERS}, "cuda")


def small_models() -> ModelSizes:
    """So little that an interpreter gets through it."""
    shapes = {}
    for name in NUMBERS:
        shape = replace(SHAPES[name], hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=16, vocabulary=97)
        shape = replace(shape, interval=2, layers=2) if shape.linear else replace(shape, layers=shape.interval)
        if shape.experts is not None:
            shape = replace(shape, experts=Experts(4, 2, 64, shape.experts.shared and 64))
        if shape.linear is not None:
            shape = replace(shape, linear=replace(shape.linear, key_heads=1, value_heads=2, key_dim=16, value_dim=16))
        if shape.window is not None:
            shape = replace(shape, window=Window(16, 1, 16))
        shapes[name] = shape
    return ModelSizes(shapes, "cpu", (1, 2), cached=20, chunk=16, turns=2, reply=2, graph_tokens=2, repeat=1)


@dataclass(frozen=True, slots=True)
class ModelBounds(Bounds):
    """`Bounds` of a model with experts, windows and states. `read`: bytes of matrices that every forward reads, without
    experts; `experts_read`: of all experts; `state_bytes` of a sequence.
    """

    read: int = 0
    experts_read: int = 0
    state_bytes: int = 0

    def step_bytes(self, sequences: int, cached: int) -> float:
        """Of a step in which each sequence decodes a token after `cached` ones."""
        kv = sum(
            2 * op.kv_heads * op.head_dim * self.item_bytes * min(cached, op.window or cached)
            for op in self.shape.attentions
        )
        return self.read + self._chosen(sequences) * self.experts_read + sequences * (kv + 2 * self.state_bytes)

    def read_s(self, positions: int, forwards: int = 1) -> float:
        """Of one sequence alone."""
        each = positions // max(forwards, 1)
        return forwards * self.step_bytes(1, each) / self.ceilings.bandwidth

    def _chosen(self, tokens: int) -> float:
        """The part of the experts that tokens choose, each at random."""
        for block in self.shape.blocks:
            op = block.op.experts if isinstance(block.op, DenseAndExperts) else block.op
            if isinstance(op, MixtureOfExperts):
                return 1.0 - (1.0 - op.routing.chosen / op.routing.experts) ** tokens
        return 0.0


def run(report: Report, sizes: ModelSizes, ceilings: Ceilings) -> None:
    """Every model as a part of its own: its parts need the memory of one."""
    for name, shape in sizes.shapes.items():
        made = Once(partial(world_of, name, shape, sizes, ceilings))
        report.run(name, lambda deadline, made=made: _measured(made(), sizes, ceilings), _PART_S, made)  # type: ignore[misc]
        made.drop()
        free_device()


def world_of(name: str, shape: Shape, sizes: ModelSizes, ceilings: Ceilings) -> World:
    context = _CONTEXT if sizes.device == "cuda" else 64
    config: Any = config_of(shape, max_position_embeddings=context)
    rows = max(sizes.rows)
    cells = max(rows * (sizes.cached + 16), 2 * context)
    return World(
        StepSizes(
            config,
            sizes.device,
            cells,
            numbers=NUMBERS[name],
            rows=rows,
            context=sizes.cached,
            short=sizes.cached,
            chunk=sizes.chunk,
            repeat=sizes.repeat,
        ),
        ceilings,
    )


def bounds_of(world: World, ceilings: Ceilings) -> ModelBounds:
    """What the device allows a model whose weights have been made."""
    state = world.states.slot_bytes if world.states is not None else 0
    of_model = (world.weights.read, world.weights.experts_read, state)
    return ModelBounds(world.shape, world.kv.dtype.itemsize, world.kv.cell_bytes, ceilings, *of_model)


def _measured(world: World, sizes: ModelSizes, ceilings: Ceilings) -> Lines:
    bounds = world.bounds = bounds_of(world, ceilings)
    if sizes.device == "cuda":  # elsewhere times say nothing, and take long
        choose_products(world.decoder.matrices, world.seconds)
        for chosen, layers in world.decoder.experts.items():
            choose_experts(layers, chosen, world.seconds)
    yield "bytes", {"matrices": bounds.read, "experts": bounds.experts_read, "a state": bounds.state_bytes}
    for way in ("launched", "in graphs"):
        if way == "in graphs":
            capture_graphs(world.runner, sizes.device, sizes.graph_tokens)
            yield "graphs", {"same_draws": int(check_graphs(world.runner, world.config))}
        for rows in sizes.rows:
            device_s, replayed = timed(world, decoding(world, rows, sizes.cached))
            ideal = bounds.step_bytes(rows, sizes.cached) / ceilings.bandwidth
            figures: Figures = {"device_s": device_s, "ideal_s": ideal, "share": ideal / device_s}
            yield f"decode, {rows} at {sizes.cached}, {way}", figures | {"replayed": replayed}
    yield from prefill_share(world)
    yield "turns alone", _turns(world, sizes)


def _turns(world: World, sizes: ModelSizes) -> Figures:
    """A program alone, whose prompts grow by its own replies and as many tokens of a tool."""
    engine, counting = world.engine()
    rng = np.random.default_rng(7)
    first = sizes.chunk // 8

    def tokens(count: int) -> Any:
        return rng.integers(1, world.shape.vocabulary, count).astype(np.int32)

    exchanges, prompt = [], tokens(first)
    for _ in range(sizes.turns):
        reply = tokens(sizes.reply)
        exchanges.append(Exchange(prompt, reply))
        prompt = np.concatenate((prompt, reply, tokens(first // 4)))
    warm = Player(engine, counting, world.bounds, [tuple(exchanges)])
    warm.wave(0)
    engine, counting = world.engine()
    player = Player(engine, counting, world.bounds, [tuple(exchanges)])
    return summary([player.wave(turn) for turn in range(sizes.turns)])
