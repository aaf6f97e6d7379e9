"""Products with weights in floats by the C kernel, each of its ways, against float64. Those in int8: test_int8.

A way that this processor lacks is tested as the same source compiled for AVX2; that takes the compiler.
"""

import ctypes
from collections.abc import Iterator

import c_kernels
import pytest
import torch
from c_kernels import ABLE, BUILD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.kernels import product_c
from holdfast.kernels.linear import gated_reference, matrix_reference
from holdfast.kernels.product_c import INTEGERS, Product, Way, way_for

WAYS = {way.name: way for way in product_c.WAYS if way.kind not in INTEGERS} if ABLE else {}
DTYPES = {"pairs": torch.bfloat16, "reals": torch.float32}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # relative to the largest value
SEEDS = st.integers(0, 100)
FIXTURE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    lacking = tuple(way.name for way in WAYS.values() if way not in product_c.available())
    variants = {name: how for name, how in BUILD["PRODUCT_VARIANTS"].items() if name.startswith(lacking)}
    return c_kernels.emulated(product_c.SOURCE, variants, tmp_path_factory)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """Each way in turn, native where this processor has it and the library is built."""
    way = WAYS[request.param]
    if way not in product_c.available():
        library = request.getfixturevalue("emulated")
        monkeypatch.setattr(product_c, "_library", lambda: library)
        product_c._function.cache_clear()
    yield way
    monkeypatch.undo()
    product_c._function.cache_clear()


@FIXTURE
@given(
    rows=st.integers(0, 80),
    size=st.tuples(st.integers(1, 150), st.integers(1, 45)) | st.sampled_from([(192, 288), (130, 511)]),
    gated=st.booleans(),
    bias=st.booleans(),
    plus=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 100),
)
def test_a_way_is_the_reference(way, rows, size, gated, bias, plus, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    dtype, (outputs, inner) = DTYPES[way.kind], (size[0], max(2, way.columns) * size[1])
    weight = torch.randn(outputs * (1 + gated), inner).to(dtype) / 4
    x = torch.randn(rows, 2 * inner).to(dtype)[:, inner:]
    b = torch.randn(outputs).to(dtype) if bias and not gated else None
    p = torch.randn(rows, outputs).to(dtype) if plus else None
    exact = gated_reference(x, weight) if gated else matrix_reference(x, weight, b)
    exact = exact if p is None else exact + p.double()
    found = Product(way, weight, b, gated)(x, p)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    if rows:
        assert (found.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@FIXTURE
@given(rows=st.integers(1, 70), gated=st.booleans(), inner=st.integers(1, 300), seed=st.integers(0, 100))
def test_a_row_comes_to_the_same_in_any_company(way, rows, gated, inner, seed):
    torch.manual_seed(seed)
    dtype, inner = DTYPES[way.kind], max(2, way.columns) * -(-2 * inner // max(2, way.columns))
    product = Product(way, torch.randn(96, inner).to(dtype), gated=gated)
    x = torch.randn(rows, inner).to(dtype)
    together = product(x)
    for start in {*range(0, rows, 7), rows - 1}:
        assert torch.equal(product(x[start : start + 1])[0], together[start])
        assert torch.equal(product(x[start:]), together[start:])


@settings(FIXTURE, max_examples=10)
@given(
    rows=st.integers(1, 150), outputs=st.integers(1, 300), gated=st.booleans(), threads=st.integers(2, 64), seed=SEEDS
)
def test_threads_change_no_bit(way, rows, outputs, gated, threads, seed):
    """However few blocks there are for them: then rows are cut, too."""
    torch.manual_seed(seed)
    dtype, inner = DTYPES[way.kind], 64
    product = Product(way, torch.randn(outputs * (1 + gated), inner).to(dtype), gated=gated)
    x, plus = torch.randn(rows, inner).to(dtype), torch.randn(rows, outputs).to(dtype)
    kept, results = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            results.append(product(x, plus))
    finally:
        torch.set_num_threads(kept)
    assert torch.equal(*results)


def test_nan_stays_in_its_row(way):
    dtype = DTYPES[way.kind]
    x = torch.ones(3, 32, dtype=dtype)
    x[1, 5] = torch.nan
    found = Product(way, torch.ones(70, 32, dtype=dtype))(x)
    assert found[1].isnan().all()
    assert (found[::2] == 32).all()


def test_what_does_not_fit_is_refused(way):
    product = Product(way, torch.zeros(4, 6, dtype=DTYPES[way.kind]))
    with pytest.raises(ValueError, match="of width 6"):
        product(torch.zeros(2, 8, dtype=DTYPES[way.kind]))
    with pytest.raises(ValueError, match="float64"):
        product(torch.zeros(2, 6, dtype=torch.float64))


def test_what_the_kernel_has_no_way_for():
    assert way_for(torch.zeros(4, 4, dtype=torch.float64)) is None
    assert way_for(torch.zeros(4, 4, device="meta")) is None
    assert way_for(torch.zeros(4, 3, dtype=torch.bfloat16)) is None
