"""The engine over a fake model: right outputs, one terminal event each, and everything returned when idle."""

import numpy as np
import pytest
from engine_world import World, words
from fake_runner import VOCABULARY, complete

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ErrorKind, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, Aborted, Rejected, Stop, Submit


def test_a_request_is_completed_and_its_usage_counted():
    world = World()
    world.submit("a", words(1, 10), max_tokens=6)
    world.run()
    world.assert_right("a")
    usage = world.end("a").usage
    assert (usage.prompt, usage.cached, usage.completion) == (10, 0, len(world.out["a"]))
    world.assert_idle()


@pytest.mark.parametrize("step_tokens", [3, 64])
def test_a_request_tells_with_its_first_step_how_much_of_its_prompt_was_cached(step_tokens):
    world = World(step_tokens=step_tokens)
    world.submit("a", words(1, 20), begins=True)
    world.run()
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_next_turn_computes_its_delta_and_at_most_a_page(page_size):
    world = World(page_size=page_size, cells=512)
    prompt, known = words(1, 20), 0
    for turn in range(6):
        name = f"turn{turn}"
        before = world.engine.stats.prompt_computed
        world.submit(name, prompt, max_tokens=5)
        world.run()
        world.assert_right(name)
        computed = world.engine.stats.prompt_computed - before
        assert computed <= len(prompt) - known + page_size
        known = len(prompt) + len(world.out[name])
        prompt = prompt + world.out[name] + words(turn + 2, 7)
    world.assert_idle()


def test_decoding_goes_on_while_another_prompt_is_prefilled():
    world = World(step_tokens=4)
    world.submit("a", words(1, 4), max_tokens=20)
    world.step()
    world.submit("b", words(2, 40))
    before = len(world.out["a"])
    for _ in range(5):
        world.step()
    assert len(world.out["a"]) > before
    world.run()
    world.assert_right("a")
    world.assert_right("b")


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
    world.submit("a", words(1, 9), max_tokens=50)
    world.step()
    world.take(world.engine.handle(Stop("a"), world.now))
    assert world.end("a").reason == "stop"
    assert world.engine.cache.peek("", np.asarray([*words(1, 9), 1], np.int32)) == 9


def test_abort_frees_row_and_cells_at_once():
    world = World()
    world.submit("a", words(1, 9), max_tokens=50)
    world.submit("waiting", words(2, 9))
    world.step()
    world.take(world.engine.handle(Abort("a"), world.now))
    world.take(world.engine.handle(Abort("waiting"), world.now))
    world.take(world.engine.handle(Abort("unknown"), world.now))
    assert isinstance(world.end("a"), Aborted)
    assert isinstance(world.end("waiting"), Aborted)
    world.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind", "field"),
    [
        ([], 4, ErrorKind.INVALID, "prompt"),
        ([1, 2], -5, ErrorKind.INVALID, "max_tokens"),
        ([1, VOCABULARY], 4, ErrorKind.INVALID, "prompt"),
        ([1, -1], 4, ErrorKind.INVALID, "prompt"),
        ([1] * 128, 1, ErrorKind.TOO_LONG, "prompt"),
        ([1] * 129, 0, ErrorKind.TOO_LONG, "prompt"),
    ],
)
def test_impossible_requests_are_rejected_with_the_field(prompt, max_tokens, kind, field):
    world = World()
    world.submit("a", prompt, max_tokens)
    error = world.end("a").error
    assert (error.kind, error.field) == (kind, field)
    assert not world.engine.busy


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
    assert len(world.out["long"]) == room - 30
    assert world.out["long"] == complete(words(1, 30), room - 30)


def test_a_prompt_larger_than_the_cache_is_rejected():
    world = World(cells=64)
    world.submit("big", words(1, 60), max_tokens=31)
    assert (world.end("big").error.kind, world.end("big").error.field) == (ErrorKind.TOO_LONG, "prompt")
    world.submit("again", words(1, 30), max_tokens=30)
    world.run()
    world.assert_right("again")


@pytest.mark.parametrize("n_turns", [3, 6])
def test_a_request_that_fills_the_cache_alone_is_served_whatever_it_shares(n_turns):
    """Every turn leaves its prefix inside a page, and others keep the branches they left."""
    world = World(cells=64, page_size=8, context_length=64, admission_ceiling=1.0)
    prompt = words(1, 5)
    for turn in range(n_turns):
        prompt = prompt + words(10 + turn, 5)
        for fork in range(2):
            world.submit(f"{turn}.{fork}", [*prompt, fork + 1, fork + 2], max_tokens=1)
            world.run()
    full = [*prompt, 7]
    world.submit("full", full, max_tokens=56 - len(full))
    world.run()
    world.assert_right("full")
    world.assert_idle()


def test_a_full_queue_refuses_and_a_late_request_is_refused():
    world = World(max_sequences=1, max_waiting=2, queue_timeout_s=5.0)
    world.submit("runs", words(1, 8), max_tokens=100)
    world.step()
    world.submit("w1", words(2, 8))
    world.submit("w2", words(3, 8))
    world.submit("w3", words(4, 8))
    assert world.end("w3").error.kind is ErrorKind.OVERLOADED
    for _ in range(6):
        world.step()
    assert isinstance(world.end("w1"), Rejected)
    assert isinstance(world.end("w2"), Rejected)
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
    for i in range(8):
        world.assert_right(f"r{i}")
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
    world.take(world.engine.handle(how("r0"), world.now))
    world.take(world.engine.handle(Abort("r1"), world.now))
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
        world.submit("again", words(0, 100) + words(1, 10))
        world.run()
        for name in world.prompts:
            world.assert_right(name)
        computed[without] = world.engine.stats.prompt_computed
    assert computed[()] < computed[("grouped_prefill",)] < computed[("prefix_cache",)] == 4 * 110


def test_speculation_takes_fewer_steps_and_changes_no_output():
    steps = {}
    for enabled in (True, False):
        world = World(cells=2048, context_length=400, speculation=DraftConfig(enabled=enabled))
        for i in range(6):
            world.submit(f"r{i}", words(i, 40), max_tokens=60)
        world.run()
        for name in world.prompts:
            world.assert_right(name)
        world.assert_idle()
        steps[enabled] = world.engine.stats.steps
        assert (world.engine.stats.accepted > 0) is enabled
    assert steps[True] < steps[False] * 0.8
