"""Floors and ceilings of tenants in the engine: who is refused, who waits, who passes whom, and what stays cached."""

import numpy as np
from engine_world import World, words

from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.requests import Rejected, TurnEnded
from holdfast.replicas.types import CellLimits


def world(**settings) -> World:
    return World(**{"order": "fair", "cells": 256, "context_length": 200, "admission_ceiling": 1.0} | settings)


def test_a_prompt_that_is_larger_than_its_tenants_ceiling_is_refused():
    small = world()
    small.submit("a", words(1, 70), 4, scope="a", cells=CellLimits(ceiling=0.25))
    end = small.end("a")
    assert isinstance(end, Rejected)
    assert (end.error.kind, end.error.field) == (ErrorKind.TOO_LONG, "prompt")
    small.serve("b", words(1, 70), 4, scope="b")


def test_who_waits_at_its_ceiling_holds_up_nobody_else():
    small = world(max_sequences=8)
    for name in "abc":
        small.submit(name, words(ord(name), 50), 10, scope="full", cells=CellLimits(ceiling=0.3), began=1.0)
    small.submit("other", words(9, 50), 2, scope="other", began=2.0)
    small.step()
    running = {each.request_id for each in small.engine.scheduler._running}
    assert running == {"a", "other"}
    small.run()
    small.assert_right("a", "b", "c", "other")


def test_a_floor_is_there_when_its_tenant_comes_however_full_it_is():
    small = world(max_sequences=12, admission_ceiling=0.75)
    small.serve("before", words(1, 40), 2, scope="quiet", cells=CellLimits(floor=0.25))
    for i in range(12):
        small.submit(f"n{i}", words(10 + i, 40), 20, scope="noisy", began=1.0)
    small.steps(6)
    assert small.engine.occupancy().waiting, "there is too little for all"
    small.begin("after", words(1, 40), 2, scope="quiet")
    assert "after" in {each.request_id for each in small.engine.scheduler._running}
    small.run()
    assert small.end("after").usage.cached >= 36, "its cells were evicted for others"
    small.assert_right(*small.prompts)


def test_paused_programs_of_a_tenant_keep_no_more_than_it_may_pin():
    small = world()
    for name in "pq":
        small.serve(name, words(ord(name), 40), 2, scope="t", program=name, cells=CellLimits(pinned=0.25))
        small.give(TurnEnded(name, "t", name, tools=("f",)))
    pins = small.engine.scheduler.retention.pins
    assert len(pins) == 1
    assert pins.cells_of("t") <= 64


def test_prompts_of_one_tenant_that_stop_each_other_go_on_while_another_is_busy():
    """Two that were let in before the ceiling came down cannot both go on, and the other tenant never rests."""
    small = world(max_sequences=4, step_tokens=8)
    for name in "ab":
        small.submit(name, words(ord(name), 100), 2, scope="t", began=1.0)
    small.steps(14)
    small.submit("c", words(3, 4), 1, scope="t", cells=CellLimits(ceiling=0.5))
    for i in range(60):
        small.submit(f"busy{i}", words(20 + i, 8), 6, scope="busy")
        small.step()
        if all(small.ends[name] for name in "abc"):
            break
    assert all(small.ends[name] for name in "abc"), "they stand still as long as others are busy"
    small.run()
    small.assert_right(*small.prompts)


def test_what_each_tenant_has_is_told_and_a_preamble_is_nobodys():
    small = world(page_size=4)
    small.engine.share([np.asarray(words(7, 16), np.int32)])
    small.submit("a", words(1, 30), 6, scope="acme")
    small.serve("b", words(2, 10), 2, scope="beta")
    pages, now = small.engine.cache.tree.tenants.counted(["acme", "beta"], "other"), small.engine.occupancy()
    assert pages == {"acme": 9, "beta": 3}
    assert now.cells_total - now.cells_free == 4 * sum(pages.values()) + 16
