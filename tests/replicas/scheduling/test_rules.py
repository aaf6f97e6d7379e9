"""The pure rules of a step: chunk sizes, admission, and who follows whom."""

from dataclasses import replace

import numpy as np
from engine_world import World, words
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.events import Sampling, Submit
from holdfast.replicas.retention.policy import RestoreCost
from holdfast.replicas.scheduling.admission import Budget, find_leader
from holdfast.replicas.scheduling.scheduler import chunk_sizes, tokens_within
from holdfast.replicas.sequences import Sequence, Status

CONFIG = EngineConfig(cells=1000, step_tokens=4096, latency_chunk=1024, admission_ceiling=0.5, completion_reserve=100)


def sequence(prompt: list[int], max_tokens: int = 10, scope: str = "", computed: int = 0) -> Sequence:
    made = Sequence.of(Submit("x", np.asarray(prompt, np.int32), Sampling(max_tokens), scope), 0, 0.0, frozenset(), 0)
    made.move(Status.RUNNING)
    made.n_computed, made.cache_scope = computed, scope
    return made


prompts = st.lists(st.tuples(st.integers(1, 10**5), st.booleans()), min_size=1, max_size=200)


@given(prompts, st.booleans())
def test_chunks_are_positive_and_within_their_bounds(prefilling, equal):
    pending, narrow = [list(each) for each in zip(*prefilling, strict=True)]
    sizes = chunk_sizes(pending, narrow, replace(CONFIG, equal_chunks=equal))
    for size, left, slim in zip(sizes, pending, narrow, strict=True):
        assert 1 <= size <= left
        assert size <= (1024 if slim else 4096)
    assert sum(sizes) <= max(4096, len(pending))


@given(prompts)
def test_who_began_first_has_what_the_floors_of_the_others_leave(prefilling):
    pending, narrow = [list(each) for each in zip(*prefilling, strict=True)]
    sizes = chunk_sizes(pending, narrow, CONFIG)
    wants = [min(left, 1024) if slim else left for left, slim in zip(pending, narrow, strict=True)]
    floor = min(CONFIG.chunk_floor, max(1, 4096 // len(pending) // 4))
    assert all(size >= min(want, floor) for size, want in zip(sizes, wants, strict=True))
    below = [i for i, (size, want) in enumerate(zip(sizes, wants, strict=True)) if size < want]
    if below:  # whoever comes behind the first that does not get all has the floor
        assert all(sizes[i] <= floor for i in range(below[0] + 1, len(sizes)))


def test_a_lone_prefill_fills_the_step_and_a_hurried_neighbour_narrows_it():
    assert chunk_sizes([9000], [False], CONFIG) == [4096]
    assert chunk_sizes([9000], [True], CONFIG) == [1024]
    assert chunk_sizes([9000] * 4, [False] * 4, CONFIG) == [4096 - 3 * CONFIG.chunk_floor] + [CONFIG.chunk_floor] * 3
    assert chunk_sizes([9000] * 4, [False] * 4, replace(CONFIG, equal_chunks=True)) == [1024] * 4
    assert chunk_sizes([9000] * 4, [False] * 4, replace(CONFIG, adaptive_chunks=False)) == [4096] * 4


@given(
    start=st.integers(0, 100_000),
    seconds=st.floats(1e-3, 10),
    a=st.one_of(st.just(0.0), st.floats(1e-10, 1e-6)),
    b=st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
)
def test_a_chunk_is_the_longest_that_fits_the_time(start, seconds, a, b):
    n = tokens_within(seconds, start, RestoreCost(a, b, 5.0))

    def taken(n):
        return a * ((start + n) ** 2 - start**2) + b * n

    assert n >= 64
    assert n == 64 or taken(n) <= seconds * (1 + 1e-6)
    assert not (a or b) or taken(n + 1) >= seconds * (1 - 1e-6)


def test_admission_counts_the_prompt_beyond_the_cache_and_a_bounded_completion():
    budget = Budget.of(CONFIG)
    assert budget.need(sequence([1] * 50, 20), n_cached=30) == 40
    assert budget.need(sequence([1] * 50, 5000), n_cached=0) == 150
    assert budget.admits(committed=400, need=100, alone=False)
    assert not budget.admits(committed=400, need=101, alone=False)
    assert budget.admits(committed=400, need=900, alone=True)


def test_the_leader_is_the_prefill_that_shares_most():
    mine = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    some, most = sequence([1, 2, 3, 4, 9]), sequence([1, 2, 3, 4, 5, 6, 9])
    other_scope = sequence([1, 2, 3, 4, 5, 6, 7, 8], scope="other")
    following = find_leader(mine, [some, most, other_scope], n_cached=0, least=2)
    assert (following.leader, following.shared, following.gain) == (most, 6, 6)
    assert not following.over
    most.n_computed = 6
    assert following.over


def test_nobody_leads_for_too_little_or_for_what_is_cached():
    mine = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    leader = sequence([1, 2, 3, 4, 5, 6, 9])
    assert find_leader(mine, [leader], n_cached=5, least=2) is None
    assert find_leader(mine, [sequence([1, 2, 3, 4, 5, 6, 9], computed=6)], n_cached=0, least=2) is None


def test_the_last_token_is_never_shared():
    twin = sequence([1, 2, 3, 4])
    assert find_leader(sequence([1, 2, 3, 4]), [twin], n_cached=0, least=1).shared == 3


def first_tokens(**settings: bool) -> list[float]:
    """When each of eight prompts that come together has its first token, a step a second."""
    world = World(cells=2048, max_sequences=8, step_tokens=64, context_length=256, admission_ceiling=1.0, **settings)
    for i in range(8):
        world.submit(f"r{i}", words(i, 128), 2, program=f"p{i}", began=1.0 + i)
    world.run()
    return [world.end(f"r{i}").timing.first_token for i in range(8)]


def test_prompts_that_come_together_are_answered_in_order_and_sooner_than_shared_equally():
    ordered, equal = first_tokens(), first_tokens(equal_chunks=True)
    assert ordered == sorted(ordered)
    assert sum(ordered) < 0.75 * sum(equal)
    assert max(ordered) <= max(equal)


@given(st.floats(0.05, 1.0), st.integers(2, 4))
def test_above_the_high_water_mark_chunks_wait_and_requests_run(mark, n):
    world = World(cells=512, max_sequences=4, step_tokens=16, high_water=mark, admission_ceiling=1.0)
    for i in range(n):
        world.submit(f"r{i}", words(i, 40), 6)
    beyond = []
    while world.engine.busy:
        used = world.engine.cache.cells.in_use
        world.step()
        chunks = [chunk for chunk in world.runner.plans[-1].chunks if not chunk.decodes]
        beyond.append(len(chunks) if used >= mark * 512 else 0)
        assert world.runner.plans[-1].chunks, "somebody gets on"
    assert max(beyond) <= 1, "above the mark one prompt goes on, and only where nobody decodes"
    deferred = world.engine.stats.chunks_deferred
    assert deferred == 0 if mark * 512 >= n * 48 else deferred > 0 or mark * 512 > 40
    for i in range(n):
        world.assert_right(f"r{i}")
        assert world.end(f"r{i}").timing.scheduled == 1.0, "requests were admitted at once"
