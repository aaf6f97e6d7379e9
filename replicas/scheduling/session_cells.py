"""How many cells the histories of sessions take, those that several of them share counted once.

    between operations    pinned, in the tree
    in an operation       held by its sequence: in the tree, but for an end that the sequence writes to

Counted again only after something of this has changed. Not here: the pins and the rows (`places` keeps them).
"""

from holdfast.replicas.kv.node import Node
from holdfast.replicas.kv.pages import PagePool
from holdfast.replicas.kv.radix import owned_to
from holdfast.replicas.sequences.parking import Owner, Parking
from holdfast.replicas.sequences.sequence import Sequence


class SessionCells:
    """`parking` has the pins of the sessions between operations; `places` says when one of them comes or goes."""

    def __init__(self, pool: PagePool, parking: Parking) -> None:
        self._pool = pool
        self._parking = parking
        self._going: dict[Owner, Sequence] = {}
        self._pages: tuple[int, int] | None = (0, 0)  # of idle sessions, of all; None: to be counted

    @property
    def idle(self) -> int:
        """Cells that the sessions between operations keep from being evicted."""
        return self._counted()[0] * self._pool.page_size

    @property
    def total(self) -> int:
        """Cells of all histories. What an operation adds is no part of it before the operation has ended."""
        return self._counted()[1] * self._pool.page_size

    def goes_on(self, sequence: Sequence) -> None:
        """A sequence that runs holds its cells now, or has given some of them to the tree."""
        if sequence.n_history and sequence.owner is not None:
            self._going[sequence.owner] = sequence
            self._pages = None

    def parked(self, owner: Owner) -> None:
        """A session has its history pinned again, or the first time."""
        self._going.pop(owner, None)
        self._pages = None

    def unpinned(self) -> None:
        """A session's pin was given back."""
        self._pages = None

    def _counted(self) -> tuple[int, int]:
        if self._pages is None:
            self._pages = self._count()
        return self._pages

    def _count(self) -> tuple[int, int]:
        in_tree: dict[Node, int] = {}
        written = 0
        for pin in self._parking.pins:
            _enter(in_tree, pin.node, pin.length, self._pool)
        idle = sum(in_tree.values())
        for sequence in self._going.values():
            n_shared, n_history = sequence.held.n_shared, sequence.n_history
            _enter(in_tree, sequence.held.node, n_history, self._pool)
            if n_history > n_shared:
                written += self._pool.pages_for(n_history) - n_shared // self._pool.page_size
        return idle, sum(in_tree.values()) + written


def _enter(in_tree: dict[Node, int], node: Node | None, end: int, pool: PagePool) -> None:
    """Count the pages below position `end` on the path to `node`, as far as they are not counted yet."""
    while node is not None:
        before = in_tree.get(node)
        if node.start < end:
            pages = node.owned if node.end <= end else owned_to(node, end, pool)
            in_tree[node] = max(pages, before or 0)
        if before is not None:
            return  # and so are those above
        node = node.parent
