"""Pools of KV pages: which are free, how many owners each of the others has, and how many pages each tenant has.

Pages are handed out and taken back as array operations; copies between pages are described as data. `radix` knows the
tokens of a page, `tensors` its KV data, and `cache` evicts when no page is free.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.replicas.types import CellLimits, record

PageIds: TypeAlias = npt.NDArray[np.int32]

NO_PAGES: PageIds = np.empty(0, dtype=np.int32)

_LEAST_ROOM = 8  # pages that are left free behind new ones, while there are others
_FEW = 16  # pages up to which one after the other is fastest
_STRETCH = 1 << 15  # flags that one search checks: about 4 us

SHARED = " shared"  # the scope of cells that all tenants may use; no tenant has this name
NO_PAGES_FREED: Mapping[str, int] = {}
_ROUNDING = 1e-6  # of a page, by which shares of decimal fractions are off
FORGOTTEN_S = 3600.0  # seconds after its last request that a tenant keeps its limits and its floor


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `cells` cells of page `source` to page `target` in every layer of a kind, before the forward."""

    source: int
    target: int
    cells: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Whole pages between the two tiers: `device[i]` of the KV store and `host[i]` of host memory.

    In one step no page is the target of two moves.
    """

    device: PageIds
    host: PageIds

    def __len__(self) -> int:
        return len(self.device)


NO_MOVES = PageMoves(NO_PAGES, NO_PAGES)


def joined(moves: Sequence[PageMoves]) -> PageMoves:
    """All moves in one."""
    if not moves:
        return NO_MOVES
    return PageMoves(np.concatenate([each.device for each in moves]), np.concatenate([each.host for each in moves]))


NO_SLOT = -1  # in place of a state slot: there is none


@record
class StateUse:
    """Where a chunk reads and writes the recurrent state of its sequence (`kernels.linear_state`).

    `source`: the slot that it reads, -1 for the zero state; `target`: the slot that it writes, perhaps the same.
    `held`: the chunk's last tokens that leave the state as it is, because one of them may be computed again: `target`
    keeps their inputs. `applied`: how many held tokens of the chunk before count, and are applied first.
    `marks`: (n, slot): the state after the first n tokens of the chunk is written to this slot, too.
    """

    source: int
    target: int
    applied: int = 0
    held: int = 0
    marks: tuple[tuple[int, int], ...] = ()


class PagePool:
    """`total` pages of `page_size` cells each, with a count of owners a page.

    An owner is a sequence that writes the page, or a tree node that refers to it. A sequence that only reads a page of
    the tree does not own it: its lease keeps the node alive, so aliasing changes no counts.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.owners = np.zeros(total, dtype=np.int32)
        self.free = total
        self._free_flags = bytearray(b"\1") * total  # searched as bytes, which for a few pages is ten times faster
        self._is_free = np.frombuffer(self._free_flags, np.bool_)  # the same memory
        self._cursor = 0  # where the search for pages goes on

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def free_pages(self) -> PageIds:
        """Every free page, ascending."""
        return np.flatnonzero(self._is_free).astype(np.int32)

    def alloc(self, n: int, after: int | None = None) -> PageIds | None:
        """`n` pages with one owner each, int32 `[n]`; None if fewer are free.

        Pages right behind page `after` come first, so that a growing sequence stays one run of pages, which attention
        on a CPU reads fastest. Others are taken in order, and leave room behind them to grow into.
        """
        if n > self.free:
            return None
        self.free -= n
        return self._few(n, after) if n <= _FEW else self._many(n, after)

    def retain(self, pages: PageIds) -> None:
        """One more owner for each of `pages`, all distinct and in use."""
        self.owners[pages] += 1

    def release(self, pages: PageIds) -> int:
        """One owner fewer for each of `pages`, all distinct. Returns how many became free."""
        if not len(pages):
            return 0
        n = self._release_few(pages) if len(pages) <= _FEW else self._release_many(pages)
        self.free += n
        return n

    def pages_for(self, n_tokens: int) -> int:
        """How many pages `n_tokens` cells take."""
        return -(-n_tokens // self.page_size)

    def _release_few(self, pages: PageIds) -> int:
        """One owner fewer for each page, one page at a time. Returns how many became free."""
        owners, flags, n = self.owners, self._free_flags, 0
        for page in pages.tolist():
            left = owners.item(page) - 1
            owners[page] = left
            if not left:
                flags[page] = 1
                n += 1
        return n

    def _release_many(self, pages: PageIds) -> int:
        """As `_release_few`, checking all owners in one array operation."""
        self.owners[pages] -= 1
        freed = pages[self.owners[pages] == 0]
        self._is_free[freed] = True
        return len(freed)

    def _few(self, n: int, after: int | None) -> PageIds:
        """`n` pages with one owner each, searched one at a time."""
        flags = self._free_flags
        pages: list[int] = []
        page = self.total if after is None else after + 1
        while len(pages) < n and page < self.total and flags[page]:
            flags[page] = 0
            pages.append(page)
            page += 1
        missing = n - len(pages)
        if missing:
            page = self._cursor - 1
            for _ in range(missing):
                page = self._next_free(page + 1)
                flags[page] = 0
                pages.append(page)
            self._leave_room(page + 1, missing)
        for page in pages:
            self.owners[page] = 1
        return np.array(pages, np.int32)

    def _many(self, n: int, after: int | None) -> PageIds:
        """As `_few`, checking all flags of a stretch in one array operation."""
        pages = NO_PAGES if after is None else self._run_from(after + 1, n)
        missing, at = n - len(pages), self._cursor
        while len(pages) < n:
            more = (self._is_free[at : at + _STRETCH].nonzero()[0][: n - len(pages)] + at).astype(np.int32)
            self._is_free[more] = False
            pages = np.concatenate((pages, more))
            at = at + _STRETCH if at + _STRETCH < self.total else 0  # round to the pages before the cursor
        if missing:
            self._leave_room(int(pages[-1]) + 1, missing)
        self.owners[pages] = 1
        return pages

    def _run_from(self, first: int, n: int) -> PageIds:
        """Take up to `n` free pages from `first` on, up to the next page in use."""
        end = min(first + n, self.total)
        taken = self._free_flags.find(0, first, end)
        end = taken if taken >= 0 else max(end, first)
        self._is_free[first:end] = False
        return np.arange(first, end, dtype=np.int32)

    def _next_free(self, at: int) -> int:
        """The first free page from `at` on, or from 0 on where none is left behind it. There is one."""
        page = self._free_flags.find(1, at)
        return page if page >= 0 else self._free_flags.find(1)

    def _leave_room(self, end: int, n: int) -> None:
        """The next search begins behind room for `n` more pages after `end`."""
        behind = end + max(n, _LEAST_ROOM)
        self._cursor = behind if behind < self.total else 0


# ---- pages by tenant ----


@dataclass(slots=True)
class _Limits:
    """A tenant's limits in pages. `cells`: the limits as requests give them; `last_seen`: when one last did."""

    cells: CellLimits
    last_seen: float
    floor: int
    ceiling: int
    kept: int = 0  # of the floor, from others


class TenantPages:
    """The pages of each tenant, of `total`: how many it uses, its floor (reserved for it) and its ceiling.

        of a tenant    |------ active ------|-- evictable --|
                       |-------------- used ----------------|
        its floor      |------------------------------ kept ------------------------------|
                                            |--- kept from others: evicted for no other, ---|
                                                 and left free by what others use

    Active pages are those that no eviction frees: they belong to running sequences or are pinned. Others may use a
    floor for cached cells, but not for running sequences or pins, so it is free when its tenant needs it. `radix`
    evicts, `admission` starts sequences.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used: dict[str, int] = {}
        self._evictable: dict[str, int] = {}
        self._limits: dict[str, _Limits] = {}
        self._kept = 0  # from others, of all floors

    # ---- counts ----

    def took(self, tenant: str, n: int) -> None:
        """A tenant has taken `n` free pages; a negative number: it has freed pages."""
        if n:
            _count(self.used, tenant, n)
            self._changed(tenant)

    def evictable_changed(self, tenant: str, n: int) -> None:
        """`n` more of its pages are evictable; a negative number: fewer."""
        if n:
            _count(self._evictable, tenant, n)
            self._changed(tenant)

    def evictable(self, tenant: str) -> int:
        return self._evictable.get(tenant, 0)

    def active(self, tenant: str) -> int:
        return self.used.get(tenant, 0) - self._evictable.get(tenant, 0)

    def counted(self, names: Container[str], others: str) -> Mapping[str, int]:
        """Pages used and cached, by tenant for these names, all `others` in one count. Safe from any thread."""
        counts: dict[str, int] = {}
        for tenant, pages in self.used.copy().items():
            if tenant != SHARED:
                _count(counts, tenant if tenant in names else others, pages)
        return counts

    # ---- limits ----

    @property
    def any(self) -> bool:
        """Whether a tenant has limits."""
        return bool(self._limits)

    @property
    def known_limits(self) -> Mapping[str, tuple[CellLimits, float]]:
        """The limits of each tenant, and when a request last gave them."""
        return {tenant: (limits.cells, limits.last_seen) for tenant, limits in self._limits.items()}

    def limit(self, tenant: str, limits: CellLimits, now: float) -> bool | None:
        """Set a tenant's limits. True if it had none before, False if they were removed, else None.

        A floor is rounded up to whole pages, a ceiling down, but not below the floor.
        """
        before = self._limits.get(tenant)
        if before is not None and before.cells == limits:
            before.last_seen = now
            return None
        if before is not None:
            self._kept -= before.kept
            del self._limits[tenant]
        if not limits.any:
            return None if before is None else False
        floor = math.ceil(limits.floor * self.total - _ROUNDING)
        self._limits[tenant] = _Limits(limits, now, floor, max(floor, self._share(limits.ceiling)))
        self._changed(tenant)
        return True if before is None else None

    def forgotten(self, now: float, besides: str) -> list[str]:
        """Tenants with limits, except `besides`, that sent no request for `FORGOTTEN_S`."""
        return [each for each, known in self._limits.items() if each != besides and now - known.last_seen > FORGOTTEN_S]

    def floor(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return limits.floor if limits is not None else 0

    def ceiling(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return limits.ceiling if limits is not None else self.total

    def pinned(self, tenant: str) -> int:
        """Most pages that its pins and sessions may protect."""
        limits = self._limits.get(tenant)
        return min(self._share(limits.cells.pinned), limits.ceiling) if limits is not None else self.total

    def spare(self, tenant: str) -> int:
        """Its evictable pages that may be evicted for another tenant."""
        limits = self._limits.get(tenant)
        if limits is None:
            return self._evictable.get(tenant, 0)
        return min(self._evictable.get(tenant, 0), max(0, self.used.get(tenant, 0) - limits.floor))

    def kept(
        self, tenant: str, promised: Mapping[str, int] | None = None, freed: Mapping[str, int] = NO_PAGES_FREED
    ) -> int:
        """Pages that the floors of others reserve. Pages already `promised` to a tenant count as part of its floor.
        `freed`: active pages by tenant to count as evictable.
        """
        if promised or freed:
            promised = promised or {}
            return sum(
                max(0, limits.floor - self.active(other) + freed.get(other, 0) - promised.get(other, 0))
                for other, limits in self._limits.items()
                if other != tenant
            )
        limits = self._limits.get(tenant)
        return self._kept - (limits.kept if limits is not None else 0)

    def available(self, tenant: str, available: int, freed: Mapping[str, int] = NO_PAGES_FREED) -> int:
        """The part of `available` pages, free or evictable, that this tenant may use. `freed`: see `kept`."""
        most = available - self.kept(tenant, freed=freed)
        limits = self._limits.get(tenant)
        return most if limits is None else min(most, limits.ceiling - self.active(tenant) + freed.get(tenant, 0))

    def most(self, tenant: str) -> int:
        """Pages that it could have if all others used no more than their floors. Safe from any thread."""
        floors = sum(limits.floor for other, limits in self._limits.copy().items() if other != tenant)
        return min(self.ceiling(tenant), self.total - floors - self.active(SHARED))

    def over(self, tenant: str, n: int) -> int:
        """Evictable pages of its own that must be evicted before it may take `n` more; below 1: none."""
        limits = self._limits.get(tenant)
        return 0 if limits is None else self.used.get(tenant, 0) + n - limits.ceiling

    def full(self, tenant: str, n: int = 1) -> bool:
        """Whether `n` more active pages would exceed its ceiling."""
        limits = self._limits.get(tenant)
        return limits is not None and self.active(tenant) + n > limits.ceiling

    def helps(self, other: str, tenant: str, n: int = 1) -> bool:
        """Whether `tenant`, which lacks `n` pages, could use a page that `other` gives back."""
        if not self._limits or other == tenant:
            return True
        return not self.full(tenant, n) and self.active(other) > self.floor(other)

    def spared(self, tenant: str) -> Iterator[str]:
        """Tenants with limits, `tenant` included, whose pages may be evicted for `tenant`."""
        for other in self._limits:
            if other == tenant or self.spare(other):
                yield other

    def _share(self, part: float) -> int:
        return int(part * self.total + _ROUNDING)

    def _changed(self, tenant: str) -> None:
        limits = self._limits.get(tenant)
        if limits is not None:
            kept = max(0, limits.floor - self.active(tenant))
            self._kept += kept - limits.kept
            limits.kept = kept


def _count(counts: dict[str, int], tenant: str, n: int) -> None:
    left = counts.get(tenant, 0) + n
    if left:
        counts[tenant] = left
    else:
        counts.pop(tenant, None)
