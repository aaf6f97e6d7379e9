"""The GPU's kernels around attention against float64: rotary embedding with the store, norms, SiLU, gates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE, arange, ones, randint, randn, randperm, zeros
from paged_world import relative_error

from holdfast.kernels.kv import FP8, in_numbers, in_store
from holdfast.kernels.layer import (
    add_norm_reference,
    gated_norm_reference,
    norm_of_gated_reference,
    rotate_and_store_reference,
    silu_and_mul_reference,
)
from holdfast.kernels.layer_gpu import add_norm, gated_norm, norm_of_gated, rotate_and_store, sigmoid_gate, silu_and_mul

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def tolerance(dtype):
    return 1e-5 if dtype == torch.float32 else 1e-2


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(0, 9),
    heads=st.tuples(st.integers(1, 9), st.integers(1, 3)),
    sizes=st.sampled_from([(8, 4), (24, 12), (64, 32), (64, 8), (24, 3), (256, 32)]),
    behind=st.integers(0, 2),
    normed=st.booleans(),
    dtype=DTYPES,
    fp8=st.booleans(),
    seed=st.integers(0, 99),
)
def test_queries_turn_and_keys_and_values_reach_their_cells_and_no_others(
    tokens, heads, sizes, behind, normed, dtype, fp8, seed
):
    torch.manual_seed(seed)
    (queries, kv_heads), (dim, half) = heads, sizes
    whole = randn(tokens, behind + queries + 2 * kv_heads, dim).to(dtype)
    qkv, others_before = whole[:, behind:], whole[:, :behind].clone()
    cos, sin = randn(2, 40, half).unbind(0)
    positions, cells = randint(0, 40, (tokens,)), randperm(24)[:tokens]
    norms = (randn(dim), randn(dim)) if normed else None
    kv = in_store(randn(2, 2, 3, 8, kv_heads, dim), FP8 if fp8 else dtype)
    before, exact = kv.clone(), kv.clone()
    expected = rotate_and_store_reference(qkv, queries, cos, sin, positions, exact, 1, cells, norms, 1e-6)
    got = rotate_and_store(qkv, queries, cos, sin, positions, kv, 1, cells, norms, 1e-6)
    assert relative_error(got, expected) < tolerance(dtype)
    # float32 on one side and float64 on the other may be rounded to neighbours, which are up to an eighth apart.
    stored, wanted = in_numbers(kv, torch.float64), in_numbers(exact, torch.float64)
    assert relative_error(stored, wanted) < (0.02 if fp8 else tolerance(dtype))
    others = ones(24, dtype=torch.bool).index_fill(0, cells, False)
    assert torch.equal(kv.flatten(2, 3)[:, :, others], before.flatten(2, 3)[:, :, others])
    assert torch.equal(kv[0], before[0])
    assert torch.equal(whole[:, :behind], others_before)


def test_what_is_stored_in_fp8_is_the_nearest_number_and_never_infinite():
    """Every number of the format, what lies half-way between two, what lies next to that, and what is beyond."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(halves, torch.full_like(halves, end)) for end in (-torch.inf, torch.inf)]
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e30, torch.inf, 1e-30, 0.0, torch.nan])
    values = torch.cat((numbers, halves, *beside, beyond, -beyond))
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(-1, 1, 16).to(DEVICE)
    tokens, numbers = len(values), numbers.to(DEVICE)
    index, table, kv = arange(tokens), ones(tokens, 8), zeros(1, 2, tokens, 1, 1, 16, dtype=FP8)
    rotate_and_store(torch.cat((values,) * 3, 1), 1, table, table * 0, index, kv, 0, index)
    stored = in_numbers(kv[0, 1].flatten(0, 1), torch.float64)
    assert torch.equal(stored.nan_to_num(9e9), in_numbers(in_store(values, FP8), torch.float64).nan_to_num(9e9))
    assert torch.equal(stored.isnan(), values.isnan())
    real = ~values.isnan()
    assert torch.equal(stored[real].signbit(), values[real].signbit())
    off = (stored[real, None] - values[real].double().clamp(-448, 448)[:, None]).abs()
    nearest = (numbers.double() - values[real].double().clamp(-448, 448)[:, None]).abs().min(1, keepdim=True).values
    assert torch.equal(off, nearest)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 5), width=st.sampled_from([1, 8, 100, 1000]), add=st.booleans(), dtype=DTYPES)
def test_norm_of_a_sum(rows, width, add, dtype):
    torch.manual_seed(width)
    x, weight = randn(rows, width).to(dtype), randn(width).to(dtype)
    residual = randn(rows, width).to(dtype) if add else None
    sums = residual.clone() if add else None
    exact = add_norm_reference(x, sums, weight, 1e-6)
    assert relative_error(add_norm(x, residual, weight, 1e-6), exact) < tolerance(dtype)
    if add:
        assert relative_error(residual, sums) < tolerance(dtype)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 4), inner=st.sampled_from([1, 7, 1500]), dtype=DTYPES)
def test_silu_and_mul(rows, inner, dtype):
    fused = 4 * randn(rows, 2 * inner).to(dtype)
    assert relative_error(silu_and_mul(fused), silu_and_mul_reference(fused)) < tolerance(dtype)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(0, 4),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 7, 128]),
    size=st.sampled_from([1.0, 60.0]),
    dtype=DTYPES,
)
def test_gates_behind_a_mixer(tokens, heads, dim, size, dtype):
    torch.manual_seed(tokens)
    x, weight = randn(tokens, heads, dim).to(dtype), randn(dim)
    gate = (size * randn(tokens, 3 + heads * dim)).to(dtype)[:, 3:]
    exact = gated_norm_reference(x, gate, weight, 1e-6)
    assert relative_error(gated_norm(x, gate, weight, 1e-6), exact) < tolerance(dtype)
    weight = randn(heads * dim)
    exact = norm_of_gated_reference(x, gate, weight, 1e-6)
    assert relative_error(norm_of_gated(x, gate, weight, 1e-6), exact) < tolerance(dtype)
    exact = (x.flatten(1).double() * gate.double().sigmoid()).to(dtype)
    flat = x.flatten(1).clone()
    assert relative_error(sigmoid_gate(flat, gate), exact) < tolerance(dtype)
    assert relative_error(flat, exact) < tolerance(dtype)


def test_shapes_that_do_not_fit_are_refused():
    kv = torch.zeros(1, 2, 3, 8, 2, 16)
    table, index = torch.zeros(4, 8), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not fit the store"):
        rotate_and_store(torch.zeros(5, 7, 16), 4, table, table, index, kv, 0, index)
    with pytest.raises(ValueError, match="5 tokens, but 4 cells"):
        rotate_and_store(torch.zeros(5, 8, 16), 4, table, table, index, kv, 0, index[:4])
    with pytest.raises(ValueError, match="differ"):
        add_norm(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        gated_norm(torch.zeros(2, 3, 4), torch.zeros(2, 11), torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        norm_of_gated(torch.zeros(2, 3, 4), torch.zeros(2, 12), torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="differ"):
        sigmoid_gate(torch.zeros(2, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="no two halves"):
        silu_and_mul(torch.zeros(2, 5))
