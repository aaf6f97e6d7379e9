"""From rows to figures: what they are of, and what they must not depend on."""

import random
from dataclasses import replace

import pytest
from bench_rows import row
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen import rows as row_files
from holdfast.loadgen.rows import Row
from holdfast.loadgen.summary import summarize, walls
from holdfast.replicas.errors import ConfigError


def turns(server: str, latencies: list[float], **more) -> list[Row]:
    return [row(server, 10.0 * i, latency, turn=i, wave=i, **more) for i, latency in enumerate(latencies)]


LATENCIES = st.lists(st.floats(0.01, 5), min_size=2, max_size=12)


@settings(max_examples=20, deadline=None)
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
    assert first.latency["p50"].low <= first.latency["p50"].value <= first.latency["p50"].high
    rest = rows[1:]
    rng.shuffle(rest)
    again = {(told.server): told for told in summarize(rows[:1] + rest, 0)}
    assert again["b"].latency["p50"].value == second.latency["p50"].value
    assert again["b"].wall.value == pytest.approx(second.wall.value)


def test_a_wave_lasts_from_its_first_request_to_its_last_answer() -> None:
    rows = [row(started=0, latency=2), row(started=1, latency=3, turn=1), row(started=9, latency=1, wave=1, turn=2)]
    assert walls(rows, {0: 3}) == {0: 5.0}
    assert walls(rows, {0: 4}) == walls(rows, {}) == {}


def test_failures_are_counted_by_kind_and_are_in_no_figure() -> None:
    rows = turns("a", [1.0, 1.0, 1.0]) + turns("b", [1.0, 1.0])
    rows += [row("b", 20.0, 300.0, turn=2, wave=2, failure="timeout")]
    first, second = summarize(rows, 0)
    assert second.failures == {"timeout": 1}
    assert second.latency["p99"].value == 1.0
    assert second.ratios["latency p99"].value == 1.0
    assert (first.wall.value, second.wall, second.ratios["wall"]) == (3.0, None, None)


def test_an_unfinished_repetition_is_in_no_wall() -> None:
    whole = [row(turn=0, repetition=0), row(turn=1, wave=1, repetition=0)]
    (told,) = summarize([*whole, row(repetition=1, latency=9.0)], 0, {"w": [2, 2]})
    assert told.wall.value == 2.0
    assert told.latency["p99"].value > 8
    (told,) = summarize(whole, 0, {"w": [3]})
    assert (told.wall, told.tokens_per_s, told.programs_per_s) == (None, None, None)


@pytest.mark.parametrize("planned", [None, {"w": [2, 3, 1]}])
def test_a_repetition_is_whole_with_its_own_number_of_requests(planned: dict[str, list[int]] | None) -> None:
    rows = [
        row(server, 10.0 * turn, latency, turn=turn, wave=turn, repetition=repetition)
        for server, latency in (("a", 1.0), ("b", 2.0))
        for repetition, count in enumerate((2, 3, 1))
        for turn in range(count)
    ]
    first, second = summarize(rows, 0, planned)
    assert (first.wall.value, first.wall.low, first.wall.high) == (2.0, 1.0, 3.0)
    assert (second.tokens_per_s.value, second.ratios["wall"].low, second.ratios["wall"].high) == (5.0, 2.0, 2.0)
    rows.remove(rows[-2])  # of the second repetition under b
    assert summarize(rows, 0, planned)[1].wall.value == 3.0


def test_answers_are_compared_where_the_prompts_were_the_same() -> None:
    rows = turns("a", [1.0] * 3)
    others = turns("b", [1.0] * 3)
    others[1] = replace(others[1], answer={"text": "other"})
    others[2] = replace(others[2], answer={"text": "other"}, prompt="diverged")
    told = summarize(rows + others, 0)[1].agreement
    assert (told.asked, told.same_prompt, told.same_answer) == (3, 2, 1)


def test_shares_are_of_tokens_and_of_requests() -> None:
    rows = [
        row(prompt_tokens=100, cached_tokens=0, calls=2),
        row(prompt_tokens=300, cached_tokens=200, turn=1, wave=1, calls=1, fits=False),
        row(prompt_tokens=900, cached_tokens=None, turn=2, wave=2, as_scripted=False, cache="hit"),
    ]
    (told,) = summarize(rows, 0)
    assert told.cached_share == 0.5
    assert told.cold_cached_share == 0.0
    assert told.cached_by_turn == (0.0, pytest.approx(2 / 3), None, None)
    assert (told.call_share, told.fitting_share, told.scripted_share) == pytest.approx((2 / 3, 1 / 2, 2 / 3))
    assert (told.cache_hits, told.prompt_tokens, told.output_tokens) == (1, (100, 900), 30)


def test_rows_come_back_from_json_as_they_were() -> None:
    rows = [row(), row(failure="cut", first_token=None, detail="x")]
    assert row_files.from_json(row_files.to_json(rows)) == rows
    with pytest.raises(ConfigError, match="not rows"):
        row_files.from_json([{"server": "a"}])


def test_a_server_that_counts_no_tokens_has_no_speed_rather_than_none_at_all() -> None:
    (told,) = summarize(turns("a", [1.0, 2.0], output_tokens=0), 0)
    assert (told.tokens_per_s, told.per_token) == (None, None)
    assert told.wall is not None
