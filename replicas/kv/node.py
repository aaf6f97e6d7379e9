"""A node of the radix tree: a run of tokens and the pages that hold their cells. Data only."""

from dataclasses import dataclass, field

from holdfast.replicas.scheduling.plan import PageIds
from holdfast.replicas.tokens import TokenIds


@dataclass(slots=True, eq=False)
class Node:
    """Tokens at absolute positions [start, end), below the parent that ends at `start`.

    `pages[i]` is the page of page slot `start // page_size + i`; together they cover [start, end):

        page slot   |    0    |    1    |    2    |    3    |
        parent      |--------------|                          pages for slots 0 1
        node                       |-------------------|      pages for slots 1 2 3

    Where `start` lies inside a page, the first page also holds the path's cells before `start` in that slot,
    so on a path the deeper node's page stands for the slot. It is either the parent's last page itself or a copy of
    it that a writer went on with. No page of a node is ever written again.
    """

    tokens: TokenIds
    start: int
    pages: PageIds
    owned: int  # pages counted for this node: all, less the first where the parent refers to it too
    parent: "Node | None" = field(default=None, repr=False)
    touched: float = 0.0
    tag: str = ""
    priority: int = 0  # tier of eviction: lower goes first
    leases: int = 0  # holders of this node or one below it
    pins: int = 0  # of these, programs between two turns (`pinned` counts them)
    children: dict[int, "Node"] = field(default_factory=dict, repr=False)  # by first token

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
