"""Row writes against a plain table; what lies outside is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.kv import page_runs
from holdfast.replicas.model.decoder import PageTable
from holdfast.replicas.plan import RowWrite

ROWS, SLOTS, PAGE_SIZE, PAGES = 3, 12, 4, 20
write = st.tuples(st.integers(0, ROWS - 1), st.integers(0, SLOTS), st.lists(st.integers(0, PAGES - 1), max_size=SLOTS))


@given(st.lists(write, max_size=15))
def test_cells_and_runs_follow_the_writes(writes):
    table = PageTable(ROWS, SLOTS, PAGE_SIZE, PAGES)
    naive: list[list[int]] = [[] for _ in range(ROWS)]
    for row, first, pages in writes:
        first = min(first, len(naive[row]))
        pages = pages[: SLOTS - first]
        naive[row][first : first + len(pages)] = pages
        table.write(RowWrite(row, first, np.array(pages, dtype=np.int32)))
    for row, pages in enumerate(naive):
        expected = [page * PAGE_SIZE + inside for page in pages for inside in range(PAGE_SIZE)]
        positions = np.arange(len(expected))
        assert table.cells(np.full(len(expected), row), positions).tolist() == expected
        assert table.runs[row] == page_runs(np.array(pages, dtype=np.int32))
        assert table.tensor[row, : len(pages)].tolist() == pages


@pytest.mark.parametrize(
    ("row", "first", "pages"), [(3, 0, [1]), (-1, 0, [1]), (0, 12, [1]), (0, 0, [20]), (0, 0, [-1]), (0, 5, [1])]
)
def test_writes_outside_are_refused(row, first, pages):
    table = PageTable(ROWS, SLOTS, PAGE_SIZE, PAGES)
    with pytest.raises(IndexError):
        table.write(RowWrite(row, first, np.array(pages, dtype=np.int32)))
    assert not table.tensor.any()
