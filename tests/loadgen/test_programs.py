"""Rows put together to programs: their clock runs in their waves, and what is not known of every turn is not told."""

import random

import pytest
from bench_rows import row
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.rows import group
from holdfast.loadgen.summary import summarize

SECONDS = st.floats(0.001, 50)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_a_job_in_one_wave_is_its_requests_and_its_tools(
    drawn: list[tuple[float, float, float, float]], rng: random.Random
) -> None:
    now, turns = 3.0, []
    for number, (bubble, prefill, decode, tool) in enumerate(drawn):
        latency = bubble + prefill + decode
        stages = {"queue": bubble / 2, "prefill": prefill, "decode": decode, "first_token": now + bubble + prefill}
        turns.append(row(started=now, latency=latency, turn=number, calls=1, **stages))
        now += latency + tool
    rng.shuffle(turns)
    (program,) = group(turns)
    bubbles, prefills, decodes, tools = (sum(times) for times in zip(*drawn, strict=True))
    *_, last_decode, last_tool = drawn[-1]
    assert program.turns == len(drawn)
    assert program.tool == pytest.approx(tools - last_tool)  # no request followed the last
    assert program.seconds == pytest.approx(bubbles + prefills + decodes + program.tool)
    assert program.last_first_token == pytest.approx(program.seconds - last_decode)
    assert (program.bubble, program.prefill) == (pytest.approx(bubbles), pytest.approx(prefills))
    assert program.decode == pytest.approx(decodes - last_decode, abs=1e-9)


def test_between_waves_no_time_passes() -> None:
    turns = [row(started=10.0 * wave, latency=2.0, turn=wave, wave=wave, calls=1) for wave in range(3)]
    (program,) = group(turns)
    assert (program.seconds, program.tool, program.last_first_token) == (6.0, 0.0, 5.0)


def test_a_pause_without_a_call_is_no_tool() -> None:
    assert group([row(), row(started=4.0, turn=1)])[0].tool == 0.0


def test_a_turn_is_late_from_when_it_was_due() -> None:
    (program,) = group([row(started=2.0, due=1.5)])
    assert program.seconds == 1.5


def test_what_a_server_does_not_tell_of_every_turn_is_not_told() -> None:
    (program,) = group([row(queue=0.1, prefill=0.4, decode=0.5), row(started=1.0, turn=1)])
    assert (program.bubble, program.prefill, program.decode) == (None, None, None)
    (silent,) = group([row(first_token=None)])
    assert silent.last_first_token is None


def test_tools_are_told_by_their_set_and_by_how_their_mean_settles() -> None:
    rows, now = [], 0.0
    for number in range(17):
        calls = [["b", {}], ["a", {}]] if number % 2 else [["c", {}]]
        rows.append(row(started=now, turn=number, calls=len(calls), answer={"text": "", "calls": calls}))
        now += 1.0 + (1.0 + number % 4 if number % 2 else 0.5)
    (told,) = summarize(rows, 0)
    assert [(each.tools, each.runs, each.mean.value) for each in told.tools] == [("c", 8, 0.5), ("a,b", 8, 3.0)]
    assert [each and each.value for each in told.tools[1].after] == [3.0, None, None, None]
    assert (told.tools[1].after[0].low, told.tools[1].after[0].high) == (2.0, 4.0)


def test_a_program_whose_last_turns_were_never_sent_is_no_program() -> None:
    rows = [row(program=name, started=float(turn), turn=turn, turns=2) for name in "pq" for turn in range(2)]
    assert [program.name for program in group(rows)] == ["p", "q"]
    assert [program.name for program in group(rows[:-1])] == ["p"]


def test_a_program_with_a_failed_turn_is_in_no_figure_of_programs() -> None:
    rows = [row(program="p"), row(program="q"), row(program="q", started=1.0, turn=1, failure="cut")]
    assert [program.name for program in group(rows)] == ["p"]
    rows += [row("b", program="p", latency=3.0), row("b", program="q", latency=9.0)]
    first, second = summarize(rows, 0)
    assert (first.programs, second.programs) == (1, 2)
    assert second.ratios["job mean"].value == 3.0  # only of the program that both completed
    assert (first.turns.value, first.bubble, first.job["p50"].value) == (1.0, None, 1.0)
