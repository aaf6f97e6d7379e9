"""Runs of pages against a plain row of page numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.paging import PageRuns, page_runs


def cells_between(runs: PageRuns, low: int, high: int, page_size: int) -> list[int]:
    return [cell + i for cell, size in runs.between(low, high, page_size) for i in range(size)]


@given(st.data(), st.lists(st.integers(0, 12), min_size=1, max_size=30), st.sampled_from([1, 4]))
def test_runs_name_the_same_cells_as_the_row(data, pages, page_size):
    runs = page_runs(np.array(pages, dtype=np.int32))
    low = data.draw(st.integers(0, len(pages) * page_size - 1))
    high = data.draw(st.integers(low, len(pages) * page_size))
    expected = [pages[p // page_size] * page_size + p % page_size for p in range(low, high)]
    assert cells_between(runs, low, high, page_size) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 12), max_size=8)), min_size=1, max_size=12))
def test_replacing_tails_equals_building_the_row_anew(writes):
    row: list[int] = []
    runs = PageRuns()
    for first, pages in writes:
        first = min(first, len(row))
        row[first:] = pages
        runs.replace_tail(first, np.array(pages, dtype=np.int32))
        assert runs == page_runs(np.array(row, dtype=np.int32))


def test_neighbouring_pages_are_one_run():
    runs = page_runs(np.array([3, 4, 5, 9, 10, 2], dtype=np.int32))
    assert runs.between(0, 24, 4) == [(12, 12), (36, 8), (8, 4)]
    assert runs.between(5, 13, 4) == [(17, 7), (36, 1)]
