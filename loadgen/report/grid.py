"""A table of the page, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Heads, and rows of a name and cells; a cell's first line is the figure."""

    first: str  # head of the names
    heads: tuple[str, ...]
    rows: list[tuple[str, list[list[str]]]]
