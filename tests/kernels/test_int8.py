"""Products in int8: every way against sums of integers in float64, and what quantising costs against the product.

A way of the kernel that this processor lacks is tested as the same source compiled for AVX2; that takes the compiler,
which the development install brings.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import c_kernels
import pytest
import torch
from c_kernels import ABLE, BUILD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.kernels import int8, product_c
from holdfast.kernels.int8 import FLOATS, Int8Matrix, available, even_out, int8_reference, quantise
from holdfast.kernels.linear import GatedMatrix, Matrix, gated_reference, matrix_reference

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # relative to the largest value
KERNEL_WAYS = tuple(way.name for way in product_c.WAYS if way.kind in product_c.INTEGERS)
WAYS = tuple(dict.fromkeys((*available(), *(KERNEL_WAYS if ABLE else ()))))
SIZES = st.tuples(st.integers(1, 70), st.integers(1, 90)) | st.sampled_from([(192, 576), (130, 1025)])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    lacking = tuple(set(KERNEL_WAYS) - set(available()))
    variants = {name: how for name, how in BUILD["PRODUCT_VARIANTS"].items() if name.startswith(lacking)}
    return c_kernels.emulated(product_c.SOURCE, variants, tmp_path_factory)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way in turn, native where this processor has it and the library is built."""
    name: str = request.param
    if name not in available():
        library = request.getfixturevalue("emulated")
        monkeypatch.setattr(product_c, "_library", lambda: library)
        monkeypatch.setattr(int8, "available", lambda: WAYS)
        product_c._function.cache_clear()
    yield name
    monkeypatch.undo()
    product_c._function.cache_clear()


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 20),
    size=SIZES,
    dtype=st.sampled_from(list(TOLERANCE)),
    gated=st.booleans(),
    bias=st.booleans(),
    plus=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 100),
)
def test_a_way_is_the_reference(way, rows, size, dtype, gated, bias, plus, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    outputs, inner = size
    weight = torch.randn(outputs * (1 + gated), inner)
    x, b = torch.randn(rows, inner).to(dtype), torch.randn(len(weight)) if bias else None
    p = torch.randn(rows, outputs).to(dtype) if plus else None
    exact = int8_reference(x, weight, b, gated)
    exact = exact if p is None else exact + p.double()
    found = Int8Matrix(weight, b, gated, way)(x, p)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    if rows:
        assert (found.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 20), outputs=st.integers(1, 70), inner=st.integers(1, 1000), seed=st.integers(0, 100))
def test_sums_of_integers_are_exact(way, rows, outputs, inner, seed):
    """Scales of one and the largest integers side by side, where sums of 16 bits would overflow."""
    torch.manual_seed(seed)
    x, weight = (torch.randint(-127, 128, (n, inner)).float() for n in (rows, outputs))
    x[:, 0] = weight[:, 0] = 127
    x[0], weight[0] = 127, 127
    found, exact = Int8Matrix(weight, way=way)(x).double(), x.double() @ weight.double().T
    off = (found - exact).abs() if way != int8.ONEDNN else (found - exact).abs() - (exact.abs() > 2**23).double()  # AMX
    assert off.max() <= 0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [15, 90])
def test_a_row_comes_to_the_same_in_any_company_and_by_any_threads(way, dtype, rows):
    torch.manual_seed(3)
    matrix, x = Int8Matrix(torch.randn(96, 200), gated=True, way=way), torch.randn(rows, 200).to(dtype)
    together = matrix(x)
    for start in range(0, rows, rows // 15):
        assert torch.equal(matrix(x[start : start + 1])[0], together[start])
        assert torch.equal(matrix(x[start:]), together[start:])
    kept = torch.get_num_threads()
    try:
        for threads in (1, 3, 32):
            torch.set_num_threads(threads)
            assert torch.equal(matrix(x), together)
    finally:
        torch.set_num_threads(kept)


def test_rows_of_zeros_with_a_nan_and_in_a_view(way):
    torch.manual_seed(4)
    weight, bias, wide = torch.randn(33, 40), torch.randn(33), torch.randn(3, 4, 80)
    wide[0, 1], wide[1, 2, 47] = 0.0, torch.nan
    x = wide[..., 40:]
    found = Int8Matrix(weight, bias, way=way)(x)
    assert found.shape == (3, 4, 33)
    assert torch.equal(found[0, 1], bias)
    assert found[1, 2].isnan().all()
    assert found.isnan().sum() == 33
    exact = int8_reference(x[2], weight, bias)
    assert (found[2].double() - exact).abs().max() <= 1e-6 * exact.abs().max()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(8, 30), outputs=st.integers(32, 200), inner=st.integers(8, 700), seed=st.integers(0, 100))
def test_normal_numbers_lose_two_percent(rows, outputs, inner, seed):
    torch.manual_seed(seed)
    x, weight, plus = torch.randn(rows, inner), torch.randn(outputs, inner), torch.randn(rows, outputs)
    assert relative(Matrix(weight, None, int8=True)(x), matrix_reference(x, weight)) < 0.02
    added = Matrix(weight, plus[0], int8=True)(x, plus)
    assert relative(added - plus, matrix_reference(x, weight, plus[0])) < 0.02
    pair = torch.randn(2 * outputs, inner) / inner**0.5
    assert relative(GatedMatrix(pair, int8=True)(x), gated_reference(x, pair)) < 0.03


@pytest.mark.parametrize("times", [20, 50, 100])
def test_evened_columns_leave_the_others_room(times):
    torch.manual_seed(5)
    x, weight = torch.randn(128, 512), torch.randn(256, 512)
    x[:, [7, 300]] *= times
    exact = matrix_reference(x, weight)
    others = x.clone()
    others[:, [7, 300]] = 0
    ordinary = matrix_reference(others, weight).norm()  # what the model would lose
    factors = even_out(x[:32].abs().amax(0), weight)
    assert torch.equal((x / factors) * factors, x)
    assert torch.equal(factors.log2(), factors.log2().round())
    plain, evened = Matrix(weight, int8=True)(x), Matrix(weight * factors, int8=True)(x / factors)
    loss = [((found.double() - exact).norm() / ordinary).item() for found in (plain, evened)]
    assert loss[1] < loss[0] / 2
    assert loss[1] < 0.1


def test_even_columns_stay_as_they_are():
    assert torch.equal(even_out(torch.full((64,), 3.0), torch.ones(8, 64)), torch.ones(64))
    assert even_out(torch.zeros(64), torch.zeros(8, 64)).isfinite().all()


def test_quantised_numbers_are_near_and_within_127():
    x = torch.randn(40, 99) * torch.logspace(-20, 20, 40)[:, None]
    numbers, scales = quantise(x)
    assert numbers.dtype == torch.int8
    assert numbers.abs().max() == 127
    assert numbers.min() >= -127
    assert ((numbers * scales - x).abs() <= scales * 0.5001).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="on a CPU"):
        Matrix(torch.zeros(4, 4, device="meta"), int8=True)
    with pytest.raises(ValueError, match="no way 'tpu'"):
        Int8Matrix(torch.zeros(4, 4), way="tpu")
    matrix = Int8Matrix(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="width 5"):
        matrix(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="float64"):
        matrix(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="int8"):
        GatedMatrix(torch.zeros(4, 4), int8=True).both(torch.zeros(1, 4))


def test_without_the_kernel_torch_computes(monkeypatch):
    monkeypatch.setattr(product_c, "_library", lambda: product_c.native.load(Path("nowhere.c"), "no.so", "none"))
    product_c.library_missing.cache_clear()
    try:
        ways, floats = available(), product_c.way_for(torch.zeros(4, 4))
    finally:
        monkeypatch.undo()
        product_c.library_missing.cache_clear()
    assert ways[-1] == FLOATS
    assert not set(ways) & set(KERNEL_WAYS)
    assert floats is None
