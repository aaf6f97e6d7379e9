"""Items cover every position of every token exactly once."""

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels import attention_plan
from holdfast.kernels.attention_plan import NARROW_ROWS, SHARED, SPLIT, attention_work
from holdfast.kernels.kv import PagedBatch, page_runs

span = st.tuples(st.integers(0, 5000), st.one_of(st.just(1), st.integers(2, 9), st.integers(1, 3000)), st.booleans())


def paged_batch(spans, page_size, common):
    """Sequences of which those with the flag begin with `common` cells on the same pages."""
    sequences = [(s, n, range(min(s, common) // page_size if shares else 0)) for s, n, shares in spans]
    return batch_over(sequences, page_size)


def batch_over(sequences, page_size):
    """Sequences `(start, length, pages)`, with pages of their own behind these as far as they reach."""
    rows, used = [], max((page for *_, pages in sequences for page in pages), default=0) + 2
    for start, length, pages in sequences:
        own = max(0, -(-(start + length) // page_size) - len(pages))
        rows.append([*pages, *range(used, used + own)])
        used += own + 1
    table = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    starts, lengths = [s for s, _, _ in sequences], [n for _, n, _ in sequences]
    runs = [page_runs(np.array(pages, np.int32)) for pages in rows]
    cells = torch.zeros(sum(lengths), dtype=torch.int64)
    return PagedBatch(page_size, torch.from_numpy(table), range(len(rows)), starts, lengths, cells, runs)


def cells_read(work):
    """By one KV head; a prefix is read once where its tokens are one tile."""
    return sum(int((items[:, 4] - items[:, 3]).sum()) for items in (work.narrow, work.wide))


def most_saved(batch, chunks):
    """How many cells fewer some chunks read in the best of all the ways to group them."""
    if not chunks:
        return 0
    one, *others = chunks
    best = most_saved(batch, others)
    for size in range(1, len(others) + 1):
        for some in combinations(others, size):
            pages = batch.page_table.numpy()[[one, *some]]
            alike = int((pages == pages[0]).all(0).cumprod().sum()) * batch.page_size
            cells = min(alike, *(batch.starts[chunk] for chunk in (one, *some)))
            cells = cells // attention_plan.SPLIT * attention_plan.SPLIT
            if cells >= attention_plan.SHARED:
                rest = [chunk for chunk in others if chunk not in some]
                best = max(best, size * cells + most_saved(batch, rest))
    return best


def check_positions(batch, work, window, split=SPLIT):
    """Every position is attended once through its own page, and every partial result merged once."""
    table, page_size = batch.page_table.numpy(), batch.page_size
    owner = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    position = np.concatenate([np.arange(s, s + n) for s, n in zip(batch.starts, batch.lengths, strict=True)])
    assert (work.positions == position).all()
    assert (work.order[: len(owner)] == np.arange(len(owner))).all()
    seen: dict[int, list[tuple[int, int]]] = {t: [] for t in range(len(owner))}
    slots: Counter[int] = Counter()
    for first, count, row, low, high, slot in np.concatenate([work.narrow, work.wide]).tolist():
        assert low >= (max(0, position[work.order[first]] - window + 1) if window else 0)
        assert window or low % split == 0  # tiles begin with pages
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


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(span, min_size=1, max_size=6),
    page_size=st.sampled_from([1, 16]),
    group=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 0, 1, 700]),
    common=st.sampled_from([0, SHARED, 2 * SHARED + SPLIT, 3 * SHARED + 40]),
)
def test_every_position_is_attended_once_through_its_own_page(spans, page_size, group, window, common):
    batch = paged_batch(spans, page_size, common)
    work = attention_work(batch, group, 2, window)
    check_positions(batch, work, window)


@settings(max_examples=100, deadline=None)
@given(
    spans=st.lists(span, min_size=1, max_size=6),
    group=st.sampled_from([1, 4, 7]),
    kv_heads=st.sampled_from([1, 8]),
    window=st.sampled_from([0, 0, 1, 700]),
    common=st.sampled_from([0, SHARED, 2 * SHARED + SPLIT]),
    invariant=st.booleans(),
)
def test_the_cut_in_c_is_that_of_the_reference(spans, group, kv_heads, window, common, invariant):
    if attention_plan.LIBRARY.missing:
        pytest.skip(attention_plan.LIBRARY.missing)
    batch = paged_batch(spans, 16, common)
    work = attention_work(batch, group, kv_heads, window, invariant=invariant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "_cut", attention_plan.cut_reference)
        expected = attention_work(batch, group, kv_heads, window, invariant=invariant)
    assert (work.narrow_rows, work.partials) == (expected.narrow_rows, expected.partials)
    for ours, other in zip(work.arrays, expected.arrays, strict=True):
        assert ours.dtype == other.dtype
        assert np.array_equal(ours, other)


few_or_many = st.one_of(st.just(1), st.integers(2, 9), st.just(70))
fork = st.tuples(st.integers(0, 40), few_or_many, st.integers(0, 12), st.integers(0, 2))


@settings(max_examples=120, deadline=None)
@given(
    forks=st.lists(fork, min_size=1, max_size=6),
    trunk=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    page_size=st.integers(1, 3),
)
def test_prefixes_in_common_are_read_as_little_as_one_group_to_a_chunk_allows(forks, trunk, page_size):
    batch = batch_over([(start, n, [*trunk[:cut], *[way] * 8]) for start, n, cut, way in forks], page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "SPLIT", 2)
        patch.setattr(attention_plan, "SHARED", 4)
        work, alone = (attention_work(batch, 1, 2, cascade=cascade) for cascade in (True, False))
        narrow = [chunk for chunk, length in enumerate(batch.lengths) if length <= NARROW_ROWS]
        assert cells_read(alone) - cells_read(work) == most_saved(batch, narrow)
    check_positions(batch, work, 0, split=2)
    tokens = sum(batch.lengths)
    assert (work.wide[work.wide[:, 0] >= tokens, 3:5] % 2 == 0).all()
    assert len(set(work.order[tokens:].tolist())) == len(work.order) - tokens  # none in two groups


@given(st.integers(0, 300_000), st.sampled_from([1, 8]))
def test_parts_are_short_where_there_is_little_to_read_and_few_where_there_is_much(start, length):
    work = attention_work(paged_batch([(start, length, False)], 16, 0), 4, 8)
    sizes = work.narrow[:, 4] - work.narrow[:, 3]
    assert sizes.max() <= 8 * SPLIT
    if start >= 8 * SPLIT:
        assert len(sizes) * 8 >= 64  # programs of 8 KV heads
    assert len(sizes) <= 1 + max(32, (start + length) // (8 * SPLIT))


def parts_of_tokens(batch, work):
    """For each token, where its parts begin and end, as far as it sees, and whether its tile is a narrow one."""
    owner = np.repeat(np.arange(len(batch.rows)), batch.lengths)
    found = [[] for _ in owner]
    for narrow, items in ((True, work.narrow), (False, work.wide)):
        for first, count, row, low, high, _ in items.tolist():
            for token in work.order[first : first + count].tolist():
                assert batch.rows[owner[token]] == row
                seen = min(high, int(work.positions[token]) + 1)
                if low < seen:
                    found[token].append((low, seen, narrow))
    return [tuple(sorted(parts)) for parts in found]


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 20000), st.sampled_from([2040, 2047, 2048, 8190, 16380])),
            st.integers(1, 20),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    group=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([0, 0, 700, 2048]),
    common=st.sampled_from([0, SHARED]),
)
def test_where_it_is_asked_for_a_token_is_cut_by_its_own_position(spans, group, window, common):
    batch = paged_batch([(start, length, True) for start, length, _ in spans], 16, common)
    batch.decodes = [decodes for *_, decodes in spans]
    together = parts_of_tokens(batch, attention_work(batch, group, 2, window, invariant=True))
    alone = []
    for start, length, decodes in spans:
        for position in range(start, start + length):
            one = paged_batch([(position, 1, False)], 16, 0)
            one.decodes = [decodes]
            alone += parts_of_tokens(one, attention_work(one, group, 2, window, invariant=True))
    # Tiles before the first that it sees a position of are no matter: they add zeros.
    for token, (mine, own) in enumerate(zip(together, alone, strict=True)):
        least = own[0][0]
        assert all(low % SPLIT == 0 for low, *_ in (*mine, *own))
        assert tuple((max(low, least), *rest) for low, *rest in mine if rest[0] > least) == own, token
