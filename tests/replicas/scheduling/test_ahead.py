"""Prompts computed before their turns come: what they save, whom they hold up (nobody), and how they end."""

import pytest
from engine_world import World, words
from pinning import KEEP

from holdfast.replicas.config import RetentionConfig
from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.programs import Kind, ProgramKey
from holdfast.replicas.requests import (
    Aborted,
    Finished,
    HandleReleased,
    PartialPrefill,
    ProgramEnded,
    Rejected,
    SessionTurn,
    TurnEnded,
)
from holdfast.replicas.scheduling import scheduler


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(scheduler, "BACKGROUND_CHUNK", 8)


def make(**settings) -> World:
    defaults = {"cells": 2048, "context_length": 512, "max_sequences": 8, "session_rows": 4}
    return World(**(defaults | settings))


def pins(world: World) -> list[ProgramKey]:
    return [pin.program.key for pin in world.engine.scheduler.retention.pins]


def handle(name: str) -> ProgramKey:
    return ProgramKey("", name, Kind.HANDLE)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_turn_computes_only_what_is_not_computed_yet(page_size, overlap):
    world = make(page_size=page_size, overlap_steps=overlap)
    known, new = words(1, 61), words(2, 9)
    world.ahead("ahead", known, "p", "h")
    world.run()
    end = world.end("ahead")
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.prompt, end.usage.completion) == ("length", 61, 0)
    stats = world.engine.stats
    assert (stats.ahead_computed, stats.prompt_computed) == (61, 0)
    assert world.serve("turn", known + new, program="p") == 61
    assert (stats.prompt_computed, stats.ahead_used, stats.ahead_wasted) == (9, 61, 0)


def test_it_is_extended_as_more_is_known():
    world = make()
    text = words(1, 90)
    for end in (30, 50, 80):
        world.ahead(f"to {end}", text[:end], "p", "h")
        world.run()
    assert world.engine.stats.ahead_computed == 80
    assert pins(world) == [handle("h")]
    world.serve("turn", text, program="p")
    assert (world.engine.stats.ahead_used, world.engine.stats.prompt_computed) == (80, 10)


def test_a_turn_that_comes_meanwhile_takes_over_what_is_there():
    world = make()
    text = words(1, 100)
    world.ahead("ahead", text[:80], "p", "h")
    world.steps(3)
    world.submit("turn", text, program="p")
    assert world.end("ahead").reason == "stop"
    assert world.engine.stats.ahead_ended["overtaken"] == 1
    world.run()
    world.assert_right("turn")
    assert world.end("turn").usage.cached == 24  # three chunks of eight
    assert (world.engine.stats.ahead_used, world.engine.stats.ahead_wasted) == (24, 0)


@pytest.mark.parametrize("begun", [0, 3])
@pytest.mark.parametrize("other", ["", "i"])
def test_no_work_ahead_ends_what_a_client_asked_for(begun, other):
    """Though the other one begins alike and is shorter."""
    world = make()
    text = words(1, 80)
    world.ahead("asked", text, "p", "h")
    world.steps(begun)
    world.ahead("other", text[:40], "p", other)
    world.run()
    assert (world.end("asked").reason, world.end("other").reason) == ("length", "length")
    assert handle("h") in pins(world)
    assert world.serve("turn", [*text, 5], program="p") == 80


def test_nobody_waits_for_it_so_it_makes_no_replica_look_busy():
    """Routers count what is in hand; with a prompt ahead for each program in a pause an idle replica looked crowded."""
    world = make(max_sequences=2, session_rows=1)
    for name in ("a", "b", "c"):
        world.ahead(name, words(1, 80), name)
    world.step()
    now = world.engine.occupancy()
    assert now.running + now.waiting == 3
    assert now.tokens_waiting == now.tokens_ahead > 0
    idle = world.engine.load()
    assert (idle.running, idle.waiting, idle.tokens_waiting) == (0, 0, 0)
    for name in ("turn", "another", "last"):
        world.submit(name, words(2, 30), program=name)
    world.step()
    load = world.engine.load()
    assert (load.running + load.waiting, load.waiting > 0) == (3, True)
    assert load.tokens_waiting == 30 * load.waiting
    world.run()
    now = world.engine.occupancy()
    assert (now.running, now.waiting, now.ahead_running, now.ahead_waiting) == (0, 0, 0, 0)
    assert (now.tokens_waiting, now.tokens_ahead) == (0, 0)


def test_it_has_one_narrow_chunk_of_the_room_that_prompts_leave():
    world = make(step_tokens=16)
    texts = {"a": words(1, 40), "b": words(2, 40), "decodes": words(3, 10), "prompt": words(4, 60)}
    for name, program in ("a", "p"), ("b", "q"):
        world.ahead(name, texts[name], program, name)
    world.submit("decodes", texts["decodes"], 60)
    world.serve("prompt", texts["prompt"], 2)
    steps = []  # tokens of prompts in each, those ahead apart
    for plan in world.runner.plans:
        sizes = dict.fromkeys(texts, 0)
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            for name, text in texts.items():
                sizes[name] += len(chunk.tokens) if text[chunk.start : end] == chunk.tokens.tolist() else 0
        steps.append((sizes["a"] + sizes["b"], sizes["prompt"] + sizes["decodes"]))
    world.assert_right("decodes", "prompt")
    assert max(ahead for ahead, _ in steps) == 8
    assert sum(ahead for ahead, _ in steps) == 80
    assert max(ahead + others for ahead, others in steps) == 16
    assert any(ahead and others for ahead, others in steps)
    assert world.engine.stats.ahead_ended == {"complete": 2, "overtaken": 0, "no_cells": 0}


def test_nothing_gives_way_to_it_and_it_ends_with_what_it_has():
    world = make(cells=128, context_length=128, retention=RetentionConfig(KEEP, most_s=50.0), admission_ceiling=1.0)
    world.serve("turn", words(1, 60), 4, program="q")
    world.give(TurnEnded("turn", "", "q", ("t",)))
    world.ahead("ahead", words(2, 90), "p", "h")
    world.run()
    assert world.end("ahead").reason == "stop"
    assert world.engine.stats.ahead_ended["no_cells"] == 1
    assert ProgramKey("", "q") in pins(world)
    assert world.engine.stats.pins_given_way == 0


def test_a_handle_keeps_it_until_its_time_is_over_or_it_is_released():
    world = make()
    for name in "hij":
        world.ahead(name, words(ord(name), 40), "p", name, keep_s=30.0)
    world.run()
    assert set(pins(world)) == {handle(name) for name in "hij"}
    world.give(HandleReleased("", "h"))
    assert set(pins(world)) == {handle("i"), handle("j")}
    world.serve("turn", [*words(ord("i"), 40), 5], program="p")
    assert handle("i") not in pins(world)
    assert handle("j") in pins(world)
    world.now += 40.0
    world.step()
    assert handle("j") not in pins(world)


@pytest.mark.parametrize("first", [0, 3, 20])
def test_one_handle_for_two_prompts_keeps_them_and_lets_go_of_both(first):
    """Two routers may extend it at once. `first`: steps that the one prompt has before the other comes."""
    world = make()
    world.ahead("one", words(1, 60), "p", "h")
    world.steps(first)
    world.ahead("other", words(2, 60), "p", "h")
    world.run()
    assert {type(world.end(name)) for name in ("one", "other")} == {Finished}
    assert set(pins(world)) == {handle("h")}
    world.give(HandleReleased("", "h"))
    assert pins(world) == []
    world.assert_idle()


def test_a_handle_released_while_it_is_computed_ends_it():
    world = make()
    world.ahead("ahead", words(1, 80), "p", "h")
    world.step()
    world.give(HandleReleased("other", "h"))
    assert not world.ends["ahead"]
    world.give(HandleReleased("", "h"))
    assert isinstance(world.end("ahead"), Aborted)
    assert pins(world) == []
    world.assert_idle()


def test_the_end_of_a_program_ends_it_and_what_was_kept_is_wasted():
    world = make()
    world.ahead("done", words(1, 40), "p", "h")
    world.run()
    world.ahead("begun", words(2, 40), "p", "i")
    world.step()
    world.give(ProgramEnded("", "p"))
    assert isinstance(world.end("begun"), Aborted)
    assert pins(world) == []
    assert world.engine.stats.ahead_wasted == world.engine.stats.ahead_computed == 48


@pytest.mark.parametrize(("most", "session"), [(3, None), (0, SessionTurn("s"))])
def test_it_draws_nothing_and_is_no_operation(most, session):
    world = make()
    world.open("s")
    world.submit("bad", [1, 2], most, background=PartialPrefill("h", 1.0), session=session)
    end = world.end("bad")
    assert isinstance(end, Rejected)
    assert (end.error.kind, end.error.field) == (ErrorKind.INVALID, "background")
