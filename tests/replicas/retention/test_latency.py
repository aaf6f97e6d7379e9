import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.retention.latency import RECENT, LatencyBook, Pauses, Tally, ToolLatency, tool_set


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


pauses_in_order = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["", "ls", "make"]), st.floats(0.0, 50.0)), max_size=40
)


@given(pauses_in_order, st.sets(st.integers(0, 9)), st.floats(0.0, 50.0))
def test_a_pause_is_known_from_its_beginning_to_the_next_turn_and_as_lasting_until_then(begun, gone, later):
    """Of each program all but the latest pause are over; that of one that has gone lasted until it went."""
    pauses, clock, expected = Pauses(), 0.0, dict[int, tuple[str, float, float | None]]()
    over = list[tuple[str, float]]()
    for program, tools, wait_s in begun:
        clock += wait_s
        if program in expected:
            before, since, _ = expected[program]
            over.append((before, clock - since))
            pauses.ended(program, clock)
        pauses.began(program, "acme", tools, clock)
        expected[program] = (tools, clock, None)
    for program in gone & expected.keys():
        expected[program] = (*expected[program][:2], clock)
        pauses.forget(program, clock)
    now = clock + later
    lasting = [(tools, (now if until is None else until) - since) for tools, since, until in expected.values()]
    for key in (None, ("acme", "ls"), ("acme", "make"), ("other", "ls")):
        found = pauses.known(key, now)
        for those, all_ in ((found.recent, over), (found.lasting, lasting)):
            wanted = sorted(seconds for tools, seconds in all_ if key is None or key == ("acme", tools))
            assert those == pytest.approx(wanted)
        assert found.count == len(found.recent)


def test_the_latest_pauses_are_those_that_began_last():
    pauses = Pauses(most=2)
    for i in range(RECENT + 1):
        pauses.began(i, "acme", "ls", float(i))
    pauses.ended(0, 1e6)  # the first one: none of the latest
    found = pauses.known(("acme", "ls"), RECENT + 10.0)
    assert found.recent == ()
    assert found.lasting == tuple(float(i) for i in range(10, RECENT + 10))
    for tools in ("make", "pytest", "sed"):
        pauses.began(tools, "other", tools, 0.0)
    assert pauses.known(("acme", "ls"), 500.0).lasting, "who calls many tools loses its own"
    assert not pauses.known(("other", "pytest"), 0.0).lasting
    assert pauses.known(("other", "sed"), 0.0).lasting
