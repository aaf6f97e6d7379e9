"""Whose turn it is among tenants that share something by their weights. Pure: no clock, no queue.

An engine shares the seconds of its steps so (`queue.FairOrder`), a router the slots of its replicas (`router/lines`).
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

Standing: TypeAlias = tuple[float, float]

_TENANTS = 65_536  # remembered, the one longest without anything forgotten first
_MANY = 1000  # requests over which is averaged what one takes


@dataclass(slots=True)
class Share:
    """One tenant's: the seconds it was served over its weight, how many of its requests run, and its weight."""

    served: float = 0.0
    running: int = 0
    weight: float = 1.0


class Shares:
    """Who was served least for its weight comes first: virtual token counters (Sheng et al. 2024).

    What runs is charged for in advance with what requests have taken on average, so that places which come free
    together go to several. Who comes back is counted at least as much as the least of those who waited: being away
    earns nothing, and nobody with a weight waits for ever. Whoever serves adds to `served` and `running` of a share.
    """

    def __init__(self, tenants: int = _TENANTS) -> None:
        self._tenants = tenants
        self._shares: OrderedDict[str, Share] = OrderedDict()
        self._least = 0.0  # of those who waited when one was chosen last
        self._begun = 0.0  # requests, the older the less
        self._spent = 0.0  # seconds on them

    def of(self, tenant: str) -> Share:
        """The share of a tenant, which is the last now to be forgotten."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(self._least)
            if len(self._shares) > self._tenants:
                self._shares.popitem(last=False)
        self._shares.move_to_end(tenant)
        return share

    def come(self, tenant: str, weight: float) -> None:
        """A request of a tenant waits from now on."""
        share = self.of(tenant)
        share.weight = weight
        share.served = max(share.served, self._least)

    def standing(self, tenant: str) -> Standing:
        """The smallest is served next."""
        share = self.of(tenant)
        ahead = share.running / share.weight
        return (share.served + ahead * self._spent / max(self._begun, 1.0), ahead)

    def chosen(self, tenant: str) -> None:
        """Of those who wait this one is served."""
        self._least = self.of(tenant).served

    def begin(self, tenant: str) -> Share:
        """A request of a tenant runs from now on."""
        share = self.of(tenant)
        share.running += 1
        self._begun += 1
        return share

    def spend(self, seconds: float) -> None:
        """So long was worked, for whomever."""
        self._spent += seconds
        if self._begun > _MANY:
            self._begun, self._spent = self._begun / 2, self._spent / 2
