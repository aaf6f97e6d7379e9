"""The pool of KV pages: which are free, and how many owners each of the others has.

Here: handing pages out and taking them back, as array operations. Not here: what a page holds (`radix` knows the
tokens, `tensors` the numbers) and whom to take pages from when none is free (`cache`).
"""

import numpy as np

from holdfast.replicas.scheduling.plan import PageIds

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)

LEAST_ROOM = 8  # pages that are left free behind new ones, while there are others


class PagePool:
    """`total` pages of `page_size` cells each, with a count of owners a page.

    An owner is a sequence that writes the page, or a tree node that refers to it. A sequence that only reads
    a page of the tree is none: its lease keeps the node alive, so aliasing touches no counts.
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
        """`n` pages with one owner each, int32 `[n]`; None when fewer are free: all or nothing.

        Those right behind page `after` come first, so that a sequence that grows stays one run of neighbours, which is
        what attention on a CPU reads fastest. Others are taken in order, with room left behind them to grow into.
        """
        if n > self.free:
            return None
        pages = NO_PAGES if after is None else self._behind(after, n)
        if len(pages) < n:
            others = self._search(n - len(pages))
            pages = np.concatenate((pages, others)) if len(pages) else others
        self.free -= n
        self.owners[pages] = 1
        return pages

    def retain(self, pages: PageIds) -> None:
        """One more owner for each of `pages`, all distinct and in use."""
        self.owners[pages] += 1

    def release(self, pages: PageIds) -> int:
        """One owner fewer for each of `pages`, all distinct; returns how many became free by it."""
        self.owners[pages] -= 1
        freed = pages[self.owners[pages] == 0]
        self._is_free[freed] = True
        self.free += len(freed)
        return len(freed)

    def pages_for(self, n_tokens: int) -> int:
        """How many pages `n_tokens` cells take."""
        return -(-n_tokens // self.page_size)

    def _behind(self, page: int, n: int) -> PageIds:
        """The free pages right behind `page`, `n` at most; they are free no more."""
        return self._take_run(page + 1, min(page + 1 + n, self.total))

    def _search(self, n: int) -> PageIds:
        """`n` pages from the cursor on, free no more. The cursor skips as many as may come to belong behind them."""
        runs: list[PageIds] = []
        missing, at = n, self._cursor
        while missing:
            first = self._free_flags.find(1, at)
            if first < 0:
                at = 0  # round to the pages before the cursor
                continue
            run = self._take_run(first, min(first + missing, self.total))
            runs.append(run)
            missing -= len(run)
            at = first + len(run)
        behind = at + max(n, LEAST_ROOM)
        self._cursor = behind if behind < self.total else 0
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _take_run(self, first: int, end: int) -> PageIds:
        """The free pages from `first` on that lie before `end` and before the next that is taken; free no more."""
        taken = self._free_flags.find(0, first, end)
        end = taken if taken >= 0 else max(end, first)
        self._is_free[first:end] = False
        return np.arange(first, end, dtype=np.int32)
