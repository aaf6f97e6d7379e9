import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention import latency
from holdfast.replicas.retention.latency import (
    AGES,
    RECENT,
    LatencyBook,
    Pauses,
    Tally,
    ToolLatency,
    ToolPause,
    tool_set,
)


@pytest.mark.parametrize(
    ("names", "key"),
    [((), ""), (("grep",), "grep"), (("sed", "grep"), "grep,sed"), (("sed", "sed"), "sed"), (("", "ls"), "ls")],
)
def test_calls_at_once_are_one_set(names, key):
    assert tool_set(names) == key


def test_names_are_bounded():
    assert len(tool_set(["x" * 9999])) == 64
    assert len(tool_set([f"{i:060}" for i in range(100)])) == 256


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=400))
def test_a_tally_is_what_the_sample_says(durations):
    tally = Tally()
    for seconds in durations:
        tally.add(seconds)
    found = tally.latency()
    assert found.count == len(durations)
    assert found.mean == pytest.approx(statistics.fmean(durations), abs=1e-9)
    variance = statistics.variance(durations) if len(durations) > 1 else 0.0
    assert found.variance == pytest.approx(variance, rel=1e-6, abs=1e-6)
    assert found.recent == tuple(sorted(durations[-RECENT:]))


def test_an_interval_counts_for_its_tenants_tools_and_for_all():
    book = LatencyBook()
    book.record("a", "grep", 1.0)
    book.record("b", "grep", 3.0)
    book.record("b", "", 5.0)
    book.record("b", "sed", -2.0)  # clocks that disagree
    book.record("b", "sed", float("nan"))
    found = book.snapshot()
    assert found.of("a", "grep") == ToolLatency(1, 1.0, 0.0, (1.0,))
    assert found.of("b", "sed").mean == 0.0
    assert found.of("c", "grep").count == 0
    assert (found.overall.count, found.overall.mean) == (4, 2.25)
    assert set(found.tools) == {("a", "grep"), ("b", "grep"), ("b", "sed")}


def test_a_book_forgets_the_tools_that_nobody_calls():
    book = LatencyBook(most=2)
    for tool in ("one", "two", "one", "three"):
        book.record("a", tool, 1.0)
    assert set(book.snapshot().tools) == {("a", "one"), ("a", "three")}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=120))
def test_a_tenant_that_invents_tools_pushes_out_its_own(intervals):
    """Nobody loses one who has no more than an equal part, whatever the others do."""
    book, latest = LatencyBook(most=9), {}
    for tenant, tool in intervals:
        book.record(tenant, f"t{tool}", 1.0)
        used = latest.setdefault(tenant, {})
        used.pop(f"t{tool}", None)
        used[f"t{tool}"] = None
        known = set(book.snapshot().tools)
        assert len(known) <= 9
        for each, tools in latest.items():
            assert {(each, name) for name in list(tools)[-3:]} <= known, "the latest three of each of three tenants"


histories = st.lists(
    st.tuples(
        st.sampled_from(["began", "began", "ended", "forget"]),
        st.integers(0, 5),
        st.sampled_from(["", "ls", "make"]),
        st.sampled_from([0.0, 0.02, 1.0]) | st.floats(0.0, 5000.0),
    ),
    max_size=80,
)


@dataclass(slots=True)
class Interval:
    """One pause as a list keeps it: until when it is known to have lasted, None for this day, and if it ended then."""

    whose: int
    tools: str
    since: float
    until: float | None = None
    over: bool = False


def counted(durations: Iterable[float]) -> list[int]:
    """How many are no longer than each of `AGES`."""
    those = list(durations)
    return [sum(seconds <= age for seconds in those) for age in AGES]


@given(histories, st.floats(0.0, 50.0), st.integers(1, 9))
def test_what_is_counted_as_pauses_end_is_what_a_list_of_the_latest_says(history, later, recent):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "RECENT", recent)
        pauses, all_, clock = Pauses(), list[Interval](), 0.0
        lasting: dict[str, ToolPause] = {}
        for what, whose, tools, wait_s in history:
            clock += wait_s
            last = next((each for each in all_ if each.whose == whose and each.until is None), None)
            if last is not None:  # a program has one pause at a time
                last.until, last.over = clock, what == "ended"
                lasting.pop(whose).end(clock, returned=last.over)
            if what == "began":
                all_.append(Interval(whose, tools, clock))
                lasting[whose] = pauses.began("acme", tools, clock)
        now = clock + later
        for key in (None, ("acme", "ls"), ("acme", "make"), ("other", "ls")):
            those = [each for each in all_ if key is None or key == ("acme", each.tools)][-recent:]
            found = pauses.known(key, now)
            over = counted(each.until - each.since for each in those if each.over)
            lasting = counted(
                (now if each.until is None else each.until) - each.since for each in those if not each.over
            )
            assert found.by_age.tolist() == [over, lasting]
            assert (found.n, found.count) == (len(those), sum(each.over for each in those))


def test_the_latest_pauses_are_those_that_began_last():
    pauses = Pauses(most=2)
    first, *_ = [pauses.began("acme", "ls", float(i)) for i in range(RECENT + 1)]
    first.end(1e6, returned=True)  # none of the latest
    found = pauses.known(("acme", "ls"), RECENT + 10.0)
    assert (found.n, found.count) == (RECENT, 0)
    assert found.by_age[1].tolist() == counted(map(float, range(10, RECENT + 10)))
    _, forgotten, _ = [pauses.began("other", tools, 0.0) for tools in ("make", "pytest", "sed")]
    assert pauses.known(("acme", "ls"), 500.0).n, "who calls many tools loses its own"
    assert not pauses.known(("other", "pytest"), 0.0).n
    assert pauses.known(("other", "sed"), 0.0).n
    pauses.began("other", "pytest", 1.0)
    forgotten.end(2.0, returned=True)  # its set was forgotten
    assert (pauses.known(("other", "pytest"), 3.0).n, pauses.known(("other", "pytest"), 3.0).count) == (1, 0)
