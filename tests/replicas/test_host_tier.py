"""The engine with a second tier: what was evicted comes back, and what goes wrong there costs no request."""

import pytest
from engine_world import World, words

LONG = words(1, 60)


def small(**settings) -> World:
    """A cache for one long prompt at a time, and a second tier for many."""
    defaults = {"cells": 96, "host_cells": 1024, "max_sequences": 4, "admission_ceiling": 1.0}
    return World(**(defaults | settings))


def test_an_evicted_prompt_comes_back_instead_of_being_computed():
    world = small()
    world.serve("first", LONG)
    world.serve("other", words(2, 60))  # takes more than half of the place: the beginning stays
    world.serve("one more", words(5, 60))  # and that was used longest ago
    stats, computed = world.engine.stats, world.engine.stats.prompt_computed
    assert world.serve("again", LONG) == stats.tokens_reloaded == 59
    assert stats.pages_in == 15
    assert stats.prompt_computed - computed == 1
    now = world.engine.occupancy()
    assert now.cells_host > 60
    assert now.reload_cells_per_s == pytest.approx(4 / 0.001)


def test_a_load_goes_on_beside_others_and_in_pieces():
    world = small(cells=160, step_tokens=16)
    world.serve("first", LONG)
    world.serve("other", words(2, 120))
    world.submit("short", words(3, 8), 40)
    world.steps(3)
    before = len(world.runner.plans)
    world.serve("again", LONG)
    world.assert_right("short")
    loading = [plan for plan in world.runner.plans[before:] if len(plan.loads)]
    assert len(loading) >= 3
    assert all(plan.chunks for plan in loading), "the others go on"


def test_a_follower_waits_for_what_its_leader_brings_back():
    world = small(cells=160, step_tokens=16)
    world.serve("first", LONG)
    world.serve("other", words(2, 120))
    for name in ("a", "b"):
        world.submit(name, LONG)
    world.run()
    world.assert_right("a", "b")
    assert world.engine.stats.tokens_reloaded < 2 * 59, "what one brought back the other aliases"


@pytest.mark.parametrize("when", ["saves", "loads"])
def test_copies_that_fail_cost_the_time_to_compute_and_no_request(when):
    world = small()
    world.serve("first", LONG)
    world.runner.fail_moves = lambda plan: len(getattr(plan, when)) > 0
    world.serve("other", words(2, 60))
    world.serve("again", LONG)
    stats = world.engine.stats
    assert stats.failed_moves > 0
    assert stats.tokens_reloaded == 0
    world.runner.fail_moves = lambda plan: False
    world.serve("more", words(5, 60))
    world.serve("third", LONG)
    assert stats.tokens_reloaded > 0, "the tier is used again"


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("kept", [0, 6])  # tokens that the device still has: a load may begin inside a page
def test_books_that_break_off_behind_a_planned_load_do_not_let_later_saves_change_what_it_reads(kept, overlap):
    world = small(cells=160, step_tokens=256, overlap_steps=overlap)
    world.serve("first", LONG)
    for i in range(10, 30):  # many leaves to evict, one after the other
        world.serve(f"short {i}", words(i, 8), 1)
    if kept:
        world.serve("beginning", LONG[:kept], 1)
    host, running = world.engine.cache.host, world.engine.scheduler._running
    save, load, planned, broken = host._save, running.load, [], []

    def loading(builder, sequence, most):
        found = load(builder, sequence, most)
        planned.extend(builder.loads)
        return found

    def breaking(leaf):
        if planned and not broken:
            broken.append(leaf)
            raise RuntimeError("injected")
        save(leaf)

    host._save, running.load = breaking, loading
    world.submit("again", LONG)
    world.submit("other", words(5, 60))
    world.step()
    assert broken, "nothing was evicted behind the load"
    world.run()
    world.assert_right("again", "other")
    assert world.engine.cache.sound
