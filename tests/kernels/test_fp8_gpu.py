"""Products with FP8 blocks, in the interpreter where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_world import relative_error
from torch.nn.functional import silu

from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.fp8 import FP8, Fp8Blocks, fp8_reference, quantized_blocks
from holdfast.kernels.fp8_gpu import MOST_STREAMED, Fp8GatedMatrix, Fp8Matrix, dequantised, streamed_blocks

# The interpreter cuts numbers to bfloat16 instead of rounding them: twice the error, and all of one sign.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3 if INTERPRETED else 3e-3, torch.float16: 1e-3}


@settings(max_examples=20, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 5, 16, 17, MOST_STREAMED]),
    inputs=st.sampled_from([16, 128, 256, 300]),
    outputs=st.sampled_from([1, 64, 130, 192]),
    dtype=st.sampled_from(list(TOLERANCE)),
    biased=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_few_rows_are_the_product(rows, inputs, outputs, dtype, biased, seed):
    torch.manual_seed(seed)
    x = torch.randn(rows, inputs + 8).to(dtype)[:, :inputs]
    blocks = quantized_blocks(torch.randn(outputs, inputs) * torch.rand(outputs, 1))
    bias = torch.randn(outputs).to(dtype) if biased else None
    exact = fp8_reference(x, blocks, bias)
    twice = [streamed_blocks(x, blocks, bias) for _ in range(2)]
    assert torch.equal(*twice)
    assert twice[0].dtype == dtype
    # The norm of few numbers is no mean: terms may cancel in all of them.
    assert not rows or relative_error(twice[0], exact) < TOLERANCE[dtype] * (3 if exact.numel() < 16 else 1)


def test_the_error_is_not_above_that_of_weights_in_bfloat16():
    torch.manual_seed(0)
    x, blocks = torch.randn(8, 512).bfloat16(), quantized_blocks(torch.randn(128, 512))
    exact = fp8_reference(x, blocks)
    rounded = x.double() @ blocks.dequantized(torch.bfloat16).double().T  # with exact sums
    ours = streamed_blocks(x.float(), blocks)
    assert relative_error(ours, exact) < relative_error(rounded, exact) / 100


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("sizes", [(130, 300), (128, 2304)])
def test_weights_become_those_of_another_dtype(dtype, sizes):
    blocks = quantized_blocks(torch.randn(sizes))
    found, expected = dequantised(blocks, dtype), blocks.dequantized(dtype)
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 0}[dtype] if INTERPRETED else 0
    assert ((found.float() - expected.float()).abs() <= step * expected.float().abs()).all()


def test_every_byte_is_its_number():
    """All but the two that stand for no number."""
    codes = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 0x7F) != 0x7F]
    blocks = Fp8Blocks(codes.view(1, -1).view(FP8), torch.ones(1, 2))
    assert torch.equal(dequantised(blocks, torch.float32), blocks.weight.float())


@pytest.mark.parametrize("rows", [3, MOST_STREAMED + 2])
def test_matrices_have_the_face_of_plain_ones(rows):
    torch.manual_seed(1)
    blocks, bias = quantized_blocks(torch.randn(256, 128)), torch.randn(256)
    x, plus = torch.randn(1, rows, 128), torch.randn(1, rows, 256)
    matrix, gated = Fp8Matrix(blocks, bias), Fp8GatedMatrix(blocks)
    exact = fp8_reference(x[0], blocks)
    assert matrix.plain is None
    assert relative_error(matrix(x)[0], exact + bias) < 1e-5
    assert relative_error(matrix(x, plus)[0], exact + bias + plus[0]) < 1e-5
    assert relative_error(gated.both(x)[0], exact) < 1e-5
    gate, up = exact.chunk(2, -1)
    assert relative_error(gated(x)[0], silu(gate) * up) < 1e-5


def test_what_does_not_fit_is_refused():
    blocks = quantized_blocks(torch.randn(128, 256))
    for x in (torch.zeros(MOST_STREAMED + 1, 256), torch.zeros(2, 128), torch.zeros(256, 2).T):
        with pytest.raises(ValueError, match="do not fit"):
            streamed_blocks(x, blocks)
    strided = Fp8Blocks(torch.zeros(256, 128).to(FP8).T, torch.ones(1, 2))
    with pytest.raises(ValueError, match="with strides"):
        dequantised(strided, torch.bfloat16)
