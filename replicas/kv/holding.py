"""What is held of the KV cache: by a running sequence, or by a pin. Data only: `cache` alone changes it.

    tokens       |<------ shared ------>|<------- own ------->|
                 0                   n_shared              capacity
    page slots   | tree | tree | tree | own | own | own | own |

Cells below `n_shared` are the tree's: read through the row, protected by a lease, never written. The rest of the row is
written by its sequence alone. Where `n_shared` lies inside a page, that slot is the sequence's own page, into which the
shared cells before were copied.
"""

from dataclasses import dataclass, field

from holdfast.replicas.kv.pages import NO_PAGES, PageCopy, PageIds
from holdfast.replicas.kv.radix import Node


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence holds of the cache. The scheduler stores it; `KVCache` alone changes it."""

    scope: str
    node: Node = field(repr=False)  # leased; ends at `n_shared`
    n_cached: int  # tokens found at `acquire`: the first to compute
    n_shared: int  # tokens whose cells are the tree's; grows with `publish`
    page_size: int
    row: PageIds = field(repr=False)  # valid up to `n_pages`
    n_pages: int
    kept: bool = True  # in the tree, for whoever comes after; else its pages are freed at the end
    # Own pages that the tree turned out to have already. The row goes on reading them; they are freed at the end.
    spare: PageIds = field(default_factory=lambda: NO_PAGES, repr=False)

    @property
    def pages(self) -> PageIds:
        """The page row, int32 `[n_pages]`: a view that stays right until the next call with this holding."""
        return self.row[: self.n_pages]

    @property
    def own(self) -> PageIds:
        """The part of the row that this sequence writes; a view."""
        return self.row[self.n_shared // self.page_size : self.n_pages]

    @property
    def capacity(self) -> int:
        """How many tokens the row has cells for."""
        return self.n_pages * self.page_size


@dataclass(slots=True, eq=False)
class Pin:
    """A hold on `length` cached tokens: until it is given back they are not evicted. It owns no pages."""

    node: Node = field(repr=False)  # leased; ends at `length`
    length: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new holding, and the copies to make before its first forward, in the same step."""

    holding: Holding
    copies: tuple[PageCopy, ...] = ()
