"""Gittins' index of a pause: it stops where the expected waste is least, and that needs no second look."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.simulator.policies import RETENTION
from holdfast.replicas.retention.latency import (
    AGES,
    RECENT,
    LatencyBook,
    LatencySnapshot,
    Pauses,
    SurvivalCounts,
    ToolLatency,
    ToolPause,
)
from holdfast.replicas.retention.policy import (
    Conditions,
    ExpectedPause,
    ExpectedWaste,
    InferCept,
    Pause,
    RestoreCost,
    break_even_s,
    life_tables,
    retention_policy,
    survival,
    trust,
)

PAUSE = Pause("acme", "shell", cells=1000)
COST = RestoreCost(c=1.0)  # a second, for the program's own 1,000 cells and those of the others


class SmallPrior(ExpectedWaste):
    PRIOR_S = 0.01


durations = st.lists(st.sampled_from([0.1, 0.5, 3.0, 40.0, 600.0]) | st.floats(0.0, 5000.0), min_size=1, max_size=60)
counts = st.sampled_from([1, 5, 20, 100, 10_000])


def tool(seconds: list[float], count: int | None = None) -> ToolLatency:
    return ToolLatency(count or len(seconds), float(np.mean(seconds)), float(np.var(seconds)), tuple(sorted(seconds)))


def times(calls: int, *kinds: tuple[float, float]) -> list[float]:
    """So many calls; of each kind of so many seconds this share."""
    return [seconds for share, seconds in kinds for _ in range(round(share * calls))]


def ttl(tools: ToolLatency, others: int = 0, overall: ToolLatency | None = None, pause: Pause = PAUSE) -> float:
    snapshot = LatencySnapshot(overall or tools, {("acme", "shell"): tools})
    return ExpectedWaste().ttl(pause, snapshot, Conditions(others=others, restore=COST))


def counts_of(seconds: Sequence[float], lasting: Sequence[float] = (), count: int | None = None) -> SurvivalCounts:
    known = SurvivalCounts.of(sorted(seconds), len(seconds) if count is None else count)
    known.by_age[1] = np.searchsorted(sorted(lasting), AGES, side="right")
    return replace(known, n=len(seconds) + len(lasting))


def life_table(seconds: Sequence[float], lasting: Sequence[float] = ()) -> np.ndarray:
    return life_tables([counts_of(seconds, lasting)])[0]


def plain_life_table(seconds: Sequence[float], lasting: Sequence[float]) -> list[float]:
    """Age by age: of those that could be seen to reach it, who did not."""
    n = len(seconds) + len(lasting)
    alive = [(n - sum(each <= 0.0 for each in seconds)) / n]
    for before, age in pairwise(AGES):
        ended = sum(before < each <= age for each in seconds)
        gone = [sum(each <= when for each in lasting) for when in (before, age)]
        at_risk = n - sum(each <= before for each in seconds) - sum(gone) / 2
        alive.append(alive[-1] * (1.0 - ended / at_risk if ended else 1.0))
    return alive


def plain_stop(alive: Sequence[float], keep_s: float) -> float:
    """The first age at which Gittins' index, the most that is found for what is held, is less than 1 / keep_s."""
    held = [0.0]
    for age in range(1, len(AGES)):
        held.append(held[-1] + float(AGES[age] - AGES[age - 1]) * (alive[age - 1] + alive[age]) / 2)
    for age in range(len(AGES) - 1):
        later = [each for each in range(age + 1, len(AGES)) if held[each] > held[age]]
        if max(((alive[age] - alive[to]) / (held[to] - held[age]) for to in later), default=0.0) < 1.0 / keep_s:
            return float(AGES[age])
    return float(AGES[-1])


def plain_ttl(known: Sequence[tuple[Sequence[float], Sequence[float], int]], keep_s: float) -> tuple[float, np.ndarray]:
    """The decision, and P(T > age): by durations of pauses that are over, of those that last, and a count."""
    alive = [1.0 / (1.0 + age) for age in AGES]
    for seconds, lasting, count in known:
        share = trust(count, 0.05)
        if share > 0.0:
            table = plain_life_table(seconds, lasting)
            alive = [share * mine + (1.0 - share) * others for mine, others in zip(table, alive, strict=True)]
    return plain_stop(alive, keep_s), np.array(alive)


def waste(alive: np.ndarray, first: int, keep_s: float) -> list[float]:
    """Expected seconds in vain, by the age of `AGES` at which a pause of age `first` is given up: held, and lost."""
    held, found = 0.0, [keep_s]
    for age in range(first, len(AGES) - 1):
        held += (AGES[age + 1] - AGES[age]) * (alive[age] + alive[age + 1]) / 2 / alive[first]
        found.append(held + alive[age + 1] / alive[first] * keep_s)
    return found


calls = st.tuples(
    st.sampled_from(["shell", "grep"]), st.sampled_from([0.0, 0.3, 40.0, 7000.0]) | st.floats(0.0, 5000.0)
)


@given(st.lists(calls, max_size=60), st.integers(1, 5), st.floats(0.0, 600.0), st.integers(0, 300_000))
def test_it_decides_what_the_plain_formula_does(history, times_, apart_s, others):
    """Whatever has been seen; where two ages waste the same one of them is as good as the other."""
    pauses, book, seen = Pauses(), LatencyBook(), list[tuple[str, float, float]]()
    lasting: list[ToolPause] = []
    now = apart_s * len(history) * times_
    for number, (name, seconds) in enumerate(history * times_):
        began = apart_s * number
        lasting.append(pauses.began("acme", name, began))
        seen.append((name, began, seconds))
    for pause, (name, began, seconds) in zip(lasting, seen, strict=True):
        if began + seconds <= now:
            pause.end(began + seconds, returned=True)
            book.record("acme", name, seconds)
    known = []
    for key in (None, "shell"):
        back = [seconds for name, began, seconds in seen if key in (None, name) and began + seconds <= now]
        latest = [each for each in seen if key in (None, each[0])][-RECENT:]
        over = [began + seconds - began for _, began, seconds in latest if began + seconds <= now]
        lasting = [now - began for _, began, seconds in latest if began + seconds > now]
        known += [(back[-RECENT:], (), len(back)), (over, lasting, len(over))]
    conditions = Conditions(others=others, restore=COST, local=partial(pauses.known, now=now))
    keep_s = break_even_s(PAUSE, conditions)
    expected, alive = plain_ttl(known, keep_s)
    found = ExpectedWaste().ttl(PAUSE, book.snapshot(), conditions)
    if found != expected:
        every = waste(alive, 0, keep_s)
        wasted = [every[int(np.searchsorted(AGES, until))] for until in (found, expected)]
        assert wasted[0] == pytest.approx(wasted[1], rel=1e-12)


@given(durations, counts, durations, counts, st.floats(0.01, 1000.0))
def test_no_other_time_is_expected_to_waste_less(own, own_count, all_, all_count, keep_s):
    alive = survival((counts_of(all_, count=all_count), counts_of(own, count=own_count)), 1.0, 0.05)
    until = ExpectedPause.of(alive).stop(keep_s)
    every = waste(alive, 0, keep_s)
    assert every[int(np.searchsorted(AGES, until))] <= min(every) * (1 + 1e-9)


@given(durations, counts, st.floats(0.01, 1000.0), st.data())
def test_what_was_decided_at_the_beginning_holds_at_every_age(seconds, count, keep_s, data):
    alive = survival((counts_of(seconds, count=count),), 1.0, 0.05)
    until = int(np.searchsorted(AGES, ExpectedPause.of(alive).stop(keep_s)))
    age = data.draw(st.integers(0, len(AGES) - 2))
    every = waste(alive, age, keep_s)
    if age < until:
        assert min(every[1:]) <= every[0] * (1 + 1e-9), "going on is still worth it"
    elif age == until:
        assert min(every[1:]) >= every[0] * (1 - 1e-9), "it is not any more"


@given(st.integers(1, 100_000), st.floats(0.1, 100.0), st.integers(0, 100_000))
def test_with_nothing_known_it_is_infercepts_rule_less_the_prior(cells, seconds, others):
    pause, conditions = Pause("", "", cells), Conditions(others=others, restore=RestoreCost(c=seconds))
    infercept = InferCept().ttl(pause, LatencySnapshot(), conditions)
    found = SmallPrior().ttl(pause, LatencySnapshot(), conditions)
    assert found == pytest.approx(min(infercept, AGES[-1]), rel=0.35, abs=0.05)


def test_two_kinds_under_one_name_are_told_apart_by_how_long_a_pause_lasts():
    shell = tool(times(1000, (0.8, 0.3), (0.2, 40.0)))
    assert 0.3 <= ttl(shell) < 0.6, "what is not back then is a slow one"
    assert ttl(shell, others=60_000) > 40.0, "with 61 s to lose it is worth the slow ones as well"


@pytest.mark.parametrize("policy", ["expected_waste", "infercept"])
def test_who_comes_back_meanwhile_waits_too_and_infercept_does_not_know(policy):
    """A second to compute it again, in which 3,000 of the 5,000 cells are asked for that are kept for others."""
    busy = Conditions(restore=COST, paused=5000, returning=3000.0)
    found = retention_policy(policy).ttl(PAUSE, LatencySnapshot(), busy)
    alone = retention_policy(policy).ttl(PAUSE, LatencySnapshot(), Conditions(restore=COST))
    running = retention_policy(policy).ttl(PAUSE, LatencySnapshot(), Conditions(restore=COST, others=3000))
    assert found == (running if policy == "expected_waste" else alone)
    assert alone < running


@given(durations, counts)
def test_what_is_left_of_a_pause_is_a_median(seconds, count):
    alive = survival((counts_of(seconds, count=count),), 1.0, 0.05)
    left = ExpectedPause.of(alive).left
    for age, after in enumerate(left):
        half = int(np.abs(AGES - (AGES[age] + after)).argmin())
        assert alive[half] <= alive[age] / 2 or half == len(AGES) - 1
        assert half == age or alive[half - 1] > alive[age] / 2


def test_who_is_away_for_long_is_known_when_the_quick_calls_are_over(monkeypatch):
    shell = tool(times(1000, (0.8, 0.3), (0.2, 40.0)))
    snapshot, policy = LatencySnapshot(shell, {("acme", "shell"): shell}), ExpectedWaste()
    away = [policy.away(PAUSE, snapshot, Conditions(wait_s=wait_s)) for wait_s in (0.0, 0.01, 1.0, 10.0, 100.0)]
    assert away[0] == inf, "nobody has waited yet"
    assert away[1] == 0.0, "what is lost is had again at once"
    assert 0.3 <= away[2] == away[3] < 0.6, "20 s are less than a slow call takes"
    assert away[4] > 40.0
    monkeypatch.setattr(ExpectedWaste, "AWAY_WAITS", 20.0)
    assert policy.away(PAUSE, snapshot, Conditions(wait_s=10.0)) > 40.0


@pytest.mark.parametrize("policy", ["none", "continuum", "infercept", *RETENTION.values()])
def test_under_other_policies_nobody_is_away(policy):
    slow = tool([40.0] * 1000)
    known = LatencySnapshot(slow, {("acme", "shell"): slow})
    assert retention_policy(policy).away(PAUSE, known, Conditions(wait_s=1.0)) == inf


def test_trust_comes_with_samples():
    shares = [trust(count, 0.05) for count in (0, 1, 2, 10, 20, 50, 100, 1000, 10**6)]
    assert shares[:3] == [0.0, 0.0, 0.0]
    assert shares == sorted(shares)
    assert trust(20, 0.05) == pytest.approx(1 - 0.30368 - 0.45303, abs=1e-4)  # Bernstein's two terms
    assert shares[-1] > 0.99


@given(durations, st.lists(st.floats(0.0, 5000.0), max_size=60))
def test_a_life_table_falls_and_who_lasts_makes_pauses_longer(seconds, lasting):
    found = life_table(seconds, lasting)
    assert found == pytest.approx(plain_life_table(seconds, lasting), abs=1e-12)
    assert (np.diff(found) <= 1e-12).all()
    assert (found >= -1e-12).all()
    assert (found <= 1.0).all()
    if min(lasting, default=0.0) >= max(seconds):
        assert (found >= life_table(seconds) - 1e-9).all()
