"""A program's next turn: in the row where the last one ended, unless somebody needed it; and what rewriting costs."""

import zlib

import jinja2
import pytest
from engine_world import World, words
from fake_runner import VOCABULARY

from holdfast.replicas.config import RetentionConfig
from holdfast.replicas.requests import Abort, Stop

# As Qwen3's: what was thought before the last question is dropped.
DROPS_THOUGHTS = jinja2.Template(
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.thought and loop.index0 > question %}<think> {{ m.thought }} </think> {% endif %}"
    "{{ m.content }} <end> {% endfor %}<assistant>"
)


def rendered(messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation, one for each word."""
    question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    text = DROPS_THOUGHTS.render(messages=messages, question=question)
    return [zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1 for word in text.split()]


def make(**settings) -> World:
    return World(**({"cells": 2048, "context_length": 256, "max_sequences": 8, "session_rows": 4} | settings))


def turns(world: World, program: str, n: int, prompt: list[int]) -> list[int]:
    """`n` turns of a program; returns its conversation."""
    for _ in range(n):
        name = f"{program}.{len(world.out)}"
        world.serve(name, prompt, max_tokens=5, program=program)
        prompt = prompt + world.out[name] + words(len(prompt), 7)
    return prompt


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_next_turn_is_in_the_same_row_and_computes_its_delta_alone(page_size):
    world = make(page_size=page_size)
    prompt = turns(world, "p", 1, words(1, 22))
    for _ in range(5):
        world.runner.plans.clear()
        computed = world.engine.stats.prompt_computed
        known = len(prompt) - 7 - 1  # all but what is new, and the last token drawn
        following = turns(world, "p", 1, prompt)
        assert world.engine.stats.prompt_computed - computed == len(prompt) - known
        assert not any(plan.copies for plan in world.runner.plans)
        assert {chunk.row for plan in world.runner.plans for chunk in plan.chunks} == {4}
        assert all(write.first >= known // page_size for plan in world.runner.plans for write in plan.writes)
        prompt = following
    assert world.engine.stats.turns_continued == 5
    assert world.engine.stats.tokens_rewritten == 0
    assert world.engine.occupancy().rows_parked == 1
    world.assert_idle()


def test_the_least_recently_used_program_gives_way():
    world = make()
    prompts = {name: turns(world, name, 1, words(ord(name), 20)) for name in "abcd"}
    turns(world, "a", 1, prompts["a"])
    turns(world, "e", 1, words(5, 20))  # takes the row of b
    assert world.engine.occupancy().rows_parked == 4
    for name, continued in (("c", 1), ("b", 0)):
        before = world.engine.stats.turns_continued
        turns(world, name, 1, prompts[name])
        assert world.engine.stats.turns_continued - before == continued
    world.assert_idle()


def test_parked_programs_stand_in_nobodys_way():
    world = make(cells=256, retention=RetentionConfig(policy="none"))
    for program in range(4):
        turns(world, f"p{program}", 1, words(program, 40))
    assert world.engine.occupancy().rows_parked == 4
    assert world.engine.cache.cells.in_use == 0
    world.submit("all", words(9, 200), max_tokens=40)  # needs nearly every cell
    for i in range(8):
        world.submit(f"row{i}", words(20 + i, 8), program=f"new{i}")  # and every row
    world.run()
    world.assert_right(*world.prompts)
    world.assert_idle()


def test_programs_of_different_tenants_share_no_row():
    world = make()
    world.serve("mine", words(1, 30), scope="one", program="p")
    assert world.serve("theirs", words(1, 30) + words(2, 9), scope="two", program="p") == 0
    assert world.engine.occupancy().rows_parked == 2


@pytest.mark.parametrize("how", [Abort, Stop])
def test_a_turn_that_is_cut_short_parks_what_it_computed(how):
    world = make()
    world.submit("a", words(1, 21), max_tokens=50, program="p")
    world.steps(2)
    world.give(how("a"))
    world.serve("b", words(1, 21) + world.out["a"] + words(2, 5), program="p")
    assert world.engine.stats.turns_continued == 1


def test_thoughts_that_the_template_drops_are_counted_and_the_true_prefix_is_cached():
    world = make(context_length=512)
    system = {"role": "system", "content": " ".join(f"rule{i}" for i in range(30))}
    messages = [system, {"role": "user", "content": "a question of some length"}]
    lost, before = 0, list[int]()
    for turn in range(3):
        prompt = rendered(messages)
        cached = world.serve(f"turn{turn}", prompt, max_tokens=4, program="p")
        if before:
            common = common_length(before, prompt)
            lost += len(before) - common
            assert cached >= common - world.config.page_size
            assert common > 30
        before = prompt + world.out[f"turn{turn}"][:-1]
        # The answer that is recorded has a thought in it; its tokens were computed with the call that follows.
        thought = " ".join(f"idea{turn}{i}" for i in range(12))
        messages.append({"role": "assistant", "thought": thought, "content": "an answer"})
        messages.append({"role": "tool", "content": f"result {turn}"})
        prompt = rendered(messages)
        world.serve(f"tool{turn}", prompt, max_tokens=4, program="p")
        lost += len(before) - common_length(before, prompt)
        before = prompt + world.out[f"tool{turn}"][:-1]
        messages.append({"role": "assistant", "content": "done"})
        messages.append({"role": "user", "content": f"question {turn}"})
    assert world.engine.stats.tokens_rewritten == lost
    assert lost >= 2 * 12


def common_length(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_turns_that_come_back_at_once_wait_for_room_rather_than_take_it_from_each_other():
    """What is cached of a prompt takes room as well, once its request runs and nobody may evict it."""
    world = World(cells=256, admission_ceiling=1.0, retention=RetentionConfig(policy="none"))
    for i in range(3):
        world.serve(f"a{i}", words(i, 70), max_tokens=2, program=f"p{i}")
    for i in range(3):
        history = words(i, 70) + world.out[f"a{i}"]
        world.submit(f"b{i}", history + words(10 + i, 6), max_tokens=16, program=f"p{i}", turns=1)
    world.step()
    assert world.engine.occupancy().running == 2
    world.run()
    assert world.engine.stats.preemptions == 0
    world.assert_right(*world.prompts)


@pytest.mark.parametrize("page_size", [1, 4])
def test_without_the_prefix_cache_a_program_keeps_its_cells_and_nobody_else_finds_them(page_size):
    world = make(page_size=page_size, without=("prefix_cache",))
    prompt = turns(world, "p", 3, words(1, 22))
    stats = world.engine.stats
    known = len(prompt) - 7 - 1
    assert stats.turns_continued == 2
    cached = stats.prompt_cached
    for program in ("q", ""):  # another program, and a request of none
        turns(world, program, 1, prompt)
        assert stats.prompt_cached == cached
    turns(world, "p", 1, prompt)
    assert stats.prompt_cached == cached + known
    world.assert_idle()
