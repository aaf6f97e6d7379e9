"""Weights in huge pages: the same values, beside each other, and given back with the last tensor of a mapping."""

import mmap
from pathlib import Path

import pytest
import torch

from holdfast.kernels import huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int32])
def test_values_are_copied_in_their_order(dtype: torch.dtype) -> None:
    values = torch.arange(21).reshape(3, 7).to(dtype)
    copies = [huge_pages.copied(values.mT), huge_pages.copied(values)]
    for copy, wanted in zip(copies, (values.mT, values), strict=True):
        assert copy.dtype == dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, wanted)
    copies[0].zero_()
    assert torch.equal(copies[1], values)


def test_nothing_is_still_a_tensor() -> None:
    assert huge_pages.copied(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux counts huge pages")
def test_a_large_weight_is_in_as_many_huge_pages_as_the_machine_gives_until_it_goes() -> None:
    values = torch.ones(40 * huge_pages.HUGE, dtype=torch.uint8)
    before = _in_huge_pages()
    copy = huge_pages.copied(values)
    gained = _in_huge_pages() - before
    del copy
    left = _in_huge_pages() - before
    memory = mmap.mmap(-1, values.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(values.numpy().tobytes())
    assert 2 * gained >= _in_huge_pages() - before - left
    assert 2 * left <= gained


def _in_huge_pages() -> int:
    """Bytes of this process that are in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))
