"""What the workloads ask: drawn by seed, never the same twice but in `repeats`, in the order their names say."""

import json

import pytest

from holdfast.loadgen.workloads.catalog import WORKLOADS, describe, drawings
from holdfast.loadgen.workloads.drawing import Draw, warm_up
from holdfast.loadgen.workloads.script import Round, Sizes, Turn
from holdfast.replicas.errors import ConfigError

NAMED = dict(drawings(list(WORKLOADS)))
DISPATCHES = ("sequential", "interleaved", "round-robin")


def drawn(name: str, seed: int = 0, repetition: int = 0, **sizes: int) -> Round:
    return NAMED[name](Draw(seed, name, repetition), Sizes(**sizes))


def order(drawn: Round) -> list[Turn]:
    return [turn for wave in drawn.waves for lane in wave for turn in lane]


@pytest.mark.parametrize("name", NAMED)
def test_a_seed_draws_the_same_and_every_other_draw_differs_from_the_first_word_on(name: str) -> None:
    assert drawn(name) == drawn(name)
    rounds = (drawn(name), drawn(name, 1), drawn(name, 0, 1), warm_up(0, 0))
    starts = [{script.system[:20] for script in round_.scripts} for round_ in rounds]
    assert len(set.union(*starts)) == sum(len(each) for each in starts)


def test_what_is_drawn_apart_has_other_sessions_and_the_same_programs() -> None:
    one, other = (NAMED["bfcl"](Draw(0, "bfcl", 0, apart), Sizes(jobs=5)) for apart in ("1 a second", "2 a second"))
    assert (one.due, one.waves) == (other.due, other.waves)
    for mine, theirs in zip(one.scripts, other.scripts, strict=True):
        assert (mine.name, mine.steps, mine.pauses) == (theirs.name, theirs.steps, theirs.pauses)
        assert mine.system.split(".")[1:] == theirs.system.split(".")[1:]
        assert mine.session != theirs.session
        assert mine.system[:20] != theirs.system[:20]


def test_no_two_tenants_open_their_prompts_alike() -> None:
    starts = {(script.tenant, script.system[:20]) for script in drawn("tenants").scripts}
    assert len(starts) == len({start for _, start in starts}) == 1 + Sizes().quiet


def test_no_two_workloads_and_no_two_programs_share_a_session() -> None:
    sessions = [script.session for name in NAMED for script in drawn(name).scripts]
    assert len(set(sessions)) == len(sessions)


@pytest.mark.parametrize("name", NAMED)
def test_every_turn_of_the_waves_is_there_once_and_in_order(name: str) -> None:
    round_ = drawn(name)
    turns = order(round_)
    assert len(set(turns)) == len(turns)
    for number, script in enumerate(round_.scripts):
        mine = [turn.index for turn in turns if turn.script == number]
        assert mine == list(range(len(mine)))
        assert len(script.steps) >= len(mine)


def test_the_three_dispatches_send_the_agents_turns_in_their_order() -> None:
    told = {name: "".join("ABC"[t.script] + str(t.index + 1) for t in order(drawn(name))) for name in DISPATCHES}
    assert told["sequential"].startswith("A1A2A3A4A5B1B2")
    assert told["interleaved"].startswith("A1B1C1A2B2C2")
    assert told["round-robin"].startswith("A1B1C1B2C2A2C3A3B3")
    tools = {tool["function"]["name"] for script in drawn("sequential").scripts for tool in script.tools}
    assert len(tools) == 15


def test_sizes_size() -> None:
    assert len(order(drawn("webapp"))) == 35
    assert len(order(drawn("webapp", webapp_turns=4))) == 4
    (longer,) = drawn("webapp", webapp_turns=4, webapp_words=10).scripts
    assert [pause.words for pause in longer.pauses] == [3, 3, 4]
    assert [len(wave) for wave in drawn("burst").waves] == [8] * 5
    assert [len(wave) for wave in drawn("burst", burst=3, bursts=2).waves] == [3, 3]
    assert [len(wave) for wave in drawn("concurrency", programs=4).waves] == [4]
    assert len(drawn("bugfix", chain=5).scripts[0].steps[0].calls) == 5
    assert len(drawn("arrivals", jobs=7).due) == 7
    for wrong in ({"burst": 0}, {"rate": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sizes(**wrong)


def test_programs_arrive_as_often_as_the_rate_says() -> None:
    due = NAMED["arrivals"](Draw(0, "arrivals", 0), Sizes(jobs=400, rate=4.0)).due
    assert list(due) == sorted(due)
    assert due[-1] == pytest.approx(100, rel=0.2)


def test_a_burst_shares_its_preamble_and_nothing_else() -> None:
    scripts = drawn("burst").scripts
    assert len({json.dumps([script.system, script.tools]) for script in scripts}) == 1
    assert len({script.steps[0].user for script in scripts}) > 35


def test_what_the_user_says_holds_every_argument() -> None:
    for name in NAMED:
        for script in drawn(name).scripts:
            for step in script.steps:
                for call in step.calls:
                    assert all(str(value) in step.user for value in call.arguments.values())


def test_repeats_ask_before_what_they_measure() -> None:
    round_ = drawn("repeats")
    assert round_.fill == round_.waves
    assert round_.forced
    assert describe(round_) == "3 programs, 15 requests, up to 1 at once, 15 tools"
