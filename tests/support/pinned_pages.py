"""What pins keep, by looking at the tree: to compare with what is counted as pins come and go."""

from collections.abc import Iterable

from holdfast.replicas.kv.radix import Node, Pin


def pinned_pages(pins: Iterable[Pin]) -> int:
    """Pages that `pins` keep in the tree, those that several of them keep counted once."""
    seen: set[Node] = set()
    for pin in pins:
        node: Node | None = pin.node
        while node is not None and node not in seen:
            seen.add(node)
            node = node.parent
    return sum(node.owned for node in seen)
