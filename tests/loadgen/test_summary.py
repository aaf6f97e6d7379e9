"""From rows to figures and tables: what the figures are of, and what they must not depend on."""

import random
from dataclasses import replace

import pytest
from bench_rows import row
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.rows import Row
from holdfast.loadgen.summary import summarize, walls
from holdfast.loadgen.table import print_report


def turns(server: str, latencies: list[float], **more) -> list[Row]:
    return [row(server, 10.0 * i, latency, turn=i, wave=i, **more) for i, latency in enumerate(latencies)]


LATENCIES = st.lists(st.floats(0.01, 5), min_size=2, max_size=12)


@settings(max_examples=20)
@given(LATENCIES, st.floats(0.2, 8), st.randoms(use_true_random=False))
def test_ratios_are_of_pairs_and_no_order_of_rows_changes_a_figure(
    latencies: list[float], k: float, rng: random.Random
) -> None:
    rows = turns("a", latencies) + turns("b", [k * latency for latency in latencies])
    first, second = summarize(rows, 0)
    names = ("latency p50", "latency p99", "ttft p50", "per token p50", "wall", "job mean", "last first token p50")
    for ratio in (second.ratios[name] for name in names):
        assert ratio.value == pytest.approx(k)
    assert second.ratios["tokens per s"].value == pytest.approx(1 / k)
    median = first.figures["latency p50"]
    assert median.low <= median.value <= median.high
    rest = rows[1:]
    rng.shuffle(rest)
    again = {each.server: each for each in summarize(rows[:1] + rest, 0)}
    assert again["b"].figures["latency p50"].value == second.figures["latency p50"].value
    assert again["b"].figures["wall"].value == pytest.approx(second.figures["wall"].value)


def test_a_wave_lasts_from_its_first_request_to_its_last_answer() -> None:
    rows = [row(started=0, latency=2), row(started=1, latency=3, turn=1), row(started=9, latency=1, wave=1, turn=2)]
    assert walls(rows, {0: 3}) == {0: 5.0}
    assert walls(rows, {0: 4}) == walls(rows, {}) == {}


def test_failures_are_counted_by_kind_and_enter_no_figure() -> None:
    rows = turns("a", [1.0, 1.0, 1.0]) + turns("b", [1.0, 1.0])
    rows += [row("b", 20.0, 300.0, turn=2, wave=2, failure="timeout")]
    first, second = summarize(rows, 0)
    assert second.failures == {"timeout": 1}
    assert second.figures["latency p99"].value == second.ratios["latency p99"].value == 1.0
    assert (first.figures["wall"].value, second.figures["wall"], second.ratios["wall"]) == (3.0, None, None)
    rows = [row(program="p"), row(program="q"), row(program="q", started=1.0, turn=1, failure="cut")]
    rows += [row("b", program="p", latency=3.0), row("b", program="q", latency=9.0)]
    first, second = summarize(rows, 0)
    assert (first.programs, second.programs, second.ratios["job mean"].value) == (1, 2, 3.0)


@pytest.mark.parametrize("planned", [None, {"w": [2, 3, 1]}])
def test_a_repetition_is_whole_with_its_own_number_of_requests(planned: dict[str, list[int]] | None) -> None:
    rows = [
        row(server, 10.0 * turn, latency, turn=turn, wave=turn, repetition=repetition)
        for server, latency in (("a", 1.0), ("b", 2.0))
        for repetition, count in enumerate((2, 3, 1))
        for turn in range(count)
    ]
    first, second = summarize(rows, 0, planned)
    wall, ratio = first.figures["wall"], second.ratios["wall"]
    assert (wall.value, wall.low, wall.high) == (2.0, 1.0, 3.0)
    assert (second.figures["tokens per s"].value, ratio.low, ratio.high) == (5.0, 2.0, 2.0)
    rows.remove(rows[-2])  # of the second repetition under b
    assert summarize(rows, 0, planned)[1].figures["wall"].value == 3.0
    (cut,) = summarize(turns("a", [1.0, 1.0]), 0, {"w": [3]})
    assert all(cut.figures[name] is None for name in ("wall", "tokens per s", "programs per s"))


def test_answers_are_compared_where_the_prompts_were_the_same() -> None:
    others = turns("b", [1.0] * 3)
    others[1] = replace(others[1], answer={"text": "other"})
    others[2] = replace(others[2], answer={"text": "other"}, prompt="diverged")
    agreement = summarize(turns("a", [1.0] * 3) + others, 0)[1].agreement
    assert (agreement.asked, agreement.same_prompt, agreement.same_answer) == (3, 2, 1)


def test_shares_are_of_tokens_and_of_requests() -> None:
    rows = [
        row(prompt_tokens=100, cached_tokens=0, calls=2),
        row(prompt_tokens=300, cached_tokens=200, turn=1, wave=1, calls=1, fits=False),
        row(prompt_tokens=900, cached_tokens=None, turn=2, wave=2, as_scripted=False, cache="hit"),
    ]
    (summary,) = summarize(rows, 0)
    assert (summary.cached_share, summary.cold_cached_share) == (0.5, 0.0)
    assert summary.cached_by_turn == (0.0, pytest.approx(2 / 3), None, None)
    shares = (summary.call_share, summary.fitting_share, summary.scripted_share)
    assert shares == pytest.approx((2 / 3, 1 / 2, 2 / 3))
    assert (summary.cache_hits, summary.prompt_tokens, summary.output_tokens) == (1, (100, 900), 30)


def test_tools_are_told_by_their_set_and_by_how_their_mean_settles() -> None:
    rows, now = [], 0.0
    for number in range(17):
        calls = [["b", {}], ["a", {}]] if number % 2 else [["c", {}]]
        rows.append(row(started=now, turn=number, calls=len(calls), answer={"text": "", "calls": calls}))
        now += 1.0 + (1.0 + number % 4 if number % 2 else 0.5)
    (summary,) = summarize(rows, 0)
    assert [(each.tools, each.runs, each.mean.value) for each in summary.tools] == [("c", 8, 0.5), ("a,b", 8, 3.0)]
    assert [each and each.value for each in summary.tools[1].after] == [3.0, None, None, None]
    assert (summary.tools[1].after[0].low, summary.tools[1].after[0].high) == (2.0, 4.0)


def test_a_server_that_counts_no_tokens_has_no_speed() -> None:
    (summary,) = summarize(turns("a", [1.0, 2.0], output_tokens=0), 0)
    assert (summary.figures["tokens per s"], summary.figures["per token p50"]) == (None, None)
    assert summary.figures["wall"] is not None


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture) -> None:
    names = ("vllm[red]", "a[/b]", ":smile:")
    rows = [row(name, turn=turn, started=float(turn)) for name in names for turn in range(2)]
    print_report(summarize(rows, 0), {"w": "[cpu] only"}, ())
    printed = capsys.readouterr().out
    assert "w: [cpu] only" in printed
    for name in names:
        assert printed.count(f"  {name} ") == 2
    assert printed.count(f"/ {names[0]}") == 4
