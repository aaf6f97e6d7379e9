"""The GPU's attention against the reference over random mixes of chunks, in the interpreter where there is no GPU."""

from functools import partial

import paged_world
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from on_device import DEVICE
from paged_world import relative_error

from holdfast.kernels import attention_plan as attention_work
from holdfast.kernels.attention_gpu import attend_gpu, launch_items
from holdfast.kernels.attention_plan import Tile, make_plan
from holdfast.kernels.kv import page_runs

PagedWorld = partial(paged_world.PagedWorld, device=DEVICE)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
span = st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(2, 9), st.integers(1, 40)))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """Parts and prefixes so short that small sequences have several."""
    monkeypatch.setattr(attention_work, "SPLIT", 32)
    monkeypatch.setattr(attention_work, "WIDE_SPLIT", 64)
    monkeypatch.setattr(attention_work, "SHARED", 32)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4, 128), (3, 1, 64)])
@pytest.mark.parametrize("common", [0, 512])
def test_long_sequences_are_the_reference(monkeypatch, dtype, shape, common):
    """With the parts and prefixes that a server cuts, over heads of models' own sizes."""
    monkeypatch.undo()
    spans = [(296, 1), (2400, 1), (0, 328), (720, 7), (5, 1)] if not common else [(620, 1), (700, 1), (530, 3)]
    for window, fp8 in ((0, False), (33, False), (0, True)):
        world = PagedWorld(spans, 16, *shape, dtype, 0, 1, common=common, fp8=fp8)
        got = attend_gpu(world.q, world.kv, 1, world.batch, 0.3, window, 0.0)
        assert relative_error(got, world.reference(window or None)) < TOLERANCE[dtype]


# Shrinking would take minutes in the interpreter. On a GPU nearly every example compiles kernels of its own.
@settings(max_examples=6, deadline=None, phases=PHASES)
@given(
    spans=st.lists(span, min_size=1, max_size=4),
    page_size=st.sampled_from([1, 16, 24, 128]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([16, 24, 64, 256, 512]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
    scattered=st.sampled_from([0, 0.1, 1]),
    heads_first=st.booleans(),
    common=st.sampled_from([0, 48, 100]),
    window=st.sampled_from([0, 0, 1, 7, 40]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    sink=st.sampled_from([None, 2.0]),
    fp8=st.booleans(),
)
def test_any_mix_of_chunks_is_the_reference(window, softcap, sink, **shape):
    world = PagedWorld(**shape)
    sinks = world.sinks(sink)
    got = attend_gpu(world.q, world.kv, 1, world.batch, 0.3, window, softcap, sinks)
    exact = world.reference(window or None, softcap or None, sinks=sinks)
    assert relative_error(got, exact) < TOLERANCE[shape["dtype"]]


@settings(max_examples=4, deadline=None, phases=PHASES)
@given(
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 16, 24, 32]),
    dim=st.sampled_from([16, 24]),
    keys=st.sampled_from([16, 32, 64]),
    ahead=st.booleans(),
    window=st.sampled_from([0, 0, 40]),
    seed=st.integers(0, 1000),
)
def test_tiles_of_any_form_are_the_reference(spans, page_size, dim, keys, ahead, window, seed):
    world = PagedWorld(spans, page_size, 1, 4, dim, torch.float32, seed, scattered=1)
    plan = make_plan(world.q, world.batch, 1, window)
    plan.tiles = (Tile(keys, 4, 3, ahead),) * 2
    out = torch.full_like(world.q, torch.nan)
    launch_items(world.q, world.kv, 1, world.batch, plan, out, 0.3, window, 0.0)
    assert relative_error(out, world.reference(window or None)) < 1e-5


def test_a_prefix_in_common_is_read_once_and_changes_nothing():
    spans = [(130, 1), (140, 3), (97, 1), (20, 1), (70, 33)]
    world = PagedWorld(spans, 16, 1, 4, 16, torch.float32, 4, 1, common=96)
    plans = [make_plan(world.q, world.batch, 1, 0, cascade) for cascade in (True, False)]
    outputs = []
    for plan in plans:
        out = torch.full_like(world.q, torch.nan)
        launch_items(world.q, world.kv, 1, world.batch, plan, out, 0.3, 0, 0.0)
        outputs.append(out)
    assert relative_error(outputs[0], world.reference()) < 1e-5
    assert relative_error(outputs[1], world.reference()) < 1e-5
    read = [sum(int((items[:, 4] - items[:, 3]).sum()) for items in (plan.narrow, plan.wide)) for plan in plans]
    assert read[1] - read[0] == 96 * 2  # three chunks have it in common, and a long one keeps to itself


def test_prefixes_that_fork_are_shared_on_each_side():
    spans = [(130, 1), (140, 3), (150, 2), (97, 1), (100, 1), (105, 4)]
    world = PagedWorld(spans, 16, 1, 4, 16, torch.float32, 4, 1, common=16)
    table = world.batch.page_table.cpu().numpy()
    for row, like, slots in ((1, 0, 6), (2, 0, 6), (4, 3, 4), (5, 3, 4)):  # all begin alike, and three each go on alike
        table[row, :slots] = table[like, :slots]
        world.batch.runs[row] = page_runs(table[row, : world.batch.runs[row].extent])
    world.batch.page_table.copy_(torch.from_numpy(table))
    plan = make_plan(world.q, world.batch, 1, 0)
    assert sorted({tuple(item[3:5]) for item in plan.wide.tolist()}) == [(0, 64), (0, 96)]
    assert relative_error(attend_gpu(world.q, world.kv, 1, world.batch, 0.3, 0, 0.0), world.reference()) < 1e-5


def test_a_sequence_is_cut_alike_whatever_else_is_in_the_batch():
    alone = PagedWorld([(130, 1)], 16, 2, 4, 32, torch.float32, 0)
    crowd = PagedWorld([(130, 1), (60, 1), (10, 30)], 16, 2, 4, 32, torch.float32, 0)
    crowd.kv[:, :, :9] = alone.kv[:, :, :9]
    crowd.q[0] = alone.q[0]
    outputs = [attend_gpu(world.q, world.kv, 1, world.batch, 0.3, 0, 0.0)[0] for world in (alone, crowd)]
    assert torch.equal(*outputs)


def test_what_cannot_be_computed_or_read_in_place_is_refused():
    world = PagedWorld([(3, 4)], 4, 2, 3, 16, torch.float32, 0)
    with pytest.raises(ValueError, match="scale"):
        attend_gpu(world.q, world.kv, 1, world.batch, 0.0, 0, 0.0)
    with pytest.raises(ValueError, match="cannot be read in place"):
        attend_gpu(world.q.transpose(0, 2).contiguous().transpose(0, 2), world.kv, 1, world.batch, 1.0, 0, 0.0)
