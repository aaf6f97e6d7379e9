"""Products with the weights of a model: every variant of the C kernel and torch's way, in floats and in int8.

A variant that this processor lacks is tested as the same source compiled for AVX2; that takes the compiler, which the
development install brings.
"""

import functools
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from c_kernels import ABLE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_world import relative_error

from holdfast.kernels import linear, native
from holdfast.kernels.linear import (
    INTEGERS,
    VARIANTS,
    Activation,
    GatedMatrix,
    Matrix,
    PackedMatrix,
    Variant,
    activate,
    even_out,
    gated_reference,
    int8_product,
    int8_reference,
    matrix_reference,
    variant_for,
)

DTYPES = {"pairs": torch.bfloat16, "reals": torch.float32}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # relative to the largest value
MATRIX_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # in any way that torch may take
INT8_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
SEEDS = st.integers(0, 100)
ACTIVATIONS = st.sampled_from([None, *get_args(Activation)])
FIXTURE = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FLOATS = [each for each in VARIANTS if each.kind not in INTEGERS] if ABLE else []
BYTES = [each for each in VARIANTS if each.kind in INTEGERS] if ABLE else []


def named(variant: Variant | None) -> str:
    return variant.name if variant else "torch"


@pytest.fixture
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Variant | None]:
    """Each variant in turn, native where this processor has it and the library is built; None: torch."""
    each: Variant | None = request.param
    if each is not None and each not in linear.available():
        monkeypatch.setattr(linear, "LIBRARY", request.getfixturevalue("emulated")("product"))
        linear._function.cache_clear()
    yield each
    linear._function.cache_clear()


floats = pytest.mark.parametrize("variant", FLOATS, indirect=True, ids=named)
int8s = pytest.mark.parametrize("variant", [*BYTES, None], indirect=True, ids=named)


def off(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The greatest error, relative to the largest value, or to 0.1 where that is less."""
    return (found.double() - exact).abs().max() / exact.abs().max().clamp_min(0.1)


def halves(activation: Activation | None) -> int:
    """Outputs of the weight for one of the product."""
    return 1 if activation in (None, "relu2") else 2


# ---- the kernel, in floats


@floats
@FIXTURE
@given(
    rows=st.integers(0, 80),
    size=st.tuples(st.integers(1, 150), st.integers(1, 45)) | st.sampled_from([(192, 288), (130, 511)]),
    activation=ACTIVATIONS,
    bias=st.booleans(),
    plus=st.booleans(),
    threads=st.integers(1, 2),
    seed=SEEDS,
)
def test_a_variant_is_the_reference(variant, rows, size, activation, bias, plus, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    dtype, (outputs, inner) = DTYPES[variant.kind], (size[0], max(2, variant.columns) * size[1])
    weight = torch.randn(outputs * halves(activation), inner).to(dtype) / 4
    x = torch.randn(rows, 2 * inner).to(dtype)[:, inner:]
    b = torch.randn(len(weight)).to(dtype) if bias else None
    p = torch.randn(rows, outputs).to(dtype) if plus else None
    exact = matrix_reference(x, weight, b)
    exact = exact if activation is None else activate(exact, activation)
    exact = exact if p is None else exact + p.double()
    found = PackedMatrix(variant, weight, b, activation)(x, p)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert not rows or off(found, exact) <= TOLERANCE[dtype]


@floats
@FIXTURE
@given(rows=st.integers(1, 70), activation=ACTIVATIONS, inner=st.integers(1, 300), seed=SEEDS)
def test_a_row_has_the_same_bits_in_any_company(variant, rows, activation, inner, seed):
    torch.manual_seed(seed)
    dtype, inner = DTYPES[variant.kind], max(2, variant.columns) * -(-2 * inner // max(2, variant.columns))
    product = PackedMatrix(variant, torch.randn(96, inner).to(dtype), activation=activation)
    x = torch.randn(rows, inner).to(dtype)
    together = product(x)
    for start in {*range(0, rows, 7), rows - 1}:
        assert torch.equal(product(x[start : start + 1])[0], together[start])
        assert torch.equal(product(x[start:]), together[start:])


@floats
@settings(FIXTURE, max_examples=10)
@given(
    rows=st.integers(1, 150),
    outputs=st.integers(1, 300),
    activation=ACTIVATIONS,
    threads=st.integers(2, 64),
    seed=SEEDS,
)
def test_threads_change_no_bit(variant, rows, outputs, activation, threads, seed):
    """However few blocks there are for them: then rows are cut, too."""
    torch.manual_seed(seed)
    dtype, inner = DTYPES[variant.kind], 64
    product = PackedMatrix(variant, torch.randn(outputs * halves(activation), inner).to(dtype), activation=activation)
    x, plus = torch.randn(rows, inner).to(dtype), torch.randn(rows, outputs).to(dtype)
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        results.append(product(x, plus))
    assert torch.equal(*results)


@floats
def test_nan_stays_in_its_row(variant):
    dtype = DTYPES[variant.kind]
    x = torch.ones(3, 32, dtype=dtype)
    x[1, 5] = torch.nan
    found = PackedMatrix(variant, torch.ones(70, 32, dtype=dtype))(x)
    assert found[1].isnan().all()
    assert (found[::2] == 32).all()


# ---- matrices, by the kernel where there is one and by torch


@pytest.fixture(params=["fastest", "torch"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "level", functools.cache(lambda: "torch"))
    name: str = request.param
    return name


@settings(FIXTURE, max_examples=20)
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    size=st.sampled_from([(8, 24), (512, 1024), (700, 800)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    bias=st.booleans(),
    plus=st.booleans(),
    seed=SEEDS,
)
def test_a_matrix_is_its_reference(level, rows, size, dtype, bias, plus, seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(size).to(dtype), torch.randn(*rows, size[1]).to(dtype)
    b = torch.randn(size[0]).to(dtype) if bias else None
    p = torch.randn(*rows, size[0]).to(dtype) if plus else None
    before = None if p is None else p.clone()
    matrix = Matrix(weight.clone(), b)
    assert (matrix.plain is None) == (variant_for(weight) is not None)
    assert level != "torch" or matrix.plain is not None
    assert off(matrix(x, p), matrix_reference(x, weight, b, p)) <= MATRIX_TOLERANCE[dtype]
    assert p is None or torch.equal(p, before)


@settings(FIXTURE, max_examples=10)
@given(
    rows=st.integers(1, 40),
    size=st.sampled_from([(16, 24), (1100, 1000)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=SEEDS,
)
def test_a_gated_pair_is_its_reference(level, rows, size, dtype, activation, seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(size).to(dtype) * 0.1, torch.randn(rows, size[1]).to(dtype)
    found, exact = GatedMatrix(weight.clone(), activation=activation)(x), gated_reference(x, weight, activation)
    assert off(found, exact) <= 2 * MATRIX_TOLERANCE[dtype]  # torch rounds both halves, then their product


# ---- int8


@int8s
@settings(FIXTURE, max_examples=25)
@given(
    rows=st.integers(0, 20),
    size=st.tuples(st.integers(1, 70), st.integers(1, 90)) | st.sampled_from([(192, 576), (130, 1025)]),
    dtype=st.sampled_from(list(INT8_TOLERANCE)),
    activation=ACTIVATIONS,
    bias=st.booleans(),
    plus=st.booleans(),
    threads=st.integers(1, 2),
    seed=SEEDS,
)
def test_int8_is_its_reference(variant, rows, size, dtype, activation, bias, plus, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    outputs, inner = size
    weight = torch.randn(outputs * halves(activation), inner)
    x, b = torch.randn(rows, inner).to(dtype), torch.randn(len(weight)) if bias else None
    p = torch.randn(rows, outputs).to(dtype) if plus else None
    exact = int8_reference(x, weight, b, activation)
    exact = exact if p is None else exact + p.double()
    found = int8_product(variant, weight, b, activation)(x, p)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert not rows or off(found, exact) <= INT8_TOLERANCE[dtype]


@int8s
@FIXTURE
@given(rows=st.integers(1, 20), outputs=st.integers(1, 70), inner=st.integers(1, 1000), seed=SEEDS)
def test_sums_of_integers_are_exact(variant, rows, outputs, inner, seed):
    """Scales of one and the largest integers side by side, where sums of 16 bits would overflow."""
    torch.manual_seed(seed)
    x, weight = (torch.randint(-127, 128, (n, inner)).float() for n in (rows, outputs))
    x[:, 0] = weight[:, 0] = 127
    x[0], weight[0] = 127, 127
    assert torch.equal(int8_product(variant, weight)(x, None).double(), x.double() @ weight.double().T)


@int8s
@pytest.mark.parametrize("dtype", INT8_TOLERANCE)
@pytest.mark.parametrize("rows", [15, 90])
def test_an_int8_row_has_the_same_bits_in_any_company_and_by_any_threads(variant, dtype, rows):
    torch.manual_seed(3)
    product, x = int8_product(variant, torch.randn(96, 200), activation="silu"), torch.randn(rows, 200).to(dtype)
    together = product(x, None)
    for start in range(0, rows, rows // 15):
        assert torch.equal(product(x[start : start + 1], None)[0], together[start])
        assert torch.equal(product(x[start:], None), together[start:])
    for threads in (1, 3, 32):
        torch.set_num_threads(threads)
        assert torch.equal(product(x, None), together)


@int8s
def test_int8_rows_of_zeros_with_a_nan_and_in_a_view(variant):
    torch.manual_seed(4)
    weight, bias, wide = torch.randn(33, 40), torch.randn(33), torch.randn(12, 80)
    wide[1], wide[6, 47] = 0.0, torch.nan
    x = wide[:, 40:]
    found = int8_product(variant, weight, bias)(x, None)
    assert torch.equal(found[1], bias)
    assert found[6].isnan().all()
    assert found.isnan().sum() == 33
    assert off(found[8:], int8_reference(x[8:], weight, bias)) <= 1e-6


@pytest.mark.parametrize("variant", [*FLOATS, *BYTES, None], indirect=True, ids=named)
def test_rows_that_do_not_fit_are_refused(variant):
    dtype, weight = DTYPES.get(variant.kind if variant else "", torch.float32), torch.zeros(4, 6)
    product = PackedMatrix(variant, weight.to(dtype)) if variant in FLOATS else int8_product(variant, weight)
    with pytest.raises(ValueError, match="of width 6"):
        product(torch.zeros(2, 8, dtype=dtype), None)
    with pytest.raises(ValueError, match="float64"):
        product(torch.zeros(2, 6, dtype=torch.float64), None)


def test_int8_is_refused_elsewhere_and_gives_nothing_but_the_gated_product():
    with pytest.raises(ValueError, match="on a CPU"):
        Matrix(torch.zeros(4, 4, device="meta"), int8=True)
    with pytest.raises(ValueError, match="gated"):
        GatedMatrix(torch.zeros(4, 4), int8=True).both(torch.zeros(1, 4))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(8, 30), outputs=st.integers(32, 200), inner=st.integers(8, 700), seed=SEEDS)
def test_normal_numbers_lose_two_percent(rows, outputs, inner, seed):
    torch.manual_seed(seed)
    x, weight, plus = torch.randn(rows, inner), torch.randn(outputs, inner), torch.randn(rows, outputs)
    assert relative_error(Matrix(weight, None, int8=True)(x), matrix_reference(x, weight)) < 0.02
    added = Matrix(weight, plus[0], int8=True)(x, plus)
    assert relative_error(added - plus, matrix_reference(x, weight, plus[0])) < 0.02
    pair = torch.randn(2 * outputs, inner) / inner**0.5
    assert relative_error(GatedMatrix(pair, int8=True)(x), gated_reference(x, pair)) < 0.03


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


@pytest.mark.parametrize("int8", [False, True])
def test_without_the_library_there_is_no_variant(int8, monkeypatch, tmp_path):
    monkeypatch.setattr(linear, "LIBRARY", native.Library("product", tmp_path))
    assert "not built" in linear.LIBRARY.missing or not ABLE
    assert variant_for(torch.zeros(4, 4), int8) is None
