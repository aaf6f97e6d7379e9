"""Rows put together to programs and to spans: their clock runs in their waves, and only known times are told."""

import json
import random
from itertools import pairwise

import pytest
from bench_rows import row
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.rows import from_json, group, to_json
from holdfast.loadgen.timeline import Phase, trace, tracks, wave_shifts
from holdfast.replicas.errors import ConfigError

SECONDS = st.floats(0.001, 50)
STAGE = st.none() | st.floats(0, 3)


def test_rows_come_back_from_json_as_they_were() -> None:
    rows = [row(), row(failure="cut", first_token=None, detail="x")]
    assert from_json(to_json(rows)) == rows
    with pytest.raises(ConfigError, match="not rows"):
        from_json([{"server": "a"}])


@settings(max_examples=30)
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=6), st.randoms(use_true_random=False)
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


def test_between_waves_and_without_a_call_no_tool_runs() -> None:
    turns = [row(started=10.0 * wave, latency=2.0, turn=wave, wave=wave, calls=1) for wave in range(3)]
    (program,) = group(turns)
    assert (program.seconds, program.tool, program.last_first_token) == (6.0, 0.0, 5.0)
    assert group([row(), row(started=4.0, turn=1)])[0].tool == 0.0


def test_a_late_turn_counts_from_its_due_time_and_unknown_stages_are_none() -> None:
    first = row(queue=0.1, prefill=0.4, decode=0.5, started=2.0, due=1.5)
    (program,) = group([first, row(started=3.0, turn=1, first_token=None)])
    assert (program.seconds, program.last_first_token) == (2.5, None)
    assert (program.bubble, program.prefill, program.decode) == (None, None, None)


def test_only_programs_with_every_turn_answered_count() -> None:
    rows = [row(program=name, started=float(turn), turn=turn, turns=2) for name in "pq" for turn in range(2)]
    assert [program.name for program in group(rows)] == ["p", "q"]
    assert [program.name for program in group(rows[:-1])] == ["p"]
    assert group([row(), row(started=1.0, turn=1, failure="cut")]) == []


# ---- spans ----


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 5), STAGE, STAGE, STAGE), min_size=1, max_size=5))
def test_spans_fill_a_program_from_its_first_request_to_its_last_answer(drawn: list[tuple]) -> None:
    now, turns = 0.5, []
    for number, (latency, tool, queue, prefill, decode) in enumerate(drawn):
        turns.append(row("a", now, latency, turn=number, calls=1, queue=queue, prefill=prefill, decode=decode))
        now += latency + tool
    (track,) = tracks(turns)
    assert track.spans[0].begin == turns[0].started
    assert track.spans[-1].end == pytest.approx(turns[-1].ended)
    for before, after in pairwise(track.spans):
        assert after.begin == pytest.approx(before.end)
        assert after.end > after.begin


@pytest.mark.parametrize(
    ("fields", "spans"),
    [
        ({"queue": 0.5, "prefill": 1.0, "decode": 2.0},
         [(Phase.OUTSIDE, 0.5), (Phase.QUEUE, 1.0), (Phase.PREFILL, 2.0), (Phase.DECODE, 4.0)]),
        ({}, [(Phase.WAIT, 2.0), (Phase.DECODE, 4.0)]),
        ({"failure": "cut", "first_token": None}, [(Phase.FAILED, 4.0)]),
    ],
)  # fmt: skip
def test_stages_end_with_the_answer_and_else_the_first_token_divides_the_turn(fields: dict, spans: list) -> None:
    (track,) = tracks([row(latency=4.0, **fields)])
    assert [(span.phase, span.end) for span in track.spans] == spans


def test_waves_follow_each_other_without_the_time_between() -> None:
    rows = [row(started=5.0), row(started=5.5, turn=1), row(started=20.0, latency=2.0, wave=1, turn=2)]
    assert wave_shifts(rows) == {0: 5.0, 1: 18.5}


def test_a_trace_has_a_track_for_each_program_and_its_slices_nest() -> None:
    rows = [
        row(server, program=program, calls=1, queue=0.1, prefill=0.2, decode=0.3) for server in "ab" for program in "pq"
    ]
    rows.append(row("a", 1.25, program="p", turn=1))
    events = json.loads(json.dumps(trace(rows)))["traceEvents"]
    named = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert named == ["a", "b", "w 0 p", "w 0 q", "w 0 p", "w 0 q"]
    slices = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (1, 1)]
    assert [event["name"] for event in slices if event["name"].startswith("turn")] == ["turn 0", "turn 1"]
    (tool,) = (event for event in slices if event["name"] == "tool")
    assert (tool["ts"], tool["dur"]) == (1_000_000, 250_000)
    phases = [each for each in slices if each["args"]["turn"] == 0 and not each["name"].startswith(("turn", "tool"))]
    assert (phases[0]["ts"], phases[-1]["ts"] + phases[-1]["dur"]) == (0, 1_000_000)
    assert sum(event["dur"] for event in phases) == 1_000_000
