"""Window pages: the KV of layers with a sliding window, of which a sequence keeps the last tokens alone.

    page slot    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |
    sequence     |-- passed --|------ window ------|- chunk -|     owns a page for each slot from `first` on
    checkpoint         |------ window ------|                      at a node's end: it owns pages as well

Window pages have a pool and a page table of their own. A page has an owner for each sequence and checkpoint that it
belongs to, so checkpoints share pages with each other and with those that run. A sequence releases its pages as its
window passes them. To leave a checkpoint is to own pages that are there. To go on from one copies at most its last
page, where that is not full.

Each running sequence has a claim on as many pages as it may need at once for one token more. The claims of all stay
within the pool, and whatever no sequence owns is free or a checkpoint's, so claimed pages can always be had. A longer
chunk takes what nobody claims.
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
        """Pages of its row, and those that are to take its place. It does not compute while these are copied in."""
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
        state = RunningWindow(row, need, 0)
        if checkpoint is not None:
            pages = checkpoint.checkpoint
            state = RunningWindow(row, need, prefix.length, end - len(pages), end)
            row[state.first : end] = pages
            self._own(pages)
            if (tail := prefix.length % self._size) and not self._copy_last(state, tail):
                self._disown(pages)
                self.checkpoints.drop(checkpoint)
                return None
            self.checkpoints.use(checkpoint)
        self.running.add(state)
        return state

    def grow(self, state: RunningWindow, end: int) -> bool:
        """Give the row pages up to slot `end`. False, and nothing changed: there are not enough."""
        missing = end - state.end
        if missing <= 0:
            return True
        self._drop_landing(state)
        if missing > self.room(state):
            return False
        pages = self._fresh(missing, state.row.item(state.end - 1) if state.end > state.first else None)
        if pages is None:
            return False
        if end > len(state.row):
            state.row = np.concatenate((state.row, np.zeros(end, np.int32)))
        state.row[state.end : end] = pages
        state.end = end
        return True

    def room(self, state: RunningWindow) -> int:
        """Pages that it may take."""
        return max(0, state.need - state.held) + max(0, self.unclaimed)

    def reach(self, state: RunningWindow) -> int:
        """Tokens up to which its row may grow."""
        return (state.end + self.room(state)) * self._size

    def computed(self, running: RunningWindow, n_computed: int) -> None:
        """Take the marks that are passed, and release the pages behind the window."""
        state, first = running, self._first(n_computed)
        self._pass_marks(state, n_computed)
        self._drop_landing(state)
        if first > state.first:
            self._disown(state.row[state.first : first])
            state.first = first
        state.at = n_computed

    def landing(self, running: RunningWindow, at: int) -> PageIds | None:
        state = running
        self._drop_landing(state)
        n = self.pool.pages_for(at) - self._first(at)
        pages = self._fresh(n) if n <= self.room(state) else None
        if pages is not None:
            state.landing = pages
        return pages

    def landed(self, running: RunningWindow, at: int) -> None:
        """The pages that were copied in take the place of its row, which the page table does not show yet."""
        state, pages = running, running.landing
        self._disown(state.row[state.first : state.end])
        state.landing, state.end = NO_PAGES, self.pool.pages_for(at)
        state.first = state.shown = state.end - len(pages)
        state.row[state.first : state.end] = pages
        state.at, state.begun = at, at - 1
        state.marks = [position for position in state.marks if position > at]

    def keep(
        self, running: RunningWindow, root: Node, tokens: TokenIds, n_computed: int, *, last: bool = False
    ) -> None:
        """The last one is that at `n_computed`, where its window is still there."""
        state = running
        self._pass_marks(state, n_computed)
        if last and n_computed > state.begun and self._first(n_computed) >= state.first:
            self._keep_at(state, n_computed)
        for at, pages in state.kept:
            if at <= n_computed:
                self._users[pages] -= 1
        state.kept = self.give(state.kept, root, tokens, n_computed)

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

    def _copy_last(self, state: RunningWindow, cells: int) -> bool:
        """Put a copy in place of the row's last page, of which others own `cells` cells."""
        pages = self._fresh(1)
        if pages is None:
            return False
        last = state.row[state.end - 1 : state.end]
        state.copies = (PageCopy(last.item(), pages.item(), cells, WINDOW_KIND),)
        self._disown(last.copy())
        last[:] = pages
        return True

    def _pass_marks(self, state: RunningWindow, n_computed: int) -> None:
        """Keep the pages before the marks up to `n_computed`, as far as they are there and nobody claims others."""
        while state.marks and state.marks[0] <= n_computed:
            position = state.marks.pop(0)
            first = self._first(position)
            if first >= state.first and self.pool.pages_for(position) - first <= self.unclaimed:
                self._keep_at(state, position)

    def _keep_at(self, state: RunningWindow, position: int) -> None:
        pages = state.row[self._first(position) : self.pool.pages_for(position)].copy()
        self._own(pages)
        state.kept.append((position, pages))

    def _drop_landing(self, state: RunningWindow) -> None:
        self._disown(state.landing)
        state.landing = NO_PAGES
