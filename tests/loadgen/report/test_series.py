"""The numbers behind the plots."""

import pytest
from bench_rows import row
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.report.palette import DARK_PAGE, LIGHT_PAGE, PHASES, SERVERS
from holdfast.loadgen.report.series import by_turn, cumulative, lanes
from holdfast.loadgen.timeline import Phase

SECONDS = st.floats(0.001, 100)
LEAST_CONTRAST = 3.0  # of a graphical object (WCAG 2.2, success criterion 1.4.11)


@settings(max_examples=40, deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=20), SECONDS)
def test_a_distribution_is_the_share_of_requests_at_or_below(latencies: list[float], bound: float) -> None:
    seconds, share = cumulative([row(latency=latency) for latency in latencies], lambda row: row.latency)
    below = [part for second, part in zip(seconds, share, strict=True) if second <= bound]
    assert (below or [0.0])[-1] == pytest.approx(sum(latency <= bound for latency in latencies) / len(latencies))
    assert share[-1] == 1.0


def test_turns_are_counted_from_one_and_failures_are_left_out() -> None:
    rows = [row(latency=latency, turn=turn) for turn in (0, 1) for latency in (1.0, 2.0, 3.0)]
    rows += [row(latency=99.0, turn=1, failure="timeout"), row(first_token=None, turn=2)]
    found = by_turn(rows, lambda row: row.latency)
    assert (found.turns, found.middle) == ([1, 2, 3], [2.0, 2.0, 1.0])
    assert found.low[0] == pytest.approx(1.2)
    assert found.high[0] == pytest.approx(2.8)
    assert by_turn(rows, lambda row: row.ttft).turns == [1, 2]


def test_a_chart_begins_at_its_repetition_and_leaves_out_what_lies_between_waves() -> None:
    rows = [row(started=50.0, program="p"), row(started=80.0, program="q", wave=1, turn=1)]
    first, second = lanes(rows, 9)
    assert [(bar.phase, bar.begin, bar.length) for bar in first.bars] == [
        (Phase.WAIT, 0.0, 0.5),
        (Phase.DECODE, 0.5, 0.5),
    ]
    assert (second.program, second.bars[0].begin) == ("q", 1.0)
    assert [lane.program for lane in lanes(rows, 1)] == ["p"]


@pytest.mark.parametrize("page", [LIGHT_PAGE, DARK_PAGE])
def test_every_colour_stands_out_from_either_page(page: str) -> None:
    assert {colour for colour in (*SERVERS, *PHASES.values()) if contrast(colour, page) < LEAST_CONTRAST} == set()
    assert set(PHASES) == set(Phase)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


def contrast(one: str, other: str) -> float:
    """How much two colours ``#rrggbb`` differ in brightness, 1 to 21 (WCAG 2.2, contrast ratio)."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
