"""Arrays arrive as they were sent, apart from each other and aligned."""

import numpy as np
import pytest
import torch

from holdfast.kernels.transfer import ALIGNED, Sender, packed, sent_together

CPU = torch.device("cpu")


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
