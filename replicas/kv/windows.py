"""Window pages: the KV of layers with a sliding window, of which a sequence keeps the last tokens alone.

    page slot    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |
    sequence     |-- passed --|------ window ------|- chunk -|     owns a page for each slot from `first` on
    checkpoint         |------ window ------|                      at a node's end: it owns pages as well

Window pages have a pool and a page table of their own. A page has an owner for each sequence and checkpoint that it
belongs to, so checkpoints share pages with each other and with those that run. A sequence releases its pages as its
window passes them. Leaving a checkpoint adds an owner to existing pages. Continuing from one copies at most its last
page, if that is not full.

Each running sequence claims the pages that it may need at once for one more token. All claims together fit the pool,
and pages that no sequence owns are free or a checkpoint's, so claimed pages are always available. A longer chunk takes
unclaimed pages.
"""

from dataclasses import dataclass, field

import numpy as np

from holdfast.replicas.kv.pages import NO_PAGES, PageCopy, PageIds, PagePool
from holdfast.replicas.kv.radix import Node, Prefix, RadixTree
from holdfast.replicas.kv.states import CheckpointStore, Marks
from holdfast.replicas.types import TokenIds, window_pages

WINDOW_KIND = 1  # of stores, rows and copies; 0: layers that see everything


@dataclass(slots=True, eq=False)
class RunningWindow(Marks):
    """The window pages of a running sequence: `row[first:end]`, by page slot, which it owns with others or alone.

    `claim`: see above; `begun`: tokens at which it began, or that were copied in; `shown`: up to this slot the page
    table shows the row; `copies`: to make before its first forward. `landing`: pages that a checkpoint is copied into.
    `marks`: positions at which to leave a checkpoint; `kept`: those passed, with their pages.
    """

    row: PageIds
    need: int
    at: int
    first: int = 0
    end: int = 0
    begun: int = field(init=False)
    shown: int = field(init=False)
    copies: tuple[PageCopy, ...] = ()
    landing: PageIds = field(default_factory=lambda: NO_PAGES)
    marks: list[int] = field(default_factory=list)
    kept: list[tuple[int, PageIds]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begun, self.shown = self.at, self.first

    @property
    def held(self) -> int:
        """Pages of its row, and those that will replace it. It does not compute while these are copied in."""
        return self.end - self.first + len(self.landing)

    @property
    def claim(self) -> int:
        return max(self.need, self.held) + sum(len(pages) for _, pages in self.kept)


class Windows(CheckpointStore[RunningWindow]):
    """The window pages of a cache: `n_pages`, for windows of `window` tokens."""

    def __init__(self, tree: RadixTree, window: int, n_pages: int, page_size: int) -> None:
        super().__init__(tree, PagePool(n_pages, page_size))
        self.window = window
        self._size = page_size
        self._need = window_pages(window, page_size)
        self._users = np.zeros(n_pages, np.int32)  # running sequences, by page, each as often as it owns it
        self.running: set[RunningWindow] = set()

    def busy(self, checkpoint: PageIds) -> bool:
        """Running sequences own all its pages."""
        return bool(self._users[checkpoint].all())

    @property
    def idle(self) -> int:
        return self.pool.used - int(np.count_nonzero(self._users))

    @property
    def unclaimed(self) -> int:
        return self.pool.total - sum(each.claim for each in self.running)

    def can_begin(self, longest: int) -> bool:
        return not self.running or self._needed(longest) <= self.unclaimed

    def begin(self, prefix: Prefix, longest: int) -> RunningWindow | None:
        """The pages of the prefix's checkpoint; a copy of the last one, where that is not full."""
        need, row = self._needed(longest), np.zeros(self.pool.pages_for(max(longest, prefix.length)) + 1, np.int32)
        checkpoint, end = prefix.checkpoint, self.pool.pages_for(prefix.length)
        running = RunningWindow(row, need, 0)
        if checkpoint is not None:
            pages = checkpoint.checkpoint
            running = RunningWindow(row, need, prefix.length, end - len(pages), end)
            row[running.first : end] = pages
            self._own(pages)
            if (tail := prefix.length % self._size) and not self._copy_last(running, tail):
                self._disown(pages)
                self.checkpoints.drop(checkpoint)
                return None
            self.checkpoints.use(checkpoint)
        self.running.add(running)
        return running

    def grow(self, running: RunningWindow, end: int) -> bool:
        """Give the row pages up to slot `end`. False, and nothing changed: there are not enough."""
        missing = end - running.end
        if missing <= 0:
            return True
        self._drop_landing(running)
        if missing > self.room(running):
            return False
        pages = self._fresh(missing, running.row.item(running.end - 1) if running.end > running.first else None)
        if pages is None:
            return False
        if end > len(running.row):
            running.row = np.concatenate((running.row, np.zeros(end, np.int32)))
        running.row[running.end : end] = pages
        running.end = end
        return True

    def room(self, running: RunningWindow) -> int:
        """Pages that it may take."""
        return max(0, running.need - running.held) + max(0, self.unclaimed)

    def reach(self, running: RunningWindow) -> int:
        """Tokens up to which its row may grow."""
        return (running.end + self.room(running)) * self._size

    def computed(self, running: RunningWindow, n_computed: int) -> None:
        """Take the marks that are passed, and release the pages behind the window."""
        first = self._first(n_computed)
        self._pass_marks(running, n_computed)
        self._drop_landing(running)
        if first > running.first:
            self._disown(running.row[running.first : first])
            running.first = first
        running.at = n_computed

    def landing(self, running: RunningWindow, at: int) -> PageIds | None:
        self._drop_landing(running)
        n = self.pool.pages_for(at) - self._first(at)
        pages = self._fresh(n) if n <= self.room(running) else None
        if pages is not None:
            running.landing = pages
        return pages

    def landed(self, running: RunningWindow, at: int) -> None:
        """Replace its row by the pages that were copied in. The page table does not show them yet."""
        pages = running.landing
        self._disown(running.row[running.first : running.end])
        running.landing, running.end = NO_PAGES, self.pool.pages_for(at)
        running.first = running.shown = running.end - len(pages)
        running.row[running.first : running.end] = pages
        running.at, running.begun = at, at - 1
        running.marks = [position for position in running.marks if position > at]

    def keep(
        self, running: RunningWindow, root: Node, tokens: TokenIds, n_computed: int, *, last: bool = False
    ) -> None:
        """The last checkpoint is at `n_computed`, if its window still exists."""
        self._pass_marks(running, n_computed)
        if last and n_computed > running.begun and self._first(n_computed) >= running.first:
            self._keep_at(running, n_computed)
        for at, pages in running.kept:
            if at <= n_computed:
                self._users[pages] -= 1
        running.kept = self.give(running.kept, root, tokens, n_computed)

    def end(self, running: RunningWindow) -> None:
        self.running.discard(running)
        for pages in (running.row[running.first : running.end], running.landing, *(each for _, each in running.kept)):
            self._disown(pages)

    # ---- parts ----

    def _first(self, position: int) -> int:
        """The first page slot that the token at `position` sees."""
        return max(0, position - self.window + 1) // self._size

    def _needed(self, longest: int) -> int:
        return min(self._need, self.pool.pages_for(longest) + 1)

    def _own(self, pages: PageIds) -> None:
        self.pool.retain(pages)
        self._users[pages] += 1

    def _disown(self, pages: PageIds) -> None:
        self._users[pages] -= 1
        self.pool.release(pages)

    def _fresh(self, n: int, after: int | None = None) -> PageIds | None:
        pages = self.take(n, after=after)
        if pages is not None:
            self._users[pages] = 1
        return pages

    def _copy_last(self, running: RunningWindow, cells: int) -> bool:
        """Replace the row's last page, of which others own `cells` cells, by a copy."""
        pages = self._fresh(1)
        if pages is None:
            return False
        last = running.row[running.end - 1 : running.end]
        running.copies = (PageCopy(last.item(), pages.item(), cells, WINDOW_KIND),)
        self._disown(last.copy())
        last[:] = pages
        return True

    def _pass_marks(self, running: RunningWindow, n_computed: int) -> None:
        """Keep the pages before the marks up to `n_computed`, if they exist and all claims still fit."""
        while running.marks and running.marks[0] <= n_computed:
            position = running.marks.pop(0)
            first = self._first(position)
            if first >= running.first and self.pool.pages_for(position) - first <= self.unclaimed:
                self._keep_at(running, position)

    def _keep_at(self, running: RunningWindow, position: int) -> None:
        pages = running.row[self._first(position) : self.pool.pages_for(position)].copy()
        self._own(pages)
        running.kept.append((position, pages))

    def _drop_landing(self, running: RunningWindow) -> None:
        self._disown(running.landing)
        running.landing = NO_PAGES
