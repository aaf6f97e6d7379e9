"""What others have of the cache: the holding of one running sequence, and the pin of one that comes back later.

Data only: `cache` alone changes it.
"""

from dataclasses import dataclass, field

from holdfast.replicas.kv.pages import NO_PAGES, PageCopy, PageIds
from holdfast.replicas.kv.radix import Node
from holdfast.replicas.kv.tags import UNLABELLED, Labels


@dataclass(slots=True, eq=False)
class Holding:
    """What one running sequence has of the cache.

    tokens       |<------ shared ------>|<------- own ------->|
                 0                   n_shared              capacity
    page slots   | tree | tree | tree | own | own | own | own |

    Cells below `n_shared` are the tree's: read through the row, protected by a lease, never written. The rest of the
    row is written by this sequence alone. Where `n_shared` lies inside a page, that slot is the sequence's own page,
    into which the shared cells before were copied.
    """

    scope: str | None  # None: nothing is found for it, and nothing of it is kept
    node: Node = field(repr=False)  # leased; ends at `n_shared`
    n_cached: int  # tokens found at `acquire`: the first to compute
    n_shared: int  # tokens whose cells are the tree's; grows with `publish`
    page_size: int
    row: PageIds = field(repr=False)  # valid up to `n_pages`
    n_pages: int
    # Own pages below `n_shared`: the tree had their tokens already when they were published. The row goes on reading
    # them; they are freed at the end.
    duplicates: PageIds = field(default_factory=lambda: NO_PAGES, repr=False)
    labels: Labels = UNLABELLED  # of its tokens, the reply's included
    who: str = ""  # whose sequence it is: what others computed is told from what it did itself

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
    """Protection of `length` cached tokens until it is given back: they are not evicted. It owns no pages.

    A `soft` pin may be taken away from whom it was left for when others need the cells; who does that is not said here.
    What soft pins alone protect is counted apart.
    """

    node: Node = field(repr=False)  # leased; ends at `length`
    length: int
    soft: bool = False


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new holding, and the copies to make before its first forward, in the same step."""

    holding: Holding
    copies: tuple[PageCopy, ...] = ()
