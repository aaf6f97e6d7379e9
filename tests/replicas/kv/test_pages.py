"""The page pool: all or nothing, and a page is free exactly when it has no owner left."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.kv import pages
from holdfast.replicas.kv.pages import PagePool


def test_sequences_that_grow_by_turns_stay_runs_of_neighbours() -> None:
    pool = PagePool(64, page_size=16)
    rows = [pool.alloc(4) for _ in range(4)]
    for _ in range(4):
        for i, row in enumerate(rows):
            assert row is not None
            more = pool.alloc(1, after=int(row[-1]))
            assert more is not None
            rows[i] = np.concatenate((row, more))
    assert all(row is not None and (np.diff(row) == 1).all() for row in rows)


@given(
    st.lists(
        st.tuples(st.sampled_from(["alloc", "release", "retain"]), st.integers(0, 6), st.none() | st.integers(0, 11)),
        max_size=40,
    )
)
def test_pool_agrees_with_a_dictionary_of_owners(steps: list[tuple[str, int, int | None]]) -> None:
    pool = PagePool(12, page_size=4)
    owners: dict[int, int] = {}
    for verb, n, after in steps:
        if verb == "alloc":
            pages = pool.alloc(n, after)
            assert (pages is None) == (n > 12 - len(owners))
            for page in [] if pages is None else pages.tolist():
                assert page not in owners
                owners[page] = 1
        else:
            some = sorted(owners)[:n]
            change = 1 if verb == "retain" else -1
            (pool.retain if verb == "retain" else pool.release)(np.array(some, dtype=np.int32))
            owners = {p: c + change if p in some else c for p, c in owners.items()}
            owners = {p: c for p, c in owners.items() if c}
        assert pool.free == 12 - len(owners)
        assert set(pool.free_pages.tolist()) == set(range(12)) - set(owners)


@given(st.lists(st.tuples(st.integers(1, 40), st.none() | st.integers(0, 99), st.integers(0, 99)), max_size=12))
def test_pages_are_the_same_looked_for_one_by_one_or_all_at_once(steps: list[tuple[int, int | None, int]]) -> None:
    one, all_at_once = PagePool(100, page_size=4), PagePool(100, page_size=4)
    with pytest.MonkeyPatch.context() as patch:
        for n, after, freed in steps:
            patch.setattr(pages, "_FEW", 99)
            found = one.alloc(n, after)
            patch.setattr(pages, "_FEW", 0)
            patch.setattr(pages, "_STRETCH", 8)
            others = all_at_once.alloc(n, after)
            assert (found is None) == (others is None)
            if found is not None and others is not None:
                assert found.tolist() == others.tolist()
                for pool in (one, all_at_once):
                    pool.release(found[freed % n :: 2])
            assert one.free_pages.tolist() == all_at_once.free_pages.tolist()
