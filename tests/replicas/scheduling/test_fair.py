"""Sharing among tenants: shares by weight while all wait, no credit for being away, nobody starves."""

from collections import Counter

import pytest
from engine_world import World, words
from hypothesis import given, settings
from hypothesis import strategies as st
from pinning import KEEP

from holdfast.replicas.config import DraftConfig, RetentionConfig
from holdfast.replicas.requests import TurnEnded


def one_row() -> World:
    """An engine that serves one request at a time, a step a second."""
    world = World(order="fair", max_sequences=1, queue_timeout_s=1e9, speculation=DraftConfig(enabled=False))
    world.step_s = 1.0
    return world


def finished(world: World) -> list[str]:
    """Names of what has finished, in that order."""
    done = [name for name, ends in world.ends.items() if ends]
    return sorted(done, key=lambda name: world.end(name).timing.finished)


def flood(world: World, tenant: str, count: int, weight: float = 1.0, tokens: int = 6) -> None:
    """`count` requests of a tenant at once, each another program."""
    for _ in range(count):
        name = f"{tenant}{sum(known.startswith(tenant) for known in world.ends)}"
        text = words(len(world.ends), 4)
        world.submit(name, text, tokens, scope=tenant, program=name, began=1.0 + len(world.ends), weight=weight)


def served(world: World, count: int) -> Counter[str]:
    """How many of the next `count` requests that finish are whose."""
    before = len(finished(world))
    while len(finished(world)) < before + count:
        world.step()
    return Counter(name[0] for name in finished(world)[before : before + count])


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 10), (3.0, 15), (0.25, 4)])
def test_who_waits_is_served_by_weight(weight, expected):
    world = one_row()
    flood(world, "a", 40)
    flood(world, "b", 40, weight)
    assert served(world, 20)["b"] == pytest.approx(expected, abs=1)


def test_what_is_kept_for_a_tenant_that_had_more_gives_way():
    retention = RetentionConfig(KEEP, most_s=50.0)
    room = {"cells": 1024, "context_length": 1024, "admission_ceiling": 1.0, "speculation": DraftConfig(enabled=False)}
    world = World(order="fair", max_sequences=8, retention=retention, **room)
    world.step_s = 0.1
    world.begin("long", words(99, 8), 200, scope="a", program="long", began=0.5)
    texts = {f"a{i}": words(i, 180) for i in range(4)}
    for i, (name, text) in enumerate(texts.items()):
        world.submit(name, text, 4, scope="a", program=name, began=1.0 + i / 10)
    world.run_until(*texts)
    for name in texts:
        world.give(TurnEnded(name, "a", name, ("t",), False, 1))
    assert world.engine.occupancy().pins == 4
    world.submit("b", words(200, 400), 4, scope="b", program="b")  # it came last, and needs what is kept
    for i, (name, text) in enumerate(texts.items()):
        again = text + world.out[name] + words(50 + i, 4)
        world.submit(f"{name} again", again, 4, scope="a", program=name, began=1.0 + i / 10, turns=1)
    world.step()
    world.step()
    assert world.engine.occupancy().running > 1
    world.run_until("b")
    assert not world.ends["long"], "nobody waits until the engine is empty"
    world.run()


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12))
def test_programs_of_one_tenant_that_each_ask_once_are_served_as_by_program(arrivals):
    orders = []
    for order in ("fair", "program"):
        world = World(order=order, max_sequences=2)
        for began, tokens in arrivals:
            name = f"{began} {len(world.ends)}"
            world.begin(name, words(len(world.ends), 5), tokens, scope="a", program=name, began=1.0 + began)
        world.run()
        orders.append([(name, world.end(name).timing.finished) for name in world.ends])
    assert orders[0] == orders[1]


def test_a_program_that_opens_ten_flows_has_one_turn():
    world = one_row()
    world.begin("first", words(99, 4), 3, scope="a", program="first")
    for i in range(10):
        world.submit(f"fork{i}", words(i, 4), 3, scope="a", program=f"sub{i}", began=1.0, root="parent")
    for i in range(3):
        world.submit(f"other{i}", words(20 + i, 4), 3, scope="a", program=f"other{i}", began=9.0 + i)
    world.run()
    assert finished(world)[:5] == ["first", "fork0", "other0", "other1", "other2"]


def test_a_program_that_began_long_ago_does_not_outrank_another_tenants():
    """Whoever keeps a program going for ever has its own share, and no more."""
    world = one_row()
    for i in range(6):
        world.submit(f"a{i}", words(i, 4), 5, scope="a", program="old", began=0.001)
        world.submit(f"b{i}", words(10 + i, 4), 5, scope="b", program=f"b{i}", began=50.0 + i)
    world.run()
    ends = [name[0] for name in finished(world)]
    assert all(abs(ends[:n].count("a") - ends[:n].count("b")) <= 1 for n in range(len(ends)))
