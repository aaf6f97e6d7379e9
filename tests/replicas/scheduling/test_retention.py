"""Programs between their turns: what is kept, for how long, and who gives way."""

from math import inf

import pytest
from engine_world import World, talkative, words
from pinning import KEEP

from holdfast.replicas.config import DraftConfig, RetentionConfig
from holdfast.replicas.programs import ProgramKey
from holdfast.replicas.requests import Abort, ProgramEnded, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import AGES, LatencySnapshot, ToolLatency
from holdfast.replicas.retention.policy import RestoreCost
from holdfast.replicas.scheduling import pins as pins_module


def make(policy: str = KEEP, share: float = 1.0, tenant_share: float = 1.0, ttl: float = 20.0, **settings) -> World:
    retention = RetentionConfig(policy, ttl if policy == KEEP else 60.0, share=share, tenant_share=tenant_share)
    room = {"cells": 256, "context_length": 256, "max_sequences": 6, "session_rows": 3}
    return World(**(room | settings), admission_ceiling=1.0, retention=retention)


def turn(
    world: World, program: str, prompt: list[int], began: float = 0.0, number: int = 0, scope: str = "", tools=("ls",)
) -> list[int]:
    """One turn of a program from its arrival to the call it makes; returns its conversation so far."""
    name = f"{scope}{program}.{len(world.out)}"
    world.serve(name, prompt, 4, scope=scope, began=began, program=program, turns=number)
    ended(world, name, program, scope, tools, number + 1)
    return prompt + world.out[name]


def ended(world: World, name: str, program: str, scope: str = "", tools=("ls",), number: int = 1, last=False) -> None:
    world.give(TurnEnded(name, scope, program, tools, last, number))


def pinned(world: World) -> set[str]:
    return {held.program.key.name for held in world.engine.scheduler.retention.pins}


def by_age(*seconds: float) -> list[int]:
    """How many are no longer than each of `AGES`."""
    return [sum(each <= age for each in seconds) for age in AGES]


def flood(world: World, n: int = 200, began: float = 99.0) -> str:
    """A prompt that needs more than what nobody keeps."""
    name = f"flood{len(world.out)}"
    world.submit(name, words(len(world.out) + 500, n), 4, began=began)
    return name


def test_a_turn_is_kept_until_it_is_known_what_it_called_and_then_for_its_time():
    world = make()
    world.serve("a", words(1, 40), 4, program="p")
    assert pinned(world) == {"p"}, "nobody has said yet what it called"
    ended(world, "a", "p")
    finished = world.end("a").timing.finished
    assert world.engine.due == finished + 20.0, "the engine says when it has to look again"
    for after, kept in ((19.5, {"p"}), (20.0, set())):
        world.now = finished + after
        world.idle()
        assert pinned(world) == kept
    assert world.engine.due is None
    assert world.engine.cache.cells.in_use == 0
    assert world.engine.stats.pins == world.engine.stats.pins_expired == 1


def test_what_nobody_speaks_of_is_let_go():
    world = make()
    world.serve("a", words(1, 40), 4, program="p")
    world.now += 1.5
    world.idle()
    assert pinned(world) == set()


def test_the_next_turn_finds_its_cells_where_without_a_pin_they_are_gone():
    for policy, hits in ((KEEP, 1), ("none", 0)):
        world = make(policy)
        text = turn(world, "p", words(1, 100))
        late = flood(world, 120)
        world.begin("q", words(8, 60), 4, program="q")  # takes what is left, and all in turn
        world.serve("b", text + words(2, 6), 4, program="p", began=0.0, turns=1)
        world.assert_right(late)
        assert world.engine.stats.pin_hits == hits
        assert (world.end("b").usage.cached > 90) == bool(hits)


@pytest.mark.parametrize("end", ["last", "flag", "program", "no tool time"])
def test_the_last_turn_leaves_nothing(end):
    world = make("continuum" if end == "no tool time" else KEEP)
    world.serve("a", words(1, 40), 4, program="p", ends=end == "flag")
    if end == "flag":
        assert pinned(world) == set()
    elif end == "program":
        world.give(ProgramEnded("", "p"))
    else:
        ended(world, "a", "p", last=end == "last")
    assert pinned(world) == set()
    assert world.engine.cache.cells.in_use == 0


def test_turns_are_counted_anew_after_each_answer():
    world = make("continuum")
    for question in range(3):
        for number in range(1, 6):
            name = f"{question}.{number}"
            world.give(TurnEnded(name, "", "p", (), number == 5, 5 * question + number, 5 * question))
    learned = world.engine._load.turns
    assert (learned.programs, learned.mean) == (3, 5.0)
    assert learned.eta == pytest.approx(1.0)


def two_that_pause() -> World:
    """Programs `early`, whose tool is a slow one, and `late`, whose tool takes 9 s, both pinned."""
    world = make("expected_waste")
    tools = {("", "ls"): ToolLatency(1000, 9.0, 0.0, (9.0,)), ("", "make"): ToolLatency(1000, 50.0, 0.0, (50.0,))}
    world.give(ToolLatencies(LatencySnapshot(ToolLatency(2000, 25.0, 0.0, (9.0, 50.0)), tools)))
    world.engine._load._prefill.cost = RestoreCost(c=5.0)
    turn(world, "early", words(1, 80), began=1.0, tools=("make",))
    turn(world, "late", words(2, 80), began=2.0)
    return world


def test_under_expected_waste_cells_are_kept_past_their_time_while_nobody_is_short_of_them():
    world = two_that_pause()
    world.now += 30.0
    world.serve("other", words(3, 20), 4, began=9.0)
    assert pinned(world) == {"early", "late"}
    world.now += 60.0
    world.idle()
    assert pinned(world) == set(), "`most_s` bounds it"


def test_under_expected_waste_what_is_worth_least_gives_way_first_though_its_program_came_first():
    world = two_that_pause()
    flood(world, 100, began=0.5)
    world.run()
    assert pinned(world) == {"late"}
    assert world.engine.stats.pins_given_way == 1


def test_under_expected_waste_what_has_lapsed_is_taken_by_programs_that_come_later_and_what_has_not_is_not():
    world = two_that_pause()
    world.begin("runs", talkative(20, 30), 30, began=0.1)
    name = flood(world, 60, began=99.0)
    world.step()
    assert pinned(world) == {"late"}, "the slow one gave way, the other did not"
    world.run()
    world.assert_right(name)


@pytest.mark.parametrize(
    ("away", "first"),
    [
        ({}, "late"),
        ({"early": 5.0}, "early"),
        ({"early": 1.0, "late": 2.0}, "late"),
        ({"early": 2.0, "late": 1.0}, "early"),
    ],
)
def test_under_expected_waste_of_what_is_worth_its_cells_the_latest_gives_way_first_unless_another_is_away(away, first):
    """Of those that are away it is who has been for longest."""
    world = two_that_pause()
    pins = world.engine.scheduler.retention.pins
    for held in pins:
        pins.lapses(held, world.now + 60.0)
        held.away = world.now - away.get(held.program.key.name, -60.0)
    flood(world, 100, began=0.5)
    world.run()
    assert {"early", "late"} - pinned(world) == {first}


def test_under_expected_waste_who_is_away_is_told_by_what_turns_wait_that_have_no_cells():
    """Nobody has waited when the first two pause; then turns have, for long, and for less than the tool takes."""
    world, tools = two_that_pause(), ("make",)
    world.engine._load.waited(100.0)
    turn(world, "patient", words(4, 20), began=3.0, tools=tools)
    for _ in range(99):
        world.engine._load.waited(1.0)
    turn(world, "brief", words(5, 20), began=4.0, tools=tools)
    away = {held.program.key.name: held.away - held.since for held in world.engine.scheduler.retention.pins}
    assert away.pop("patient") > 50.0
    assert away == {"early": inf, "late": inf, "brief": 0.0}


def all_give_way(away: float = inf) -> World:
    """Both lose their cells to a program that came before them; `late` is away for long `away` seconds from now on."""
    world = two_that_pause()
    (late,) = [held for held in world.engine.scheduler.retention.pins if held.program.key.name == "late"]
    late.away = world.now + away
    flood(world, 200, began=0.5)
    world.run()
    assert pinned(world) == set()
    return world


def goes_first(world: World) -> bool:
    """Whether a turn of `late` that comes now starts before a program that came first and has no cells."""
    for i in range(2):
        world.submit(f"runs{i}", words(30 + i, 8), 12, began=0.1)
    world.step()
    world.submit("before", words(50, 200), 4, began=1.0)
    world.serve("again", words(2, 80), 4, began=2.0, program="late", turns=1)
    return world.end("again").timing.scheduled < world.end("before").timing.scheduled


@pytest.mark.parametrize(
    ("after", "away", "first"), [(2.0, inf, True), (60.0, inf, False), (2.0, 1.0, False), (2.0, 8.0, True)]
)
def test_under_expected_waste_who_lost_its_cells_goes_first_where_it_comes_back_in_time(after, away, first):
    """Before keeping them would have cost more than losing them, here some 5 s, and before it is away for long."""
    world = all_give_way(away)
    world.now += after
    assert goes_first(world) is first
    late = world.engine.programs.find(ProgramKey("", "late"))
    assert late.first_until == -inf, "its place is not kept: it has run since"


@pytest.mark.parametrize(("after", "reload", "first"), [(2.0, None, True), (40.0, None, True), (40.0, 0.01, False)])
def test_under_expected_waste_who_has_its_cells_goes_first_unless_a_tier_restores_them_for_less(after, reload, first):
    """And then only where it comes within what the copy takes."""
    world = two_that_pause()
    world.engine._load.reload = reload
    world.now += after
    assert goes_first(world) is first


def test_a_replica_knows_its_pauses_from_their_beginning():
    world = make("expected_waste")
    pauses = world.engine._load.pauses
    text = turn(world, "p", words(1, 20))
    turn(world, "q", words(2, 20))
    since = {held.program.key.name: held.since for held in world.engine.scheduler.retention.pins}
    world.now = since["p"] + 7.0
    found = pauses.known(("", "ls"), world.now)
    assert found.by_age.tolist() == [by_age(), by_age(7.0, world.now - since["q"])], "from the end of the turn"
    world.submit("again", text + words(3, 4), 4, program="p", turns=1)
    world.give(ProgramEnded("", "q"))
    at = world.now
    world.run()
    world.now += 100.0
    found = pauses.known(None, world.now)
    assert found.by_age.tolist() == [by_age(7.0), by_age(at - since["q"])], "nobody waits for it any more"
    ended(world, "again", "p", number=2, last=True)
    assert pauses.known(None, world.now).by_age.tolist() == found.by_age.tolist()


def test_a_pin_outlives_its_deadline_while_its_next_turn_waits():
    world = make(ttl=5.0, completion_reserve=150)
    text = turn(world, "p", words(1, 60), began=0.5)
    world.begin("long", words(9, 40), 150, began=0.1)  # the ceiling lets nobody in beside it
    world.submit("b", text + words(2, 90), 40, program="p", began=0.5, turns=1)
    world.now += 50.0
    world.step()
    assert pinned(world) == {"p"}
    assert world.engine.occupancy().waiting == 1
    world.give(Abort("b"))
    world.step()
    assert pinned(world) == set(), "it has gone, and the time is over"
    world.run()


def test_programs_that_arrived_later_give_way_the_last_one_first():
    world = make()
    for i, program in enumerate("abc"):
        turn(world, program, words(i, 50), began=1.0 + i)
    world.begin("runs", words(70, 4), 20, began=0.5)
    late = flood(world, 90, began=9.0)
    world.step()
    assert pinned(world) == set("abc"), "who came later waits"
    assert world.engine.occupancy().waiting == 1
    world.give(Abort(late))
    early = flood(world, 90, began=1.5)
    world.step()
    assert pinned(world) == set("ab"), "who came before does not"
    world.run()
    world.assert_right(early)
    assert world.engine.stats.pins_given_way == 1


def test_its_own_cells_do_not_give_way_to_a_turn():
    world = make()
    texts = {program: turn(world, program, words(ord(program), 70), began=ord(program)) for program in "abc"}
    world.begin("next", texts["c"] + words(5, 60), 4, program="c", began=ord("c"), turns=1)
    assert pinned(world) == {"a"}
    world.run()
    world.assert_right("next")
    assert world.end("next").usage.cached >= 70


def test_pins_keep_no_more_than_their_share():
    world = make(share=0.5)
    for i, program in enumerate("abcd"):
        turn(world, program, words(i, 50), began=5.0 - i)
        assert world.engine.occupancy().cells_pinned <= 128
    assert pinned(world) == set("cd"), "who arrived first stays"
    assert world.engine.stats.pins_refused == 2


def test_a_tenant_keeps_no_more_than_its_share():
    world = make(tenant_share=0.25)
    turn(world, "other", words(9, 50), began=99.0, scope="two")
    for i, program in enumerate("abc"):
        turn(world, program, words(i, 50), began=1.0 + i, scope="one")
    assert pinned(world) == {"a", "other"}


def test_the_row_of_a_pinned_program_goes_last():
    world = make(cells=512)
    turn(world, "kept", words(1, 20))
    for program in ("x", "y"):
        world.serve(program, words(ord(program), 20), 4, program=program)
        ended(world, program, program, last=True)
    turn(world, "new", words(3, 20))
    parked = {program.key.name for program in world.engine.programs if program.row is not None}
    assert parked == {"kept", "y", "new"}


def test_new_books_keep_what_was_learned_and_no_pin():
    world = make()
    turn(world, "p", words(1, 20))
    world.engine._load.waited(3.0)
    world.engine.cache.sound = False
    world.step()
    assert pinned(world) == set()
    assert world.engine._load.conditions().wait_s == 3.0


def test_a_prompt_that_runs_takes_the_cells_that_another_program_keeps_rather_than_wait_for_ever(monkeypatch):
    monkeypatch.setattr(pins_module, "SETTLE_S", 1000.0)
    world = make(cells=160, completion_reserve=4, step_tokens=1)
    world.submit("a", talkative(20, 90), 90, began=1.0, program="p")
    world.serve("b", words(2, 90), 4, began=2.0)  # there was room for it, until the other wrote on
    assert world.engine.stats.pins_given_way == 1
    world.assert_right("a")


@pytest.mark.parametrize(("began", "given_way", "preemptions"), [(9.0, 1, 0), (0.1, 0, 1)])
def test_cells_for_a_next_token_come_from_who_arrived_last(began, given_way, preemptions):
    world = make(cells=160, ttl=1000.0, completion_reserve=4, speculation=DraftConfig(enabled=False))
    turn(world, "kept", words(5, 36), began=began)  # 40 cells
    world.submit("a", talkative(20, 60), 60, began=1.0)
    world.submit("b", talkative(21, 60), 60, began=2.0)
    world.run_until("a")
    assert (world.engine.stats.pins_given_way, world.engine.stats.preemptions) == (given_way, preemptions)
    world.run()
    world.assert_right("a", "b")


def test_no_pin_gives_way_to_a_request_that_has_no_room_even_then():
    world = make()
    turn(world, "before", words(1, 100), began=1.0)
    turn(world, "behind", words(2, 40), began=9.0)
    world.begin("runs", talkative(20, 60), 60, began=0.1)
    waits = flood(world, 120, began=2.0)  # all that is behind it are 44 cells
    world.step()
    assert not world.ends[waits]
    assert world.engine.occupancy().waiting == 1
    assert pinned(world) == {"before", "behind"}
    world.run()
    world.assert_right(waits)


def test_a_pin_whose_cells_others_keep_as_well_does_not_give_way():
    """Dropping it would make no room: the running sequence goes on from the same beginning."""
    world = make()
    shared = turn(world, "shared", words(1, 60), began=9.0)
    turn(world, "alone", words(2, 60), began=8.0)
    world.begin("runs", shared + words(3, 8), 40, began=0.1)
    comes = flood(world, 90, began=2.0)
    world.step()
    assert not world.engine.occupancy().waiting
    assert pinned(world) == {"shared"}, "the latest program gives way first, but for one that makes no room"
    world.run()
    world.assert_right(comes)
    assert world.engine.stats.pins_given_way == 1


def test_beyond_its_share_a_tenant_loses_a_pin_that_makes_room_and_not_the_latest_that_makes_none():
    """A program and the branch off it keep the same cells: without the branch's pin no fewer would be kept."""
    world = make(tenant_share=0.5)  # 128 cells
    shared = turn(world, "shared", words(1, 60), began=1.0)
    turn(world, "alone", words(2, 40), began=2.0)
    world.serve("branch", shared, 0, began=9.0, program="branch")
    ended(world, "branch", "branch")
    assert pinned(world) == {"shared", "alone", "branch"}
    grown = turn(world, "shared", shared + words(3, 24), began=1.0, number=1)
    assert len(grown) > 88
    assert pinned(world) == {"shared", "branch"}
    assert world.engine.stats.pins_refused == 1
