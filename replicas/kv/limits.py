"""Pages by tenant: how many each uses, its floor (reserved for it) and its ceiling.

    of a tenant    |------ active ------|-- evictable --|
                   |-------------- used ----------------|
    its floor      |------------------------------ kept ------------------------------|
                                        |--- kept from others: evicted for no other, ---|
                                             and left free by what others use

Active pages are those that no eviction frees: they belong to running sequences or are pinned. Others may use a floor
for cached cells, but not for running sequences or pins, so it is free when its tenant needs it. `radix` evicts,
`admission` starts sequences.
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
        """Set a tenant's limits. True if it had none before, False if they were removed, else None.

        A floor is rounded up to whole pages, a ceiling down, but not below the floor.
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
        """Tenants with limits, except `besides`, that sent no request for `FORGOTTEN_S`."""
        return [each for each, known in self._limits.items() if each != besides and now - known.heard > FORGOTTEN_S]

    def floor(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return limits.floor if limits is not None else 0

    def ceiling(self, tenant: str) -> int:
        limits = self._limits.get(tenant)
        return limits.ceiling if limits is not None else self.total

    def pinned(self, tenant: str) -> int:
        """Most pages that its pins and sessions may protect."""
        limits = self._limits.get(tenant)
        return min(self._share(limits.asked.pinned), limits.ceiling) if limits is not None else self.total

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
        """Of `available` pages, free or evictable, those that this tenant may use. `freed`: see `kept`."""
        most = available - self.kept(tenant, freed=freed)
        limits = self._limits.get(tenant)
        return most if limits is None else min(most, limits.ceiling - self.active(tenant) + freed.get(tenant, 0))

    def most(self, tenant: str) -> int:
        """Pages that it could have if all others used no more than their floors. Safe from any thread."""
        floors = sum(limits.floor for other, limits in self._limits.copy().items() if other != tenant)
        return min(self.ceiling(tenant), self.total - floors - self.active(SHARED))

    def over(self, tenant: str, n: int) -> int:
        """Own evictable pages that have to go before it may take `n` more; below 1: none."""
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
