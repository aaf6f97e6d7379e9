"""The pool of KV pages: which are free, and how many owners each of the others has.

Here: handing pages out and taking them back, as array operations. Not here: what a page holds (`radix` knows the
tokens, `tensors` the numbers) and whom to take pages from when none is free (`cache`).
"""

import numpy as np

from holdfast.replicas.scheduling.plan import PageIds

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)


class PagePool:
    """`total` pages of `page_size` cells each, with a count of owners a page.

    An owner is a sequence that writes the page, or a tree node that refers to it. A sequence that only reads
    a page of the tree is none: its lease keeps the node alive, so aliasing touches no counts.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.owners = np.zeros(total, dtype=np.int32)
        # A stack, so that the pages used last, warm in the caches, are used next. Page 0 lies on top at first.
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free = total

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def free_pages(self) -> PageIds:
        """Every free page, in no order; a view."""
        return self._stack[: self.free]

    def alloc(self, n: int) -> PageIds | None:
        """`n` pages with one owner each, int32 `[n]`; None when fewer are free: all or nothing."""
        if n > self.free:
            return None
        pages = self._stack[self.free - n : self.free][::-1].copy()  # ascending: neighbours can be read as one run
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
        self._stack[self.free : self.free + len(freed)] = freed[::-1]
        self.free += len(freed)
        return len(freed)

    def pages_for(self, n_tokens: int) -> int:
        """How many pages `n_tokens` cells take."""
        return -(-n_tokens // self.page_size)
