"""Copies between the store and host memory: what comes back is what left, and a failed one is told."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.kv.pages import NO_MOVES, PageMoves
from holdfast.replicas.kv.tensors import CellShape, HostPages, KVTensors

SHAPE = CellShape(layers=3, kv_heads=2, head_dim=8)
PAGES = 12


def moves(device: list[int], host: list[int]) -> PageMoves:
    return PageMoves(np.array(device, np.int32), np.array(host, np.int32))


def tiers(host_pages: int = 20) -> tuple[KVTensors, HostPages]:
    kv = KVTensors(SHAPE, PAGES, 4, torch.bfloat16)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    return kv, HostPages(kv, host_pages)


def checksum(kv: KVTensors, page: int) -> int:
    return hash(kv.data[:, :, page].contiguous().view(torch.uint8).numpy().tobytes())


some = st.integers(1, PAGES).flatmap(
    lambda n: st.tuples(
        st.permutations(range(PAGES)).map(lambda pages: pages[:n]),
        st.permutations(range(20)).map(lambda pages: pages[:n]),
        st.permutations(range(PAGES)).map(lambda pages: pages[:n]),
    )
)


@given(some)
@settings(max_examples=30, deadline=None)
def test_what_comes_back_is_what_left(pages):
    left, host, back = pages
    kv, tier = tiers()
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


def test_pages_go_out_and_others_come_into_their_place_in_one_step():
    kv, tier = tiers()
    first, second = checksum(kv, 3), checksum(kv, 4)
    tier.save(moves([3], [7]))
    tier.wait()
    tier.save(moves([4], [8]))
    tier.load(moves([4], [7]))
    assert tier.wait().ok
    assert checksum(kv, 4) == first
    tier.load(moves([0], [8]))
    tier.wait()
    assert checksum(kv, 0) == second


@pytest.mark.parametrize("wrong", [moves([1], [99]), moves([99], [1])])
def test_a_copy_that_fails_is_told_and_the_next_step_goes_on(wrong):
    kv, tier = tiers()
    tier.save(wrong)
    tier.load(wrong)
    assert not tier.wait().ok
    before = checksum(kv, 2)
    tier.save(moves([2], [0]))
    tier.load(moves([5], [0]))
    assert tier.wait().ok
    assert checksum(kv, 5) == before


def test_a_step_without_moves_takes_no_time():
    _, tier = tiers()
    tier.save(NO_MOVES)
    tier.load(NO_MOVES)
    assert tier.wait().load_s == 0.0


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
