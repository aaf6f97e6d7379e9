"""The engine over a fake model: right outputs, one terminal event each, and everything returned when idle."""

import numpy as np
import pytest
from engine_world import World, words
from fake_runner import VOCABULARY, complete

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ErrorKind, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, Aborted, Rejected, Stop, Submit


@pytest.mark.parametrize("step_tokens", [3, 64])
def test_a_request_tells_with_its_first_step_how_much_of_its_prompt_was_cached(step_tokens):
    world = World(step_tokens=step_tokens)
    world.serve("a", words(1, 20), begins=True)
    world.submit("b", [*words(1, 20), *words(2, 20)], begins=True)
    world.submit("c", words(3, 20))
    world.step()
    assert ("b" in world.started, world.out["b"] == []) == (True, step_tokens == 3)
    world.run()
    assert world.started.keys() == {"a", "b"}
    for name, told in world.started.items():
        usage = world.end(name).usage
        assert (told.prompt, told.cached) == (usage.prompt, usage.cached)
        assert (usage.cached > 0) == (name == "b")


def test_a_request_that_says_no_arrival_stands_by_when_it_came_whatever_clock_others_say():
    world, epoch = World(max_sequences=1), 1.7e9
    names = ("first", "said 1", "unsaid 1", "said 2", "unsaid 2", "old")
    for i, name in enumerate(names):
        said = 0.0 if name.startswith("unsaid") else epoch + 0.5 if name == "old" else epoch + world.now
        world.give(Submit(name, tokens=np.asarray(words(i, 8), np.int32), sampling=Sampling(4), program_arrival=said))
        world.now += 1.0
    world.run()
    served = sorted(names, key=lambda name: world.end(name).timing.scheduled)
    assert served == ["first", "old", "said 1", "unsaid 1", "said 2", "unsaid 2"]


def test_stop_finishes_and_keeps_the_cells_for_the_next_turn():
    world = World()
    world.begin("a", words(1, 9), max_tokens=50)
    world.give(Stop("a"))
    assert world.end("a").reason == "stop"
    assert world.engine.cache.peek("", np.asarray([*words(1, 9), 1], np.int32)) == 9


def test_abort_frees_row_and_cells_at_once():
    world = World()
    world.submit("a", words(1, 9), max_tokens=50)
    world.submit("waiting", words(2, 9))
    world.step()
    for name in ("a", "waiting", "unknown"):
        world.give(Abort(name))
    assert [type(world.end(name)) for name in ("a", "waiting")] == [Aborted] * 2
    world.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "cells", "kind", "field"),
    [
        ([], 4, 256, ErrorKind.INVALID, "prompt"),
        ([1, 2], -5, 256, ErrorKind.INVALID, "max_tokens"),
        ([1, VOCABULARY], 4, 256, ErrorKind.INVALID, "prompt"),
        ([1, -1], 4, 256, ErrorKind.INVALID, "prompt"),
        ([1] * 128, 1, 256, ErrorKind.TOO_LONG, "prompt"),
        ([1] * 129, 0, 256, ErrorKind.TOO_LONG, "prompt"),
        ([1] * 60, 31, 64, ErrorKind.TOO_LONG, "prompt"),  # the cache is too small
    ],
)
def test_impossible_requests_are_rejected_with_the_field(prompt, max_tokens, cells, kind, field):
    world = World(cells=cells)
    world.submit("a", prompt, max_tokens)
    error = world.end("a").error
    assert (error.kind, error.field) == (kind, field)
    assert not world.engine.busy
    world.serve("again", words(1, 30), max_tokens=30)


@pytest.mark.parametrize(("top_k", "kind"), [(2**31 - 1, None), (2**31, ErrorKind.INVALID), (2**63, ErrorKind.INVALID)])
def test_a_top_k_that_no_array_holds_is_rejected_alone(top_k, kind):
    world = World()
    world.give(Submit("a", tokens=np.array([1, 2], np.int32), sampling=Sampling(max_tokens=1, top_k=top_k)))
    world.run()
    error = getattr(world.end("a"), "error", None)
    assert (error.kind if error else None) is kind


@pytest.mark.parametrize(("settings", "room"), [({"cells": 64}, 60), ({}, 128)])
def test_a_reply_is_at_most_as_long_as_the_prompt_leaves_room_for(settings, room):
    world = World(**settings)
    world.submit("long", words(1, 30), max_tokens=100_000)
    world.run()
    assert world.out["long"] == complete(words(1, 30), room - 30)
    assert len(world.out["long"]) == room - 30


@pytest.mark.parametrize("n_turns", [3, 6])
def test_a_request_that_fills_the_cache_alone_is_served_whatever_it_shares(n_turns):
    """Every turn leaves its prefix inside a page, and others keep the branches they left."""
    world = World(cells=64, page_size=8, context_length=64, admission_ceiling=1.0)
    prompt = words(1, 5)
    for turn in range(n_turns):
        prompt = prompt + words(10 + turn, 5)
        for fork in range(2):
            world.serve(f"{turn}.{fork}", [*prompt, fork + 1, fork + 2], max_tokens=1)
    full = [*prompt, 7]
    world.serve("full", full, max_tokens=56 - len(full))
    world.assert_idle()


def test_a_full_queue_refuses_and_a_late_request_is_refused():
    world = World(max_sequences=1, max_waiting=2, queue_timeout_s=5.0)
    world.begin("runs", words(1, 8), max_tokens=100)
    for i in range(3):
        world.submit(f"w{i}", words(2 + i, 8))
    assert world.end("w2").error.kind is ErrorKind.OVERLOADED
    world.steps(6)
    assert [type(world.end(f"w{i}")) for i in range(3)] == [Rejected] * 3
    world.run()
    world.assert_right("runs")
    world.assert_idle()


def test_fail_all_ends_running_and_waiting():
    world = World(max_sequences=1)
    world.submit("a", words(1, 8))
    world.submit("b", words(2, 8))
    world.step()
    world.take(world.engine.fail_all(UnavailableError("bye"), world.now))
    assert world.end("a").error.kind is world.end("b").error.kind is ErrorKind.UNAVAILABLE
    world.assert_idle()


@pytest.mark.parametrize("step_tokens", [16, 4096])
def test_a_burst_over_a_shared_preamble_computes_it_once(step_tokens):
    world = World(cells=4096, context_length=512, max_sequences=16, step_tokens=step_tokens)
    preamble = words(0, 200)
    for i in range(8):
        world.submit(f"r{i}", preamble + words(i + 1, 10))
    world.run()
    world.assert_right(*(f"r{i}" for i in range(8)))
    assert world.engine.stats.prompt_computed <= 200 + 8 * (10 + world.config.page_size)
    assert world.engine.stats.prompt_grouped >= 7 * (200 - world.config.page_size)
    world.assert_idle()


@pytest.mark.parametrize("how", [Abort, Stop])
def test_followers_go_on_when_their_leader_ends(how):
    world = World(cells=4096, context_length=512, max_sequences=16, step_tokens=16)
    preamble = words(0, 200)
    for i in range(3):
        world.submit(f"r{i}", preamble + words(i + 1, 10))
    world.step()
    world.give(how("r0"))
    world.give(Abort("r1"))
    world.run()
    world.assert_right("r2")
    world.assert_idle()


def test_switches_turn_sharing_off_and_change_no_output():
    computed = {}
    for without in ((), ("grouped_prefill",), ("prefix_cache",)):
        world = World(cells=4096, context_length=512, max_sequences=16, without=without)
        for i in range(3):
            world.submit(f"r{i}", words(0, 100) + words(i + 1, 10))
        world.run()
        world.serve("again", words(0, 100) + words(1, 10))
        world.assert_right(*world.prompts)
        computed[without] = world.engine.stats.prompt_computed
    assert computed[()] < computed[("grouped_prefill",)] < computed[("prefix_cache",)] == 4 * 110


def test_speculation_takes_fewer_steps_and_changes_no_output():
    steps = {}
    for enabled in (True, False):
        world = World(cells=2048, context_length=400, speculation=DraftConfig(enabled=enabled))
        for i in range(6):
            world.submit(f"r{i}", words(i, 40), max_tokens=60)
        world.run()
        world.assert_right(*world.prompts)
        world.assert_idle()
        steps[enabled] = world.engine.stats.steps
        assert (world.engine.stats.accepted > 0) is enabled
    assert steps[True] < steps[False] * 0.8
