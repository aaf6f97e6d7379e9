"""The pool of KV pages: which are free, and how many owners each of the others has.

Pages are handed out and taken back as array operations; copies between pages are described as data. `radix` knows the
tokens of a page, `tensors` its KV data, and `cache` evicts when no page is free.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

PageIds: TypeAlias = npt.NDArray[np.int32]

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)

_LEAST_ROOM = 8  # pages that are left free behind new ones, while there are others
_FEW = 16  # pages up to which one after the other is fastest
_STRETCH = 1 << 15  # flags that are looked at at once: about 4 us


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `cells` cells of page `source` to page `target` in every layer, before the forward."""

    source: int
    target: int
    cells: int


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Whole pages between the two tiers: `device[i]` of the KV store and `host[i]` of host memory.

    In one step no page is the target of two moves.
    """

    device: PageIds
    host: PageIds

    def __len__(self) -> int:
        return len(self.device)


NO_MOVES = PageMoves(NO_PAGES, NO_PAGES)


class PagePool:
    """`total` pages of `page_size` cells each, with a count of owners a page.

    An owner is a sequence that writes the page, or a tree node that refers to it. A sequence that only reads a page of
    the tree does not own it: its lease keeps the node alive, so aliasing changes no counts.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.owners = np.zeros(total, dtype=np.int32)
        self.free = total
        self._free_flags = bytearray(b"\1") * total  # searched as bytes, which for a few pages is ten times faster
        self._is_free = np.frombuffer(self._free_flags, np.bool_)  # the same memory
        self._cursor = 0  # where the search for pages goes on

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def free_pages(self) -> PageIds:
        """Every free page, ascending."""
        return np.flatnonzero(self._is_free).astype(np.int32)

    def alloc(self, n: int, after: int | None = None) -> PageIds | None:
        """`n` pages with one owner each, int32 `[n]`; None if fewer are free.

        Pages right behind page `after` come first, so that a growing sequence stays one run of pages, which attention
        on a CPU reads fastest. Others are taken in order, and leave room behind them to grow into.
        """
        if n > self.free:
            return None
        self.free -= n
        return self._few(n, after) if n <= _FEW else self._many(n, after)

    def retain(self, pages: PageIds) -> None:
        """One more owner for each of `pages`, all distinct and in use."""
        self.owners[pages] += 1

    def release(self, pages: PageIds) -> int:
        """One owner fewer for each of `pages`, all distinct. Returns how many became free."""
        if not len(pages):
            return 0
        n = self._release_few(pages) if len(pages) <= _FEW else self._release_many(pages)
        self.free += n
        return n

    def pages_for(self, n_tokens: int) -> int:
        """How many pages `n_tokens` cells take."""
        return -(-n_tokens // self.page_size)

    def _release_few(self, pages: PageIds) -> int:
        """One owner fewer for each, one page after the other; how many have none left."""
        owners, flags, n = self.owners, self._free_flags, 0
        for page in pages.tolist():
            left = owners.item(page) - 1
            owners[page] = left
            if not left:
                flags[page] = 1
                n += 1
        return n

    def _release_many(self, pages: PageIds) -> int:
        """The same, with all owners looked at at once."""
        self.owners[pages] -= 1
        freed = pages[self.owners[pages] == 0]
        self._is_free[freed] = True
        return len(freed)

    def _few(self, n: int, after: int | None) -> PageIds:
        """`n` pages with one owner each, looked for one by one."""
        flags = self._free_flags
        pages: list[int] = []
        page = self.total if after is None else after + 1
        while len(pages) < n and page < self.total and flags[page]:
            flags[page] = 0
            pages.append(page)
            page += 1
        missing = n - len(pages)
        if missing:
            page = self._cursor - 1
            for _ in range(missing):
                page = self._next_free(page + 1)
                flags[page] = 0
                pages.append(page)
            self._leave_room(page + 1, missing)
        for page in pages:
            self.owners[page] = 1
        return np.array(pages, np.int32)

    def _many(self, n: int, after: int | None) -> PageIds:
        """The same, with all flags of a stretch looked at at once."""
        pages = NO_PAGES if after is None else self._run_from(after + 1, n)
        missing, at = n - len(pages), self._cursor
        while len(pages) < n:
            more = (self._is_free[at : at + _STRETCH].nonzero()[0][: n - len(pages)] + at).astype(np.int32)
            self._is_free[more] = False
            pages = np.concatenate((pages, more))
            at = at + _STRETCH if at + _STRETCH < self.total else 0  # round to the pages before the cursor
        if missing:
            self._leave_room(int(pages[-1]) + 1, missing)
        self.owners[pages] = 1
        return pages

    def _run_from(self, first: int, n: int) -> PageIds:
        """The free pages from `first` on that lie before the next that is taken, `n` at most; free no more."""
        end = min(first + n, self.total)
        taken = self._free_flags.find(0, first, end)
        end = taken if taken >= 0 else max(end, first)
        self._is_free[first:end] = False
        return np.arange(first, end, dtype=np.int32)

    def _next_free(self, at: int) -> int:
        """The first free page from `at` on, or from 0 on where none is left behind it. There is one."""
        page = self._free_flags.find(1, at)
        return page if page >= 0 else self._free_flags.find(1)

    def _leave_room(self, end: int, n: int) -> None:
        """The next search begins behind room for `n` more pages after `end`."""
        behind = end + max(n, _LEAST_ROOM)
        self._cursor = behind if behind < self.total else 0
