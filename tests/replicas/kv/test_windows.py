"""Window pages in the cache: what a sequence owns as it goes, where it can go on, what checkpoints share."""

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.config import DraftConfig, least_window_cells
from holdfast.replicas.kv.cache import Holding, KVCache
from holdfast.replicas.kv.tensors import CellShape
from holdfast.replicas.types import window_pages

SIZE, WINDOW = 4, 20


def world(room: int = 12, **settings) -> World:
    defaults = {"window": WINDOW, "page_size": SIZE, "cells": 1024, "context_length": 256}
    return World(**({"window_cells": room * least_window_cells(WINDOW, SIZE)} | defaults | settings))


def turn(the: World, name: str, prompt: list[int], most: int = 8, **more) -> int:
    """Tokens of the prompt that were cached; the reply is checked."""
    the.submit(name, prompt, most, **more)
    the.run()
    the.assert_right(name)
    return the.end(name).usage.cached


def test_a_program_goes_on_from_the_end_of_its_reply() -> None:
    the = world(speculation=DraftConfig(enabled=False))
    prompt = words(1, 41)
    assert turn(the, "a", prompt, program="p") == 0
    longer = prompt + the.out["a"] + words(2, 9)
    end = 41 + len(the.out["a"]) - 1  # the last token has no cell
    assert turn(the, "b", longer, program="p") == end
    copies = [copy for plan in the.runner.plans for copy in plan.copies]
    assert [(copy.cells, copy.kind) for copy in copies] == ([(end % SIZE, 0), (end % SIZE, 1)] if end % SIZE else [])


def test_a_prefix_shorter_than_the_window_is_all_pages() -> None:
    the = world()
    turn(the, "a", words(1, 12), program="p", most=0)
    assert turn(the, "b", words(1, 12) + words(2, 5), program="p") == 12


def test_a_reply_that_the_next_prompt_leaves_out_costs_the_reply_alone() -> None:
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
    the = world(max_sequences=8, step_tokens=32)
    shared = words(1, 64)
    for i in range(8):
        the.submit(str(i), shared + words(20 + i, 20), 4, program=f"p{i}")
    the.run()
    for i in range(8):
        the.assert_right(str(i))
    assert sorted(the.end(str(i)).usage.cached for i in range(8)) == [0] + [64] * 7


def test_forks_and_prefills_ahead_go_on_where_they_end() -> None:
    the = world(max_sequences=6, session_rows=3)
    the.open("s")
    the.append("a", "s", words(1, 42))
    the.ahead("w", words(5, 41), "p", "h")
    the.run()
    the.fork("s", "t")
    the.query("b", "s", words(2, 10), 4)
    the.query("c", "t", words(3, 10), 4)
    the.submit("d", words(5, 41) + words(6, 9), 4, program="p")
    the.run()
    for name, cached in zip("bcd", (42, 42, 41), strict=True):
        the.assert_right(name)
        assert the.end(name).usage.cached == cached


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_nothing_is_lost_where_windows_do_not_fit(overlap: str) -> None:
    """Sixty-four programs come by turns, with window pages for a few of them; prompts are shorter than a chunk."""
    the = world(3, max_sequences=8, cells=8192, overlap_steps=overlap)
    texts = {i: words(i, 30) for i in range(64)}
    for round_ in range(3):
        for i in texts:
            the.submit(f"{i}.{round_}", texts[i], 6, program=f"p{i}")
        the.run()
        for i in texts:
            the.assert_right(f"{i}.{round_}")
            texts[i] = texts[i] + the.out[f"{i}.{round_}"] + words(100 * round_ + i, 12)
    assert the.engine.stats.checkpoints_evicted > 64
    assert the.engine.stats.preemptions == 0, "no sequence begins that could lack a window page"


def test_evicted_windows_come_back_from_the_host() -> None:
    the = world(2, cells=256, host_cells=4096, session_rows=2)
    first = words(1, 90)
    turn(the, "a", first, program="p")
    for i in range(8):
        turn(the, f"x{i}", words(10 + i, 90))
    assert turn(the, "b", first + the.out["a"] + words(2, 9), program="p") > 80
    assert the.engine.stats.tokens_reloaded > 0


# ---- pages ----


def sequence(cache: KVCache, tokens: np.ndarray, chunk: int, most: int = 0) -> Holding:
    """Computes its tokens chunk by chunk, with never more than `most` window pages."""
    holding = cache.acquire("", tokens, 0.0).holding
    assert cache.windows is not None
    assert holding.window is not None
    for end in [*range(holding.n_cached + chunk, len(tokens), chunk), len(tokens)]:
        assert cache.grow(holding, end) is not None
        assert not most or holding.window.held <= most
        cache.computed(holding, end)
    return holding


def test_a_sequence_owns_its_window_and_its_chunk() -> None:
    cache = KVCache(300, SIZE, window=(WINDOW, 40))
    tokens = np.arange(1000, dtype=np.int32)
    holding = sequence(cache, tokens, chunk=32, most=(WINDOW + 32) // SIZE + 1)
    assert holding.window is not None
    assert holding.window.held <= WINDOW // SIZE + 1 < window_pages(WINDOW, SIZE)
    assert cache.windows is not None
    assert cache.windows.pool.used == holding.window.held


def test_checkpoints_share_pages_and_the_next_turn_shares_them_too() -> None:
    cache = KVCache(300, SIZE, window=(WINDOW, 40))
    assert cache.windows is not None
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


# ---- what it is worth ----

SHAPES = {
    "gpt-oss-20b": (CellShape(12, 8, 64), CellShape(12, 8, 64), 128, 0.51),
    "Gemma-4-26B-A4B": (CellShape(5, 2, 512), CellShape(25, 8, 256), 1024, 0.11),
    "Muse-Glimmer-30B": (CellShape(13, 2, 128), CellShape(39, 2, 128), 2048, 0.27),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_context_of_128k_takes_the_window_and_not_all_of_it(name: str) -> None:
    full, windowed, window, most = SHAPES[name]
    length, size = 1 << 17, 16
    the = World(
        window=window,
        window_cells=8192 + 4 * window,
        cells=length + 1024,
        context_length=length,
        page_size=size,
        step_tokens=4096,
        speculation=DraftConfig(enabled=False),
    )
    prompt = words(1, length - 8)
    the.submit("a", prompt, 8, program="p")
    the.run()
    the.assert_right("a")
    cache = the.engine.cache
    assert cache.windows is not None
    held = cache.pool.used * size * full.values + cache.windows.pool.used * size * windowed.values
    before = cache.pool.used * size * (full.values + windowed.values)

    assert held < most * before
