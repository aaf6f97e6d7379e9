"""Products take the way that was timed to be faster, and compute the same on both."""

import pytest
import torch
from tiny_decoder import decoder

from holdfast.kernels.linear import GatedMatrix, Matrix
from holdfast.replicas.model.decoder_gpu import GpuDecoder, LayerTimes, Product, choose_products, choose_ways


def clock(*seconds):
    """Times in turn: ours, torch's, ours, ..."""
    left = list(seconds)
    return lambda call: (call(), left.pop(0))[1]


def test_each_size_takes_the_faster_way_in_each_number_of_rows(monkeypatch):
    from holdfast.kernels import stream_gpu

    rows = []
    monkeypatch.setattr(stream_gpu, "streamed", lambda x, w, b=None: rows.append(len(x)) or x @ w.T)
    first, second = (Matrix(torch.randn(24, 16), leave=True) for _ in range(2))
    gated = GatedMatrix(torch.randn(64, 16), leave=True)
    timed = choose_products([first, second, gated], clock(1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.01, 1.0, 3.0, 3.0, 1.0))
    assert [each.rows for each in timed] == [1, 8, 16] * 2
    assert (timed[0].outputs, timed[0].inputs) == (24, 16)
    rows.clear()
    for count in range(1, 18):
        x = torch.randn(count, 16)
        for matrix in (first, second):
            assert torch.allclose(matrix(x), x @ matrix.plain.T, atol=1e-5)
        assert torch.allclose(gated.both(x), x @ gated.plain.T, atol=1e-5)
    assert rows == [1, 1, *range(2, 9), *(n for n in range(9, 17) for _ in range(2))]


def test_matrices_of_a_size_are_timed_behind_each_other(monkeypatch):
    from holdfast.replicas.model import decoder_gpu

    calls = []
    monkeypatch.setattr(decoder_gpu, "streamed", lambda x, w: calls.append(w) or x @ w.T)
    alike = [Matrix(torch.randn(24, 16), leave=True) for _ in range(10)]
    timed = choose_products(alike, clock(*[8.0, 4.0] * 3))
    assert [(each.ours_s, each.torchs_s) for each in timed] == [(1.0, 0.5)] * 3
    assert [w is each.plain for w, each in zip(calls[:8], alike, strict=False)] == [True] * 8
    assert len(calls) == 3 * 8


@pytest.mark.parametrize("ours_s", [1e-9, 1e9])
def test_the_decoder_computes_the_same_either_way(ours_s):
    model, _ = decoder(GpuDecoder, 8, 16)
    x = torch.randn(3, 16)
    before = [matrix(x[:, :1].expand(3, matrix.plain.shape[1])) for matrix in (model._layers[0].qkv, model._head)]
    flip = [0]

    def seconds(call):
        call()
        flip[0] += 1
        return ours_s if flip[0] % 2 else 1.0

    choose_products(model.matrices, seconds)
    after = [
        matrix(x[:, :1].expand(3, matrix.plain.shape[1]).contiguous()) for matrix in (model._layers[0].qkv, model._head)
    ]
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_layers_are_fused_in_as_many_rows_as_that_is_faster():
    model, _ = decoder(GpuDecoder, 8, 16)
    sizes = len({matrix.plain.shape for matrix in model.matrices})
    products, layers = choose_ways(model, clock(*[1.0] * 6 * sizes, 3.0, 1.0, 1.0, 1.0, 2.0, 1.5))
    assert len(products) == 3 * sizes
    assert layers == [LayerTimes(1, 3.0, 1.0), LayerTimes(8, 1.0, 1.0), LayerTimes(16, 2.0, 1.5)]
    assert [rows for rows in range(20) if rows in model._fused] == [1, *range(9, 17)]


def test_what_computes_something_else_is_not_chosen_however_fast_it_is(monkeypatch, caplog):
    from holdfast.replicas.model import decoder_gpu

    model, _ = decoder(GpuDecoder, 8, 16)
    sizes = len({matrix.plain.shape for matrix in model.matrices})
    seconds = clock(*[1.0, 9.0] * 3 * sizes, *[9.0, 1.0] * 3)
    monkeypatch.setattr(decoder_gpu, "streamed", lambda x, w, *_: torch.full((len(x), len(w)), torch.nan))
    monkeypatch.setattr(decoder_gpu, "rest_fused", lambda layer, mixed, residual, eps: residual.zero_())
    choose_ways(model, seconds)
    assert "are off by" in caplog.text
    assert not any(rows in model._fused for rows in range(20))
    assert not any(rows in matrix._streamed for matrix in model.matrices for rows in range(20))


def test_a_tie_is_left_to_torch():
    assert not Product(1, 1, 1, 1.0, 1.01).ours_is_faster
    assert Product(1, 1, 1, 1.0, 1.1).ours_is_faster
