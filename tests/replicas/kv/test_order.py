"""The order of eviction, on nodes built by hand."""

import numpy as np

from holdfast.replicas.kv.radix import EvictionOrder, Node


def _node(priority: int = 0, parent: Node | None = None) -> Node:
    empty = np.empty(0, dtype=np.int32)
    node = Node(empty, 0, empty, owned=0, parent=parent, priority=priority)
    if parent is not None:
        parent.children[len(parent.children)] = node
    return node


def _cut(order: EvictionOrder, node: Node | None) -> Node | None:
    """What the tree does with a node that `pop` returned."""
    if node is not None and node.parent is not None:
        node.parent.children.clear()
        order.leaf(node.parent)
    return node


def test_oldest_use_goes_first_and_a_use_moves_to_the_end() -> None:
    a, b, c = _node(), _node(), _node()
    order = EvictionOrder()
    for node in (a, b, c, a):
        order.append(node)
    assert [order.pop() for _ in range(4)] == [b, c, a, None]


def test_lower_tier_goes_first_whatever_its_age() -> None:
    old_valuable, young_cheap, old_cheap = _node(priority=1), _node(), _node()
    order = EvictionOrder()
    for node in (old_valuable, old_cheap, young_cheap):
        order.append(node)
    assert [order.pop() for _ in range(3)] == [old_cheap, young_cheap, old_valuable]


def test_discarded_node_is_not_popped() -> None:
    a, b = _node(), _node()
    order = EvictionOrder()
    order.discard(a)
    order.append(a)
    order.append(b)
    order.discard(a)
    assert a not in order
    assert b in order
    assert [order.pop(), order.pop()] == [b, None]


def test_parent_follows_its_child_and_waits_for_one_in_a_higher_tier() -> None:
    parent, other = _node(), _node()
    child = _node(priority=1, parent=parent)
    order = EvictionOrder()
    for node in (child, parent, other):
        order.append(node)
    assert order.pop() is other, "the parent is older, but no leaf"
    assert parent not in order
    order.append(other)
    assert _cut(order, order.pop()) is other
    assert _cut(order, order.pop()) is child
    assert _cut(order, order.pop()) is parent


def test_parent_passed_over_goes_first_once_it_is_a_leaf() -> None:
    parent, other = _node(), _node()
    child = _node(priority=1, parent=parent)
    order = EvictionOrder()
    for node in (child, parent, other):
        order.append(node)
    assert order.pop() is other
    assert _cut(order, order.pop()) is child
    order.append(other)
    assert order.pop() is parent
