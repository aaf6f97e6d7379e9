"""Packed and plain products against float64, on both sides of the size from which a matrix is packed.

Each by our kernel, where it is, and by oneDNN.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.kernels import product_c
from holdfast.kernels.linear import PACKED_BYTES, GatedMatrix, Matrix, can_pack, gated_reference, matrix_reference

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # relative to the largest value: an element may cancel out
DTYPES = st.sampled_from(list(TOLERANCE))


@pytest.fixture(params=["ours", "onednn"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "onednn":
        monkeypatch.setattr(product_c, "available", tuple)


def agree(found: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    assert (found.double() - exact).abs().max() <= roundings * TOLERANCE[found.dtype] * exact.abs().max()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    size=st.sampled_from([(8, 24), (512, 1024), (700, 800)]),
    dtype=DTYPES,
    bias=st.booleans(),
    plus=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_matrix_is_its_reference(rows, size, dtype, bias, plus, seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(size).to(dtype), torch.randn(*rows, size[1]).to(dtype)
    b = torch.randn(size[0]).to(dtype) if bias else None
    p = torch.randn(*rows, size[0]).to(dtype) if plus else None
    before = None if p is None else p.clone()
    agree(Matrix(weight.clone(), b)(x, p), matrix_reference(x, weight, b, p))
    assert p is None or torch.equal(p, before)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 40), size=st.sampled_from([(16, 24), (1100, 1000)]), dtype=DTYPES, seed=st.integers(0, 100))
def test_a_gated_pair_is_its_reference(rows, size, dtype, seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(size).to(dtype) * 0.1, torch.randn(rows, size[1]).to(dtype)
    agree(GatedMatrix(weight.clone())(x), gated_reference(x, weight), roundings=2)  # of both halves, then their product


def test_rows_that_are_a_view_and_no_rows_at_all():
    weight = torch.randn(512, 1024)
    wide = torch.randn(6, 2048)
    agree(Matrix(weight)(wide[:, 512:1536]), matrix_reference(wide[:, 512:1536], weight))
    assert Matrix(weight)(wide[:0, :1024]).shape == (0, 512)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_what_is_packed():
    assert can_pack(torch.zeros(PACKED_BYTES // 4, 1))
    assert not can_pack(torch.zeros(PACKED_BYTES // 4 - 1, 1))
    assert not can_pack(torch.zeros(PACKED_BYTES, 1, dtype=torch.float64))
    assert not can_pack(torch.zeros(PACKED_BYTES, 1, device="meta"))
