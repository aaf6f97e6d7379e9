"""Checkpoints in the radix tree, and recurrent states in slots beside the pages.

    checkpoint   what a sequence needs besides the cells of a node's path to go on from its end. Nobody writes it
    slot         one state of every linear layer, on the device; `kernels.linear_state` has the numbers
    running      a sequence writes its own slot, step by step

For a model with recurrent states a checkpoint is a slot with the state after the node's last token. For one whose
windows have pages of their own it is the pages of the last window before that (`windows`). A cached prefix of such a
model can be continued from a checkpoint only: a match goes as far as the deepest one on its path, and the rest is
computed again. A chunk reads a checkpoint's slot and writes the sequence's own, so going on costs no copy, and the
checkpoint stays for others. Each tier of the cache has its own (`cache`, `host`).
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.pages import NO_PAGES, NO_SLOT, SHARED, PageIds, PagePool, StateUse
from holdfast.replicas.kv.radix import Node, Prefix, RadixTree
from holdfast.replicas.types import TokenIds

_STALE = 64  # outdated entries that a heap of any size may have


class Marks:
    """Positions at which a running sequence is to leave a checkpoint, ascending. `at`: how far it has come."""

    __slots__ = ()
    at: int
    marks: list[int]

    def mark(self, position: int) -> None:
        if position > self.at and position not in self.marks:
            insort(self.marks, position)


@dataclass(slots=True)
class RunningState(Marks):
    """The state of a running sequence, as it is once all planned steps have run.

    `slot` is its own. Its next chunk reads `source`: `NO_SLOT`, a checkpoint, or its own. `at`: tokens applied to it.
    `origin`: the checkpoint's slot that it began with.
    `marks`: positions at which the state is to be kept as a checkpoint, ascending; `kept`: those planned, with slots.
    """

    slot: int
    source: int = NO_SLOT
    at: int = 0
    marks: list[int] = field(default_factory=list)
    kept: list[tuple[int, PageIds]] = field(default_factory=list)
    origin: int = field(init=False)

    def __post_init__(self) -> None:
        self.origin = self.source


class StateSlots(PagePool):
    """`total` slots, and the owners of each: a sequence that writes it, a node, a chunk that is going to read it."""

    def __init__(self, total: int) -> None:
        super().__init__(total, page_size=1)
        self._read: list[int] = []

    def release(self, pages: PageIds) -> int:
        """One owner fewer. Raises EngineError where a slot has none."""
        if not self.owners[pages].all():
            raise EngineError(f"state slots {pages} are free")
        return super().release(pages)

    def release_once_read(self, slot: int) -> None:
        """The step that is being planned reads this slot: it stays as it is until `begin_step`."""
        self._read.append(slot)

    def begin_step(self) -> None:
        """A step is going to be planned. Steps run in order, so what earlier ones read may be written now."""
        for slot in self._read:
            self.release(_one(slot))
        self._read.clear()


def _one(slot: int) -> PageIds:
    return np.array([slot], np.int32)


class Checkpoints:
    """The checkpoints of a tree, in the order of eviction: GreedyDual-Size (Cao and Irani, 1997).

    Each has a value: the cost of computing it again, plus the value of the checkpoint that was evicted last. The cost
    is as of its last use: tokens since the checkpoint before it, for each slot or page that the two do not share.
    Cheap checkpoints are evicted first, and expensive ones once they have not been used for long. Pinned ones go after
    all others. `busy`: whether evicting these slots or pages would make none free.
    """

    def __init__(self, pool: PagePool, busy: Callable[[PageIds], bool]) -> None:
        self.evicted = 0  # since the scheduler counted them
        self._pool = pool
        self._busy = busy
        self._values: dict[Node, float] = {}
        self._heap: list[tuple[float, int, Node]] = []
        self._numbers = count()
        self._clock = 0.0
        self._pinned: Counter[Node] = Counter()
        self.leaving: Callable[[Node], None] = lambda node: None  # called before an eviction

    def __len__(self) -> int:
        return len(self._values)

    def keep(self, node: Node, checkpoint: PageIds) -> None:
        """`node` takes over the slot or the pages of a checkpoint at its end. A node keeps the one it has."""
        if len(node.checkpoint):
            self._pool.release(checkpoint)
        else:
            node.checkpoint = checkpoint
        self.use(node)

    def use(self, node: Node) -> None:
        """The checkpoint of `node` is new, or was just found: its value is as of now."""
        above = deepest(node.parent)
        tokens = node.end - (above.end if above is not None else 0)
        self._enter(node, self._clock + tokens / min(len(node.checkpoint), self._pool.pages_for(tokens)))

    def demote(self, node: Node) -> None:
        """No turn will come back for `node`: its checkpoint, if it has one, goes first."""
        if len(node.checkpoint):
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
        if len(node.checkpoint):
            self._pool.release(node.checkpoint)
            node.checkpoint = NO_PAGES
            del self._values[node]

    def lose(self, slots: Collection[int]) -> None:
        """A step that was to write these slots failed: nobody knows what they hold."""
        for node in [node for node in self._values if not set(slots).isdisjoint(node.checkpoint.tolist())]:
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
        """The checkpoint to evict next: of those that are not busy, the least valuable one.

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
            if self._busy(node.checkpoint):
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


R = TypeVar("R", bound=Marks)


class CheckpointStore(Generic[R]):
    """The checkpoints of a tree in one `pool`: which prefix a sequence goes on from, and what makes room.

    Alone it is that of the host tier, where nobody runs. With running sequences (`R`): `States`, `Windows`.
    """

    def __init__(self, tree: RadixTree, pool: PagePool) -> None:
        self.pool = pool
        self.checkpoints = Checkpoints(pool, self.busy)
        self._tree = tree
        tree.lost = self.checkpoints.drop

    def busy(self, checkpoint: PageIds) -> bool:
        """Whether evicting a checkpoint would make nothing free: a step is going to read it."""
        return bool((self.pool.owners[checkpoint] > 1).any())

    def take(self, n: int, worth: float | None = None, after: int | None = None) -> PageIds | None:
        """`n` slots or pages, if need be those of checkpoints: with a `worth` of some that are worth less.

        `after`: a page behind which they had best be. None: there are not enough.
        """
        while self.pool.free < n and self.checkpoints.evict(worth):
            pass
        return self.pool.alloc(n, after)

    def usable(self, scope: str | None, prefix: Prefix, tokens: TokenIds) -> Prefix:
        """The part of a cached prefix of `tokens` that a sequence can go on from: up to the deepest checkpoint.

        The pages of a shared preamble are aliased, and its checkpoints stay where they are.
        """
        node, shared = deepest_within(prefix), self._tree.roots.get(SHARED)
        if shared is not None and scope != SHARED:
            other = deepest_within(self._tree.walk(shared, tokens[: prefix.length]))
            if other is not None and (node is None or other.end > node.end):
                return Prefix(self._tree.walk(prefix.node.root, tokens[: other.end]).node, other.end, other)
        return Prefix(prefix.node.root, 0) if node is None else Prefix(node, node.end, node)

    def give(
        self, kept: list[tuple[int, PageIds]], root: Node, tokens: TokenIds, n_computed: int
    ) -> list[tuple[int, PageIds]]:
        """Give checkpoints at positions up to `n_computed` to nodes below `root` that end there, which are in the tree.
        Returns the others.
        """
        for at, checkpoint in kept:
            if at <= n_computed:
                prefix = self._tree.walk(root, tokens[:at])
                assert prefix.length == at, "a checkpoint at tokens that are not in the tree"
                self.checkpoints.keep(self._tree.node_at(prefix), checkpoint)
        return [(at, checkpoint) for at, checkpoint in kept if at > n_computed]

    @property
    def idle(self) -> int:
        """Slots or pages that checkpoints own alone. Any thread may ask."""
        return len(self.checkpoints)

    # ---- running sequences ----

    def begin_step(self) -> None:
        """A step is going to be planned."""

    def can_begin(self, longest: int) -> bool:
        """Whether there is room for one more sequence, of up to `longest` tokens."""
        raise NotImplementedError

    def begin(self, prefix: Prefix, longest: int) -> R | None:
        """The state of a sequence of up to `longest` tokens that continues a usable `prefix`. There is room for it.

        None: making room took the prefix's own checkpoint, so the caller must look for another prefix.
        """
        raise NotImplementedError

    def advance(self, running: R, start: int, size: int, held: int) -> StateUse | None:
        """The use of states by a chunk of `size` tokens from `start` on; the last `held` may be computed again.

        Called once the step is planned and can no longer change.
        """

    def computed(self, running: R, n_computed: int) -> None:
        """A sequence has computed so many tokens, and goes on."""

    def landing(self, running: R, at: int) -> PageIds | None:
        """The slot or pages into which a checkpoint at `at` is to be copied for a sequence; None: no room yet."""
        raise NotImplementedError

    def landed(self, running: R, at: int) -> None:
        """The copy of `landing` is complete: the sequence continues from `at`."""
        raise NotImplementedError

    def keep(self, running: R, root: Node, tokens: TokenIds, n_computed: int, *, last: bool = False) -> None:
        """Give the checkpoints of a sequence at positions up to `n_computed` to the nodes of the tree that end there.

        With `last` one at its end as well, where that is known.
        """
        raise NotImplementedError

    def end(self, running: R) -> None:
        """Give back what a sequence has left."""
        raise NotImplementedError


class States(CheckpointStore[RunningState]):
    """Recurrent states: what chunks read and write, and what is kept."""

    def __init__(self, tree: RadixTree, total: int) -> None:
        self.slots = StateSlots(total)
        super().__init__(tree, self.slots)

    def begin_step(self) -> None:
        self.slots.begin_step()

    def can_begin(self, longest: int) -> bool:
        return self.slots.free > 0 or self.checkpoints.next() is not None

    def begin(self, prefix: Prefix, longest: int = 0) -> RunningState | None:
        """A slot of its own, and the checkpoint that its first chunk will read."""
        checkpoint = prefix.checkpoint
        if checkpoint is None:
            slot = self.take(1)
            assert slot is not None, "no state slot is free"
            return RunningState(slot.item())
        source = checkpoint.checkpoint
        self.slots.retain(source)
        slot = self.take(1)
        if slot is None:
            self.slots.release(source)
            self.checkpoints.drop(checkpoint)
            return None
        self.checkpoints.use(checkpoint)
        return RunningState(slot.item(), source.item(), prefix.length)

    def advance(self, running: RunningState, start: int, size: int, held: int) -> StateUse:
        """A mark without a slot is left out."""
        state = running
        before, last, end = state.at, state.at, start + size - held
        marks: list[tuple[int, int]] = []
        while state.marks and state.marks[0] <= end:
            position = state.marks.pop(0)
            if position > start and (slot := self.take(1, worth=position - last)) is not None:
                marks.append((position - start, slot.item()))
                state.kept.append((position, slot))
                last = position
        use = StateUse(state.source, state.slot, start - before, held, tuple(marks))
        if state.source not in (NO_SLOT, state.slot):
            self.slots.release_once_read(state.source)
        state.source, state.at = state.slot, end
        return use

    def landing(self, running: RunningState, at: int) -> PageIds:
        return _one(running.slot)

    def landed(self, running: RunningState, at: int) -> None:
        if running.source not in (NO_SLOT, running.slot):
            self.slots.release(_one(running.source))
        running.source, running.at = running.slot, at
        running.marks = [position for position in running.marks if position > at]

    def keep(self, running: RunningState, root: Node, tokens: TokenIds, n_computed: int, *, last: bool = False) -> None:
        """The state that the sequence has now is its last one, where no planned step has gone beyond `n_computed`."""
        if last and running.source == running.slot and 0 < running.at <= n_computed:
            running.kept.append((running.at, _one(running.slot)))
            running.slot = running.source = NO_SLOT
        running.kept = self.give(running.kept, root, tokens, n_computed)

    def end(self, running: RunningState) -> None:
        source = running.source if running.source != running.slot else NO_SLOT
        for slot in (running.slot, source):
            if slot != NO_SLOT:
                self.slots.release(_one(slot))
        for _, kept in running.kept:
            self.slots.release(kept)


def deepest(node: Node | None) -> Node | None:
    """The deepest node with a checkpoint on the path to `node`; None: there is none."""
    while node is not None and not len(node.checkpoint):
        node = node.parent
    return node


def deepest_within(prefix: Prefix) -> Node | None:
    """The deepest node with a checkpoint that ends within `prefix`."""
    return deepest(prefix.node if prefix.node.end <= prefix.length else prefix.node.parent)
