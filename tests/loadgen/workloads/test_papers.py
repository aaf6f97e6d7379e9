"""The papers' workloads have the figures that the papers tell."""

import random
import statistics
from collections import Counter
from itertools import pairwise

import pytest

from holdfast.loadgen.program import Program, Turn, prompts
from holdfast.loadgen.workloads.catalog import describe, drawings
from holdfast.loadgen.workloads.drawing import Draw
from holdfast.loadgen.workloads.script import Round, Sizes
from holdfast.loadgen.workloads.tooltime import HeavyTailed, log_normal

NAMED = dict(drawings(["swe", "mixed", "bfcl", "coding", "sutradhara", "tenants"]))


def drawn(name: str, **sizes: float) -> Round:
    return NAMED[name](Draw(0, name, 0), Sizes(**sizes))


def sent(round_: Round) -> list[tuple[Program, tuple[Turn, ...]]]:
    """Every program with the turns that are sent of it where the model follows the script."""
    counts = Counter(place for wave in round_.waves for lane in wave for place in lane)
    return [(program, program.turns[: counts[place]]) for place, program in enumerate(round_.programs)]


def pauses(round_: Round) -> list[float]:
    """Seconds between turns."""
    return [(turn.delay_ms or 0.0) / 1e3 for _, turns in sent(round_) for turn in turns[1:]]


def added(turn: Turn) -> int:
    """The common words that its results, or its user's message, hold."""
    return sum(
        len((m["content"].partition("\n")[2] if m["role"] == "tool" else m["content"].rpartition("\n\n")[0]).split())
        for m in turn.prompt
    )


def test_log_normal_tools_have_the_mean_and_variance_asked_for() -> None:
    rng = random.Random(0)
    times = [log_normal(rng, 1.09, 1.7) for _ in range(50_000)]
    assert statistics.mean(times) == pytest.approx(1.09, rel=0.02)
    assert statistics.variance(times) == pytest.approx(1.7, rel=0.2)


def test_heavy_tailed_tools_have_the_percentiles_asked_for() -> None:
    rng, tool = random.Random(0), HeavyTailed(2.0, 1.3, 2.9)
    percentiles = statistics.quantiles([tool.draw(rng) for _ in range(50_000)], n=100)
    assert percentiles[49] == pytest.approx(2.0, rel=0.02)
    assert percentiles[74] == pytest.approx(2.6, rel=0.02)
    assert percentiles[89] == pytest.approx(5.8, rel=0.03)


@pytest.mark.parametrize(("name", "turns", "tool", "jobs"), [("swe", 20, 0.29, 60), ("bfcl", 4.2, 1.09, 200)])
def test_programs_are_as_long_as_told_and_keep_their_words_when_turns_are_multiplied(
    name: str, turns: float, tool: float, jobs: int
) -> None:
    once, thrice = drawn(name, jobs=jobs), drawn(name, jobs=jobs, turns_times=3)
    lengths = [len(lane) for lane in once.waves[0]]
    assert statistics.mean(lengths) == pytest.approx(turns, rel=0.05)
    assert [len(lane) for lane in thrice.waves[0]] == [3 * length for length in lengths]
    assert once.due == thrice.due == tuple(sorted(once.due))
    assert statistics.mean(pauses(once)) == pytest.approx(tool, rel=0.2)
    for _, turns_sent in sent(once) + sent(thrice):
        assert sum(map(added, turns_sent[1:])) == (Sizes().prompt_tokens if len(turns_sent) > 1 else 0)


def test_commands_of_two_kinds_come_under_one_name() -> None:
    round_ = drawn("mixed", jobs=150)
    seconds = pauses(round_)
    quick = [each for each in seconds if each < 2.0]
    assert len(quick) / len(seconds) == pytest.approx(0.8, abs=0.02)
    assert statistics.mean(quick) == pytest.approx(0.25, rel=0.05)
    assert statistics.mean(each for each in seconds if each > 2.0) == pytest.approx(15.0, rel=0.05)
    assert {len(program.turns[0].tools) for program in round_.programs} == {1}
    slower = drawn("mixed", jobs=150, tool_times=3.0)
    assert pauses(slower) == pytest.approx([3.0 * each for each in seconds])
    for program, other in zip(round_.programs, slower.programs, strict=True):
        assert [turn.prompt for turn in program.turns] == [turn.prompt for turn in other.turns]


def test_coding_sessions_are_as_those_that_were_seen() -> None:
    scale = 0.01
    round_ = drawn("coding", jobs=150, scale=scale)
    assert round_.due == tuple(sorted(round_.due))
    lengths, of_agents = [], 0
    for program, turns in sent(round_):
        length = sum(len(m["content"].split()) for m in turns[0].prompt)
        for turn in turns:
            length += added(turn) if turn is not turns[0] else 0
            lengths.append(length)
        of_agents += len(turns) if "agent" in program.id else 0
    assert statistics.median(lengths) == pytest.approx(195_000 * scale, rel=0.1)
    percentiles = statistics.quantiles(pauses(round_), n=100)
    assert [percentiles[at - 1] for at in (50, 90, 99)] == pytest.approx([2.0, 24.0, 660.0], rel=0.15)
    assert of_agents / len(lengths) == pytest.approx(0.5, abs=0.04)
    groups = Counter(program.id.split("-agent")[0] for program in round_.programs if "-agent" in program.id)
    assert statistics.mean(groups.values()) == pytest.approx(7, rel=0.1)
    one, other = [p for p in round_.programs if p.id.startswith(f"{next(iter(groups))}-agent")][:2]
    asked = [program.turns[0].prompt[1]["content"] for program in (one, other)]
    assert asked[0][:2000] == asked[1][:2000], "a group begins alike"


def test_sutradharas_programs_fan_out_as_told_and_their_prompts_are_known_by_half_or_more() -> None:
    programs = sent(drawn("sutradhara", jobs=600, prompt_tokens=400))
    counts = [len(turns) for _, turns in programs]
    fans = [len(turn.output.answer["tool_calls"]) for _, turns in programs for turn in turns[:-1]]
    assert (statistics.median(counts), max(counts)) == (2, 7)
    assert (statistics.median(fans), max(fans)) == (2, 21)
    for _, turns in programs:
        length = 300.0
        for before, turn in pairwise(turns):
            assert len(turn.prompt) == len(before.output.answer["tool_calls"])
            assert 0.49 <= length / (length + added(turn)) <= 0.81
            length += added(turn)
        assert turns[-1].output.answer.get("tool_calls") is None
        assert length <= 3 * 400 + len(turns)


def test_a_noisy_tenant_sends_so_many_times_as_much_as_a_quiet_one() -> None:
    round_ = drawn("tenants", jobs=2, quiet=2, noise=5)
    assert [program.tenant for program in round_.programs] == ["noisy"] * 10 + ["quiet-0"] * 2 + ["quiet-1"] * 2
    assert "tools take" in describe(drawn("bfcl", jobs=3))


def test_sutradharas_system_prompts_change_with_the_tools_that_were_called() -> None:
    programs = [each for each in sent(drawn("sutradhara", jobs=60, prompt_tokens=400)) if len(each[1]) > 2]
    assert len({turns[0].system for _, turns in programs}) == 1
    for program, turns in programs:
        whole = list(prompts(program))[: len(turns)]
        assert [each[0]["content"] for each in whole] == [turn.system for turn in turns]
        assert turns[-1].system != turns[0].system
        assert [message["role"] for message in whole[-1]].count("system") == 1
    later = [turn.system for _, turns in programs for turn in turns[1:]]
    assert len(set(later)) < len(later), "programs share them"
    head = 37  # words that all of them begin with
    assert len({" ".join(turn.system.split()[:head]) for _, turns in programs for turn in turns}) == 1
