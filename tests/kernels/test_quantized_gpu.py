"""Products with quantised weights, in the interpreter where there is no GPU. Weights are quantised on the host."""

import pytest
import torch
from on_device import DEVICE, randn
from paged_world import relative_error
from torch.nn.functional import silu

from holdfast.kernels.attention_gpu import INTERPRETED
from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, quantized, quantized_reference
from holdfast.kernels.quantized_gpu import MOST_STREAMED, QuantizedGatedMatrix, QuantizedMatrix

# The interpreter cuts numbers to bfloat16 instead of rounding them: twice the error, and all of one sign.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3 if INTERPRETED else 3e-3, torch.float16: 1e-3}
STYLES = {
    "fp8 in blocks": ("e4m3", (128, 128)),
    "fp8 in low blocks": ("e4m3", (40, 64)),
    "fp8 per channel": ("e4m3", (1, 1 << 20)),
    "mxfp8": ("e4m3", (1, 32), E8M0),
    "mxfp4": ("e2m1", (1, 32), E8M0),
    "nvfp4": ("e2m1", (1, 16), FP8),
    "int8": ("uint8", (1, 1 << 20), torch.bfloat16),
    "int8 with zero points": ("uint8", (1, 32), torch.float16, True),
    "int4": ("uint4", (1, 128), torch.float16),
    "int4 in groups of 32, with zero points": ("uint4", (1, 32), torch.bfloat16, True),
    "int4 per channel, with zero points": ("uint4", (1, 1 << 20), torch.float16, True),
}


# Rows, inputs, outputs, dtype: of a part of a tile, of several, and of many of them; programs share 2,100 inputs.
SIZES = [(1, 300, 130, torch.bfloat16), (17, 128, 1, torch.float16), (5, 448, 64, torch.float32)]
SIZES += [(20, 2100, 40, torch.bfloat16)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("rows", "inputs", "outputs", "dtype"), SIZES)
def test_few_rows_are_the_product(style, rows, inputs, outputs, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs + 8).to(dtype)[:, :inputs]
    weight = quantized(torch.randn(outputs, inputs) * torch.rand(outputs, 1), *STYLES[style])
    bias = torch.randn(outputs).to(dtype) if rows > 1 else None
    exact = quantized_reference(x, weight, bias)
    matrix = QuantizedMatrix(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))
    found = matrix.streamed(x.to(DEVICE))
    assert found.dtype == dtype
    assert relative_error(found, exact) < TOLERANCE[dtype]
    if inputs == 2100:
        assert torch.equal(matrix.streamed(x.to(DEVICE)), found)


def test_the_error_is_not_above_that_of_weights_in_bfloat16():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 512).bfloat16(), quantized(torch.randn(128, 512), "e4m3", (128, 128))
    exact = quantized_reference(x, weight)
    rounded = x.double() @ weight.dequantized(torch.bfloat16).double().T  # with exact sums
    ours = QuantizedMatrix(weight.to(DEVICE)).streamed(x.float().to(DEVICE))
    assert relative_error(ours, exact) < relative_error(rounded, exact) / 100


@pytest.mark.parametrize("style", STYLES)
def test_weights_become_those_of_another_dtype(style):
    rows = 130 if style == "fp8 in blocks" else 50  # some more than a block has
    for dtype, sizes in ((torch.float32, (rows, 300)), (torch.bfloat16, (5, 2304)), (torch.float16, (9, 48))):
        weight = quantized(torch.randn(sizes), *STYLES[style])
        found, expected = QuantizedMatrix(weight.to(DEVICE)).dequantised(dtype).cpu(), weight.dequantized(dtype)
        step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 0}[dtype] if INTERPRETED else 0
        assert ((found.float() - expected.float()).abs() <= step * expected.float().abs()).all()


@pytest.mark.parametrize("numbers", ["e4m3", "e2m1"])
def test_every_code_is_its_number(numbers):
    """All of e4m3 but the two that stand for no number, and all pairs of e2m1."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F] if numbers == "e4m3" else codes
    weight = QuantizedWeight(numbers, codes.view(1, -1), torch.ones(1, 1), (1, 512))
    found = QuantizedMatrix(weight.to(DEVICE)).dequantised(torch.float32)
    assert torch.equal(found.cpu(), weight.dequantized(torch.float32))


@pytest.mark.parametrize("rows", [3, MOST_STREAMED + 2])
def test_matrices_have_the_face_of_plain_ones(rows):
    torch.manual_seed(1)
    weight = quantized(torch.randn(64, 128), "e4m3", (32, 128)).to(DEVICE)
    bias, x, plus = randn(64), randn(1, rows, 128), randn(1, rows, 64)
    matrix, gated = QuantizedMatrix(weight, bias), QuantizedGatedMatrix(weight)
    exact = quantized_reference(x[0], weight)
    assert matrix.plain is None
    assert relative_error(matrix(x)[0], exact + bias) < 1e-5
    assert relative_error(matrix(x, plus)[0], exact + bias + plus[0]) < 1e-5
    assert relative_error(gated.both(x)[0], exact) < 1e-5
    gate, up = exact.chunk(2, -1)
    assert relative_error(gated(x)[0], silu(gate) * up) < 1e-5


def test_what_does_not_fit_is_refused():
    matrix = QuantizedMatrix(quantized(torch.randn(128, 256), "e4m3", (128, 128)))
    assert matrix.streamed(torch.zeros(0, 256)).shape == (0, 128)
    for x in (torch.zeros(MOST_STREAMED + 1, 256), torch.zeros(2, 128), torch.zeros(256, 2).T):
        with pytest.raises(ValueError, match="do not fit"):
            matrix.streamed(x)
    odd = quantized(torch.randn(8, 256), "uint4", (1, 1), torch.float16)
    assert not odd.in_tiles
    with pytest.raises(ValueError, match="not for the kernels"):
        QuantizedMatrix(odd)
