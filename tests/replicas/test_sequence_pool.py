"""Rows: two regions, never handed out twice, back on every path."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.programs import Region, SequencePool


def test_regions_do_not_lend_to_each_other():
    pool = SequencePool(4, session_rows=1)
    transient = [pool.acquire() for _ in range(4)]
    assert sorted(transient[:3]) == [0, 1, 2]
    assert transient[3] is None
    assert pool.acquire(Region.SESSION) == 3
    assert pool.acquire(Region.SESSION) is None
    pool.release(3)
    assert pool.acquire() is None


@given(st.lists(st.sampled_from([Region.TRANSIENT, Region.SESSION, None]), max_size=50))
def test_rows_are_conserved(operations):
    pool, taken = SequencePool(6, session_rows=2), []
    for region in operations:
        if region is None:
            if taken:
                pool.release(taken.pop(0))
        elif (row := pool.acquire(region)) is not None:
            assert row not in taken
            taken.append(row)
        assert pool.free() + pool.free(Region.SESSION) + pool.taken == pool.rows
