"""The reference against torch's own attention, torch's way over pages against the reference, over random chunks."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_world import PagedWorld

from holdfast.kernels import attention, native
from holdfast.kernels.attention import paged_attention


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", functools.cache(lambda: "torch"))
    monkeypatch.setattr(attention, "_BLOCK", 17)


span = st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 40)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spans=st.lists(span, min_size=1, max_size=6),
    page_size=st.sampled_from([1, 8, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([8, 16, 24]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    scattered=st.sampled_from([0, 0.1, 0.4, 1]),
    heads_first=st.booleans(),
    int8=st.booleans(),
    window=st.sampled_from([None, None, 1, 7, 64, 1000]),
    softcap=st.sampled_from([None, None, 2.0]),
    sink=st.sampled_from([None, None, 1.0, 60.0]),
)
def test_torch_over_pages_is_the_reference(without_kernels, window, softcap, sink, **shape):
    world = PagedWorld(**shape)
    sinks = world.sinks(sink)
    exact = world.reference(window, softcap, sinks=sinks)
    tolerance = 2e-5 if shape["dtype"] == torch.float32 else 4e-2
    torch.testing.assert_close(world.attend(window, softcap, sinks), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scattered", [0, 0.05])
def test_great_scores_stay_apart_in_bfloat16(without_kernels, scattered):
    """Keys with a large part in common, as a bias gives them: scores of 100 that differ by little."""
    world = PagedWorld([(700, 150), (0, 33)], 16, 2, 3, 32, torch.bfloat16, 5, scattered)
    common = torch.randn(32) * 5
    world.kv[:, 0] += common.to(torch.bfloat16)
    world.q += (common / 4).to(torch.bfloat16)
    exact = world.reference(dtype=torch.float64).double()
    assert (world.attend() - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("start", [0, 21])
def test_reference_is_plain_attention(start):
    world = PagedWorld([(start, 12)], 4, 2, 3, 8, torch.float32, 0, 1)
    cells = world.batch.cells_of(0, 0, start + 12)
    keys, values = world.kv[1].flatten(1, 2)[:, cells].transpose(1, 2).repeat_interleave(3, dim=1).unbind(0)
    mask = torch.ones(12, start + 12, dtype=torch.bool).tril(start)
    plain = torch.nn.functional.scaled_dot_product_attention(
        world.q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(world.reference(dtype=torch.float32), plain.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_a_sink_is_a_position_without_a_value():
    """Like a first key that scores the sink with every query, and a value of zeros."""
    world, more = (PagedWorld([(start, 4)], 1, 1, 2, 8, torch.float32, 0) for start in (9, 10))
    sink, query = 1.7, torch.randn(2, 8)
    world.q[:], more.q[:] = query, query  # of each head the same for all tokens
    more.kv[1, 0, 1:14], more.kv[1, 1, 1:14] = world.kv[1, 0, :13], world.kv[1, 1, :13]
    more.kv[1, :, 0] = 0
    more.kv[1, 0, 0, 0, 0] = torch.linalg.lstsq(query, torch.full((2, 1), sink / 0.3)).solution[:, 0]
    sinks = torch.full((2,), sink)
    assert more.batch.page_table[0, 0] == world.batch.page_table[0, 0] == 0
    for attended in (world.reference(sinks=sinks), world.attend(sinks=sinks)):
        torch.testing.assert_close(attended, more.reference(), atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    world = PagedWorld([(3, 4)], 4, 2, 3, 8, torch.float32, 0, 0)
    with pytest.raises(ValueError, match="does not fit the store"):
        paged_attention(world.q[..., :4], world.kv, 1, world.batch, 1.0)
    with pytest.raises(ValueError, match="heads over"):
        paged_attention(world.q[:, :5], world.kv, 1, world.batch, 1.0)
    with pytest.raises(ValueError, match=r"sinks \(5,\) for 6 heads"):
        world.attend(sinks=torch.zeros(5))
