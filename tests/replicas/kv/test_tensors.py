"""The KV allocation: shape, bytes, order in memory."""

import pytest
import torch

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.tensors import CellShape, KVTensors

SHAPE = CellShape(layers=3, kv_heads=2, head_dim=8)


def test_one_allocation_of_the_shape_asked_for():
    kv = KVTensors(SHAPE, pages=5, page_size=4, dtype=torch.bfloat16)
    assert kv.data.shape == (3, 2, 5, 4, 2, 8)
    assert (kv.pages, kv.page_size, kv.cells) == (5, 4, 20)
    assert kv.cell_bytes == 2 * 3 * 2 * 8 * 2
    assert kv.data.untyped_storage().nbytes() == kv.cells * kv.cell_bytes


def test_a_run_of_pages_is_unbroken_for_a_head_on_a_cpu():
    kv = KVTensors(SHAPE, pages=5, page_size=4, dtype=torch.float32)
    assert kv.data[0, 0, 1:4, :, 1].is_contiguous()


def test_store_and_copy_reach_the_cells():
    kv = KVTensors(SHAPE, pages=3, page_size=4, dtype=torch.float32)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    kv.store(1, k, v, torch.tensor([4, 6]))
    kv.copy_page(1, 2, 3)
    assert torch.equal(kv.data[1, 0, 2, 0], k[0])
    assert torch.equal(kv.data[1, 1, 2, 2], v[1])
    assert not kv.data[0].any()


def test_too_much_memory_is_a_setting_error():
    with pytest.raises(ConfigError, match="no memory") as caught:
        KVTensors(CellShape(1000, 1000, 1000), pages=10**6, page_size=16, dtype=torch.float32)
    assert caught.value.field == "cells"
