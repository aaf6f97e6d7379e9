"""The page table: which page holds which part of which sequence, one row for each. It follows the plan's row writes.

Who may use a page is decided elsewhere; entries beyond a sequence's last position may be left from an earlier one.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.paging import PageRuns
from holdfast.replicas.scheduling.plan import RowWrite


class PageTable:
    """[rows, slots] int32 on the device, with a host copy to plan from. On a CPU both are the same memory.

    `runs[row]` is the row as runs of neighbouring pages.
    """

    def __init__(self, rows: int, slots: int, page_size: int, pages: int, device: str | torch.device = "cpu") -> None:
        self.page_size = page_size
        self.device = torch.device(device)
        self._pages = pages
        self._host = np.zeros((rows, slots), dtype=np.int32)
        self.tensor: Tensor = torch.from_numpy(self._host).to(self.device)
        self.runs = [PageRuns() for _ in range(rows)]

    def write(self, write: RowWrite) -> None:
        """Apply one row write. Raises IndexError when it reaches outside the table or names a page that is not."""
        self.note(write)
        if self.tensor.device.type != "cpu":
            end = write.first + len(write.pages)
            pages = torch.from_numpy(np.ascontiguousarray(write.pages))
            self.tensor[write.row, write.first : end] = pages.to(self.device)

    def note(self, write: RowWrite) -> None:
        """The host's part of a row write; whoever calls it sees to it that the device's follows, in order."""
        rows, slots = self._host.shape
        first, end = write.first, write.first + len(write.pages)
        if not (0 <= write.row < rows and first >= 0 and end <= slots):
            raise IndexError(f"pages {first} to {end} of row {write.row} lie outside a table of {rows} x {slots}")
        if len(write.pages) and not (write.pages.min() >= 0 and write.pages.max() < self._pages):
            raise IndexError(f"row {write.row} names a page outside the {self._pages} there are")
        runs = self.runs[write.row]
        if first > runs.extent:
            raise IndexError(f"row {write.row} is written from page {first} on but ends at {runs.extent}")
        self._host[write.row, first:end] = write.pages
        runs.replace_tail(first, self._host[write.row, first : max(end, runs.extent)])

    def cells(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The cell of each (row, position)."""
        slots, inside = np.divmod(positions, self.page_size)
        cells: npt.NDArray[np.int64] = self._host[rows, slots].astype(np.int64) * self.page_size + inside
        return cells
