"""The order in which tree nodes are evicted: lower priority tier first, then oldest use first, leaves only.

A use ends when the last lease on a node is released, and releasing goes from a leaf towards the root. So within a tier
every node stands behind all its descendants, the head of the queue is a leaf unless more valuable nodes
hang from it, and no search is needed.
"""

from collections import OrderedDict

from holdfast.replicas.kv.node import Node


class EvictionOrder:
    """Nodes without leases, one queue a tier. Every operation takes constant time, amortised."""

    def __init__(self) -> None:
        self._tiers: dict[int, OrderedDict[Node, None]] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._tiers.get(node.priority, ())

    def append(self, node: Node) -> None:
        """`node` was just used, after all its descendants in the order were."""
        tier = self._tiers.setdefault(node.priority, OrderedDict())
        tier[node] = None
        tier.move_to_end(node)

    def discard(self, node: Node) -> None:
        """`node` is in use; it may have been missing here (see `pop`)."""
        if (tier := self._tiers.get(node.priority)) is not None:
            tier.pop(node, None)

    def pop(self) -> Node | None:
        """Take out the leaf to evict next; None when there is none.

        Inner nodes met on the way wait for descendants in a higher tier. They leave the queue as well, so that
        they are met only once, and `leaf` brings them back.
        """
        for priority in sorted(self._tiers):
            tier = self._tiers[priority]
            while tier:
                node, _ = tier.popitem(last=False)
                if not node.children:
                    return node
        return None

    def leaf(self, node: Node) -> None:
        """`node` lost its last child. If `pop` had passed it over it goes to the head, where it was then."""
        tier = self._tiers.setdefault(node.priority, OrderedDict())
        if node not in tier:
            tier[node] = None
            tier.move_to_end(node, last=False)
