"""Agents with their orchestrator on a simulated replica: what a turn is asked with, what is gained, and by whom."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.cluster.cli import MISUSE, main
from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.agents import Agent, Call, Iteration, Texts, draw
from holdfast.loadgen.simulator.orchestrated import Done, Orchestrated, Way
from holdfast.loadgen.simulator.orchestration import ROWS, Options, run
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.replicas.errors import ConfigError

MACHINE = machines.profile("14b-a100")
NEITHER, SPLIT, DISPATCH = Way(), Way(split=True), Way(dispatch=True)
SMALL = ["simulate-orchestrator", "--agents", "2", "--seeds", "2", "--cells", "90000"]


def agents(tool_s: float = 3.0, calls: int = 3, system: int = 8_000) -> list[Agent]:
    """One agent whose second prompt has another beginning: `calls` tools of `tool_s` seconds."""
    texts = Texts()
    asked = tuple(Call(100 * (n + 1), f"t{n}", tool_s, texts.new(500)) for n in range(calls))
    iterations = (Iteration(texts.system(0, system), 100 * calls, asked), Iteration(texts.system(1, system), 200, ()))
    return [Agent("agent", 1.0, texts.new(2_000), iterations)]


def done(way: Way = NEITHER, given: list[Agent] | None = None) -> Done:
    config = replace(engine_config("program", MACHINE, host=False), without=("kv_tags",))
    simulated = Orchestrated(MACHINE, config, way)
    (one,) = simulated.run(given or agents())
    assert simulated.engine.cache.stats.held == 0
    return one


def test_a_prompt_with_another_beginning_is_computed_while_tools_run() -> None:
    plain, split = done(), done(SPLIT)
    assert plain.found[1].ahead == 0
    known = len(agents()[0].iterations[1].system) + 2_000 + 300  # system prompt, query and answer
    assert split.found[1].ahead == known - split.found[1].within
    assert plain.first_s - split.first_s > 1.5
    assert plain.tool_s == pytest.approx(split.tool_s)


def test_what_does_not_fit_into_the_pause_is_left_for_the_turn() -> None:
    short, none = done(SPLIT, agents(tool_s=0.5)), done(SPLIT, agents(tool_s=0.0))
    assert 0 < short.found[1].ahead < done(SPLIT).found[1].ahead
    assert none.found[1].ahead == 0
    assert none.first_s <= done(given=agents(tool_s=0.0)).first_s / 0.98


def test_tools_that_begin_as_their_calls_close_end_sooner() -> None:
    plain, early = done(), done(DISPATCH)
    assert plain.tool_s == pytest.approx(3.0, abs=0.01)
    assert early.tool_s == pytest.approx(3.0, abs=0.01), "the last call closes with the reply"
    slow_first = agents()
    calls = slow_first[0].iterations[0].calls
    calls = (replace(calls[0], tool_s=9.0), *calls[1:])
    slow_first[0] = replace(
        slow_first[0], iterations=(replace(slow_first[0].iterations[0], calls=calls), slow_first[0].iterations[1])
    )
    plain, early = done(given=slow_first), done(DISPATCH, slow_first)
    decoding = 200 * MACHINE.decode_s(1, 10_000)
    assert plain.tool_s - early.tool_s == pytest.approx(decoding, rel=0.1)
    assert plain.first_s - early.first_s == pytest.approx(decoding, rel=0.1)


def test_found_tokens_are_told_by_who_computed_them() -> None:
    one, two = agents(), agents()
    again = replace(two[0], name="second", arrived=100.0, query=Texts().new(10)[:0])
    config = replace(engine_config("program", MACHINE, host=False), without=("kv_tags",))
    first, second = Orchestrated(MACHINE, config, Way()).run([one[0], replace(again, query=two[0].query + 1)])
    assert (first.found[0].across, first.found[0].within) == (0, 0)
    assert first.found[1].across == 0
    assert first.found[1].within == 2_000, "what both system prompts begin with"
    assert second.found[0].across == 8_000
    assert (second.found[1].across, second.found[1].within) == (6_000, 2_000)


def test_texts_of_agents_are_as_the_paper_tells() -> None:
    drawn = list(draw("fan-out", 300, 1.0, 0))
    turns = [len(agent.iterations) for agent in drawn]
    assert (np.median(turns), max(turns)) == (2, 7)
    fans = [len(iteration.calls) for agent in drawn for iteration in agent.iterations[:-1]]
    assert (np.median(fans), max(fans)) == (2, 21)
    for agent in drawn:
        length = len(agent.iterations[0].system) + len(agent.query)
        for iteration in agent.iterations[:-1]:
            told = sum(len(call.result) for call in iteration.calls)
            assert 0.47 <= length / (length + told) <= 0.83
            length += told
    assert {len(agent.iterations[0].calls) for agent in draw("append-only", 20, 1.0, 0)} == {1}


def test_the_same_seed_gives_the_same_run_and_no_row_changes_what_is_asked() -> None:
    options = Options(agents=6, cells=90_000)
    assert run(options, ROWS[0], 0.02, 3) == run(options, ROWS[0], 0.02, 3)
    config = engine_config("program", options.machine, host=False)
    prompts = {
        row.name: sorted(
            found.prompt
            for each in Orchestrated(options.machine, replace(config, **row.engine), row.way).run(
                draw("fan-out", 6, 0.02, 3)
            )
            for found in each.found
        )
        for row in ROWS
    }
    assert len({tuple(each) for each in prompts.values()}) == 1


def test_the_command_prints_and_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.json"
    assert main([*SMALL, "--rates", "0.01,0.02", "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert all(row.name in told for row in ROWS)
    assert "tools' share" in told
    assert len(json.loads(file.read_text())["runs"]) == 2 * (len(ROWS) + 2 * 2)


@pytest.mark.parametrize(
    "wrong",
    [["--workload", "poetry"], ["--agents", "0"], ["--rate", "0"], ["--tools", "-1"], ["--seeds", "0"]],
)
def test_wrong_arguments_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *wrong]) == MISUSE
    assert "must be" in (said := capsys.readouterr().err) or "there is no" in said


def test_tokens_of_no_two_pieces_meet() -> None:
    texts = Texts()
    pieces = [texts.new(10), texts.system(1, 4_000), texts.system(2, 4_000), texts.new(3)]
    assert np.array_equal(pieces[1][:2_000], pieces[2][:2_000])
    assert not set(pieces[1][2_000:].tolist()) & set(pieces[2].tolist())
    assert texts.system(1, 4_000) is pieces[1]
    with pytest.raises(ConfigError):
        next(draw("poetry", 1, 1.0, 0))
