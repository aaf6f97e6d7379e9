"""A salt narrows a tenant's cache: only what came with the same is found, whoever computes it first."""

import numpy as np
from engine_world import World, words
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.requests import ProgramEnded
from holdfast.replicas.speculation.drafter import TurnMemory
from holdfast.replicas.types import salted


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.integers(0, 1)), min_size=2, max_size=8))
def test_only_what_came_with_the_same_salt_is_found(asked):
    world, seen = World(cells=2048, context_length=256), set()
    for number, (salt, text) in enumerate(asked):
        cached = world.serve(f"r{number}", words(text, 40), 4, scope="a", cache_salt=salt)
        assert (cached >= 32) is ((salt, text) in seen)
        assert cached == 0 or (salt, text) in seen
        seen.add((salt, text))


def test_the_cells_of_a_salted_program_go_first_when_it_is_over():
    world = World(cells=256, context_length=256)
    for text, program in enumerate("pq"):
        world.submit(program, words(text, 60), 4, scope="a", program=program, cache_salt="x")
    world.run()
    world.give(ProgramEnded("a", "p"))
    world.serve("more", words(2, 170), 4, scope="a")
    over, kept = (world.engine.cache.peek("a\0salt\0x", np.asarray(words(text, 60), np.int32)) for text in (0, 1))
    assert over < kept


def test_drafts_are_made_of_turns_that_came_with_the_same_salt_alone():
    world = World(cells=2048, context_length=256, speculation=DraftConfig())
    steps = {}
    for name, salt in (("first", "x"), ("other", "y"), ("plain", ""), ("again", "x")):
        before = world.engine.stats.steps
        world.serve(name, words(0, 30), 24, scope="a", cache_salt=salt)
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
