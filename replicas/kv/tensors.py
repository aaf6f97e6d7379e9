"""The KV store: one allocation for every layer, page and cell. Who owns a page is decided elsewhere (`kv/pages`).

    [layers, 2, pages, page_size, kv_heads, head_dim]      index 1: 0 keys, 1 values

That is the shape everywhere; the order in memory depends on the device. On a GPU it is the shape's own, so a cell is
one block. On a CPU the heads come before the pages: a core reads one head at a time, and a run of pages then is one
unbroken stretch for each head. With 4 heads of 32 values out of cold memory, attention over 500 cells takes 47 us of
a core that way and 153 us the other way; with 8 heads of 128 the two are equal in float32, 405 to 540 us in bfloat16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.kv import copy_cells, store_kv
from holdfast.replicas.errors import ConfigError


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
