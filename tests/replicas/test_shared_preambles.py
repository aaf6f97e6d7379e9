"""What an operator lists for all tenants: computed once, nobody's, kept."""

import json

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import SHARED
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.service import read_preambles
from holdfast.replicas.types import CellLimits

PREAMBLE = words(77, 42)  # ten pages and a half


def sharing(**settings) -> World:
    world = World(**{"order": "fair", "page_size": 4} | settings)
    world.engine.share([np.asarray(PREAMBLE, np.int32)])
    return world


def ask(world: World, name: str, scope: str, n: int = 8, **more) -> int:
    """Cached tokens of a prompt that begins with the preamble."""
    return world.serve(name, PREAMBLE + words(sum(name.encode()), n), 3, scope=scope, **more)


def test_no_tenant_computes_it_and_none_has_its_cells():
    world = sharing()
    assert ask(world, "a", "a") == ask(world, "b", "b") == 40
    assert ask(world, "c", "b") >= 42, "what goes on from it is the tenant's own"
    used = world.engine.cache.tree.tenants.used
    assert used[SHARED] == 11
    assert used["a"] == 3  # of 42 + 8 + 2 tokens those behind the fortieth
    assert world.engine.stats.prompt_computed == 10 + 10 + 8
    assert world.engine.stats.own_tokens["preamble"] == 42


@pytest.mark.parametrize("model", [{"state_slots": 16}, {"window": 20, "window_cells": 160}])
def test_tenants_go_on_from_its_checkpoint(model):
    world = sharing(**model)
    assert [ask(world, name, name) for name in "abc"] == [40, 40, 40]
    assert world.engine.stats.own_tokens["preamble"] == 42


def test_a_prompt_that_leaves_it_on_the_way_finds_what_is_the_same():
    world = sharing()
    assert world.serve("a", PREAMBLE[:30] + words(5, 9), 2, scope="a") == 28
    assert ask(world, "b", "a") == 40


def test_it_stays_whatever_else_needs_room():
    world = sharing(cells=96)
    assert ask(world, "a", "a") == 40
    for i in range(12):
        world.serve(f"n{i}", words(i, 40), 2, scope="n")
    assert ask(world, "b", "b") == ask(world, "c", "c", cells=CellLimits(ceiling=0.25)) == 40


def test_it_is_computed_again_with_new_books():
    world = sharing()
    assert ask(world, "a", "a") == 40
    world.engine._start_anew(RuntimeError("the books are lost"), world.now)
    world.run()
    assert ask(world, "b", "b") == 40


def test_salted_scopes_find_it_too_and_nothing_of_each_other():
    world = sharing()
    assert ask(world, "a", "a") == 40
    for name in ("b", "c"):
        assert world.serve(name, PREAMBLE + words(3, 9), 2, scope="a", cache_salt=name) == 40


@pytest.mark.parametrize("settings", [{"cells": 64}, {"without": ("prefix_cache",)}, {"context_length": 40}])
def test_what_leaves_no_room_is_refused_by_its_field(settings):
    with pytest.raises(ConfigError) as error:
        sharing(**settings)
    assert error.value.field == "shared_preambles"


def test_the_file_is_a_list_of_messages_and_tools(tmp_path):
    path = tmp_path / "preambles.json"
    system = [{"role": "system", "content": "You book trips."}]
    path.write_text(json.dumps([{"messages": system}]))
    assert read_preambles(str(path)) == [ChatPrompt(system)]
    for wrong in ("{}", "[[]]", '[{"messages": "x"}]', '[{"messages": [], "tools": []}]', '[{"text": ["x"]}]', "no"):
        path.write_text(wrong)
        with pytest.raises(ConfigError) as error:
            read_preambles(str(path))
        assert error.value.field == "shared_preambles"
    with pytest.raises(ConfigError):
        read_preambles(str(tmp_path / "none.json"))
