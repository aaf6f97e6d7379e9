"""Products take the way that was timed to be faster, and compute the same on both."""

import pytest
import torch
from on_device import randint, randn
from tiny_decoder import decoder

from holdfast.kernels.linear import GatedMatrix, Matrix, Route
from holdfast.replicas.model.decoder_gpu import GpuDecoder, choose_products, one_order


def clock(*seconds):
    """Times in turn: ours, ours in tall tiles, torch's, ours, ..."""
    left = list(seconds)
    return lambda call: (call(), left.pop(0))[1]


def test_each_size_takes_the_faster_way_in_each_number_of_rows(monkeypatch):
    from holdfast.kernels import stream_gpu

    rows, tall = [], []
    monkeypatch.setattr(stream_gpu, "streamed", lambda x, w, b=None: rows.append(len(x)) or x @ w.T)
    monkeypatch.setattr(stream_gpu, "streamed_tall", lambda x, w, b=None: tall.append(len(x)) or x @ w.T)
    first, second = (Matrix(randn(24, 16), leave=True) for _ in range(2))
    gated = GatedMatrix(randn(64, 16), leave=True)
    small = (1.0, 1.5, 2.0, 3.0, 3.0, 1.0, 1.0, 1.1, 2.0)
    large = (1.0, 1.0, 1.01, 3.0, 1.0, 3.0, 3.0, 3.0, 1.0)
    timed = choose_products([first, second, gated], clock(*small, *large))
    assert [each.rows for each in timed] == [1, 8, 16] * 2
    assert (timed[0].outputs, timed[0].inputs) == (24, 16)
    rows.clear()
    for count in range(1, 18):
        x = randn(count, 16)
        for matrix in (first, second):
            assert torch.allclose(matrix(x), x @ matrix.plain.T, atol=1e-5)
        assert torch.allclose(gated.both(x), x @ gated.plain.T, atol=1e-5)
    assert rows == [1, 1, *(n for n in range(9, 17) for _ in range(2))]
    assert tall == [*range(2, 9)]


def test_what_computes_something_else_is_not_chosen_however_fast_it_is(monkeypatch, caplog):
    from holdfast.replicas.model import decoder_gpu

    model, _ = decoder(GpuDecoder, 8, 16)
    sizes = len({matrix.plain.shape for matrix in model.matrices})
    seconds = clock(*[1.0, 2.0, 9.0] * 3 * sizes)
    monkeypatch.setattr(decoder_gpu, "streamed", lambda x, w, *_: x.new_full((len(x), len(w)), torch.nan))
    choose_products(model.matrices, seconds)
    assert "are off by" in caplog.text
    assert not any(
        rows in (*matrix.route.streamed, *matrix.route.tall) for matrix in model.matrices for rows in range(20)
    )


def whole(*shape):
    """Numbers whose sums are exact in any order: the interpreter's depends on the tile, a GPU's does not."""
    return randint(-4, 5, shape).float()


def off_for(counts):
    """A product that has other bits for so many rows."""
    return lambda x, weight, bias=None: x @ weight.T + (len(x) in counts)


def test_products_that_are_summed_otherwise_go_another_way(monkeypatch):
    from holdfast.kernels import linear as products
    from holdfast.replicas.model import decoder_gpu

    monkeypatch.setattr(torch, "randn", lambda *shape, device=None: whole(*shape))
    for module in (decoder_gpu, products):
        monkeypatch.setattr(module, "linear", off_for({1, 2, 40, 130, 131, 150}))
    matrix, gated = Matrix(whole(24, 16), leave=True), GatedMatrix(whole(64, 16), leave=True)
    routes = one_order([matrix, gated], 160)
    assert routes[matrix.plain.shape] == Route(frozenset({1, 2, 40}), filled={130: 132, 131: 132, 150: 151})
    x = whole(160, 16)
    for rows in (1, 2, 3, 40, 128, 130, 131, 132, 150, 160):
        assert torch.equal(matrix(x[:rows]), x[:rows] @ matrix.plain.T)
        assert torch.equal(gated.both(x[:rows]), x[:rows] @ gated.plain.T)


def test_an_order_that_cannot_be_had_is_said(monkeypatch):
    from holdfast.replicas.model import decoder_gpu

    monkeypatch.setattr(torch, "randn", lambda *shape, device=None: whole(*shape))
    monkeypatch.setattr(decoder_gpu, "linear", off_for(range(150, 161)))
    with pytest.raises(RuntimeError, match="torch sums 160 rows with 24 x 16"):
        one_order([Matrix(torch.randn(24, 16), leave=True)], 160)
