"""The KV store: one allocation for every layer, page and cell. Who owns a page is decided elsewhere (`kv/pages`).

    [layers, 2, pages, page_size, kv_heads, head_dim]      index 1: 0 keys, 1 values

That is the shape everywhere; the order in memory depends on the device. On a GPU it is the shape's own, so a cell is
one block. On a CPU the heads come before the pages: a core reads one head at a time, and a run of pages then is one
unbroken stretch for each head. With 4 heads of 32 values out of cold memory, attention over 500 cells takes 47 us of
a core that way and 153 us the other way; with 8 heads of 128 the two are equal in float32, 405 to 540 us in bfloat16.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.kv import copy_cells, store_kv
from holdfast.kernels.transfer import sent
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import PageIds, PageMoves


@dataclass(frozen=True, slots=True)
class CellShape:
    """One token's keys and values in every layer."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def values(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


class KVTensors:
    """The storage itself; `data` has the module's shape."""

    def __init__(
        self,
        shape: CellShape,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        scratch: bool = False,
    ) -> None:
        """Allocate. `scratch`: with one more page, behind the others, for what is written and never read.

        Raises ConfigError when the device has not that much memory.
        """
        self.shape = shape
        self._scratch = scratch
        self.data = self._allocated(pages, page_size, dtype, device)
        self.pages = pages

    def resize(self, pages: int) -> None:
        """Start again with `pages` pages: what was stored is gone. Raises ConfigError like the constructor."""
        page_size, dtype, device = self.page_size, self.data.dtype, self.data.device
        self.data = torch.empty(0)  # given back before the new one is asked for
        self.data = self._allocated(pages, page_size, dtype, device)
        self.pages = pages

    def _allocated(self, pages: int, page_size: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        shape = self.shape
        heads, cell = (shape.layers, 2, shape.kv_heads), (pages + self._scratch, page_size)
        try:
            if torch.device(device).type == "cpu":
                stored = torch.zeros(*heads, *cell, shape.head_dim, dtype=dtype)
                return stored.permute(0, 1, 3, 4, 2, 5)
            return torch.zeros(*heads[:2], *cell, *heads[2:], shape.head_dim, dtype=dtype, device=device)
        except RuntimeError as error:
            wanted = shape.values * pages * page_size * dtype.itemsize / 2**30
            raise ConfigError(f"no memory for {wanted:.2f} GiB of KV on {device}: {error}", "cells") from error

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    @property
    def cells(self) -> int:
        return self.pages * self.page_size

    @property
    def scratch_cell(self) -> int | None:
        """A cell that nobody reads; None without such a page."""
        return self.cells if self._scratch else None

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in every layer."""
        return self.shape.values * self.data.dtype.itemsize

    def store(self, layer: int, k: Tensor, v: Tensor, cells: Tensor) -> None:
        """Write `k`, `v` [T, kv_heads, head_dim] into `cells` [T]; see `kernels.kv.store_kv`."""
        store_kv(self.data, layer, k, v, cells)

    def copy_page(self, source: int, target: int, cells: int) -> None:
        """Copy the first `cells` cells of a page in every layer; see `kernels.kv.copy_cells`."""
        copy_cells(self.data, source, target, cells)


# ---- The second tier's memory, and copies between it and the KV store beside a step's forward.
#
#     [pages, layers, 2, page_size, kv_heads, head_dim]      on the host; pinned where the store is on a GPU
#
#     step   |-- gather --|--------- forward ---------|- wait -|
#     side                |-- out --|------ in ------|
#
# What leaves the device is gathered before the forward may write over it. The rest runs on the side: on a stream of
# its
# own, or, where the store is in host memory too, in a thread. Which page goes where is decided elsewhere
# (`host_tier`).


@dataclass(frozen=True, slots=True)
class Moved:
    """How the copies of a step went. Not `ok`: it is not known what they wrote. `load_s`: seconds of copying in."""

    ok: bool = True
    load_s: float = 0.0


class _Side(Protocol):
    """Does things in order, beside what the caller does."""

    def do(self, work: Callable[[], None]) -> None: ...

    def wait(self) -> list[float]:
        """Wait until all is done; seconds that each took. Raises what one of them raised."""
        ...


class _Thread:
    """A thread, for a store in host memory. It copies alone: a second team of threads would slow the engine's down."""

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self._executor = ThreadPoolExecutor(1, "host-tier", self._alone)
        self._executor.submit(int).result()
        torch.set_num_threads(threads)  # for this thread and later ones; that one's stays
        self._begun: list[Future[float]] = []

    @staticmethod
    def _alone() -> None:
        torch.get_num_threads()  # a thread that asks for the first time takes what was set last
        torch.set_num_threads(1)

    def do(self, work: Callable[[], None]) -> None:
        def timed() -> float:
            begin = time.perf_counter()
            with torch.no_grad():
                work()
            return time.perf_counter() - begin

        self._begun.append(self._executor.submit(timed))

    def wait(self) -> list[float]:
        begun, self._begun = self._begun, []
        errors = [error for each in begun if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        return [each.result() for each in begun]


class _Stream:
    """A CUDA stream, for a store on a GPU. What is begun on it waits for what the caller's stream has begun."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def do(self, work: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream), torch.no_grad():
            begin.record(self._stream)
            work()
            end.record(self._stream)
        self._begun.append((begin, end))

    def wait(self) -> list[float]:
        begun, self._begun = self._begun, []
        self._stream.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in begun]


class HostPages:
    """`pages` pages of host memory beside a store. In each step: `save`, then `load`, then `wait`."""

    def __init__(self, kv: KVTensors, pages: int) -> None:
        """Allocate. Raises ConfigError when the machine has not that much memory."""
        self._kv = kv.data
        layers, two, _, *page = kv.data.shape
        device = kv.data.device
        cuda = device.type == "cuda"
        try:
            self.data = torch.zeros(pages, layers, two, *page, dtype=kv.data.dtype, pin_memory=cuda)
        except RuntimeError as error:
            wanted = pages * kv.page_size * kv.cell_bytes / 2**30
            raise ConfigError(f"no memory for {wanted:.2f} GiB of KV on the host: {error}", "host_memory") from error
        self._side: _Side = _Stream(device) if cuda else _Thread()
        self._kept: list[Tensor] = []  # what the side still reads
        self._loads = False
        self._failed = False

    def save(self, moves: PageMoves) -> None:
        """Begin to copy pages out; from here on the store's pages may be written over."""
        if len(moves):
            self._try(lambda: self._save(moves))

    def load(self, moves: PageMoves) -> None:
        """Begin to copy pages in; they are there after `wait`."""
        self._loads = len(moves) > 0
        if self._loads:
            self._try(lambda: self._side.do(lambda: self._load(moves)))

    def wait(self) -> Moved:
        """Wait until everything that was begun is done, or has failed."""
        seconds: list[float] = []
        self._try(lambda: seconds.extend(self._side.wait()))
        ok, self._failed = not self._failed, False
        self._kept.clear()
        return Moved(ok, seconds[-1] if ok and self._loads else 0.0)

    def _save(self, moves: PageMoves) -> None:
        with torch.no_grad():
            staged = self._kv.index_select(2, self._index(moves.device)).movedim(2, 0).contiguous()
        self._kept.append(staged)

        def work() -> None:
            for at, first, n in _runs(moves.host):
                self.data[first : first + n].copy_(staged[at : at + n], non_blocking=True)

        self._side.do(work)

    def _load(self, moves: PageMoves) -> None:
        staged = torch.empty(len(moves), *self.data.shape[1:], dtype=self.data.dtype, device=self._kv.device)
        for at, first, n in _runs(moves.host):
            staged[at : at + n].copy_(self.data[first : first + n], non_blocking=True)
        self._kv.index_copy_(2, self._index(moves.device), staged.movedim(0, 2))

    def _index(self, pages: PageIds) -> Tensor:
        return sent(pages.astype(np.int64), self._kv.device)

    def _try(self, work: Callable[[], None]) -> None:
        """The supervisor of the copies: whatever goes wrong with one is told by `wait`."""
        try:
            work()
        except (RuntimeError, ValueError, IndexError, TypeError):
            self._failed = True


def _runs(pages: PageIds) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring pages: index of the first, its page, how many. One copy moves a run."""
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    for run in np.split(np.arange(len(pages)), cuts):
        yield int(run[0]), int(pages[run[0]]), len(run)
