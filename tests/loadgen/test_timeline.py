"""Spans of programs: they follow each other, are as long as was told, and a trace holds them all."""

import json
from itertools import pairwise

import pytest
from bench_rows import row
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.timeline import Phase, trace, tracks, wave_shifts

STAGE = st.none() | st.floats(0, 3)


@settings(max_examples=60, deadline=None)
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


def test_stages_are_as_long_as_the_server_tells_and_end_with_the_answer() -> None:
    (track,) = tracks([row(started=10.0, latency=4.0, queue=0.5, prefill=1.0, decode=2.0)])
    assert [(span.phase, span.begin, span.end) for span in track.spans] == [
        (Phase.OUTSIDE, 10.0, 10.5),
        (Phase.QUEUE, 10.5, 11.0),
        (Phase.PREFILL, 11.0, 12.0),
        (Phase.DECODE, 12.0, 14.0),
    ]


def test_of_a_server_that_tells_nothing_the_first_token_divides_the_turn() -> None:
    (track,) = tracks([row(latency=4.0)])
    assert [(span.phase, span.end) for span in track.spans] == [(Phase.WAIT, 2.0), (Phase.DECODE, 4.0)]
    (failed,) = tracks([row(failure="cut", first_token=None)])
    assert [span.phase for span in failed.spans] == [Phase.FAILED]


def test_waves_follow_each_other_without_what_lies_between() -> None:
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
    inside = [
        event for event in slices if event["args"]["turn"] == 0 and not event["name"].startswith(("turn", "tool"))
    ]
    assert inside[0]["ts"] == 0
    assert inside[-1]["ts"] + inside[-1]["dur"] == 1_000_000
    assert sum(event["dur"] for event in inside) == 1_000_000
