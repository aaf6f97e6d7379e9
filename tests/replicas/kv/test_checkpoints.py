"""Layers that do not read every cell: where a prefix can be continued, what is kept, and what is evicted first.

Layers with a window keep window pages, and recurrent layers keep states. Both can continue a prefix only at a
checkpoint.
"""

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.config import DraftConfig, least_window_cells
from holdfast.replicas.kv.cache import Holding, KVCache
from holdfast.replicas.kv.tensors import CellShape

SIZE, WINDOW = 4, 20
NO_DRAFTS = DraftConfig(enabled=False)
KINDS = ["windows", "states"]


def world(kind: str, room: int = 40, **settings) -> World:
    """An engine whose layers have window pages for `room` sequences, or `room` slots for states."""
    defaults = {"page_size": SIZE, "cells": 1024, "context_length": 256}
    if kind == "windows":
        defaults |= {"window": WINDOW, "window_cells": room * least_window_cells(WINDOW, SIZE)}
    else:
        defaults |= {"state_slots": room}
    return World(**(defaults | settings))


def test_a_program_continues_from_the_window_at_the_end_of_its_reply() -> None:
    the = world("windows", speculation=NO_DRAFTS)
    prompt = words(1, 41)
    assert the.serve("a", prompt, program="p") == 0
    longer = prompt + the.out["a"] + words(2, 9)
    end = 41 + len(the.out["a"]) - 1  # the last token has no cell
    assert the.serve("b", longer, program="p") == end
    copies = [copy for plan in the.runner.plans for copy in plan.copies]
    assert [(copy.cells, copy.kind) for copy in copies] == ([(end % SIZE, 0), (end % SIZE, 1)] if end % SIZE else [])


def test_a_program_continues_from_the_state_at_the_end_of_its_reply() -> None:
    the = world("states", speculation=NO_DRAFTS)
    prompt = words(1, 40)
    assert the.serve("a", prompt, program="p") == 0
    longer = prompt + the.out["a"] + words(2, 9)
    # The state lacks the token drawn last and the one that it was drawn from.
    start = 40 + len(the.out["a"]) - 2
    assert the.serve("b", longer, program="p") == start
    chunk = next(c for p in the.runner.plans for c in p.chunks if c.start == start and len(c.tokens) > 1)
    assert chunk.state is not None
    assert chunk.state.source != chunk.state.target, "the checkpoint stays for others"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_without_the_last_reply_computes_that_reply_alone(kind: str) -> None:
    """The history of a thinking model has no thoughts, so the next turn leaves the old one near the prompt's end."""
    the = world(kind)
    prompt = words(1, 61)
    the.serve("a", prompt, 30, program="p")
    assert the.serve("b", prompt[:58] + words(3, 30), program="p") == 52  # the last page's end 8 before the prompt's


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_shared_after_its_second_use(kind: str) -> None:
    the = world(kind)
    shared = words(1, 50)
    cached = [the.serve(str(i), shared + words(10 + i, 30), program=f"p{i}") for i in range(4)]
    assert cached == [0, 0, 48, 48]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_wait_together_compute_their_prefix_once(kind: str) -> None:
    the = world(kind, max_sequences=8, step_tokens=32)
    shared = words(1, 64)
    for i in range(8):
        the.submit(str(i), shared + words(20 + i, 20), 4, program=f"p{i}")
    the.run()
    the.assert_right(*(str(i) for i in range(8)))
    assert sorted(the.end(str(i)).usage.cached for i in range(8)) == [0] + [64] * 7


# ---- window pages ----


def sequence(cache: KVCache, tokens: np.ndarray, chunk: int, most: int) -> Holding:
    """Compute `tokens` chunk by chunk, with never more than `most` window pages."""
    holding = cache.acquire("", tokens, 0.0).holding
    for end in [*range(holding.n_cached + chunk, len(tokens), chunk), len(tokens)]:
        assert cache.grow(holding, end) is not None
        assert holding.window.held <= most
        cache.computed(holding, end)
    return holding


def test_checkpoints_share_pages_and_the_next_turn_shares_them_too() -> None:
    cache = KVCache(300, SIZE, window=(WINDOW, 40))
    pool, tokens = cache.windows.pool, np.arange(200, dtype=np.int32)
    holding = cache.acquire("", tokens[:110], 0.0).holding
    holding.mark(104)
    cache.grow(holding, 110)
    cache.finish(holding, tokens[:110], 110, 0.0)
    assert len(cache.windows.checkpoints) == 2
    assert pool.used == 7  # positions 85 to 109 in pages of 4; two checkpoints apart have 5 and 6
    again = cache.acquire("", tokens[:150], 1.0)
    assert again.holding.n_cached == 110
    assert pool.used == 8, "the last page, which is not full, was copied"


SHAPES = {
    "gpt-oss-20b": (CellShape(12, 8, 64), CellShape(12, 8, 64), 128, 0.51),
    "Gemma-4-26B-A4B": (CellShape(5, 2, 512), CellShape(25, 8, 256), 1024, 0.11),
    "Muse-Glimmer-30B": (CellShape(13, 2, 128), CellShape(39, 2, 128), 2048, 0.27),
}
"""Cells of full layers, cells of layers with a window, the window, and the share of the memory that is needed."""


def test_a_context_of_128k_takes_the_window_and_not_all_of_it() -> None:
    length, size = 1 << 17, 16
    for full, windowed, window, most in SHAPES.values():
        cache = KVCache((length + 1024) // size, size, window=(window, (8192 + 4 * window) // size))
        holding = sequence(cache, np.arange(length, dtype=np.int32), chunk=4096, most=(window + 4096) // size + 2)
        cache.finish(holding, np.arange(length, dtype=np.int32), length, 0.0)
        held = cache.pool.used * size * full.values + cache.windows.pool.used * size * windowed.values
        assert held < most * cache.pool.used * size * (full.values + windowed.values)


# ---- state slots and their order ----


def checkpoint(cache: KVCache, tokens: list[int], now: float) -> None:
    """A sequence computes its tokens in one step and ends."""
    ids = np.asarray(tokens, np.int32)
    holding = cache.acquire("", ids, now).holding
    cache.grow(holding, len(ids))
    cache.states.advance(holding.state, holding.n_cached, len(ids) - holding.n_cached, 0)
    cache.finish(holding, ids, len(ids), now)
    cache.states.slots.begin_step()


def test_the_state_that_is_cheapest_to_compute_again_is_evicted_first() -> None:
    cache = KVCache(200, SIZE, state_slots=4)
    for seed, n in ((1, 100), (2, 10), (3, 60)):
        checkpoint(cache, words(seed, n), seed)
    checkpoint(cache, words(4, 50), 4)
    checkpoint(cache, words(5, 20), 5)  # takes the slot of the one with 10 tokens
    found = [cache.peek("", np.asarray([*words(seed, n), 1], np.int32)) for seed, n in ((1, 100), (2, 10), (3, 60))]
    assert found == [100, 0, 60]
