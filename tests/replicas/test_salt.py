"""A salt narrows a tenant's cache: only what came with the same is found, whoever computes it first."""

from dataclasses import replace

import numpy as np
from engine_world import World, words
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ProgramEnded, Submit
from holdfast.replicas.speculation.drafter import TurnMemory
from holdfast.replicas.types import salted


def ask(world: World, name: str, text: list[int], salt: str, tokens: int = 4, program: str = "") -> None:
    world.prompts[name] = (text, tokens)
    submit = Submit(
        name,
        tokens=np.asarray(text, np.int32),
        sampling=Sampling(tokens),
        scope="a",
        program_id=program,
        program_arrival=1.0,
    )
    world.give(replace(submit, cache_salt=salt))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.integers(0, 1)), min_size=2, max_size=8))
def test_only_what_came_with_the_same_salt_is_found(asked):
    world, seen = World(cells=2048, context_length=256), set()
    for number, (salt, text) in enumerate(asked):
        ask(world, f"r{number}", words(text, 40), salt)
        world.run()
        cached = world.end(f"r{number}").usage.cached
        assert (cached >= 32) is ((salt, text) in seen)
        assert cached == 0 or (salt, text) in seen
        seen.add((salt, text))


def test_the_cells_of_a_salted_program_go_first_when_it_is_over():
    world = World(cells=256, context_length=256)
    ask(world, "over", words(0, 60), "x", program="p")
    ask(world, "kept", words(1, 60), "x", program="q")
    world.run()
    world.give(ProgramEnded("a", "p"))
    ask(world, "more", words(2, 170), "")
    world.run()
    cache = world.engine.cache
    assert cache.peek("a\0salt\0x", np.asarray(words(0, 60), np.int32)) < cache.peek(
        "a\0salt\0x", np.asarray(words(1, 60), np.int32)
    )


def test_drafts_are_made_of_turns_that_came_with_the_same_salt_alone():
    world = World(cells=2048, context_length=256, speculation=DraftConfig())
    steps = {}
    for name, salt in (("first", "x"), ("other", "y"), ("plain", ""), ("again", "x")):
        before = world.engine.stats.steps
        ask(world, name, words(0, 30), salt, tokens=24)
        world.run()
        steps[name] = world.engine.stats.steps - before
    assert steps["first"] == steps["other"] == steps["plain"], "another salt's turn was drafted from"
    assert steps["again"] < steps["first"]
    assert set(world.engine._drafter._memory._scopes) == {"a", "a\0salt\0x", "a\0salt\0y"}


def test_salts_give_a_tenant_no_more_of_the_draft_memory():
    memory = TurnMemory(total_bytes=1 << 20, scope_bytes=1 << 15)
    memory.add("other", np.arange(50, dtype=np.int32))
    for i in range(100):
        memory.add(salted("a", str(i)), np.arange(i, i + 200, dtype=np.int32))
    assert memory.find("other") is not None
    assert memory.find(salted("a", "99")) is not None
    assert memory.nbytes == sum(index.nbytes for index in memory._scopes.values())
    assert memory.nbytes <= (1 << 15) + memory.find("other").nbytes
