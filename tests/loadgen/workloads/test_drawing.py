"""What the workloads ask: drawn by seed, never the same twice but in `repeats`, in the order their names say."""

import json

import pytest

from holdfast.loadgen.program import Program
from holdfast.loadgen.workloads.catalog import WORKLOADS, describe, drawings
from holdfast.loadgen.workloads.drawing import Draw, warm_up
from holdfast.loadgen.workloads.script import Round, Sizes
from holdfast.replicas.errors import ConfigError

NAMED = dict(drawings(list(WORKLOADS)))
DISPATCHES = ("sequential", "interleaved", "round-robin")


def drawn(name: str, seed: int = 0, repetition: int = 0, **sizes: int) -> Round:
    return NAMED[name](Draw(seed, name, repetition), Sizes(**sizes))


def order(drawn: Round) -> list[int]:
    """The programs whose next turns are sent."""
    return [place for wave in drawn.waves for lane in wave for place in lane]


def system(program: Program) -> str:
    return program.turns[0].prompt[0]["content"]


def users(program: Program) -> list[str]:
    return [m["content"] for turn in program.turns for m in turn.prompt if m["role"] == "user"]


@pytest.mark.parametrize("name", NAMED)
def test_a_seed_draws_the_same_and_every_other_draw_differs_from_the_first_word_on(name: str) -> None:
    assert drawn(name) == drawn(name)
    rounds = (drawn(name), drawn(name, 1), drawn(name, 0, 1), warm_up(0, 0))
    starts = [{system(program)[:20] for program in round_.programs} for round_ in rounds]
    assert len(set.union(*starts)) == sum(len(each) for each in starts)


def test_what_is_drawn_apart_has_other_sessions_and_the_same_programs() -> None:
    one, other = (NAMED["bfcl"](Draw(0, "bfcl", 0, apart), Sizes(jobs=5)) for apart in ("1 a second", "2 a second"))
    assert (one.due, one.waves) == (other.due, other.waves)
    assert one.session != other.session
    for mine, theirs in zip(one.programs, other.programs, strict=True):
        said = [[text.rpartition("\n\n")[2] for text in users(each)] for each in (mine, theirs)]
        assert (mine.id, said[0]) == (theirs.id, said[1])
        assert [turn.delay_ms for turn in mine.turns] == [turn.delay_ms for turn in theirs.turns]
        assert system(mine).split(".")[1:] == system(theirs).split(".")[1:]
        assert system(mine)[:20] != system(theirs)[:20]


def test_no_two_tenants_workloads_or_programs_share_a_session() -> None:
    starts = {(program.tenant, system(program)[:20]) for program in drawn("tenants").programs}
    assert len(starts) == len({start for _, start in starts}) == 1 + Sizes().quiet
    rounds = [drawn(name) for name in NAMED]
    sessions = [f"{round_.session}-{program.id}" for round_ in rounds for program in round_.programs]
    assert len(set(sessions)) == len(sessions)


@pytest.mark.parametrize("name", NAMED)
def test_a_program_has_as_many_turns_as_are_sent_however_the_model_answers(name: str) -> None:
    round_ = drawn(name)
    for place, program in enumerate(round_.programs):
        assert 0 < order(round_).count(place) <= len(users(program))


def test_the_three_dispatches_send_the_agents_turns_in_their_order() -> None:
    told = {name: "".join("ABC"[place] for place in order(drawn(name))) for name in DISPATCHES}
    assert told["sequential"].startswith("AAAAABB")
    assert told["interleaved"].startswith("ABCABC")
    assert told["round-robin"].startswith("ABCBCACAB")
    tools = {tool["function"]["name"] for program in drawn("sequential").programs for tool in program.turns[0].tools}
    assert len(tools) == 15


def test_sizes_size() -> None:
    assert len(order(drawn("webapp"))) == 35
    assert len(order(drawn("webapp", webapp_turns=4))) == 4
    plain, longer = (drawn("webapp", webapp_turns=4, webapp_words=words).programs[0] for words in (0, 10))
    words = [[len(str(turn.prompt[0]["content"]).split()) for turn in each.turns[1:4]] for each in (plain, longer)]
    assert [more - less for less, more in zip(*words, strict=True)] == [3, 3, 4]
    assert [len(wave) for wave in drawn("burst").waves] == [8] * 5
    assert [len(wave) for wave in drawn("burst", burst=3, bursts=2).waves] == [3, 3]
    assert [len(wave) for wave in drawn("concurrency", programs=4).waves] == [4]
    answers = [turn.output.answer for turn in drawn("bugfix", chain=5).programs[0].turns[:6]]
    assert sum(bool(answer.get("tool_calls")) for answer in answers) == 5
    assert len(drawn("arrivals", jobs=7).due) == 7
    for wrong in ({"burst": 0}, {"rate": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sizes(**wrong)


def test_programs_arrive_as_often_as_the_rate_says() -> None:
    due = NAMED["arrivals"](Draw(0, "arrivals", 0), Sizes(jobs=400, rate=4.0)).due
    assert list(due) == sorted(due)
    assert due[-1] == pytest.approx(100, rel=0.2)


def test_a_burst_shares_its_preamble_and_nothing_else() -> None:
    programs = drawn("burst").programs
    assert len({json.dumps([system(program), program.turns[0].tools]) for program in programs}) == 1
    assert len({users(program)[0] for program in programs}) > 35


def test_what_the_user_says_holds_every_argument() -> None:
    for name in NAMED:
        for program in drawn(name).programs:
            said = ""
            for turn in program.turns:
                said = next((m["content"] for m in turn.prompt if m["role"] == "user"), said)
                for call in turn.output.answer.get("tool_calls") or ():
                    arguments = json.loads(call["function"]["arguments"])
                    assert all(str(value) in said for value in arguments.values())


def test_repeats_ask_before_what_they_measure() -> None:
    round_ = drawn("repeats")
    assert round_.fill == round_.waves
    assert round_.forced
    assert describe(round_) == "3 programs, 15 requests, up to 1 at once, 15 tools"
