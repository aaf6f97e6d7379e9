"""How many pages the programs' pins keep in the tree: counted as pins come and go, so that nobody has to search.

    pins    = 0          none of these pages is counted here
    leases  > pins > 0   kept by pins, and by sequences or sessions that read them
    leases == pins > 0   kept by pins alone: `RadixTree.paused`

Pages that several pins keep are counted once. No page of a pinned node comes or goes while the pin is held: a node is
only cut in two, and both halves are pinned then.
"""

from holdfast.replicas.kv.node import Node
from holdfast.replicas.kv.radix import RadixTree


class PinnedPages:
    """Pages by scope. `Node.pins` counts the pins at a node or below it; changed here, and where a node is cut."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._pages: dict[str, int] = {}
        self.total = 0

    def of(self, scope: str) -> int:
        return self._pages.get(scope, 0)

    def add(self, scope: str, node: Node) -> None:
        """A pin at the end of `node`, which has its lease."""
        gained, step = 0, node
        while step.parent is not None:
            step.pins += 1
            if step.pins == 1:
                gained += step.owned
            if step.pins == step.leases:
                self._tree.paused += step.owned
            step = step.parent
        self._count(scope, gained)

    def remove(self, scope: str, node: Node) -> None:
        """That pin goes; its lease is given back after it."""
        lost, step = 0, node
        while step.parent is not None:
            if step.pins == step.leases:
                self._tree.paused -= step.owned
            step.pins -= 1
            if step.pins == 0:
                lost += step.owned
            step = step.parent
        self._count(scope, -lost)

    def _count(self, scope: str, pages: int) -> None:
        self.total += pages
        left = self._pages.pop(scope, 0) + pages
        if left:
            self._pages[scope] = left
