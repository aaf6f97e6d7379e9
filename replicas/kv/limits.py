"""Pages by tenant: what each has, what nobody takes from it, and what it may have at most.

    of a tenant    |------ active ------|-- evictable --|
                   |-------------- used ----------------|
    its floor      |------------------------------ kept ------------------------------|
                                        |--- kept from others: evicted for no other, ---|
                                             and left free by what others use

`active` are those that no eviction frees: of what runs and of what is pinned. A floor is lent as cache, and never to
what another tenant runs or pins, so that it is there when its tenant comes. Not here: who is evicted (`radix`), who is
started (`admission`).
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from holdfast.replicas.types import CellLimits

SHARED = " shared"  # the scope of what is kept for all, and no tenant's name
NO_PAGES_FREED: Mapping[str, int] = {}
_ROUNDING = 1e-6  # of a page, by which shares of decimal fractions are off
FORGOTTEN_S = 3600.0  # after the last request of a tenant its limits are forgotten, and its floor is anybody's


@dataclass(slots=True)
class _Limits:
    """In pages. `asked`: as they were told; `heard`: when a request last told them."""

    asked: CellLimits
    heard: float
    floor: int
    ceiling: int
    kept: int = 0  # of the floor, from others


class TenantPages:
    """The pages of each tenant, of `total`, and their limits. Tenants without limits cost a count."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used: dict[str, int] = {}
        self._evictable: dict[str, int] = {}
        self._limits: dict[str, _Limits] = {}
        self._kept = 0  # from others, of all floors

    # ---- counts ----

    def took(self, tenant: str, n: int) -> None:
        """`n` free pages are this tenant's now; with a negative number, so many of its are free again."""
        if n:
            _count(self.used, tenant, n)
            self._changed(tenant)

    def evictable_changed(self, tenant: str, n: int) -> None:
        """`n` more of its pages are evictable, or fewer."""
        if n:
            _count(self._evictable, tenant, n)
            self._changed(tenant)

    def evictable(self, tenant: str) -> int:
        return self._evictable.get(tenant, 0)

    def active(self, tenant: str) -> int:
        return self.used.get(tenant, 0) - self._evictable.get(tenant, 0)

    def counted(self, names: Container[str], others: str) -> Mapping[str, int]:
        """The pages of those of these names, in use and cached, and of all `others` together. Any thread may ask."""
        found: dict[str, int] = {}
        for tenant, pages in self.used.copy().items():
            if tenant != SHARED:
                _count(found, tenant if tenant in names else others, pages)
        return found

    # ---- limits ----

    @property
    def any(self) -> bool:
        """Whether a tenant has limits."""
        return bool(self._limits)

    @property
    def asked(self) -> Mapping[str, tuple[CellLimits, float]]:
        """What has been told, and when, by tenant."""
        return {tenant: (limits.asked, limits.heard) for tenant, limits in self._limits.items()}

    def limit(self, tenant: str, asked: CellLimits, now: float) -> bool | None:
        """A tenant's limits from now on. Whether it has some now and had none before, True, or the other way, False.

        A floor is rounded up to whole pages, a ceiling down; a tenant may have what its floor is.
        """
        before = self._limits.get(tenant)
        if before is not None and before.asked == asked:
            before.heard = now
            return None
        if before is not None:
            self._kept -= before.kept
            del self._limits[tenant]
        if not asked.any:
            return None if before is None else False
        floor = math.ceil(asked.floor * self.total - _ROUNDING)
        self._limits[tenant] = _Limits(asked, now, floor, max(floor, self._share(asked.ceiling)))
        self._changed(tenant)
        return True if before is None else None

    def forgotten(self, now: float, besides: str) -> list[str]:
        """Tenants with limits, but for `besides`, that have not been heard of for long."""
        return [each for each, known in self._limits.items() if each != besides and now - known.heard > FORGOTTEN_S]

    def floor(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return limits.floor if limits is not None else 0

    def ceiling(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return limits.ceiling if limits is not None else self.total

    def pinned(self, tenant: str) -> int:
        """How many pages its pins and sessions may keep."""
        limits = self._limits.get(tenant)
        return min(self._share(limits.asked.pinned), limits.ceiling) if limits is not None else self.total

    def spare(self, tenant: str) -> int:
        """How many of its evictable pages may be evicted for another tenant."""
        limits = self._limits.get(tenant)
        if limits is None:
            return self._evictable.get(tenant, 0)
        return min(self._evictable.get(tenant, 0), max(0, self.used.get(tenant, 0) - limits.floor))

    def kept(
        self, tenant: str, promised: Mapping[str, int] | None = None, freed: Mapping[str, int] = NO_PAGES_FREED
    ) -> int:
        """Pages that the floors of others keep from this tenant; beyond what those are `promised` already, if it is
        said, by tenant. `freed`: as if so many active pages of each tenant were evictable.
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
        """Of `available` pages, free or evictable, those that this tenant may come to use. `freed`: as of `kept`."""
        most = available - self.kept(tenant, freed=freed)
        limits = self._limits.get(tenant)
        return most if limits is None else min(most, limits.ceiling - self.active(tenant) + freed.get(tenant, 0))

    def most(self, tenant: str) -> int:
        """The pages that it could have if nobody else used more than its floor. Any thread may ask."""
        floors = sum(limits.floor for other, limits in self._limits.copy().items() if other != tenant)
        return min(self.ceiling(tenant), self.total - floors - self.active(SHARED))

    def over(self, tenant: str, n: int) -> int:
        """How many of its own evictable pages have to go for `n` more; less than 1: none."""
        limits = self._limits.get(tenant)
        return 0 if limits is None else self.used.get(tenant, 0) + n - limits.ceiling

    def full(self, tenant: str, n: int = 1) -> bool:
        """Whether its ceiling is what `n` more pages would have to give way to."""
        limits = self._limits.get(tenant)
        return limits is not None and self.active(tenant) + n > limits.ceiling

    def helps(self, other: str, tenant: str, n: int = 1) -> bool:
        """Whether a page that `other` uses no more could be one of the `n` that `tenant` lacks."""
        if not self._limits or other == tenant:
            return True
        return not self.full(tenant, n) and self.active(other) > self.floor(other)

    def spared(self, tenant: str) -> Iterator[str]:
        """Tenants with limits that have pages which may be evicted for `tenant`, itself among them."""
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
