"""Recurrent states in slots, beside the pages: those of running sequences, and checkpoints in the radix tree.

    slot         one state of every linear layer, on the device; `kernels.linear_state` has the numbers
    running      a sequence writes its own slot, step by step
    checkpoint   a slot that a node of the tree keeps: the state after the node's last token; nobody writes it

A cached prefix can be continued from a checkpoint only: a match goes as far as the deepest checkpoint on its path, and
the rest is computed again. A chunk reads a checkpoint and writes the sequence's own slot, so going on costs no copy,
and the checkpoint stays for others. Each tier of the cache has its own (`cache`, `host`).
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.pages import NO_SLOT, SHARED, StateUse
from holdfast.replicas.kv.radix import Node, Prefix, RadixTree
from holdfast.replicas.types import TokenIds

_STALE = 64  # entries that do not hold any more, in a heap of any size


@dataclass(slots=True)
class RunningState:
    """The state of a running sequence, as it is once all planned steps have run.

    `slot` is its own. Its next chunk reads `source`: `NO_SLOT`, a checkpoint, or its own. `at`: tokens applied to it.
    `origin`: the checkpoint's slot that it began with.
    `marks`: positions at which the state is to be kept as a checkpoint, ascending; `kept`: those planned, with slots.
    """

    slot: int
    source: int = NO_SLOT
    at: int = 0
    marks: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    origin: int = field(init=False)

    def __post_init__(self) -> None:
        self.origin = self.source

    def mark(self, position: int) -> None:
        if position > self.at and position not in self.marks:
            insort(self.marks, position)


class StateSlots:
    """`total` slots, and the owners of each: a sequence that writes it, a node, a chunk that is going to read it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._owners = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._read: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, slot: int) -> int:
        return self._owners[slot]

    def take(self) -> int | None:
        """A free slot with one owner; None: there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._owners[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        self._owners[slot] += 1

    def release(self, slot: int) -> None:
        """One owner fewer. Raises EngineError where it has none."""
        if not self._owners[slot]:
            raise EngineError(f"state slot {slot} is free")
        self._owners[slot] -= 1
        if not self._owners[slot]:
            self._free.append(slot)

    def release_once_read(self, slot: int) -> None:
        """The step that is being planned reads this slot: it stays as it is until `begin_step`."""
        self._read.append(slot)

    def begin_step(self) -> None:
        """A step is going to be planned. Steps run in order, so what earlier ones read may be written now."""
        for slot in self._read:
            self.release(slot)
        self._read.clear()


class Checkpoints:
    """The checkpoints of a tree, in the order of eviction: GreedyDual-Size (Cao and Irani, 1997).

    Each has a value: what computing it again would cost when it was last used, in tokens behind the checkpoint before
    it, plus the value of the one that was evicted last. All have one size. So what is cheap to compute again goes
    first, and in the end what was not used for long. Those that a pin protects go after all others.
    """

    def __init__(self, slots: StateSlots) -> None:
        self.evicted = 0  # since the scheduler counted them
        self._slots = slots
        self._values: dict[Node, float] = {}
        self._heap: list[tuple[float, int, Node]] = []
        self._numbers = count()
        self._clock = 0.0
        self._pinned: Counter[Node] = Counter()
        self.leaving: Callable[[Node], None] = lambda node: None  # told of one that will be evicted

    def __len__(self) -> int:
        return len(self._values)

    def keep(self, node: Node, slot: int) -> None:
        """`node` takes the slot over, with the state after its last token. A node keeps the one it has."""
        if node.checkpoint != NO_SLOT:
            self._slots.release(slot)
        else:
            node.checkpoint = slot
        self.use(node)

    def use(self, node: Node) -> None:
        """The checkpoint of `node` is new, or was just found: its value is as of now."""
        above = deepest(node.parent)
        self._enter(node, self._clock + node.end - (above.end if above is not None else 0))

    def demote(self, node: Node) -> None:
        """No turn will come back for `node`: its checkpoint, if it has one, goes first."""
        if node.checkpoint != NO_SLOT:
            self._enter(node, 0.0)

    def pin(self, node: Node) -> None:
        """A pin protects the path to `node`, and this checkpoint is the deepest one there."""
        self._pinned[node] += 1

    def unpin(self, node: Node) -> None:
        self._pinned[node] -= 1
        if not self._pinned[node]:
            del self._pinned[node]

    def drop(self, node: Node) -> None:
        """`node` loses its checkpoint, if it has one: it is evicted, or its end is cut off."""
        if node.checkpoint != NO_SLOT:
            self._slots.release(node.checkpoint)
            node.checkpoint = NO_SLOT
            del self._values[node]

    def lose(self, slots: Collection[int]) -> None:
        """A step that was to write these slots failed: nobody knows what they hold."""
        for node in [node for node in self._values if node.checkpoint in slots]:
            self.drop(node)

    def evict(self, worth: float | None) -> bool:
        """Evict the next checkpoint. False: there is none, or with a `worth` none that is worth less, in tokens."""
        node = self.next(worth)
        if node is None:
            return False
        self._clock = max(self._clock, self._values[node])
        self.evicted += 1
        self.leaving(node)
        self.drop(node)
        return True

    def next(self, worth: float | None = None) -> Node | None:
        """The checkpoint to evict next: of those that no chunk is going to read, the least valuable one.

        Pinned ones come last, and not at all for something of a `worth`.
        """
        passed: list[tuple[float, int, Node]] = []
        found = pinned = None
        while self._heap and found is None:
            value, _, node = self._heap[0]
            if self._values.get(node) != value:
                heapq.heappop(self._heap)  # used again, or gone
                continue
            if worth is not None and value >= self._clock + worth:
                break
            passed.append(heapq.heappop(self._heap))
            if self._slots.owners(node.checkpoint) > 1:
                continue
            if self._pinned[node]:
                pinned = pinned or node
            else:
                found = node
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found or (pinned if worth is None else None)

    def _enter(self, node: Node, value: float) -> None:
        self._values[node] = value
        heapq.heappush(self._heap, (value, next(self._numbers), node))
        if len(self._heap) > 2 * len(self._values) + _STALE:
            self._heap = [(value, next(self._numbers), node) for node, value in self._values.items()]
            heapq.heapify(self._heap)


class States:
    """The states of a cache: which prefix a sequence goes on from, what its chunks read and write, what is kept."""

    def __init__(self, tree: RadixTree, total: int) -> None:
        self.slots = StateSlots(total)
        self.checkpoints = Checkpoints(self.slots)
        self._tree = tree
        tree.lost = self.checkpoints.drop

    @property
    def available(self) -> bool:
        """Whether a sequence would get a slot."""
        return self.slots.free > 0 or self.checkpoints.next() is not None

    def take(self, worth: float | None = None) -> int | None:
        """A slot, if need be that of another checkpoint: with a `worth` one that is worth less."""
        slot = self.slots.take()
        while slot is None and self.checkpoints.evict(worth):
            slot = self.slots.take()
        return slot

    def usable(self, scope: str | None, prefix: Prefix, tokens: TokenIds) -> Prefix:
        """The part of a cached prefix of `tokens` that a sequence can go on from: up to the deepest checkpoint.

        The pages of a shared preamble are aliased, and its checkpoints stay where they are.
        """
        found, shared = deepest_within(prefix), self._tree.roots.get(SHARED)
        if shared is not None and scope != SHARED:
            other = deepest_within(self._tree.walk(shared, tokens[: prefix.length]))
            if other is not None and (found is None or other.end > found.end):
                return Prefix(self._tree.walk(prefix.node.root, tokens[: other.end]).node, other.end, other)
        return Prefix(prefix.node.root, 0) if found is None else Prefix(found, found.end, found)

    def begin(self, prefix: Prefix) -> RunningState | None:
        """A slot for a sequence that goes on from a usable `prefix`, whose checkpoint it will read.

        None: the only slot left was that of the checkpoint, which is gone; the next call finds it. There is a slot
        (`available`).
        """
        checkpoint = prefix.checkpoint
        if checkpoint is None:
            slot = self.take()
            assert slot is not None, "no state slot is free"
            return RunningState(slot)
        self.slots.retain(checkpoint.checkpoint)
        slot = self.take()
        if slot is None:
            self.slots.release(checkpoint.checkpoint)
            self.checkpoints.drop(checkpoint)
            return None
        self.checkpoints.use(checkpoint)
        return RunningState(slot, checkpoint.checkpoint, prefix.length)

    def advance(self, state: RunningState, start: int, size: int, held: int) -> StateUse:
        """What a chunk of `size` tokens from `start` on does with the state; the last `held` may be computed again.

        Called once the step is planned: nothing of it is taken back. A mark without a slot is left out.
        """
        before, last, end = state.at, state.at, start + size - held
        marks: list[tuple[int, int]] = []
        while state.marks and state.marks[0] <= end:
            position = state.marks.pop(0)
            if position > start and (slot := self.take(worth=position - last)) is not None:
                marks.append((position - start, slot))
                state.kept.append((position, slot))
                last = position
        use = StateUse(state.source, state.slot, start - before, held, tuple(marks))
        if state.source not in (NO_SLOT, state.slot):
            self.slots.release_once_read(state.source)
        state.source, state.at = state.slot, end
        return use

    def landed(self, state: RunningState, at: int) -> None:
        """The state after `at` tokens was copied into the sequence's own slot."""
        if state.source not in (NO_SLOT, state.slot):
            self.slots.release(state.source)
        state.source, state.at = state.slot, at
        state.marks = [position for position in state.marks if position > at]

    def keep(self, state: RunningState, root: Node, tokens: TokenIds, n_computed: int, *, last: bool = False) -> None:
        """Give states at positions up to `n_computed` to nodes below `root` that end there, which are in the tree.

        With `last` the state that the sequence has now as well, where no planned step has gone beyond.
        """
        if last and state.source == state.slot and 0 < state.at <= n_computed:
            state.kept.append((state.at, state.slot))
            state.slot = state.source = NO_SLOT
        for at, slot in state.kept:
            if at <= n_computed:
                prefix = self._tree.walk(root, tokens[:at])
                assert prefix.length == at, "a state at tokens that are not in the tree"
                self.checkpoints.keep(self._tree.node_at(prefix), slot)
        state.kept = [(at, slot) for at, slot in state.kept if at > n_computed]

    def end(self, state: RunningState) -> None:
        """Give back what a sequence has left."""
        source = state.source if state.source != state.slot else NO_SLOT
        for slot in (state.slot, source, *(slot for _, slot in state.kept)):
            if slot != NO_SLOT:
                self.slots.release(slot)


def deepest(node: Node | None) -> Node | None:
    """The deepest node with a checkpoint on the path to `node`; None: there is none."""
    while node is not None and node.checkpoint == NO_SLOT:
        node = node.parent
    return node


def deepest_within(prefix: Prefix) -> Node | None:
    """The deepest node with a checkpoint that ends within `prefix`."""
    return deepest(prefix.node if prefix.node.end <= prefix.length else prefix.node.parent)
