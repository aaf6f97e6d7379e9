"""The papers' workloads have the figures that the papers tell."""

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from holdfast.loadgen.conversation import Conversation, Said
from holdfast.loadgen.workloads.catalog import describe, drawings
from holdfast.loadgen.workloads.drawing import Draw
from holdfast.loadgen.workloads.script import Round, Sizes
from holdfast.loadgen.workloads.tooltime import HeavyTailed, log_normal

NAMED = dict(drawings(["swe", "mixed", "bfcl", "coding", "sutradhara", "tenants"]))


def drawn(name: str, **sizes: float) -> Round:
    return NAMED[name](Draw(0, name, 0), Sizes(**sizes))


def words(talk: Conversation) -> int:
    return sum(len(str(message["content"]).split()) for message in talk.messages)


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


@pytest.mark.parametrize(("name", "turns", "tool", "jobs"), [("swe", 20, 0.29, 150), ("bfcl", 4.2, 1.09, 600)])
def test_programs_are_as_long_as_told_and_keep_their_words_when_turns_are_multiplied(
    name: str, turns: float, tool: float, jobs: int
) -> None:
    once, thrice = drawn(name, jobs=jobs), drawn(name, jobs=jobs, turns_times=3)
    lengths = [len(lane) for lane in once.waves[0]]
    assert statistics.mean(lengths) == pytest.approx(turns, rel=0.05)
    assert [len(lane) for lane in thrice.waves[0]] == [3 * length for length in lengths]
    assert once.due == thrice.due == tuple(sorted(once.due))
    assert statistics.mean(p.seconds for s in once.scripts for p in s.pauses) == pytest.approx(tool, rel=0.2)
    for script in once.scripts + thrice.scripts:
        assert sum(pause.words for pause in script.pauses) == (Sizes().prompt_tokens if script.pauses else 0)


def test_commands_of_two_kinds_come_under_one_name() -> None:
    round_ = drawn("mixed", jobs=150)
    pauses = [pause.seconds for script in round_.scripts for pause in script.pauses]
    quick = [seconds for seconds in pauses if seconds < 2.0]
    assert len(quick) / len(pauses) == pytest.approx(0.8, abs=0.02)
    assert statistics.mean(quick) == pytest.approx(0.25, rel=0.05)
    assert statistics.mean(seconds for seconds in pauses if seconds > 2.0) == pytest.approx(15.0, rel=0.05)
    assert {len(script.tools) for script in round_.scripts} == {1}
    slower = drawn("mixed", jobs=150, tool_times=3.0)
    longer = [pause.seconds for script in slower.scripts for pause in script.pauses]
    assert longer == [3.0 * seconds for seconds in pauses]
    assert [replace(script, pauses=()) for script in slower.scripts] == [
        replace(script, pauses=()) for script in round_.scripts
    ]


def test_coding_sessions_are_as_those_that_were_seen() -> None:
    scale = 0.01
    round_ = drawn("coding", jobs=150, scale=scale)
    assert round_.due == tuple(sorted(round_.due))
    prompts, gaps, of_agents = [], [], 0
    for script, lane in zip(round_.scripts, round_.waves[0], strict=True):
        length = len(script.system.split()) + len(script.steps[0].user.split())
        for turn in lane:
            prompts.append(length)
            length += script.pause(turn.index).words
        gaps += [pause.seconds for pause in script.pauses]
        of_agents += len(lane) if "agent" in script.name else 0
    assert statistics.median(prompts) == pytest.approx(195_000 * scale, rel=0.1)
    percentiles = statistics.quantiles(gaps, n=100)
    assert [percentiles[at - 1] for at in (50, 90, 99)] == pytest.approx([2.0, 24.0, 660.0], rel=0.15)
    assert of_agents / len(prompts) == pytest.approx(0.5, abs=0.04)
    groups = Counter(script.name.split("-agent")[0] for script in round_.scripts if "-agent" in script.name)
    assert statistics.mean(groups.values()) == pytest.approx(7, rel=0.1)
    first, second = [script for script in round_.scripts if script.name.startswith(f"{next(iter(groups))}-agent")][:2]
    assert first.steps[0].user[:2000] == second.steps[0].user[:2000], "a group begins alike"


def test_sutradharas_programs_fan_out_as_told_and_their_prompts_are_known_by_half_or_more() -> None:
    round_ = drawn("sutradhara", jobs=600, prompt_tokens=400)
    iterations = [len(lane) for lane in round_.waves[0]]
    fans = [fan for script in round_.scripts for fan in script.steps[0].together]
    assert (statistics.median(iterations), max(iterations)) == (2, 7)
    assert (statistics.median(fans), max(fans)) == (2, 21)
    for script, turns in zip(round_.scripts, iterations, strict=True):
        length = 300.0
        for pause in script.pauses:
            assert 0.49 <= length / (length + pause.words) <= 0.81
            length += pause.words
        assert len(script.pauses) == turns - 1
        assert length <= 3 * 400 + turns
        assert sum(script.steps[0].together) == len(script.steps[0].calls)


def test_what_tools_tell_goes_into_the_history_whether_the_model_called_them_or_not() -> None:
    script = next(s for s in drawn("sutradhara", prompt_tokens=4000).scripts if len(s.pauses) >= 1)
    obedient, stubborn = Conversation(script), Conversation(script)
    before = words(obedient)
    obedient.take(obedient.scripted)
    stubborn.take(Said("I will not."))
    assert len(obedient.scripted.calls) == (script.steps[0].together[1:] or (0,))[0]
    results = [message for message in obedient.messages if message["role"] == "tool"]
    assert len(results) == script.steps[0].together[0]
    for talk in (obedient, stubborn):
        assert script.pauses[0].words <= words(talk) - before <= script.pauses[0].words + 40 * len(results)


def test_a_noisy_tenant_sends_so_many_times_what_a_quiet_one_does() -> None:
    round_ = drawn("tenants", jobs=2, quiet=2, noise=5)
    assert [script.tenant for script in round_.scripts] == ["noisy"] * 10 + ["quiet-0"] * 2 + ["quiet-1"] * 2


def test_a_round_says_what_it_drew() -> None:
    told = describe(drawn("bfcl", jobs=3))
    assert told.startswith("3 programs, ")
    assert "tools take" in told


def test_sutradharas_system_prompts_change_with_the_tools_that_were_called() -> None:
    scripts = [script for script in drawn("sutradhara", jobs=60, prompt_tokens=400).scripts if len(script.systems) > 2]
    assert len({script.systems[0] for script in scripts}) == 1
    for script in scripts:
        talk = Conversation(script)
        for turn in range(len(script.pauses)):
            assert talk.messages[0] == {"role": "system", "content": script.systems[turn]}
            talk.take(talk.scripted)
        assert talk.messages[0]["content"] == script.systems[-1] != script.systems[0]
        assert [message["role"] for message in talk.messages].count("system") == 1
    later = {system for script in scripts for system in script.systems[1:]}
    assert len(later) < sum(len(script.systems) - 1 for script in scripts), "programs share them"
    head = 37  # words that all of them begin with
    assert len({" ".join(system.split()[:head]) for script in scripts for system in script.systems}) == 1
