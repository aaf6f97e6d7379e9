"""FP8 in blocks of 128 x 128: the format, and its products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_world import relative_error

from holdfast.kernels.fp8 import BLOCK, FP8, Fp8Blocks, fp8_reference, quantized_blocks, quantized_rows

SIZES = st.sampled_from([1, 40, 128, 130, 256, 300])


@settings(max_examples=20, deadline=None)
@given(outputs=SIZES, inputs=SIZES, seed=st.integers(0, 99))
def test_a_weight_is_its_number_times_the_scale_of_its_block(outputs, inputs, seed):
    torch.manual_seed(seed)
    plain = torch.randn(outputs, inputs) * torch.rand(outputs, 1) * 10
    blocks = quantized_blocks(plain)
    exact = blocks.dequantized(torch.float64)
    for o, k in ((0, 0), (outputs - 1, inputs - 1), (outputs // 2, inputs - 1)):
        assert exact[o, k] == blocks.weight[o, k].double() * blocks.scale[o // BLOCK, k // BLOCK].double()
    assert torch.equal(blocks.dequantized(torch.bfloat16), blocks.dequantized(torch.float32).bfloat16())
    # Half a step of 3 bits of mantissa, or of the smallest numbers.
    step = blocks.scale.repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK, 1)[:, :inputs]
    assert ((exact - plain).abs() <= torch.maximum(plain.abs() / 16, step * 2**-10) * 1.001).all()
    assert relative_error(exact, plain) < 0.03


def test_transformers_dequantizes_alike():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    blocks = quantized_blocks(torch.randn(256, 384))
    found = Fp8Dequantize(None)._dequantize_one(blocks.weight, blocks.scale, torch.float32)
    assert torch.equal(found, blocks.dequantized(torch.float32))


def test_a_zero_matrix_stays_zero():
    assert not quantized_blocks(torch.zeros(130, 128)).dequantized(torch.float32).any()


def test_rows_are_quantised_in_groups():
    x = torch.randn(5, 256) * torch.tensor([1.0, 100.0]).repeat_interleave(128)
    numbers, scale = quantized_rows(x)
    assert numbers.dtype == FP8
    assert scale.shape == (5, 2)
    again = numbers.float().view(5, 2, 128) * scale[..., None]
    for group, exact in zip(again.unbind(1), x.view(5, 2, 128).unbind(1), strict=True):
        assert relative_error(group, exact) < 0.03


def test_fused_matrices_are_filled_through_their_parts():
    fused = Fp8Blocks.empty(300, 200)
    parts = [quantized_blocks(torch.randn(size, 200)) for size in (128, 128, 44)]
    for view, part in zip(fused.split([128, 128, 44]), parts, strict=True):
        view.weight.copy_(part.weight)
        view.scale.copy_(part.scale)
    expected = torch.cat([part.dequantized(torch.float32) for part in parts])
    assert torch.equal(fused.dequantized(torch.float32), expected)
    assert relative_error(fp8_reference(torch.eye(200), fused, torch.ones(300)), expected.T + 1) < 1e-7
    with pytest.raises(ValueError, match="do not begin with blocks"):
        fused.split([100, 200])


def test_what_is_not_fp8_in_blocks_is_refused():
    weight, scale = torch.zeros(130, 128).to(FP8), torch.ones(2, 1)
    Fp8Blocks(weight, scale)
    with pytest.raises(ValueError, match="are not blocks"):
        Fp8Blocks(weight, scale[:1])
    with pytest.raises(ValueError, match="are not FP8"):
        Fp8Blocks(weight.bfloat16(), scale)
    with pytest.raises(ValueError, match="are not FP8"):
        Fp8Blocks(weight, scale.bfloat16())
