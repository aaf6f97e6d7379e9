"""The KV store: shape, bytes, order in memory; and copies to host memory and back.

What comes back is what left, a copy that fails is told and logged, and little is on its way at once.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.replicas.config import ModelShape
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import PageMoves
from holdfast.replicas.kv.tensors import CellShape, HostPages, KVTensors
from holdfast.replicas.types import KVDType

SHAPE = CellShape(layers=3, kv_heads=2, head_dim=8)
PAGES = 12


@pytest.mark.parametrize(
    ("kv_dtype", "width", "cell_bytes"), [("auto", 8, 2 * 3 * 2 * 8 * 2), ("int8", 12, 2 * 3 * 2 * 12)]
)
def test_one_allocation_of_the_shape_asked_for(kv_dtype, width, cell_bytes):
    """In int8 a cell has bytes and scales."""
    kv = KVTensors(SHAPE, pages=5, page_size=4, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    assert (kv.data.shape, kv.dtype) == ((3, 2, 5, 4, 2, width), torch.bfloat16)
    assert (kv.pages, kv.page_size, kv.cells, kv.cell_bytes) == (5, 4, 20, cell_bytes)
    assert kv.data.untyped_storage().nbytes() == kv.cells * cell_bytes
    kv.resize(2)
    assert kv.data.untyped_storage().nbytes() == 2 * 4 * cell_bytes


@pytest.mark.parametrize("kv_dtype", get_args(KVDType))
def test_a_shape_tells_the_bytes_of_a_cell(kv_dtype):
    told = ModelShape(100, "bfloat16", SHAPE.values, 100, SHAPE.head_dim)
    kv = KVTensors(SHAPE, pages=5, page_size=4, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    assert told.cell_bytes(2, kv_dtype) == kv.cell_bytes == kv.data.nbytes / kv.cells
    assert kv_dtype != "fp8" or kv.cell_bytes == SHAPE.values


def test_too_much_memory_is_a_setting_error():
    with pytest.raises(ConfigError, match="no memory") as caught:
        KVTensors(CellShape(1000, 1000, 1000), pages=10**6, page_size=16, dtype=torch.float32)
    assert caught.value.field == "cells"


# ---- copies to host memory and back ----


def moves(device: list[int], host: list[int]) -> PageMoves:
    return PageMoves(np.array(device, np.int32), np.array(host, np.int32))


def tiers(staged_pages: int = 64, kv_dtype: KVDType = "auto") -> tuple[KVTensors, HostPages]:
    kv = KVTensors(SHAPE, PAGES, 4, torch.bfloat16, kv_dtype=kv_dtype)
    kv.data.copy_(99 * torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    return kv, HostPages(kv, 20, staged=staged_pages * kv.page_size * kv.cell_bytes)


def checksum(kv: KVTensors, page: int) -> int:
    return hash(kv.data[:, :, page].contiguous().view(torch.uint8).numpy().tobytes())


some = st.integers(1, PAGES).flatmap(
    lambda n: st.tuples(
        st.permutations(range(PAGES)).map(lambda pages: pages[:n]),
        st.permutations(range(20)).map(lambda pages: pages[:n]),
        st.permutations(range(PAGES)).map(lambda pages: pages[:n]),
    )
)


@given(some, st.sampled_from([0, 1, 3, 64]), st.sampled_from(get_args(KVDType)))
@settings(max_examples=60)
def test_what_comes_back_is_what_left(pages, staged_pages, kv_dtype):
    left, host, back = pages
    kv, tier = tiers(staged_pages, kv_dtype)
    sums = [checksum(kv, page) for page in left]
    tier.save(moves(left, host))
    kv.data.zero_()  # what a forward does to pages that were taken over
    assert tier.wait().ok
    tier.load(moves(back, host))
    told = tier.wait()
    assert told.ok
    assert told.load_s > 0
    assert [checksum(kv, page) for page in back] == sums
    others = set(range(PAGES)) - set(back)
    assert not any(kv.data[:, :, page].any() for page in others)


@pytest.mark.parametrize("wrong", [moves([1], [99]), moves([99], [1])])
def test_a_copy_that_fails_is_told_and_logged_and_the_next_step_goes_on(wrong, caplog):
    kv, tier = tiers()
    tier.save(wrong)
    tier.load(wrong)
    assert not tier.wait().ok
    assert "copying 1 pages of KV" in caplog.text
    caplog.clear()
    tier.load(wrong)
    assert not tier.wait().ok
    assert "copying 1 pages of KV from the host failed" in caplog.text
    caplog.clear()
    before = checksum(kv, 2)
    tier.save(moves([2], [0]))
    tier.load(moves([5], [0]))
    assert tier.wait().ok
    assert checksum(kv, 5) == before
    assert caplog.text == ""


class Inline:
    """Does at once what is done on the side."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def do(self, lane, work) -> None:
        if self.error is not None:
            raise self.error
        work()

    def join(self, lane) -> None:
        pass

    def meet(self) -> None:
        pass

    def wait(self) -> float:
        return 1.0


class Late(Inline):
    """Does everything as late as it may, and the lanes in any order."""

    def __init__(self, turns: list[int]) -> None:
        self.turns = turns
        self.begun: list[list] = [[], []]

    def do(self, lane, work) -> None:
        self.begun[lane].append(work)

    def join(self, lane) -> None:
        while self.begun[lane]:
            self.begun[lane].pop(0)()

    def meet(self) -> None:
        for lane in self.turns:
            if self.begun[lane]:
                self.begun[lane].pop(0)()
        self.join(0)
        self.join(1)

    def wait(self) -> float:
        self.meet()
        return 1.0


@given(some, st.sampled_from([0, 2, 6]), st.lists(st.integers(0, 1), max_size=12))
@settings(max_examples=60)
def test_lanes_need_no_order_but_what_they_ask_for(pages, staged_pages, turns):
    """What leaves is taken over, and comes back in the same step, by whichever lane is free."""
    left, host, back = pages
    kv, tier = tiers(staged_pages)
    tier._side = Late(turns)
    sums = [checksum(kv, page) for page in left]
    tier.save(moves(left, host))
    kv.data.zero_()
    tier.load(moves(back, host))
    assert tier.wait().ok
    assert [checksum(kv, page) for page in back] == sums


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that were made meanwhile, views not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes += tensor.untyped_storage().nbytes()
        return made


class Counted:
    """The side as it is; what it allocates is counted as well."""

    def __init__(self, side) -> None:
        self.side = side
        self.join, self.meet, self.wait = side.join, side.meet, side.wait
        self.allocated: list[Allocated] = []

    def do(self, lane, work) -> None:
        allocated = Allocated()
        self.allocated.append(allocated)

        def counted() -> None:
            with allocated:
                work()

        self.side.do(lane, counted)


@given(st.integers(1, 64), st.integers(0, 40))
@settings(max_examples=30)
def test_however_much_moves_nothing_is_allocated_beyond_two_small_buffers(n, staged_pages):
    kv = KVTensors(CellShape(layers=2, kv_heads=2, head_dim=32), 64, 8, torch.float32)
    kv.data.normal_()
    before = kv.data.clone()
    page_bytes = kv.page_size * kv.cell_bytes
    with Allocated() as once:
        tier = HostPages(kv, 64, staged_pages * page_bytes)
    assert once.bytes - tier.data.nbytes <= max(staged_pages, 2) * page_bytes
    tier._side = counted = Counted(tier._side)
    pages = moves(list(range(n)), list(range(n)))
    with Allocated() as meanwhile:
        tier.save(pages)
        assert tier.wait().ok
        kv.data[:, :, :n].zero_()
        tier.load(pages)
        assert tier.wait().ok
    assert meanwhile.bytes + sum(each.bytes for each in counted.allocated) <= 2 * n * 8, "only the pages' numbers"
    assert torch.equal(kv.data, before)


def test_unless_told_otherwise_little_is_staged():
    kv = KVTensors(CellShape(layers=4, kv_heads=8, head_dim=64), 64, 64, torch.float32)  # 64 MiB
    with Allocated() as once:
        tier = HostPages(kv, 64)
    assert once.bytes - tier.data.nbytes <= 32 << 20


def test_copies_take_one_thread_and_leave_the_others_as_they_were() -> None:
    """A team of its own would be one more than there are cores for: see `test_service`."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 22).add_(1)  # this thread's team
        kv = KVTensors(SHAPE, 4096, 16, torch.float32)
        host = HostPages(kv, 4096)
        threads = len(os.listdir("/proc/self/task"))
        pages = list(range(4096))
        host.load(moves(pages, pages))
        assert host.wait().ok
        assert len(os.listdir("/proc/self/task")) == threads
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)
