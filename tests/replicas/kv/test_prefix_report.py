"""What prompts begin with gets its tokens from the prompts, and is told only while the cache has it."""

import numpy as np
import pytest
from engine_world import World
from hypothesis import given
from hypothesis import strategies as st
from kv_audit import run

from holdfast.replicas.kv.cache import REPORT_S, KVCache, PrefixReport
from holdfast.replicas.types import TokenIds, common_prefix


def tokens(*numbers: int) -> TokenIds:
    return np.array(numbers, dtype=np.int32)


SHARED = tokens(*range(1, 21))


def test_two_prompts_say_what_they_share() -> None:
    cache, made = KVCache(64, 4), PrefixReport()
    for tail in (range(100, 110), range(200, 215)):
        prompt = tokens(*SHARED, *tail)
        made.seen("t", "d", prompt)
        run(cache, prompt, scope="t")
    made.look(cache, 0.0)
    assert made.held == {"d": len(SHARED)}


def test_of_one_prompt_alone_nobody_knows_where_its_beginning_ends_and_a_scope_sees_its_own() -> None:
    cache, made = KVCache(64, 4), PrefixReport()
    made.seen("t", "d", SHARED)
    made.seen("other", "e", SHARED)
    run(cache, SHARED, scope="t")
    made.look(cache, 0.0)
    assert made.held == {"d": 0}


@pytest.mark.parametrize("second", [20, 25, 32])  # tokens of the first prompt that another one has, and no others
def test_the_same_prompt_again_says_no_more(second: int) -> None:
    cache, made = KVCache(64, 4), PrefixReport()
    prompt = tokens(*SHARED, *range(100, 112))
    for each in (prompt, prompt[:second]):
        made.seen("t", "d", each)
        run(cache, each, scope="t")
    made.look(cache, 0.0)
    assert made.held == {"d": 0}
    made.seen("t", "d", tokens(*SHARED, *range(200, 212)))
    made.look(cache, REPORT_S)
    assert made.held == {"d": len(SHARED)}


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=5))
def test_no_more_is_told_than_all_prompts_so_far_begin_with(tails: list[list[int]]) -> None:
    """Each prompt so far begins with what is told."""
    cache, made = KVCache(64, 4), PrefixReport()
    for i, tail in enumerate(tails):
        prompt = tokens(*SHARED, *tail)
        made.seen("t", "d", prompt)
        run(cache, prompt, scope="t")
        made.look(cache, i * REPORT_S)
        told = made.held["d"]
        shared = min(
            common_prefix(tokens(*SHARED, *one), tokens(*SHARED, *other))
            for one in tails[: i + 1]
            for other in tails[: i + 1]
        )
        assert told in (0, min(shared, len(prompt) - 1), shared)
        assert told <= shared


def test_a_look_that_came_too_early_is_made_up_for_in_an_idle_step() -> None:
    world = World(cells=64)
    for name, tail in (("a", []), ("b", [40, 41])):
        world.submit(name, [*SHARED.tolist(), *tail], 1, prefixes=("d",))
    world.now = 0.1
    while world.engine.busy:
        world.engine.step(world.now)  # all of them before the next look is due
    due = world.engine.due
    assert due == pytest.approx(0.1 + REPORT_S)
    world.engine.step(due)
    assert world.engine.load().prefixes == {"d": 0}
    assert world.engine.due is None


def test_what_was_evicted_is_told_no_more() -> None:
    cache, made = KVCache(16, 4), PrefixReport()
    made.seen("t", "d", SHARED)
    run(cache, SHARED, scope="t")
    made.look(cache, 0.0)
    run(cache, tokens(*range(1000, 1060)), scope="t")
    made.look(cache, REPORT_S / 2)
    assert made.held, "it is looked at now and then"
    made.look(cache, REPORT_S)
    assert made.held == {}


def test_those_asked_for_last_are_kept() -> None:
    cache, made = KVCache(64, 4), PrefixReport(most=2)
    run(cache, SHARED, scope="t")
    for digest in ("a", "b", "a", "c"):
        made.seen("t", digest, SHARED)
    made.look(cache, 0.0)
    assert set(made.held) == {"a", "c"}
