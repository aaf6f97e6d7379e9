"""Quantised weights: their numbers, and what can be done with them without touching a number."""

import pytest
import torch
from paged_world import relative_error

from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, concatenated, quantized, quantized_reference

STYLES = {  # how, and the largest relative error of normally distributed weights
    "fp8 in blocks": (("e4m3", (128, 128)), 0.03),
    "fp8 per channel": (("e4m3", (1, 999)), 0.03),
    "mxfp8": (("e4m3", (1, 32), E8M0), 0.03),
    "mxfp4": (("e2m1", (1, 32), E8M0), 0.2),
    "nvfp4": (("e2m1", (1, 16), FP8), 0.12),
    "int8": (("uint8", (1, 999), torch.bfloat16), 0.01),
    "int4": (("uint4", (1, 64), torch.float16), 0.15),
    "int4 with zero points": (("uint4", (1, 32), torch.float16, True), 0.1),
}


def made(style, *sizes, seed=0):
    torch.manual_seed(seed)
    plain = torch.randn(*sizes) * (0.1 + torch.rand(sizes[0], 1))
    return plain, quantized(plain, *STYLES[style][0])


@pytest.mark.parametrize("style", STYLES)
def test_weights_are_near_those_they_are_made_of(style):
    plain, weight = made(style, 300, 160)
    exact = weight.dequantized(torch.float64)
    assert weight.shape == plain.shape
    assert 0.001 < relative_error(exact, plain) < STYLES[style][1]
    assert torch.equal(weight.dequantized(torch.bfloat16), weight.dequantized(torch.float32).bfloat16())
    assert relative_error(quantized_reference(torch.eye(160), weight, torch.ones(300)), exact.T + 1) < 1e-12
    assert not quantized(torch.zeros(32, 64), *STYLES[style][0]).dequantized(torch.float32).any()
    again = quantized(exact.float(), *STYLES[style][0])  # what is quantised once stays as it is
    assert relative_error(again.dequantized(torch.float64), exact) < 0.02


@pytest.mark.parametrize("style", STYLES)
def test_parts_orders_and_experts_are_those_of_the_plain_weight(style):
    weights = [made(style, size, 160, seed=size)[1] for size in (192, 192, 44)]
    plain = [each.dequantized(torch.float32) for each in weights]
    above = concatenated(weights)
    assert torch.equal(above.dequantized(torch.float32), torch.cat(plain))
    experts = concatenated(weights[:2], experts=True)
    assert torch.equal(experts.dequantized(torch.float32), torch.stack(plain[:2]))
    assert torch.equal(experts[1].dequantized(torch.float32), plain[1])
    for order in (torch.arange(192).view(2, 3, 32).transpose(0, 1).flatten(), torch.randperm(192)):
        assert torch.equal(experts.rows(order).dequantized(torch.float32), torch.stack(plain[:2])[:, order])
        assert torch.equal(above.rows(order).dequantized(torch.float32), torch.cat(plain)[order])


def test_blocks_stay_whole_where_an_order_moves_whole_blocks():
    weight = quantized(torch.randn(512, 128), "e4m3", (128, 128))
    assert weight.rows(torch.arange(512).roll(128)).block == (128, 128)
    assert weight.rows(torch.arange(512).roll(64)).block == (64, 128)
    assert concatenated([weight, weight]).block == (128, 128)


def test_parts_with_and_without_zero_points_become_one():
    torch.manual_seed(0)
    weights = [quantized(torch.randn(32, 64), "uint4", (1, 32), torch.float16, each) for each in (False, True)]
    expected = torch.cat([each.dequantized(torch.float32) for each in weights])
    assert torch.equal(concatenated(weights).dequantized(torch.float32), expected)
    with pytest.raises(ValueError, match="different formats"):
        concatenated([weights[0], quantized(torch.randn(32, 64), "e2m1", (1, 32))])


def test_transformers_dequantises_alike():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = quantized(torch.randn(256, 384), "e4m3", (128, 128))
    found = Fp8Dequantize(None)._dequantize_one(blocks.codes.view(FP8), blocks.scales, torch.float32)
    assert torch.equal(found, blocks.dequantized(torch.float32))
    codes, scales = (torch.randint(0, 256, size, dtype=torch.uint8) for size in ((3, 40, 2, 16), (3, 40, 2)))
    scales = scales % 60 + 90
    weight = QuantizedWeight("e2m1", codes.flatten(-2), scales.view(E8M0), (1, 32))
    theirs = convert_moe_packed_tensors(codes, scales, dtype=torch.bfloat16)  # [experts, in, out]
    assert torch.equal(weight.dequantized(torch.bfloat16), theirs.mT)


def test_what_does_not_belong_together_is_refused():
    codes, scales = torch.zeros(130, 128, dtype=torch.uint8), torch.ones(2, 1)
    QuantizedWeight("e4m3", codes, scales, (128, 128))
    wrong = [(codes, scales[:1]), (codes.float(), scales), (codes, scales.int()), (codes, scales, codes[:1, :1])]
    for parts in (*wrong, (codes, scales, None, scales)):
        with pytest.raises(ValueError, match="is no part of a weight"):
            QuantizedWeight("e4m3", parts[0], parts[1], (128, 128), *parts[2:])
