"""Gated DeltaNet and Mamba-2 on a GPU against float64, in the interpreter where there is no GPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from on_device import DEVICE, full
from state_worlds import assert_close, spans

from holdfast.kernels import linear_state_gpu
from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.linear_state import LinearShape
from holdfast.kernels.linear_state_gpu import gated_delta_gpu, mamba2_gpu
from holdfast.loadgen.bench.kernels import linear_state
from holdfast.loadgen.bench.kernels.linear_state import Span, Work, beside, written

StateWorld = partial(linear_state.StateWorld, device=DEVICE)
# The interpreter cuts numbers to bfloat16 instead of rounding them: twice the error, and all of one sign.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2 if INTERPRETED else 1e-2, torch.float16: 1e-2}
SMALL = LinearShape(1, 2, 16, 16, 4)
MAMBA2 = LinearShape(1, 2, 16, 16, 4, rule="mamba2")
SHAPES = [SMALL, LinearShape(2, 2, 16, 32, 4), LinearShape(1, 1, 32, 16, 3), MAMBA2]
SHAPES += [LinearShape(2, 4, 32, 16, 3, rule="mamba2")]
WINDOW = 3


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Chunks so short that small sequences have several, and programs that take a part of a state."""
    monkeypatch.setattr(linear_state_gpu, "SHORT", 6)
    monkeypatch.setattr(linear_state_gpu, "_CHUNK", 16)
    monkeypatch.setattr(linear_state_gpu, "_SCANNED", 16)


def close(world, tolerance):
    assert_close(world, world.kernel(), tolerance)


@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    spans=st.lists(spans(WINDOW), min_size=1, max_size=4),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
def test_any_step_is_float64s(spans, shape, dtype, seed):
    close(StateWorld(spans, shape, WINDOW, dtype, seed=seed), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [SMALL, MAMBA2], ids=lambda shape: shape.rule)
def test_chunks_of_their_own_size_are_float64s(monkeypatch, shape):
    monkeypatch.undo()
    close(StateWorld([Span(2, 70, 0, (64, 66))], shape, WINDOW, torch.float32), 1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [LinearShape(4, 12, 128, 128, 4), LinearShape(2, 16, 128, 64, 4, rule="mamba2")], ids=lambda s: s.rule
)
def test_heads_of_models_own_sizes_are_float64s(monkeypatch, shape, dtype):
    """Their tiles are compiled to other programs than those of small heads."""
    monkeypatch.undo()
    few = [Span(3, 1), Span(0, 5, 2, (1, 3)), Span(1, 4, 1, moves=True), Span(0, 3, 3, begins=True)]
    many = [Span(2, 630, 0, (64, 70)), Span(0, 1), Span(3, 280, 1, (5,)), Span(0, 64, begins=True)]
    for some in (few, many):
        close(StateWorld(some, shape, 4, dtype), TOLERANCE[dtype])


def test_keys_that_are_alike_are_no_trouble():
    """Powers of their products grow like binomials, and would cancel in a sum."""
    world = StateWorld([Span(0, 40)], LinearShape(1, 1, 16, 16, 2), WINDOW, torch.float32)
    world.mixed[:, 16:32] = 1.0
    world.weights.conv[16:32] = 1.0
    world.gates[0].fill_(-20.0)  # nothing fades
    world.gates[1].fill_(20.0)  # and all is written over
    close(world, 1e-4)


@pytest.mark.parametrize("shape", [SMALL, MAMBA2], ids=lambda shape: shape.rule)
@pytest.mark.parametrize("tokens", [3, 18])
def test_what_fills_a_captured_batch_changes_nothing(tokens, shape):
    """Sequences without tokens, marks of none, tokens of none."""
    world = StateWorld([Span(1, tokens, 1, (2,)), Span(0, 2)], shape, WINDOW, torch.float32)
    batch, more = world.batch, full((2,), -1, dtype=torch.int32)
    filled = replace(
        batch,
        starts=torch.cat((batch.starts, batch.starts[-1:].expand(2))),
        source=torch.cat((batch.source, more)),
        target=torch.cat((batch.target, more)),
        applied=torch.cat((batch.applied, 0 * more)),
        held=torch.cat((batch.held, 0 * more)),
        marks=torch.cat((batch.marks, full((4, 3), 1 << 20, dtype=torch.int32))),
    )

    def call(*given):
        *inputs, weights, states, layer, _ = given
        inputs = [torch.cat((each, torch.full_like(each[:3], torch.nan))) for each in inputs]
        return world.kernel()(*inputs, weights, states, layer, filled)[: tokens + 2]

    (out, states), (expected, then) = world.run(call), world.run(world.kernel())
    assert torch.equal(out, expected)
    assert torch.equal(written(states), written(then))


def test_what_does_not_fit_is_refused():
    world = StateWorld([Span(0, 2)], SMALL, WINDOW, torch.float32)
    with pytest.raises(ValueError, match="do not fit the states"):
        world.run(lambda mixed, *rest: gated_delta_gpu(mixed.double(), *rest))
    with pytest.raises(ValueError, match="do not fit 64 channels and 2 gates of"):
        world.run(lambda mixed, a, *rest: gated_delta_gpu(mixed, a[:1], *rest))
    with pytest.raises(ValueError, match="do not fit 64 channels and 2 gates of"):
        world.run(lambda mixed, a, b, *rest: mamba2_gpu(mixed, a, *rest))
    odd = StateWorld([Span(0, 2)], LinearShape(1, 1, 24, 16, 4), WINDOW, torch.float32)
    with pytest.raises(ValueError, match="heads of 24"):
        odd.run(gated_delta_gpu)


def test_the_comparison_with_others_runs_through():
    figures = beside(SMALL, Work(2, 9), DEVICE, torch.float32, lambda call: (call(), 2.0)[1])
    assert figures["over_torch"] == 1.0
    assert figures["state_bytes"] == 2 * 2 * 4 * 2 * 16 * 16
