"""What is drawn: the same for a seed, to the figures of the traces."""

from itertools import accumulate, pairwise

import numpy as np
import pytest

from holdfast.loadgen.simulator.programs import CONTEXT, KINDS, MAX_TOKENS, Workload
from holdfast.replicas.errors import ConfigError

SCALES = {"coding": 0.1}  # real sessions are longer than a context of the simulator


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_says_all(kind: str) -> None:
    workload = Workload(kind, 20, 0.5)
    assert list(workload.draw(3)) == list(workload.draw(3))
    assert list(workload.draw(3)) != list(workload.draw(4))


def test_another_rate_brings_the_same_programs() -> None:
    slow, fast = list(Workload("swe", 20, 0.5).draw(0)), list(Workload("swe", 20, 5.0).draw(0))
    assert [program.turns for program in slow] == [program.turns for program in fast]
    assert [program.arrived for program in slow] == pytest.approx([10 * program.arrived for program in fast])


@pytest.mark.parametrize("kind", KINDS)
def test_slower_tools_are_all_that_differs(kind: str) -> None:
    programs, slower = (list(Workload(kind, 20, 0.5, scale=0.1, tool_times=times).draw(0)) for times in (1.0, 4.0))
    turns, longer = ([turn for program in drawn for turn in program.turns] for drawn in (programs, slower))
    assert [turn.tool_s for turn in longer] == [4.0 * turn.tool_s for turn in turns]
    assert [(turn.prompt, turn.reply, turn.tool) for turn in longer] == [
        (turn.prompt, turn.reply, turn.tool) for turn in turns
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_figures_of_the_traces(kind: str) -> None:
    programs = list(Workload(kind, 1500, 1.0, scale=SCALES.get(kind, 1.0)).draw(0))
    figures = KINDS[kind].figures
    turns = np.mean([len(program.turns) for program in programs])
    assert turns == pytest.approx(1 + (figures.most - 1) * figures.share, rel=0.05)
    tools = [turn.tool_s for program in programs for turn in program.turns if turn.tool]
    assert np.mean(tools) == pytest.approx(figures.tool_s, rel=0.15)
    assert programs[-1].arrived == pytest.approx(1500, rel=0.1)


def test_coding_sessions_are_as_those_that_were_seen() -> None:
    parents = list(Workload("coding", 400, 1.0, scale=0.1).draw(0))
    agents = [child for program in parents for turn in program.turns for child in turn.children]
    assert len({program.number for program in parents + agents}) == len(parents) + len(agents)
    prompts, replies, gaps = [], [], []
    for program in parents + agents:
        lengths = list(accumulate(turn.prompt + turn.reply for turn in program.turns))
        prompts += [length - turn.reply for length, turn in zip(lengths, program.turns, strict=True)]
        replies += [turn.reply for turn in program.turns]
        gaps += [turn.tool_s for turn in program.turns if turn.tool]
    assert np.median(prompts) == pytest.approx(19_500, rel=0.05)
    assert np.median(replies) == pytest.approx(31.7, rel=0.05)
    assert np.percentile(gaps, (50, 90, 99)) == pytest.approx((2.0, 24.0, 660.0), rel=0.1)
    groups = [len(turn.children) for program in parents for turn in program.turns if turn.children]
    assert np.mean(groups) == pytest.approx(7, rel=0.05)
    assert sum(len(agent.turns) for agent in agents) / len(prompts) == pytest.approx(0.5, abs=0.03)
    child = agents[0]
    assert child.parent is not None
    assert (child.tokens()[: child.shared] == child.parent.tokens()[: child.shared]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_programs_fit_their_context_and_end_without_a_tool(kind: str) -> None:
    for program in Workload(kind, 50, 1.0, scale=3.0 * SCALES.get(kind, 1.0), context=16384).draw(0):
        agents = [child for turn in program.turns for child in turn.children]
        assert all(each.length + MAX_TOKENS <= 16384 for each in (program, *agents))
        assert all(turn.tool or turn.children for turn in program.turns[:-1])
        assert program.turns[-1].tool == ""


def test_more_turns_of_the_same_text() -> None:
    once, five = (list(Workload("swe", 60, 1.0, times).draw(0)) for times in (1, 5))
    assert sum(len(program.turns) for program in five) == pytest.approx(5 * sum(len(p.turns) for p in once), rel=0.05)
    assert sum(p.length for p in five) == pytest.approx(sum(p.length for p in once), rel=0.1)


def test_texts_share_the_system_prompt_and_no_more() -> None:
    texts = [program.tokens() for program in Workload("swe", 4, 1.0).draw(0)]
    shared = KINDS["swe"].shared
    for one, other in pairwise(texts):
        assert (one[:shared] == other[:shared]).all()
        assert one[shared] != other[shared]
        assert one.max() < 2**31
    for text in texts:
        assert (np.diff(text[shared + 1 :]) == 1).all()


@pytest.mark.parametrize("wrong", [{"kind": "poetry"}, {"programs": 0}, {"rate": 0.0}, {"context": CONTEXT + 1}])
def test_wrong_sizes(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Workload(**{"kind": "swe", "programs": 1, "rate": 1.0} | wrong)
