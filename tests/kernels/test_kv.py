"""Storing into cells and copying pages, in either order of memory."""

import pytest
import torch

from holdfast.kernels.kv import SCALE, copy_cells, in_bytes, in_numbers, store_kv, store_kv_reference


@pytest.fixture(params=[True, False], ids=["heads first", "cells first"])
def store(request):
    kv = torch.randn(3, 2, 2, 5, 4, 8).permute(0, 1, 3, 4, 2, 5)
    return kv if request.param else kv.contiguous()


def test_store_is_the_reference_and_touches_nothing_else(store):
    expected = store.clone()
    k, v = torch.randn(2, 6, 8).transpose(0, 1), torch.randn(6, 2, 8)
    cells = torch.tensor([19, 0, 7, 8, 3, 12])
    store_kv_reference(expected, 1, k, v, cells)
    before = store.clone()
    store_kv(store, 1, k, v, cells)
    assert torch.equal(store, expected)
    assert torch.equal(store[[0, 2]], before[[0, 2]])
    assert not torch.equal(store[1], before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_int8_each_heads_key_and_value_is_within_half_a_step_of_its_own(dtype):
    k, v = (torch.randn(6, 2, 8) * 10.0 ** torch.randint(-6, 6, (6, 2, 1))).to(dtype), torch.randn(6, 2, 8).to(dtype)
    k[3, 1], v[2, 0, 5] = 0.0, torch.nan
    store = in_bytes(torch.zeros(3, 2, 5, 4, 2, 8, dtype=dtype))
    assert store.shape[-1] == 8 + SCALE
    cells = torch.tensor([19, 0, 7, 8, 3, 12])
    store_kv(store, 1, k, v, cells)
    for stored, exact in zip(store[1].flatten(1, 2), (k, v), strict=True):
        found = in_numbers(stored[cells], torch.float32)
        step = exact.float().abs().amax(-1, keepdim=True) / 127
        whole = ~step.isnan()[..., 0]
        assert ((found - exact.float()).abs() <= step * 0.5001)[whole].all()
        assert found[~whole].isnan().all()
    others = torch.ones(20, dtype=torch.bool).index_fill(0, cells, False)
    assert not store.flatten(2, 3)[:, :, others].any()
    assert not store[[0, 2]].any()


def test_copy_takes_the_first_cells_of_every_layer(store):
    before = store.clone()
    copy_cells(store, 4, 1, 3)
    assert torch.equal(store[:, :, 1, :3], before[:, :, 4, :3])
    assert torch.equal(store[:, :, 1, 3:], before[:, :, 1, 3:])
    others = [0, 2, 3, 4]
    assert torch.equal(store[:, :, others], before[:, :, others])


@pytest.mark.parametrize(("source", "target", "cells"), [(5, 0, 1), (0, -1, 1), (0, 1, 5), (0, 1, 0), (2, 2, 1)])
def test_a_copy_that_cannot_be_is_refused(store, source, target, cells):
    with pytest.raises(ValueError, match="cannot copy"):
        copy_cells(store, source, target, cells)


def test_a_store_outside_or_of_another_shape_is_refused(store):
    k = torch.zeros(1, 2, 8)
    with pytest.raises(IndexError):
        store_kv(store, 0, k, k, torch.tensor([20]))
    with pytest.raises(ValueError, match="do not fit"):
        store_kv(store, 0, k[..., :4], k[..., :4], torch.tensor([0]))
