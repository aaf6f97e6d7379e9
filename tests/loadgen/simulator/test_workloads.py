"""What is drawn: the same for a seed, to the figures of the traces."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest

from holdfast.loadgen.program import Program
from holdfast.loadgen.simulator import workloads
from holdfast.loadgen.simulator.workloads import CROWDS, KINDS, MAX_TOKENS, Crowd, Workload, agents, tokens_of
from holdfast.replicas.errors import ConfigError

SCALES = {"coding": 0.1}  # real sessions are longer than a context of the simulator


def children(programs: list[Program]) -> list[Program]:
    return [child for program in programs for turn in program.turns for child in turn.children]


def crowd(kind: str, programs: int = 400, seed: int = 0) -> list[Program]:
    return list(Crowd(kind, programs, 10.0).draw(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_says_all_and_only_the_named_size_changes(kind: str) -> None:
    workload = Workload(kind, 20, 0.5, scale=0.1)
    programs = list(workload.draw(3))
    assert programs == list(workload.draw(3)) != list(workload.draw(4))
    fast = list(Workload(kind, 20, 5.0, scale=0.1).draw(3))
    assert [program.arrived for program in programs] == pytest.approx([10 * program.arrived for program in fast])
    slower = list(Workload(kind, 20, 0.5, scale=0.1, tool_times=4.0).draw(3))
    for program, quick, slow in zip(programs, fast, slower, strict=True):
        for turn, same, longer in zip(program.turns, quick.turns, slow.turns, strict=True):
            assert longer.pause_s == 4.0 * turn.pause_s == 4.0 * same.pause_s
            assert (longer.added, longer.reply) == (same.added, same.reply) == (turn.added, turn.reply)


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_the_traces(kind: str) -> None:
    programs = list(Workload(kind, 500, 1.0, scale=SCALES.get(kind, 1.0)).draw(0))
    figures = KINDS[kind].figures
    turns = np.mean([len(program.turns) for program in programs])
    assert turns == pytest.approx(1 + (figures.most - 1) * figures.share, rel=0.05)
    tools = [turn.pause_s for program in programs for turn in program.turns if turn.runs]
    assert np.mean(tools) == pytest.approx(figures.tool_s, rel=0.15)
    assert programs[-1].arrived == pytest.approx(500, rel=0.1)


def test_coding_sessions_are_as_those_that_were_seen() -> None:
    parents = list(Workload("coding", 400, 1.0, scale=0.1).draw(0))
    agents = children(parents)
    assert len({program.number for program in parents + agents}) == len(parents) + len(agents)
    prompts, replies, gaps = [], [], []
    for program in parents + agents:
        lengths = list(accumulate(turn.added + turn.reply for turn in program.turns))
        prompts += [length - turn.reply for length, turn in zip(lengths, program.turns, strict=True)]
        replies += [turn.reply for turn in program.turns]
        gaps += [turn.pause_s for turn in program.turns if turn.runs]
    assert np.median(prompts) == pytest.approx(19_500, rel=0.05)
    assert np.median(replies) == pytest.approx(31.7, rel=0.05)
    assert np.percentile(gaps, (50, 90, 99)) == pytest.approx((2.0, 24.0, 660.0), rel=0.1)
    groups = [len(turn.children) for program in parents for turn in program.turns if turn.children]
    assert np.mean(groups) == pytest.approx(7, rel=0.05)
    assert sum(len(agent.turns) for agent in agents) / len(prompts) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_programs_fit_their_context_and_end_without_a_tool(kind: str) -> None:
    programs = list(Workload(kind, 50, 1.0, scale=3.0 * SCALES.get(kind, 1.0), context=16384).draw(0))
    assert all(each.length + MAX_TOKENS <= 16384 for each in programs + children(programs))
    for program in programs:
        assert all(turn.runs or turn.children for turn in program.turns[:-1])
        assert program.turns[-1].runs == ()


def test_more_turns_of_the_same_text() -> None:
    once, five = (list(Workload("swe", 60, 1.0, times).draw(0)) for times in (1, 5))
    assert sum(len(program.turns) for program in five) == pytest.approx(5 * sum(len(p.turns) for p in once), rel=0.05)
    assert sum(p.length for p in five) == pytest.approx(sum(p.length for p in once), rel=0.1)


def test_texts_share_the_system_prompt_and_no_more() -> None:
    texts = [tokens_of(program) for program in Workload("swe", 4, 1.0).draw(0)]
    shared = KINDS["swe"].shared
    for one, other in pairwise(texts):
        assert (one[:shared] == other[:shared]).all()
        assert one[shared] != other[shared]
        assert one.max() < 2**31
        assert (np.diff(one[shared + 1 :]) == 1).all()


def test_wrong_sizes() -> None:
    for wrong in ({"kind": "poetry"}, {"programs": 0}, {"rate": 0.0}, {"context": workloads.CONTEXT + 1}):
        with pytest.raises(ConfigError):
            Workload(**{"kind": "swe", "programs": 1, "rate": 1.0} | wrong)
        if "context" not in wrong:
            with pytest.raises(ConfigError):
                Crowd(**{"kind": "agents", "programs": 1, "rate": 1.0} | wrong)
    with pytest.raises(ConfigError):
        next(agents("poetry", 1, 1.0, 0))


# ---- many replicas ----


@pytest.mark.parametrize("kind", CROWDS)
def test_a_seed_says_all_of_a_crowd_and_programs_fit(kind: str) -> None:
    """One program of `fan-out` in four thousand was too long: its parent had nearly filled a context."""
    count, seed = (5000, 100) if kind == "fan-out" else (100, 0)
    assert crowd(kind, 50) == crowd(kind, 50) != crowd(kind, 50, seed=1)
    programs = crowd(kind, count, seed)
    assert all(one.arrived <= other.arrived for one, other in pairwise(programs))
    everybody = programs + children(programs)
    assert len({program.id for program in everybody}) == len(everybody)
    assert all(each.length - each.turns[-1].reply + MAX_TOKENS <= workloads.CROWD_CONTEXT for each in everybody)


def test_preambles_are_shared_by_their_rank() -> None:
    programs = crowd("preambles", 2000)
    shares = Counter(program.beginning.preamble for program in programs)
    assert shares[1] == pytest.approx(2 * shares[2], rel=0.25)
    assert len(shares) == 40
    first, second = [program for program in programs if program.beginning.preamble == 1][:2]
    other = next(program for program in programs if program.beginning.preamble == 2)
    shared = first.beginning.tokens
    assert (tokens_of(first)[:shared] == tokens_of(second)[:shared]).all()
    assert tokens_of(first)[shared] != tokens_of(second)[shared]
    assert tokens_of(first)[0] != tokens_of(other)[0]
    assert first.begins == second.begins != other.begins


def test_sub_agents_begin_with_what_their_parent_said() -> None:
    programs = crowd("fan-out")
    parents = [program for program in programs if children([program])]
    counts = [len(children([parent])) for parent in parents]
    assert np.median(counts) == 2
    assert 10 <= max(counts) <= 21
    for parent in parents[:20]:
        for child in children([parent]):
            at, shared = child.beginning.fork, child.beginning.tokens
            assert shared == sum(turn.added + turn.reply for turn in parent.turns[: at + 1])
            assert (tokens_of(child)[:shared] == tokens_of(parent)[:shared]).all()
            assert tokens_of(child)[shared] != tokens_of(parent)[shared]
            assert child.begins == parent.standing(at)


def test_the_hot_tenant_sends_most_and_in_bursts() -> None:
    programs = crowd("hot-tenant", 3000)
    hot, quiet = ([p for p in programs if (p.tenant == "hot") is each] for each in (True, False))
    assert len(hot) == pytest.approx(0.6 * len(programs), rel=0.1)
    assert all(program.arrived % 30 <= 15 for program in hot)
    assert sum(program.arrived % 30 > 15 for program in quiet) == pytest.approx(len(quiet) / 2, rel=0.15)
    assert len({program.tenant for program in quiet}) == 9


def test_agents_are_as_the_paper_tells() -> None:
    drawn = list(agents("fan-out", 300, 1.0, 0))
    turns = [len(agent.turns) for agent in drawn]
    assert (np.median(turns), max(turns)) == (2, 7)
    fans = [len(turn.runs) for agent in drawn for turn in agent.turns[:-1]]
    assert (np.median(fans), max(fans)) == (2, 21)
    for agent in drawn:
        length = agent.turns[0].added
        for turn in agent.turns[:-1]:
            results = sum(run.tokens for run in turn.runs)
            assert 0.47 <= length / (length + results) <= 0.83
            length += results
    assert {len(agent.turns[0].runs) for agent in agents("append-only", 20, 1.0, 0)} == {1}
