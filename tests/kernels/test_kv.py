"""Storing into cells and copying pages, in either order of memory; runs of pages; arrays on their way to a device."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.kv import (
    ALIGNED,
    SCALE,
    PageRuns,
    Sender,
    copy_cells,
    in_bytes,
    in_numbers,
    packed,
    page_runs,
    sent_together,
    store_kv,
    store_kv_reference,
)

CPU = torch.device("cpu")


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


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_runs_name_the_same_pages_as_the_row(pages):
    runs = page_runs(np.array(pages, dtype=np.int32))
    ends = [*runs.slots[1:], runs.extent]
    assert pages == [
        page + i for slot, page, end in zip(runs.slots, runs.pages, ends, strict=True) for i in range(end - slot)
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 12), max_size=8)), min_size=1, max_size=12))
def test_replacing_tails_equals_building_the_row_anew(writes):
    row: list[int] = []
    runs = PageRuns()
    for first, pages in writes:
        first = min(first, len(row))
        row[first:] = pages
        runs.replace_tail(first, np.array(pages, dtype=np.int32))
        assert runs == page_runs(np.array(row, dtype=np.int32))


def test_arrays_in_one_copy_keep_their_values():
    arrays = [np.arange(5, dtype=np.int32), np.zeros((0, 6), np.int32), np.ones((3, 7), np.int32)]
    offsets, size = packed(arrays)
    assert all(offset % ALIGNED == 0 for offset in offsets)
    assert size >= sum(array.nbytes for array in arrays)
    for array, there in zip(arrays, sent_together(arrays, CPU), strict=True):
        assert np.array_equal(array, there.numpy())
        assert there.data_ptr() % 16 == 0


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_sender_keeps_arrays_apart(count):
    sender = Sender(CPU)
    rng = np.random.default_rng(count)
    arrays = [rng.integers(0, 99, (n, 2)).astype(t) for n, t in zip(range(count), "bhil?", strict=False)]
    first = sender.send(arrays)
    sender.send([np.full(200, 7, np.int8)])
    for array, there in zip(arrays, first, strict=True):
        assert np.array_equal(array, there.numpy())
        assert array.dtype == there.numpy().dtype
