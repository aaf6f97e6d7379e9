"""KV data: the store that attention reads, its second tier in host memory, and the copies between the two.

Here: numbers. Not here: who owns a page (`cache`), what is kept in the second tier (`host`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.kv import FP8, SCALE, copy_cells, sent, store_kv
from holdfast.kernels.linear_state import LinearStates
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import NO_MOVES, PageIds, PageMoves
from holdfast.replicas.types import KVDType

log = logging.getLogger(__name__)

STAGED = 32 << 20  # bytes of pages that are on their way between the tiers at once
_LANES = 2  # that share these
_STORED = {"int8": (torch.int8, SCALE), "fp8": (FP8, 0)}  # the store's dtype, and more of it behind each head's numbers


@dataclass(frozen=True, slots=True)
class CellShape:
    """One token's keys and values in every layer."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def rows(self) -> int:
        """Keys and values of a head."""
        return 2 * self.layers * self.kv_heads

    @property
    def values(self) -> int:
        return self.rows * self.head_dim


@dataclass(frozen=True, slots=True)
class KVKind:
    """The attention layers of a model that share a store and a page table: all, or those with or without a window.

    `window`: the tokens that they see, if pages behind a sequence's window are freed; None: they keep every page.
    """

    cell: CellShape
    window: int | None = None


class KVTensors:
    """The KV store of one kind of layers: one allocation for every layer, page and cell.

        data    [layers, 2, pages, page_size, kv_heads, head_dim]      index 1: 0 keys, 1 values

    `window`: the store of the layers with a window, where they have one of their own (`KVKind`).

    Keys and values come and go in `dtype`. With a `kv_dtype` of int8 or fp8 `data` has bytes of them, in int8 with a
    scale behind each head's (`kernels.kv`).

    That is the shape everywhere; the order in memory depends on the device. On a GPU it is the shape's own, so a cell
    is one block. On a CPU the heads come before the pages: a core reads one head at a time, and a run of pages then is
    one unbroken stretch for each head. With 4 heads of 32 values out of cold memory, attention over 500 cells takes
    47 us of a core that way and 153 us the other way; with 8 heads of 128 the two are equal in float32, 405 to 540 us
    in bfloat16.
    """

    def __init__(
        self,
        shape: CellShape,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        scratch: bool = False,
        kv_dtype: KVDType = "auto",
    ) -> None:
        """Allocate. `scratch`: with one more page, behind the others, for what is written and never read.

        Raises ConfigError when the device has not that much memory.
        """
        self.shape = shape
        self.dtype = dtype
        self.window: KVTensors | None = None
        self._scratch = scratch
        self._stored, more = _STORED.get(kv_dtype, (dtype, 0))
        self._row = shape.head_dim + more
        self.data = self._allocated(pages, page_size, device)
        self.pages = pages

    @classmethod
    def of(
        cls,
        kinds: Sequence[KVKind],
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        scratch: bool = False,
        kv_dtype: KVDType = "auto",
    ) -> "KVTensors":
        """The stores of a model, with so many pages of each kind."""
        stores = [
            cls(kind.cell, n, page_size, dtype, device, scratch, kv_dtype) for kind, n in zip(kinds, pages, strict=True)
        ]
        if len(stores) > 1:
            stores[0].window = stores[1]
        return stores[0]

    def resize(self, pages: int) -> None:
        """Start again with `pages` pages: what was stored is gone. Raises ConfigError like the constructor."""
        page_size, device = self.page_size, self.data.device
        self.data = torch.empty(0)  # given back before the new one is asked for
        self.data = self._allocated(pages, page_size, device)
        self.pages = pages

    def _allocated(self, pages: int, page_size: int, device: str | torch.device) -> Tensor:
        shape, row, dtype = self.shape, self._row, self._stored
        heads, cell = (shape.layers, 2, shape.kv_heads), (pages + self._scratch, page_size)
        try:
            if torch.device(device).type == "cpu":
                stored = torch.zeros(*heads, *cell, row, dtype=dtype)
                return stored.permute(0, 1, 3, 4, 2, 5)
            return torch.zeros(*heads[:2], *cell, *heads[2:], row, dtype=dtype, device=device)
        except RuntimeError as error:
            gib = self.cell_bytes * pages * page_size / 2**30
            raise ConfigError(f"no memory for {gib:.2f} GiB of KV on {device}: {error}", "cells") from error

    @property
    def kinds(self) -> tuple["KVTensors", ...]:
        """The stores of the model, by kind."""
        return (self,) if self.window is None else (self, self.window)

    def kind(self, window: int | None) -> int:
        """The kind of a layer that sees `window` tokens, or all."""
        return int(window is not None and self.window is not None)

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
        return self.shape.rows * self._row * self._stored.itemsize

    def store(self, layer: int, k: Tensor, v: Tensor, cells: Tensor) -> None:
        """Write `k`, `v` [T, kv_heads, head_dim] into `cells` [T]; see `kernels.kv.store_kv`."""
        store_kv(self.data, layer, k, v, cells)

    def copy_page(self, source: int, target: int, cells: int) -> None:
        """Copy the first `cells` cells of a page in every layer; see `kernels.kv.copy_cells`."""
        copy_cells(self.data, source, target, cells)


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a step's copies. Not `ok`: nobody knows which pages they wrote. `load_s`: seconds of copying in."""

    ok: bool = True
    load_s: float = 0.0


class HostStates:
    """The second tier's memory for recurrent states: for each of `states.tensors` that lasts, [slots, layers, ...].

    A slot is some 20 to 150 MB in as many pieces as there are layers, copied in the stream of the step.
    """

    def __init__(self, states: LinearStates, slots: int) -> None:
        """Allocate. Raises ConfigError where there is not that much memory."""
        matrices = states.recurrent  # in the order of memory, which is another one on a CPU
        self._device = (matrices if matrices.is_contiguous() else matrices.mT, states.conv)
        pinned = states.recurrent.device.type == "cuda"
        try:
            self._host = [
                torch.zeros(slots, each.shape[0], *each.shape[2:], dtype=each.dtype, pin_memory=pinned)
                for each in self._device
            ]
        except RuntimeError as error:
            gib = states.slot_bytes * slots / 2**30
            message = f"no memory for {gib:.2f} GiB of recurrent states on the host: {error}"
            raise ConfigError(message, "host_memory") from error

    def save(self, moves: PageMoves) -> None:
        for device, host in zip(moves.device.tolist(), moves.host.tolist(), strict=True):
            for device_states, host_states in zip(self._device, self._host, strict=True):
                host_states[host].copy_(device_states[:, device], non_blocking=True)

    def load(self, moves: PageMoves) -> None:
        for device, host in zip(moves.device.tolist(), moves.host.tolist(), strict=True):
            for device_states, host_states in zip(self._device, self._host, strict=True):
                device_states[:, device].copy_(host_states[host], non_blocking=True)


class HostWindow:
    """The second tier's memory for window pages, copied in the stream of the step, some at a time:
    [pages, layers, 2, page_size, kv_heads, head_dim].
    """

    def __init__(self, kv: KVTensors, pages: int, staged: int = STAGED) -> None:
        """Allocate. Raises ConfigError where there is not that much memory."""
        self._pages = kv.data.movedim(2, 0)  # of the store, as they are ordered here
        self._most = max(1, staged // (kv.page_size * kv.cell_bytes))
        self._host = _host_pages(kv, pages)

    def save(self, moves: PageMoves) -> None:
        for device, host in self._parts(moves):
            staged = self._pages.index_select(0, device)
            for at, first, n in _runs(host):
                self._host[first : first + n].copy_(staged[at : at + n], non_blocking=True)

    def load(self, moves: PageMoves) -> None:
        for device, host in self._parts(moves):
            staged = torch.empty(len(host), *self._pages.shape[1:], dtype=self._pages.dtype, device=self._pages.device)
            for at, first, n in _runs(host):
                staged[at : at + n].copy_(self._host[first : first + n], non_blocking=True)
            self._pages.index_copy_(0, device, staged)

    def _parts(self, moves: PageMoves) -> Iterator[tuple[Tensor, PageIds]]:
        for at in range(0, len(moves), self._most):
            some = slice(at, at + self._most)
            yield sent(moves.device[some].astype(np.int64), self._pages.device), moves.host[some]


def _host_pages(kv: KVTensors, pages: int) -> Tensor:
    """Host memory for pages of a store. Raises ConfigError where there is not that much."""
    try:
        shape = kv.data.movedim(2, 0).shape[1:]
        return torch.zeros(pages, *shape, dtype=kv.data.dtype, pin_memory=kv.data.device.type == "cuda")
    except RuntimeError as error:
        gib = pages * kv.page_size * kv.cell_bytes / 2**30
        raise ConfigError(f"no memory for {gib:.2f} GiB of KV on the host: {error}", "host_memory") from error


class HostPages:
    """The second tier's memory: `pages` pages on the host, pinned where the store is on a GPU.

        data    [pages, layers, 2, page_size, kv_heads, head_dim]

    In each step: `save`, then `load`, then `wait`.

        step      |-- save --|--------- forward ---------|- wait -|
        lane 0       |- out -|  |-- in --|  |-- in --|
        lane 1           |- out -|  |-- in --|  |-- in --|

    Pages that leave the store are gathered before the forward may write over them; the rest runs on the side. Pages
    move in slices, in two lanes by turns: one slice is gathered or put in its place while another crosses the bus. Each
    lane has a buffer of half of `staged` bytes, or of one page, allocated once. A move of any size allocates only its
    page numbers. The forward waits for all but the last two slices that leave. A failed copy is logged, and `wait`
    reports it.
    """

    def __init__(
        self, kv: KVTensors, pages: int, staged: int = STAGED, checkpoints: HostStates | HostWindow | None = None
    ) -> None:
        """Allocate, for a `kv` that is not resized any more. Raises ConfigError where there is not that much memory."""
        device, dtype = kv.data.device, kv.data.dtype
        self.checkpoints = checkpoints
        self._pages = kv.data.movedim(2, 0)  # of the store, as they are ordered here
        page, page_bytes = self._pages.shape[1:], kv.page_size * kv.cell_bytes
        cuda = device.type == "cuda"
        slice_pages = min(max(staged // _LANES // page_bytes, 1), pages)
        self.data = _host_pages(kv, pages)
        try:
            self._buffers = torch.empty(_LANES, slice_pages, *page, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ConfigError(f"no memory for copies of KV to the host: {error}", "host_memory") from error
        self._side: _Side = _Streams(device) if cuda else _Thread()
        self._indices: list[Tensor] = []  # that the side may be reading
        self._loads = False
        self._failed = False

    def save(self, moves: PageMoves, checkpoints: PageMoves = NO_MOVES) -> None:
        """Copy pages and checkpoints out; from here on those on the device may be written over."""
        if len(moves):
            self._try(f"copying {len(moves)} pages of KV to the host", lambda: self._save(moves))
        if len(checkpoints) and (host := self.checkpoints) is not None:
            self._try("copying checkpoints to the host", lambda: host.save(checkpoints))

    def load(self, moves: PageMoves, checkpoints: PageMoves = NO_MOVES) -> None:
        """Begin to copy pages and checkpoints in; they are there after `wait`."""
        if len(checkpoints) and (host := self.checkpoints) is not None:
            self._try("copying checkpoints from the host", lambda: host.load(checkpoints))
        self._loads = len(moves) > 0
        if self._loads:
            task = f"copying {len(moves)} pages of KV from the host"
            self._try(task, lambda: self._load(moves, task))

    def wait(self) -> Moved:
        """Wait until all copies are done or have failed."""
        seconds = 0.0
        try:
            seconds = self._side.wait()
        except Exception:
            self._fail("waiting for copies of KV")
        self._indices.clear()
        ok, self._failed = not self._failed, False
        return Moved(ok, seconds if ok and self._loads else 0.0)

    def _save(self, moves: PageMoves) -> None:
        index = self._index(moves.device)
        for lane, some, staged in self._slices(len(moves)):
            self._side.join(lane)  # what the buffer held is on the host
            with torch.no_grad():
                torch.index_select(self._pages, 0, index[some], out=staged)
            out = partial(self._copy_out, moves.host[some], staged)
            self._side.do(lane, partial(self._try, f"copying {len(staged)} staged pages of KV to the host", out))

    def _copy_out(self, host: PageIds, staged: Tensor) -> None:
        for at, first, n in _runs(host):
            self.data[first : first + n].copy_(staged[at : at + n], non_blocking=True)

    def _load(self, moves: PageMoves, task: str) -> None:
        index = self._index(moves.device)
        self._indices.append(index)
        self._side.meet()  # a page that comes in may be one that has just gone out, by the other lane
        for lane, some, staged in self._slices(len(moves)):
            into = partial(self._copy_in, moves.host[some], index[some], staged)
            self._side.do(lane, partial(self._try, task, into))
        self._side.meet()

    def _copy_in(self, host: PageIds, index: Tensor, staged: Tensor) -> None:
        for at, first, n in _runs(host):
            staged[at : at + n].copy_(self.data[first : first + n], non_blocking=True)
        self._pages.index_copy_(0, index, staged)

    def _slices(self, n: int) -> Iterator[tuple[int, slice, Tensor]]:
        """`n` pages in slices that fit a buffer: the lane, the slice, and its part of the lane's buffer."""
        most = self._buffers.shape[1]
        for number, at in enumerate(range(0, n, most)):
            lane, end = number % _LANES, min(at + most, n)
            yield lane, slice(at, end), self._buffers[lane, : end - at]

    def _index(self, pages: PageIds) -> Tensor:
        return sent(pages.astype(np.int64), self._pages.device)

    def _try(self, task: str, work: Callable[[], None]) -> None:
        """The supervisor of the copies. After a failed copy it skips the other copies of the step: none would count."""
        try:
            if not self._failed:
                work()
        except Exception:
            self._fail(task)

    def _fail(self, task: str) -> None:
        log.exception("%s failed", task)
        self._failed = True


def _runs(pages: PageIds) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring pages: index of the first, its page, how many. One copy moves a run."""
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    for run in np.split(np.arange(len(pages)), cuts):
        yield int(run[0]), int(pages[run[0]]), len(run)


class _Side(Protocol):
    """Runs work beside the caller's. The work of one lane runs in order; lanes run at the same time."""

    def do(self, lane: int, work: Callable[[], None]) -> None:
        """Start `work`, which must not raise, after all earlier work of the caller."""
        ...

    def join(self, lane: int) -> None:
        """Make the caller's later work wait for all earlier work in this lane."""
        ...

    def meet(self) -> None:
        """Make later work in every lane wait for all earlier work in every lane, and for the caller's."""
        ...

    def wait(self) -> float:
        """Wait for all work. Returns the seconds between the last two calls of `meet`, or 0 if there were fewer."""
        ...


class _Thread:
    """A thread, for a store in host memory. It copies alone: a second team of threads would slow the engine's down.

    So it does one thing at a time, in the order of the calls, whichever lane they are for.
    """

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self._executor = futures.ThreadPoolExecutor(1, "host-tier", self._alone)
        self._executor.submit(int).result()
        torch.set_num_threads(threads)  # for this thread and later ones; that one's stays
        self._begun: list[list[futures.Future[None]]] = [[] for _ in range(_LANES)]
        self._met: list[futures.Future[float]] = []

    @staticmethod
    def _alone() -> None:
        torch.get_num_threads()  # a thread that asks for the first time takes what was set last
        torch.set_num_threads(1)

    @staticmethod
    def _run(work: Callable[[], None]) -> None:
        with torch.no_grad():
            work()

    def do(self, lane: int, work: Callable[[], None]) -> None:
        self._begun[lane].append(self._executor.submit(self._run, work))

    def join(self, lane: int) -> None:
        futures.wait(self._begun[lane])

    def meet(self) -> None:
        self._met.append(self._executor.submit(time.perf_counter))

    def wait(self) -> float:
        begun, self._begun = self._begun, [[] for _ in range(_LANES)]
        met, self._met = self._met, []
        for work in chain.from_iterable(begun):
            work.result()
        times = [each.result() for each in met]
        return times[-1] - times[-2] if len(times) > 1 else 0.0


class _Streams:
    """A CUDA stream a lane, for a store on a GPU: the streams wait, and not the caller."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(_LANES)]  # type: ignore[no-untyped-call]
        self._met: list[torch.cuda.Event] = []

    def do(self, lane: int, work: Callable[[], None]) -> None:
        stream = self._streams[lane]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad():
            work()

    def join(self, lane: int) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._streams[lane])

    def meet(self) -> None:
        first, *others = self._streams
        for stream in (torch.cuda.current_stream(self._device), *others):
            first.wait_stream(stream)
        met = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        met.record(first)
        for stream in others:
            stream.wait_stream(first)
        self._met.append(met)

    def wait(self) -> float:
        met, self._met = self._met, []
        for stream in self._streams:
            stream.synchronize()
        return met[-2].elapsed_time(met[-1]) / 1e3 if len(met) > 1 else 0.0
