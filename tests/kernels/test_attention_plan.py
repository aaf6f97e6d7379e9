"""Items cover every position of every token exactly once."""

from collections import Counter
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.attention_plan import SHARED, SPLIT, attention_work
from holdfast.kernels.paging import PagedBatch, page_runs

span = st.tuples(st.integers(0, 5000), st.one_of(st.just(1), st.integers(2, 9), st.integers(1, 3000)), st.booleans())


def paged_batch(spans, page_size, common):
    """Sequences of which those with the flag begin with `common` cells on the same pages."""
    table = np.zeros((len(spans), max(-(-(start + length) // page_size) for start, length, _ in spans)), np.int32)
    used, runs = common // page_size, []
    for row, (start, length, shares) in enumerate(spans):
        count = -(-(start + length) // page_size)
        table[row, :count] = np.arange(used, used + count)
        used += count
        if shares:
            same = min(start, common) // page_size
            table[row, :same] = np.arange(same)
        runs.append(page_runs(table[row, :count]))
    starts, lengths = [s for s, _, _ in spans], [n for _, n, _ in spans]
    cells = torch.zeros(sum(lengths), dtype=torch.int64)
    return PagedBatch(page_size, torch.from_numpy(table), range(len(spans)), starts, lengths, cells, runs)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(span, min_size=1, max_size=6),
    page_size=st.sampled_from([1, 16]),
    group=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 0, 1, 700]),
    common=st.sampled_from([0, SHARED, 3 * SHARED + 40]),
)
def test_every_position_is_attended_once_through_its_own_page(spans, page_size, group, window, common):
    batch = paged_batch(spans, page_size, common)
    work = attention_work(batch, group, 2, window)
    table = batch.page_table.numpy()
    owner = np.repeat(np.arange(len(spans)), batch.lengths)
    position = np.concatenate([np.arange(s, s + n) for s, n, _ in spans])
    seen: dict[int, list[tuple[int, int]]] = {t: [] for t in range(len(owner))}
    slots: Counter[int] = Counter()
    for first, count, row, low, high, slot in np.concatenate([work.narrow, work.wide]).tolist():
        pages = slice(low // page_size, -(-high // page_size))
        for i in range(count):
            token = int(work.order[first + i])
            seen[token].append((low, high))
            assert (table[row, pages] == table[owner[token], pages]).all()
            slots[slot + i if slot >= 0 else -1] += 1
    for token, pieces in seen.items():
        pieces.sort()
        assert all(a[1] == b[0] for a, b in pairwise(pieces))
        assert pieces[0][0] <= (max(0, position[token] - window + 1) if window else 0)
        assert pieces[-1][1] > position[token]
    results = [
        int(first + part * stride)
        for merge in work.merges
        for first, stride, count in (merge[1:4], merge[4:7])
        for part in range(count)
    ]
    assert sorted(results) == list(range(work.partials))
    assert all(times == 1 for slot, times in slots.items() if slot >= 0)
    assert len(slots) - (-1 in slots) == work.partials


def test_chunks_with_a_prefix_in_common_read_it_in_one_piece():
    spans = [(4 * SPLIT + 7, 1, True), (4 * SPLIT + 300, 5, True), (4 * SPLIT, 1, False)]
    work = attention_work(paged_batch(spans, 16, 4 * SPLIT), 4, 8)
    assert work.wide[:, 1].tolist() == [6, 6]
    assert sorted(work.wide[:, 3:5].tolist()) == [[0, 2 * SPLIT], [2 * SPLIT, 4 * SPLIT]]
    assert (work.narrow[:, 3] >= 4 * SPLIT)[work.narrow[:, 2] < 2].all()


@given(st.integers(0, 300_000), st.sampled_from([1, 8]))
def test_parts_are_short_where_there_is_little_to_read_and_few_where_there_is_much(start, length):
    work = attention_work(paged_batch([(start, length, False)], 16, 0), 4, 8)
    sizes = work.narrow[:, 4] - work.narrow[:, 3]
    assert sizes.max() <= 8 * SPLIT
    if start >= 8 * SPLIT:
        assert len(sizes) * 8 >= 64  # programs of 8 KV heads
    assert len(sizes) <= 1 + max(32, (start + length) // (8 * SPLIT))


def test_the_longest_blocks_of_a_chunk_are_begun_first():
    work = attention_work(paged_batch([(0, 3000, False), (700, 900, False)], 16, 0), 4, 8)
    sizes = work.wide[:, 4] - work.wide[:, 3]
    assert (np.diff(sizes) <= 0).all()
