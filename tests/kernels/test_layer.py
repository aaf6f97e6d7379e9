"""The norms and the rotation on a CPU, at each level of the kernel and by torch, against float64."""

import pytest
import torch
from c_kernels import ABLE, levels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_world import largest_error as off

from holdfast.kernels import layer
from holdfast.kernels.kv import in_bytes, in_numbers
from holdfast.kernels.layer import (
    Rotation,
    add_norm_reference,
    gated_norm,
    gated_norm_reference,
    norm_of_gated,
    norm_of_gated_reference,
    rms_norm,
    rotate_and_store_reference,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # relative to the largest value
FIXTURE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


level = levels("layer", layer, (*(layer.LANES if ABLE else ()), "torch"))


@FIXTURE
@given(
    rows=st.integers(1, 80),
    width=st.sampled_from([1, 7, 8, 24, 100, 576, 1000]),
    dtype=st.sampled_from(list(TOLERANCE)),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_a_norm_is_its_reference(level, rows, width, dtype, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    x, weight = torch.randn(rows, 2 * width).to(dtype)[:, :width], torch.randn(width)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    assert off(found, add_norm_reference(x.double(), None, weight.double(), 1e-6)) < TOLERANCE[dtype]
    assert torch.equal(rms_norm(x[-1:], weight, 1e-6)[0], found[-1])


@FIXTURE
@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 5),
    dim=st.sampled_from([4, 8, 24, 128]),
    size=st.sampled_from([0.1, 1.0, 60.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_a_gated_norm_is_its_reference(level, tokens, heads, dim, size, dtype, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    x, weight = torch.randn(tokens, heads, dim).to(dtype), torch.randn(dim)
    gate = (size * torch.randn(tokens, 2 * heads * dim)).to(dtype)[:, heads * dim :]
    found = gated_norm(x, gate, weight, 1e-6)
    assert found.dtype == dtype
    assert off(found, gated_norm_reference(x.double(), gate.double(), weight.double(), 1e-6)) < TOLERANCE[dtype]
    assert torch.equal(gated_norm(x[-1:], gate[-1:], weight, 1e-6)[0], found[-1])
    weight = torch.randn(heads * dim)
    found = norm_of_gated(x, gate, weight, 1e-6)
    assert found.dtype == dtype
    assert off(found, norm_of_gated_reference(x.double(), gate.double(), weight, 1e-6)) < TOLERANCE[dtype]
    assert torch.equal(norm_of_gated(x[-1:], gate[-1:], weight, 1e-6)[0], found[-1])


@FIXTURE
@given(
    tokens=st.integers(1, 40),
    heads=st.tuples(st.integers(1, 9), st.integers(1, 3)),
    dim=st.sampled_from([(6, 3), (16, 8), (48, 24), (64, 32), (96, 48), (96, 16), (64, 8), (256, 32), (40, 5)]),
    behind=st.integers(0, 2),
    normed=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    heads_first=st.booleans(),
    int8=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_queries_and_keys_turn_and_keys_and_values_reach_their_cells_and_no_others(
    level, tokens, heads, dim, behind, normed, dtype, heads_first, int8, threads, seed
):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    queries, kv_heads = heads
    dim, half = dim
    whole = torch.randn(tokens, queries + 2 * kv_heads + behind, dim).to(dtype)
    qkv, rest = torch.split(whole, [queries + 2 * kv_heads, behind], dim=1)
    rest_before = rest.clone()
    angles = 7 * torch.rand(50, half)
    cos, sin = angles.cos(), angles.sin()
    positions, cells = torch.randint(0, 50, (tokens,)), torch.randperm(48)[:tokens]
    norms = (torch.randn(dim), torch.randn(dim)) if normed else None
    kv = torch.randn(2, 2, 6, 8, kv_heads, dim).to(dtype)
    exact = kv.double()
    if int8:
        kv = in_bytes(kv)
    if heads_first:
        kv = kv.permute(0, 1, 4, 2, 3, 5).contiguous().permute(0, 1, 3, 4, 2, 5)
    before = kv.clone()
    given = None if norms is None else (norms[0].double(), norms[1].double())
    expected = rotate_and_store_reference(qkv.double(), queries, cos, sin, positions, exact, 1, cells, given, 1e-6)
    values = qkv[:, queries + kv_heads :].clone()
    q = Rotation(cos, sin, positions, cells, kv, queries, 1e-6).rotate_and_store(qkv, 1, norms)
    allowed = TOLERANCE[dtype] * (1 + normed)  # torch, also for heads that do not fill vectors, rounds once more
    assert off(q, expected) < allowed
    assert off(in_numbers(kv[1], torch.float64), exact[1]) < allowed + int8 / 127
    keys = qkv[:, queries : queries + kv_heads]
    for stored, of_row in zip(kv.flatten(2, 3)[1, :, cells], (keys, values), strict=True):
        assert torch.equal(stored, in_bytes(of_row) if int8 else of_row)
    others = torch.ones(48, dtype=torch.bool).index_fill(0, cells, False)
    assert torch.equal(kv.flatten(2, 3)[:, :, others], before.flatten(2, 3)[:, :, others])
    assert torch.equal(kv[0], before[0])
    assert torch.equal(rest, rest_before)


def test_shapes_that_do_not_fit_are_refused():
    kv, table = torch.zeros(1, 2, 3, 8, 2, 16), torch.zeros(4, 8)
    index = torch.arange(4)
    rotation = Rotation(table, table, index, index, kv, 4, 1e-6)
    with pytest.raises(ValueError, match="does not fit the store"):
        rotation.rotate_and_store(torch.zeros(4, 7, 16), 0)
    with pytest.raises(ValueError, match="cells of 4 tokens are"):
        Rotation(table, table, index, index[:3], kv, 4, 1e-6)
    with pytest.raises(IndexError, match="positions from 1 to 4, of 4"):
        Rotation(table, table, index + 1, index, kv, 4, 1e-6)
    with pytest.raises(IndexError, match="cells from -1 to 2, of 24"):
        Rotation(table, table, index, index - 1, kv, 4, 1e-6)
