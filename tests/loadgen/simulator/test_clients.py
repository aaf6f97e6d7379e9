"""Agents with their orchestrator on a simulated replica."""

from dataclasses import replace

import numpy as np
import pytest

from holdfast.loadgen.program import Beginning, Output, Program, Sized, ToolRun, Turn, sized
from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.clients import AgentDone, Orchestrated, Texts, Way
from holdfast.loadgen.simulator.policies import engine_config
from holdfast.loadgen.simulator.scenarios import PARTS, play_agents
from holdfast.loadgen.simulator.workloads import agents

MACHINE = machines.profile("14b-a100")
NEITHER, SPLIT, DISPATCH = Way(), Way(split=True), Way(dispatch=True)
SYSTEM, QUERY = 8_000, 2_000
CONFIG = replace(engine_config("program", MACHINE, host=False), without=("kv_tags",))


def agent(seconds: float = 3.0, first_s: float | None = None, number: int = 0, arrived: float = 1.0) -> Program:
    """Its second prompt has another system prompt; three tools of so many seconds, the first of them of `first_s`."""
    runs = tuple(ToolRun(f"t{n}", seconds, 500, 100 * (n + 1)) for n in range(3))
    runs = (replace(runs[0], seconds=seconds if first_s is None else first_s), *runs[1:])
    first = Turn(Sized(SYSTEM + QUERY), output=Output(tokens=300), system="first", runs=runs)
    last = Turn(Sized(1500), output=Output(tokens=200), system="t0")
    return sized(number, (first, last), arrived, Beginning(SYSTEM))


def done(way: Way = NEITHER, program: Program | None = None) -> AgentDone:
    simulated = Orchestrated(MACHINE, CONFIG, way)
    (one,) = simulated.run([program or agent()])
    assert simulated.engine.cache.stats.held == 0
    return one


def test_a_prompt_with_another_beginning_is_computed_while_tools_run() -> None:
    plain, split = done(), done(SPLIT)
    assert plain.turns[1].ahead == 0
    known = SYSTEM + QUERY + 300  # system prompt, query and answer
    assert split.turns[1].ahead == known - split.turns[1].within
    assert plain.first_s - split.first_s > 1.5
    assert plain.tool_s == pytest.approx(split.tool_s)


def test_what_does_not_fit_into_the_pause_is_left_for_the_turn() -> None:
    short, none = done(SPLIT, agent(0.5)), done(SPLIT, agent(0.0))
    assert 0 < short.turns[1].ahead < done(SPLIT).turns[1].ahead
    assert none.turns[1].ahead == 0
    assert none.first_s <= done(program=agent(0.0)).first_s / 0.98


def test_tools_that_begin_as_their_calls_close_end_sooner() -> None:
    assert done().tool_s == pytest.approx(3.0, abs=0.01)
    assert done(DISPATCH).tool_s == pytest.approx(3.0, abs=0.01), "the last call closes with the reply"
    plain, early = (done(way, agent(first_s=9.0)) for way in (NEITHER, DISPATCH))
    decoding = 200 * MACHINE.decode_s(1, 10_000)
    assert plain.tool_s - early.tool_s == pytest.approx(decoding, rel=0.1)
    assert plain.first_s - early.first_s == pytest.approx(decoding, rel=0.1)


def test_cached_tokens_count_by_who_computed_them() -> None:
    first, second = Orchestrated(MACHINE, CONFIG, NEITHER).run([agent(), agent(number=1, arrived=100.0)])
    assert (first.turns[0].across, first.turns[0].within) == (0, 0)
    assert first.turns[1].across == 0
    assert first.turns[1].within == 2_000, "what both system prompts begin with"
    assert second.turns[0].across == 8_000
    assert (second.turns[1].across, second.turns[1].within) == (6_000, 2_000)


def test_the_same_seed_gives_the_same_run_and_no_part_changes_what_is_asked() -> None:
    machine = replace(MACHINE, cells=90_000)
    runs = [play_agents("case", "fan-out", 3, 0.02, 1.0, machine, "baseline", 3) for _ in range(2)]
    assert runs[0] == runs[1]
    config = engine_config("program", machine, host=False)

    def prompts(way: Way, settings: dict[str, object]) -> list[int]:
        ended = Orchestrated(machine, replace(config, **settings), way).run(agents("fan-out", 3, 0.02, 3))
        return sorted(turn.prompt for each in ended for turn in each.turns)

    first, *others = (prompts(*part) for part in PARTS.values())
    assert others == [first] * len(others)


def test_tokens_of_no_two_pieces_meet() -> None:
    texts = Texts()
    pieces = [texts.new(10), texts.system("a", 4_000), texts.system("b", 4_000), texts.new(3)]
    assert np.array_equal(pieces[1][:2_000], pieces[2][:2_000])
    assert not set(pieces[1][2_000:].tolist()) & set(pieces[2].tolist())
    assert texts.system("a", 4_000) is pieces[1]
