"""Gated DeltaNet and Mamba-2 on a CPU, at each level of the kernel and by torch: against float64, however cut."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from c_kernels import ABLE, levels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_world import largest_error as off
from state_worlds import assert_close, spans
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan, mamba2_selective_state_update

from holdfast.kernels import linear_state
from holdfast.kernels.linear_state import (
    NO_STATE,
    LinearShape,
    LinearStates,
    LinearWeights,
    StateBatch,
    gated_delta,
    mamba2,
)
from holdfast.loadgen.bench.kernels.linear_state import Span, StateWorld

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # relative to the largest value
LEVELS = (*(linear_state.LANES if ABLE else ()), "torch")
FIXTURE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = (
    LinearShape(1, 1, 16, 16, 4),
    LinearShape(2, 4, 32, 48, 4),
    LinearShape(1, 3, 48, 16, 2),
    LinearShape(2, 2, 16, 160, 3),
    LinearShape(1, 2, 16, 32, 4, rule="mamba2"),
    LinearShape(2, 6, 48, 16, 3, rule="mamba2"),
    LinearShape(1, 8, 128, 64, 4, rule="mamba2"),
    LinearShape(1, 2, 128, 128, 4),
)
RULES = {"delta": gated_delta, "mamba2": mamba2}
DRAFTS = 4  # of a window at most


level = levels("linear_state", linear_state, LEVELS)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def weights_of(shape: LinearShape) -> LinearWeights:
    heads = shape.value_heads
    taps, decay = 0.5 * torch.randn(shape.channels, shape.kernel), 4 * torch.rand(heads) - 1
    extra = (torch.randn(shape.channels), torch.randn(heads)) if shape.rule == "mamba2" else ()
    return LinearWeights(taps, decay, torch.randn(heads), *extra)


def tokens_of(shape: LinearShape, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Inputs of so many tokens: mixed, and the gates."""
    widths = (shape.channels, *[shape.value_heads] * shape.gates)
    return tuple((2 * torch.randn(count, width)).to(dtype) for width in widths)


def run(tokens, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch) -> torch.Tensor:
    return RULES[states.shape.rule](*tokens, weights, states, layer, batch)


def filled(shape: LinearShape, slots: int, dtype: torch.dtype, layers: int = 1) -> LinearStates:
    """States of another life in every slot."""
    states = LinearStates(shape, layers, slots, DRAFTS, dtype, "cpu")
    for each in states.tensors:
        each.normal_()
    return states


def copied(states: LinearStates) -> LinearStates:
    layers, slots = states.recurrent.shape[:2]
    made = LinearStates(states.shape, layers, slots, DRAFTS, states.conv.dtype, "cpu")
    made.recurrent, made.conv, made.window, made.gates = (each.clone() for each in states.tensors)
    return made


@dataclass(eq=False)
class Conversation:
    """One sequence: the inputs that its state keeps, the slot, and the drafts in the slot's window."""

    history: list[torch.Tensor]
    slot: int
    drafts: list[torch.Tensor]


@dataclass
class World:
    """Conversations over slots, with everything at random: `draw` an integer from 0 to n."""

    shape: LinearShape
    dtype: torch.dtype
    slots: int
    weights: LinearWeights = field(init=False)
    states: LinearStates = field(init=False)
    running: list[Conversation] = field(default_factory=list)
    marks: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # slot: the inputs that its state keeps

    def __post_init__(self) -> None:
        self.weights, self.states = weights_of(self.shape), filled(self.shape, self.slots, self.dtype, layers=2)

    def one_pass(self, history: list[torch.Tensor]) -> tuple[torch.Tensor, LinearStates]:
        """The outputs and the state after all of these inputs in one chunk."""
        states = filled(self.shape, 1, self.dtype)
        batch = StateBatch(int32(0, len(history[0])), int32(NO_STATE), int32(0), int32(0), int32(0), int32().view(0, 3))
        return run(history, self.weights, states, 0, batch), states

    def step(self, draw, close) -> None:
        """One call with some conversations, old and new; `close` compares what must be the same."""
        free = [s for s in range(self.slots) if s not in self.marks and all(s != each.slot for each in self.running)]
        draws = {each: draw(len(free)) for each in ("new", "fork")}
        empty = [each[:0] for each in tokens_of(self.shape, 1, self.dtype)]
        beginning = [Conversation(list(empty), NO_STATE, empty) for _ in range(draws["new"] % 3)]
        forks = [Conversation(list(kept), slot, empty) for slot, kept in list(self.marks.items())[: draws["fork"] % 3]]
        going = [each for each in self.running if draw(3)]
        inputs, starts, uses, marks, expected = [], [0], [], [], []
        for each in (*going, *beginning, *forks):
            if each.slot in self.marks or each.slot == NO_STATE or (free and draw(1)):
                if not free:
                    continue
                target = free.pop()
            else:
                target = each.slot
            applied = draw(len(each.drafts[0]))
            own = 1 + draw((0, 2, 7, 40)[draw(3)])
            held = draw(min(own, DRAFTS))
            number, source = len(uses), each.slot
            new = tokens_of(self.shape, own, self.dtype)
            before = [torch.cat((x, y[:applied])) for x, y in zip(each.history, each.drafts, strict=True)]
            whole = [torch.cat(pair) for pair in zip(before, new, strict=True)]
            kept = len(whole[0]) - held
            for n in sorted({1 + draw(own - held - 1) for _ in range(draw(2))} if own > held else ()):
                if free:
                    marks.append((number, n, free.pop()))
                    self.marks[marks[-1][2]] = [x[: len(before[0]) + n] for x in whole]
            inputs.append(new)
            starts.append(starts[-1] + own)
            uses.append((source, target, applied, held))
            expected.append((whole, own))
            each.history, each.slot = [x[:kept] for x in whole], target
            each.drafts = [x[kept:] for x in whole]
            if each not in self.running:
                self.running.append(each)
        if not uses:
            return
        batch = StateBatch(
            int32(*starts), *(int32(*x) for x in zip(*uses, strict=True)), int32(*sum(marks, ())).view(-1, 3)
        )
        before_call = copied(self.states)
        out = run([torch.cat(each) for each in zip(*inputs, strict=True)], self.weights, self.states, 1, batch)
        assert out.dtype == self.dtype
        for (whole, own), begin, end in zip(expected, starts, starts[1:], strict=False):
            close(out[begin:end], self.one_pass(whole)[0][-own:])
        written = {use[1] for use in uses} | {slot for *_, slot in marks}
        others = torch.tensor([slot not in written for slot in range(self.slots)])
        for now, was in zip(self.states.tensors, before_call.tensors, strict=True):
            assert torch.equal(now[0], was[0])
            assert torch.equal(now[1, others], was[1, others])
        for slot, history in [*((each.slot, each.history) for each in self.running), *self.marks.items()]:
            if slot in written and len(history[0]):
                _, states = self.one_pass(history)
                close(self.states.recurrent[1, slot], states.recurrent[0, 0])
                assert torch.equal(self.states.conv[1, slot], states.conv[0, 0])
        for each in self.running:
            held = len(each.drafts[0])
            assert torch.equal(self.states.window[1, each.slot, :held], each.drafts[0])
            assert torch.equal(self.states.gates[1, each.slot, :held], torch.stack(each.drafts[1:], 1).float())


@FIXTURE
@given(
    shape=st.sampled_from(SHAPES[:-1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_cut_of_conversations_is_one_pass(level, shape, dtype, threads, seed, data):
    """Chunks, drafts of which any number is accepted, marks and forks, in and out of place, in any company."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)

    def close(found, exact):
        assert off(found, exact) < TOLERANCE[dtype] if level == "torch" else torch.equal(found, exact)

    world = World(shape, dtype, slots=12)
    for _ in range(5):
        world.step(lambda most: data.draw(st.integers(0, most)), close)


@FIXTURE
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(list(TOLERANCE)),
    sequences=st.lists(spans(DRAFTS, most=100), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_it_is_its_reference(level, shape, dtype, sequences, seed):
    """With drafts applied and held, marks, and sequences that begin or move to another slot."""
    world = StateWorld(sequences, shape, DRAFTS, dtype, seed=seed)
    assert_close(world, RULES[shape.rule], TOLERANCE[dtype], TOLERANCE[torch.float32], off)


@pytest.mark.parametrize("kept", [0, 31, 32, 33, 64])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=lambda shape: shape.rule)
def test_drafts_may_begin_where_a_block_of_the_kernel_ends(level, shape, kept):
    torch.manual_seed(0)
    count = kept + 3
    states, weights, tokens = filled(shape, 2, torch.float32), weights_of(shape), tokens_of(shape, count, torch.float32)
    out = []
    for target, held in ((0, 0), (1, 3)):
        uses = (int32(0, count), int32(NO_STATE), int32(target), int32(0), int32(held))
        out.append(run(tokens, weights, states, 0, StateBatch(*uses, int32().view(0, 3))))
    assert off(out[1], out[0]) < TOLERANCE[torch.float32] if level == "torch" else torch.equal(out[1], out[0])


@pytest.mark.parametrize("level", LEVELS[:-1], indirect=True)
@pytest.mark.parametrize("shape", [LinearShape(1, 1, 128, 128, 4), LinearShape(1, 1, 128, 64, 4, rule="mamba2")])
def test_a_long_prompt_loses_nothing_to_rounding(level, shape):
    world = StateWorld([Span(0, 2000, begins=True)], shape, DRAFTS, torch.float32)
    assert_close(world, RULES[shape.rule], 2e-6, error=off)


@pytest.mark.parametrize("gate", [-200.0, -30.0, 30.0, 200.0, float("nan")])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=lambda shape: shape.rule)
def test_gates_of_any_size(level, shape, gate):
    """A gate may be as large as it likes; what is not a number stays with its own sequence."""
    world = StateWorld([Span(0, 3), Span(0, 3)], shape, DRAFTS, torch.float32)
    for number, each in enumerate(world.gates):
        each[:3] = -gate if number else gate
    assert_close(world, RULES[shape.rule], TOLERANCE[torch.float32], error=off)


@pytest.mark.parametrize("level", LEVELS[:-1], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [
        {"starts": int32(0, 2, 5)},
        {"source": int32(0, 3)},
        {"source": int32(-2, 1)},
        {"source": int32(-1, 1)},
        {"target": int32(0, -1)},
        {"applied": int32(DRAFTS + 1, 0)},
        {"held": int32(0, DRAFTS + 1)},
        {"marks": int32(0, 3, 2).view(1, 3)},
        {"marks": int32(0, 1, 3).view(1, 3)},
        {"marks": int32(1, 1, 2, 0, 1, 2).view(2, 3)},
    ],
)
def test_a_batch_that_leads_outside_is_refused(level, wrong):
    shape = SHAPES[0]
    states, weights, tokens = filled(shape, 3, torch.float32), weights_of(shape), tokens_of(shape, 9, torch.float32)
    fits = {"starts": int32(0, 2, 9), "source": int32(0, 1), "target": int32(0, 1), "applied": int32(1, 0)}
    fits |= {"held": int32(0, 2), "marks": int32(0, 2, 2).view(1, 3)}
    before = copied(states)
    with pytest.raises(ValueError, match="leads outside"):
        gated_delta(*tokens, weights, states, 0, StateBatch(**(fits | wrong)))
    assert all(torch.equal(x, y) for x, y in zip(states.tensors, before.tensors, strict=True))
    with pytest.raises(ValueError, match="do not fit"):
        gated_delta(tokens[0], tokens[1][:8], tokens[2], weights, states, 0, StateBatch(**fits))
    with pytest.raises(ValueError, match="do not fit"):
        mamba2(*tokens[:2], weights, states, 0, StateBatch(**fits))
    with pytest.raises(ValueError, match="with D do not fit the rule delta"):
        gated_delta(*tokens, replace(weights, d=torch.ones(1)), states, 0, StateBatch(**fits))
    with pytest.raises(IndexError, match="layer 1 of 1"):
        gated_delta(*tokens, weights, states, 1, StateBatch(**fits))
    gated_delta(*tokens, weights, states, 0, StateBatch(**fits))


@pytest.mark.parametrize("dt_bias", [0.0, -9.0])
def test_mamba2_is_the_mixer_of_transformers(level, dt_bias):
    """Its step of one token always; its way for more tokens where it clamps no dt at `time_step_min`."""
    torch.manual_seed(0)
    shape = LinearShape(2, 4, 16, 16, 4, rule="mamba2")
    (heads, dim), count = (shape.value_heads, shape.value_dim), 21
    weights = replace(weights_of(shape), dt_bias=torch.full((heads,), dt_bias))
    mixed, dt = tokens_of(shape, count, torch.float32)
    convolved = torch.nn.functional.conv1d(mixed.T[None], weights.conv[:, None], weights.bias, 1, 3, 1, len(mixed.T))
    x, b, c = torch.nn.functional.silu(convolved[0, :, :count].T).split([heads * dim, 32, 32], 1)
    given = {"dt_bias": weights.dt_bias, "dt_softplus": True, "D": weights.d}
    x, b, c = x.view(1, count, heads, dim), b.view(1, count, 2, 16), c.view(1, count, 2, 16)
    decay, limits = -weights.a_log.exp(), (0.001, float("inf"))
    together = mamba2_chunk_scan(x, dt[None], decay, b, c, 8, dt_limit=limits, **given)[0]
    state, wide = torch.zeros(1, heads, dim, 16), (heads, dim)
    given |= {"dt_bias": weights.dt_bias[:, None].expand(wide), "D": weights.d[:, None].expand(wide)}
    each = [
        mamba2_selective_state_update(
            state, x[:, t], dt[t, None, :, None].expand(1, *wide), decay[:, None, None], b[:, t], c[:, t], **given
        )[0]
        for t in range(count)
    ]
    batch = StateBatch(int32(0, count), int32(NO_STATE), int32(0), int32(0), int32(0), int32().view(0, 3))
    states = filled(shape, 1, torch.float32)
    found = mamba2(mixed, dt, weights, states, 0, batch)
    assert off(found, torch.stack(each)) < 1e-5
    assert off(states.recurrent[0].mT, state) < 1e-5
    assert (off(found, together) < 1e-5) == (dt_bias == 0.0)
