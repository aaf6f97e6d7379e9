"""Recurrent states in the cache: where a prefix can be continued, what is kept for whom, and what goes first."""

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.states import StateSlots

SIZE = 4


def world(slots: int = 16, **settings) -> World:
    return World(**({"state_slots": slots, "page_size": SIZE, "cells": 1024, "context_length": 256} | settings))


def turn(the: World, name: str, prompt: list[int], most: int = 8, **more) -> int:
    """Tokens of the prompt that were cached; the reply is checked."""
    the.submit(name, prompt, most, **more)
    the.run()
    the.assert_right(name)
    return the.end(name).usage.cached


def test_a_program_goes_on_from_the_state_at_the_end_of_its_reply() -> None:
    the = world(speculation=DraftConfig(enabled=False))
    prompt = words(1, 40)
    assert turn(the, "a", prompt, program="p") == 0
    longer = prompt + the.out["a"] + words(2, 9)
    # All but the token drawn last and the one it was drawn from, which the state does not have.
    assert turn(the, "b", longer, program="p") == 40 + len(the.out["a"]) - 2
    start = 40 + len(the.out["a"]) - 2
    chunk = next(c for p in the.runner.plans for c in p.chunks if c.start == start and len(c.tokens) > 1)
    assert chunk.state is not None
    assert chunk.state.source != chunk.state.target, "the checkpoint stays for others"


def test_a_reply_that_the_next_prompt_leaves_out_costs_the_reply_alone() -> None:
    """A thinking model's history has no thoughts, so the next turn leaves the old one near the prompt's end."""
    the = world()
    prompt = words(1, 61)
    turn(the, "a", prompt, most=30, program="p")
    assert turn(the, "b", prompt[:58] + words(3, 30), program="p") == 52  # the last page's end 8 before the prompt's


def test_a_prefix_seen_a_second_time_is_shared_from_then_on() -> None:
    the = world()
    shared = words(1, 50)
    cached = [turn(the, str(i), shared + words(10 + i, 30), program=f"p{i}") for i in range(4)]
    assert cached == [0, 0, 48, 48]


def test_programs_that_wait_together_compute_their_prefix_once() -> None:
    the = world(slots=40, max_sequences=8, step_tokens=32)
    shared = words(1, 64)
    for i in range(8):
        the.submit(str(i), shared + words(20 + i, 20), 4, program=f"p{i}")
    the.run()
    for i in range(8):
        the.assert_right(str(i))
    assert sorted(the.end(str(i)).usage.cached for i in range(8)) == [0] + [64] * 7


def test_a_fork_goes_on_from_the_state_of_its_parent() -> None:
    the = world(max_sequences=6, session_rows=3)
    the.open("s")
    the.append("a", "s", words(1, 40))
    the.run()
    the.fork("s", "t")
    the.query("b", "s", words(2, 10), 4)
    the.query("c", "t", words(3, 10), 4)
    the.run()
    for name in "bc":
        the.assert_right(name)
        assert the.end(name).usage.cached == 40


def test_a_background_prefill_leaves_its_state_where_it_ends() -> None:
    the = world()
    prompt = words(1, 41)
    the.ahead("w", prompt, "p", "h")
    the.run()
    assert turn(the, "a", prompt + words(2, 10), program="p") == 41


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("drafts", [False, True])
def test_nothing_is_lost_where_states_do_not_fit(overlap: str, drafts: bool) -> None:
    """Sixty-four programs come by turns, with slots for a quarter of their states."""
    the = world(
        slots=16,
        max_sequences=8,
        cells=8192,
        overlap_steps=overlap,
        speculation=DraftConfig(enabled=drafts),
    )
    texts = {i: words(i, 30) for i in range(64)}
    for round_ in range(3):
        for i in texts:
            the.submit(f"{i}.{round_}", texts[i], 6, program=f"p{i}")
        the.run()
        for i in texts:
            the.assert_right(f"{i}.{round_}")
            texts[i] = texts[i] + the.out[f"{i}.{round_}"] + words(100 * round_ + i, 12)
    states = the.engine.cache.states
    assert states is not None
    assert the.engine.stats.checkpoints_evicted > 64
    assert states.slots.free + len(states.checkpoints) == states.slots.total


def test_a_step_that_failed_leaves_no_checkpoint_behind() -> None:
    the = world(overlap_steps="on", speculation=DraftConfig(enabled=False))
    the.submit("a", words(1, 30), 12, program="p")
    the.step()
    the.runner.fail = lambda plan: True
    the.run()
    the.runner.fail = lambda plan: False
    assert turn(the, "b", words(1, 30) + words(2, 5), program="p") in (0, 20)


# ---- slots and their order ----


def checkpoint(cache: KVCache, tokens: list[int], now: float) -> None:
    """A sequence comes, computes its tokens in one step and goes."""
    ids = np.asarray(tokens, np.int32)
    holding = cache.acquire("", ids, now).holding
    cache.grow(holding, len(ids))
    assert cache.states is not None
    assert holding.state is not None
    cache.states.advance(holding.state, holding.n_cached, len(ids) - holding.n_cached, 0)
    cache.finish(holding, ids, len(ids), now)
    cache.states.slots.begin_step()


def test_what_is_cheapest_to_compute_again_goes_first() -> None:
    cache = KVCache(200, SIZE, state_slots=4)
    for seed, n in ((1, 100), (2, 10), (3, 60)):
        checkpoint(cache, words(seed, n), seed)
    checkpoint(cache, words(4, 50), 4)
    checkpoint(cache, words(5, 20), 5)  # takes the slot of the one with 10 tokens
    found = [cache.peek("", np.asarray([*words(seed, n), 1], np.int32)) for seed, n in ((1, 100), (2, 10), (3, 60))]
    assert found == [100, 0, 60]


def test_what_was_not_used_for_long_goes_in_the_end() -> None:
    cache = KVCache(400, SIZE, state_slots=4)
    checkpoint(cache, words(1, 100), 1)
    for seed in range(2, 30):
        checkpoint(cache, words(seed, 20), seed)
    assert cache.peek("", np.asarray([*words(1, 100), 1], np.int32)) == 0


def test_a_slot_is_given_back_once() -> None:
    slots = StateSlots(4)
    slot = slots.alloc(1)
    assert slot is not None
    slots.release(slot)
    with pytest.raises(EngineError):
        slots.release(slot)
