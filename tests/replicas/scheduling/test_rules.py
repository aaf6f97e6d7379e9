"""The pure rules of a step: chunk sizes, admission, and who follows whom."""

import math

from engine_world import World, words
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.retention.policy import RestoreCost
from holdfast.replicas.scheduling.scheduler import chunk_sizes, tokens_within

CONFIG = EngineConfig(cells=1000, step_tokens=4096, admission_ceiling=0.5, completion_reserve=100)


def begun(pending: list[int]) -> list[tuple[int, int]]:
    return [(0, left) for left in pending]


prompts = st.lists(st.tuples(st.integers(1, 10**5), st.booleans()), min_size=1, max_size=200)


@given(prompts)
def test_a_quarter_of_a_step_goes_to_the_shortest_prompts_and_the_rest_is_spent_in_order(prefilling):
    pending, narrow = [list(each) for each in zip(*prefilling, strict=True)]
    sizes = chunk_sizes(begun(pending), narrow, 1024, 4096)
    wants = [min(left, 1024) if slim else left for left, slim in zip(pending, narrow, strict=True)]
    assert sizes[0] >= 1
    assert all(0 <= size <= want for size, want in zip(sizes, wants, strict=True))
    assert sum(sizes) == min(4096, sum(wants))
    kept, quarter = 1024, [0] * len(wants)
    for i in sorted(range(1, len(wants)), key=lambda i: (pending[i], i)):
        quarter[i] = min(wants[i], kept)
        kept -= quarter[i]
    assert all(size >= least for size, least in zip(sizes, quarter, strict=True))
    below = [i for i, (size, want) in enumerate(zip(sizes, wants, strict=True)) if size < want]
    if below:  # behind the first prompt that does not get all it wants, each has its part of the quarter
        assert all(sizes[i] == quarter[i] for i in range(below[0] + 1, len(sizes)))


costs = st.builds(
    RestoreCost,
    a=st.one_of(st.just(0.0), st.floats(1e-10, 1e-6)),
    b=st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    c=st.floats(0, 5),
    read=st.one_of(st.just(0.0), st.floats(1e-9, 1e-5)),
)


@given(st.integers(0, 100_000), st.floats(1e-3, 10), costs)
def test_a_chunk_is_the_longest_that_fits_the_time(start, seconds, cost):
    n = tokens_within(seconds, start, cost)
    assert n == 0 or cost.between(start, start + n) <= seconds * (1 + 1e-6)
    assert cost.between(0, 1) == 0 or cost.between(start, start + n + 1) >= seconds * (1 - 1e-6)
    assert tokens_within(0.0, start, cost) == 0
    assert tokens_within(-seconds, start, cost) == 0
    assert tokens_within(math.inf, start, cost) >= CONFIG.step_tokens


@given(
    st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 10**5), st.booleans()), min_size=1, max_size=100),
    st.floats(1e-3, 10),
    costs,
)
def test_chunks_are_foretold_to_take_no_longer_than_they_may(prefilling, seconds, cost):
    """Except for one token of the first. No time is left that a sequence which has a chunk could use."""
    pending, narrow = [(start, left) for start, left, _ in prefilling], [slim for _, _, slim in prefilling]
    sizes = chunk_sizes(pending, narrow, 1024, 4096, seconds, cost)
    spans = [(start, start + n) for (start, _), n in zip(pending, sizes, strict=True)]
    taken = [cost.between(*span) for span in spans]
    enough = seconds * (1 + 1e-6)
    limits = [min(left, 1024) if slim else left for _, left, slim in prefilling]
    assert sizes[0] >= 1
    assert all(0 <= n <= limit for n, limit in zip(sizes, limits, strict=True))
    assert sum(sizes) <= 4096
    assert sum(taken) <= enough or (sizes[0] == 1 and sum(taken[1:]) <= enough / 4)
    reads = [cost.read * end if n else 0.0 for (_, end), n in zip(spans, sizes, strict=True)]
    assert all(2 * read <= s * (1 + 1e-6) for read, s in zip(reads[1:], taken[1:], strict=True))
    for (start, end), n, limit in zip(spans, sizes, limits, strict=True):
        if 0 < n < limit and sum(sizes) < 4096:
            more = cost.between(start, end + 1) - cost.between(start, end)
            assert sum(taken) + more >= seconds * (1 - 1e-6)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 90), min_size=2, max_size=6), st.sampled_from([1.0, 40.0, 200.0]), st.integers(1, 3))
def test_prompts_make_a_step_no_longer_than_they_may(prompts, step_ms, pace):
    """Every token is computed once and every step gets on. The forecast of what prompts add to a step is within
    `step_ms`, within the fixed cost of a step, or within twice the time for reading the first prompt's cells.
    """
    world = World(cells=2048, max_sequences=8, step_tokens=64, step_ms=step_ms, admission_ceiling=1.0)
    foretold: list[tuple[float, float, float]] = []  # beside who decodes: what is added, by one token each, and c

    def run(plan):
        drew = {each.row for each in world.engine.live.values() if each.drawn}
        prompts = [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks if chunk.row not in drew]
        cost = world.engine._load.cost
        world.step_s = 0.02 + 0.004 * sum(len(chunk.tokens) for chunk in plan.chunks)
        if len(prompts) < len(plan.chunks):
            added = sum(cost.between(start, start + n) for start, n in prompts)
            foretold.append((added, max((cost.between(start, start + 1) for start, _ in prompts), default=0.0), cost.c))
        return False

    world.runner.fail = run
    waiting = [(f"r{i}", words(i, n)) for i, n in enumerate(prompts * 3)]
    while waiting or world.engine.busy:
        for name, prompt in waiting[:pace]:
            world.submit(name, prompt, 12)
        del waiting[:pace]
        world.step()
        assert world.runner.plans[-1].chunks, "somebody gets on"
    world.assert_right(*(f"r{i}" for i in range(3 * len(prompts))))
    stats = world.engine.stats
    assert stats.prompt_computed + stats.prompt_cached == 3 * sum(prompts)
    for added, least, once in foretold:
        assert added <= max(step_ms / 1e3, once) * (1 + 1e-6) + least


def test_a_short_prompt_waits_for_two_steps_of_a_long_one_that_began_before_it():
    """Each step is bounded in time though nobody decodes: 200 tokens of 1 ms, where `step_tokens` allows 4,096."""
    world = World(cells=8192, context_length=8192, step_tokens=4096, step_ms=200.0, admission_ceiling=1.0)

    def run(plan):
        world.step_s = 0.001 * sum(len(chunk.tokens) for chunk in plan.chunks)
        return False

    world.runner.fail = run
    for i, length in enumerate((50, 100, 200, 150) * 2):  # so that the engine learns what a token costs
        world.serve(f"r{i}", words(i, length), 1, program=f"r{i}", began=1.0 + i)
    world.submit("long", words(10, 7000), 1, program="long", began=10.0)
    begun = len(world.runner.plans)
    world.step()
    world.begin("short", words(11, 40), 1, program="short", began=11.0)
    assert {chunk.row for chunk in world.runner.plans[-1].chunks if len(chunk.tokens) == 40}
    world.run()
    longest = max(sum(len(chunk.tokens) for chunk in plan.chunks) for plan in world.runner.plans[begun:])
    assert 150 <= longest <= 220


@settings(max_examples=30)
@given(st.floats(0.05, 1.0), st.integers(2, 4))
def test_above_the_high_water_mark_chunks_wait_and_requests_run(mark, n):
    world = World(cells=512, max_sequences=4, step_tokens=16, admission_ceiling=1.0)
    world.engine.scheduler._high_water = int(mark * 512)
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


@settings(max_examples=40)
@example([2, 2, 7, 2], 12)  # one token is left of the step, for a prompt of two
@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.integers(2, 40))
def test_no_cut_leaves_a_prompts_last_token_by_itself_where_that_would_move_bits(lengths, step_tokens):
    world = World(cells=1024, step_tokens=step_tokens, batch_invariant=True)
    prompts = [words(i, length) for i, length in enumerate(lengths)]
    for i, prompt in enumerate(prompts):
        world.submit(f"{i}", prompt, max_tokens=2)
    world.run()
    if step_tokens // len(lengths) > 2:  # else there is no other way
        length_of: dict[int, int] = {}  # of the prompt in each row
        for chunk in (chunk for plan in world.runner.plans for chunk in plan.chunks):
            if chunk.start == 0:
                begin = chunk.tokens.tolist()
                length_of[chunk.row] = next(len(each) for each in prompts if each[: len(begin)] == begin)
            assert len(chunk.tokens) > 1 or chunk.start != length_of[chunk.row] - 1
