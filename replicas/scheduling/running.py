"""The sequences that run: each has a row of the pool and cells of the cache, and gives both back however it leaves."""

from collections.abc import Iterator

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.scheduling.builder import PlanBuilder
from holdfast.replicas.scheduling.order import Order
from holdfast.replicas.sequences.pool import SequencePool
from holdfast.replicas.sequences.sequence import Sequence, Status


class Running:
    """The only caller of the pool, and of the cache for cells."""

    def __init__(self, cache: KVCache, pool: SequencePool, order: Order) -> None:
        self._cache = cache
        self._pool = pool
        self._order = order
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def rows(self) -> int:
        return self._pool.rows

    @property
    def rows_taken(self) -> int:
        return self._pool.taken

    def in_order(self, *, decoding: bool) -> list[Sequence]:
        """Those that decode, or those that prefill, first to be served first."""
        return sorted((s for s in self._sequences if s.decoding is decoding), key=self._order.key)

    def last(self) -> Sequence:
        """The one to be preempted next."""
        return max(self._sequences, key=self._order.key)

    def start(self, builder: PlanBuilder, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence a row and its cached prefix; False when no row is free."""
        row = self._pool.acquire()
        if row is None:
            return False
        with self._pool.guarded(row):
            acquired = self._cache.acquire(sequence.submit.scope, sequence.tokens, now, reuse=sequence.reuse)
        sequence.move(Status.RUNNING)
        sequence.row = row
        sequence.holding = acquired.holding
        sequence.n_computed = acquired.holding.n_cached
        builder.copies[row] = acquired.copies
        builder.write(sequence, 0, acquired.holding.pages.copy())
        self._sequences.append(sequence)
        return True

    def grow(self, builder: PlanBuilder, sequence: Sequence, n_tokens: int) -> bool:
        """Make sure that `n_tokens` positions of the sequence have cells; False when they are not to be had."""
        holding = sequence.held
        first = len(holding.pages)
        pages = self._cache.grow(holding, n_tokens)
        if pages is None:
            return False
        builder.write(sequence, first, pages)
        return True

    def publish(self, sequence: Sequence, now: float) -> None:
        """Let others alias what the sequence has computed so far."""
        self._cache.publish(sequence.held, sequence.tokens, sequence.n_computed, now)

    def leave(self, sequence: Sequence, now: float, *, keep: bool) -> None:
        """Take row and cells back. `keep` hands the computed cells to the tree, else they are freed.

        The row is returned even if the cache raises.
        """
        self._sequences.remove(sequence)
        holding, row = sequence.held, sequence.the_row
        sequence.holding = sequence.row = None
        try:
            if keep:
                self._cache.finish(holding, sequence.tokens, sequence.n_computed, now)
            else:
                self._cache.drop(holding)
        finally:
            self._pool.release(row)
        sequence.n_computed = 0
