"""Products of a few rows, in the interpreter where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import randn
from paged_world import relative_error

from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.stream_gpu import MOST_ORDERED, MOST_ROWS, streamed, streamed_reference, streamed_tall

# The interpreter cuts numbers to bfloat16 instead of rounding them: twice the error, and all of one sign.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2 if INTERPRETED else 1e-2, torch.float16: 1e-2}


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, MOST_ROWS),
    inputs=st.sampled_from([16, 256, 300, 512]),
    outputs=st.sampled_from([1, 16, 40]),
    dtype=st.sampled_from(list(TOLERANCE)),
    biased=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_few_rows_are_the_product(rows, inputs, outputs, dtype, biased, seed):
    torch.manual_seed(seed)
    x = 3 * randn(rows, inputs + 8).to(dtype)[:, :inputs]
    weight = randn(outputs, inputs).to(dtype)
    bias = randn(outputs).to(dtype) if biased else None
    exact = streamed_reference(x, weight, bias)
    twice = [streamed(x, weight, bias) for _ in range(2)]
    assert torch.equal(*twice)
    assert twice[0].dtype == dtype
    few = exact.numel() < 16  # the norm of so few numbers is no mean: terms may cancel in all of them
    assert relative_error(twice[0], exact) < TOLERANCE[dtype] * (3 if few else 1)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(17, torch.bfloat16), (64, torch.float16), (65, torch.float32), (MOST_ORDERED, torch.bfloat16)]
)
def test_a_product_alone_is_there_for_more_rows(rows, dtype):
    x, weight, bias = randn(rows, 256).to(dtype), randn(70, 256).to(dtype), randn(70).to(dtype)
    assert relative_error(streamed(x, weight, bias), streamed_reference(x, weight, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 256, 128), (1, 300, 70), (MOST_ROWS, 300, 70)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tall_tiles_compute_the_same(rows, inputs, outputs, dtype):
    x = randn(rows, inputs + 8).to(dtype)[:, :inputs]
    weight, bias = randn(outputs, inputs).to(dtype), randn(outputs).to(dtype)
    y = streamed_tall(x, weight, bias)
    assert y.shape == (rows, outputs)
    assert not rows or relative_error(y, streamed_reference(x, weight, bias)) < TOLERANCE[dtype]
    assert not rows or relative_error(streamed_tall(x, weight), streamed_reference(x, weight)) < TOLERANCE[dtype]
    with pytest.raises(ValueError, match="do not fit"):
        streamed_tall(torch.zeros(MOST_ROWS + 1, inputs).to(dtype), weight)


def test_a_wide_matrix_is_read_in_larger_pieces(monkeypatch):
    monkeypatch.setattr("holdfast.kernels.stream_gpu._WIDE", 64)
    x, weight = randn(3, 256), randn(64, 256)
    assert relative_error(streamed(x, weight), streamed_reference(x, weight)) < 1e-5


@pytest.mark.parametrize("x", [torch.zeros(MOST_ORDERED + 1, 32), torch.zeros(2, 16), torch.zeros(32, 2).T])
def test_what_does_not_fit_is_refused(x):
    with pytest.raises(ValueError, match="do not fit"):
        streamed(x, torch.zeros(8, 32))
