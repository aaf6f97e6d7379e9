"""How many pages the programs' pins keep in the tree: counted as pins come and go, so that nobody has to search.

Pages that several pins keep are counted once. No page of a pinned node comes or goes while the pin is held: a node is
only cut in two, and both halves are pinned then.
"""

from holdfast.replicas.kv.node import Node


class PinnedPages:
    """Pages by scope. `Node.pins` counts the pins at a node or below it; changed here, and where a node is cut."""

    def __init__(self) -> None:
        self._pages: dict[str, int] = {}
        self.total = 0

    def of(self, scope: str) -> int:
        return self._pages.get(scope, 0)

    def add(self, scope: str, node: Node) -> None:
        """A pin at the end of `node`."""
        gained, step = 0, node
        while step.parent is not None:
            step.pins += 1
            if step.pins == 1:
                gained += step.owned
            step = step.parent
        self._count(scope, gained)

    def remove(self, scope: str, node: Node) -> None:
        """That pin goes."""
        lost, step = 0, node
        while step.parent is not None:
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
