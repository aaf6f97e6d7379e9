"""Whose turn it is, as arithmetic: shares by weight, nobody starves, idle time is lent and not held against anybody."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.scheduling.shares import Classes, FairShares, Roots, Shares
from holdfast.replicas.types import Priority

LONGEST = 5.0


class Server:
    """One place; each tenant has requests of its own length, and so many of them at once."""

    def __init__(self, lengths: dict[str, float], weights: dict[str, float]) -> None:
        self.shares, self.lengths, self.weights = Shares(), lengths, weights
        self.waiting = dict.fromkeys(lengths, 0)
        self.had = dict.fromkeys(lengths, 0.0)
        self.turns: list[str] = []

    def come(self, tenant: str) -> None:
        self.shares.on_arrive(tenant, self.weights[tenant], alone=not any(self.waiting.values()))
        self.waiting[tenant] += 1

    def serve(self) -> None:
        waiting = [name for name, n in self.waiting.items() if n]
        tenant = waiting[self.shares.first(waiting)[0]]
        self.shares.on_start(tenant)
        self.waiting[tenant] -= 1
        self.shares.charge(tenant, self.lengths[tenant])
        self.shares.on_end(tenant)
        self.had[tenant] += self.lengths[tenant]
        self.turns.append(tenant)

    def saturate(self, names: str, turns: int) -> None:
        """These always have a request that waits, for so many turns."""
        for name in names:
            self.come(name)
        for _ in range(turns):
            self.serve()
            for name in names:
                if not self.waiting[name]:
                    self.come(name)


given_lengths = st.lists(st.floats(0.1, LONGEST), min_size=2, max_size=6)
given_weights = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=6, max_size=6)


@settings(max_examples=30)
@given(given_lengths, given_weights)
def test_who_always_waits_is_served_by_weight_and_none_starves(lengths, weights):
    names = "abcdef"[: len(lengths)]
    server = Server(dict(zip(names, lengths, strict=True)), dict(zip(names, weights, strict=False)))
    server.saturate(names, 600)
    level = [server.had[name] / server.weights[name] for name in names]
    assert max(level) - min(level) <= 4 * LONGEST / min(weights)
    assert set(server.turns[-300:]) == set(names) or min(level) > max(level) - 4 * LONGEST / min(weights)


@settings(max_examples=40)
@given(st.integers(1, 200), st.floats(0.5, LONGEST))
def test_idle_time_is_lent_and_not_held_against_who_used_it(alone, length):
    server = Server({"a": length, "b": length}, {"a": 1.0, "b": 1.0})
    for _ in range(alone):  # nobody else wants any
        server.come("a")
        server.serve()
    assert server.had["a"] == pytest.approx(alone * length), "it has all"
    server.saturate("ab", 20)
    assert abs(server.turns[alone:].count("a") - 10) <= 1, "and is behind nobody for it"


@settings(max_examples=40)
@given(st.integers(1, 50))
def test_being_away_earns_nothing(away):
    server = Server({"a": 1.0, "b": 1.0, "c": 1.0}, dict.fromkeys("abc", 1.0))
    server.saturate("ab", 2)
    server.saturate("ac", 2 * away)
    before = len(server.turns)
    server.saturate("abc", 30)
    assert server.turns[before:].count("b") <= 11


@settings(max_examples=40)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_who_is_served_elsewhere_is_overtaken_but_not_for_ever(elsewhere):
    server = Server({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0})
    server.come("b")
    server.come("a")
    gap = 0
    for i in range(200):
        server.shares.elsewhere("b", elsewhere[i % len(elsewhere)])
        server.serve()
        gap = 0 if server.turns[-1] == "b" else gap + 1
        assert gap <= 13, "the bound is ten seconds"
        for name in "ab":
            if not server.waiting[name]:
                server.come(name)
    assert server.had["a"] >= server.had["b"] - 2.0


def test_a_program_waits_once_it_has_had_a_quantum_and_who_was_away_has_no_more_than_the_rest_of_one():
    roots = Roots(quantum_s=10.0)
    old = roots.on_arrive("old")
    roots.on_start(old)
    roots.charge("old", 25.0)
    roots.on_end("old")
    assert roots.on_arrive("old")[0] == 2.0
    assert roots.on_arrive("new")[0] == 0.0
    roots.on_start((2.0, 0.0))  # nobody before it waits
    assert roots.on_arrive("newer")[0] == 2.0


@settings(max_examples=20)
@given(st.floats(0.01, 0.5))
def test_batch_has_its_part_where_the_others_would_take_all(share):
    """Each step is interactive unless batch's turn is due; then it is batch's."""
    classes, had = Classes(share), {True: 0.0, False: 0.0}
    for _ in range(10000):
        due = classes.due
        classes.serve(0.0 if due else 0.01, 0.01 if due else 0.0, wanted=True)
        had[due] += 0.01
    assert had[True] / 100 == pytest.approx(share, abs=0.01)


def test_batch_that_nobody_keeps_from_running_is_owed_nothing_and_owes_nothing():
    classes = Classes(0.1)
    classes.serve(0.0, 1000.0, wanted=True)
    for _ in range(60):
        classes.serve(0.1, 0.0, wanted=True)
    assert classes.due
    classes.serve(0.1, 0.0, wanted=False)
    assert not classes.due


@given(st.lists(st.tuples(st.sampled_from(Priority), st.integers(0, 5)), max_size=40), st.integers(1, 3))
def test_what_others_are_told_is_of_those_served_last_and_no_more(served, tenants):
    fair = FairShares(tenants)
    last: dict[str, float] = {}
    for priority, number in served:
        fair.charge(priority, "alone", 1.0, contended=False)
        fair.charge(priority, f"t{number}", 1.5, contended=True)
        name = f"{priority}/t{number}"
        last[name] = last.pop(name, 0.0) + 1.5
        if len(last) > 2 * tenants:
            del last[next(iter(last))]
        assert fair.contended == last


NAMES = "abcd"
acts = st.lists(st.tuples(st.sampled_from(["come", "begin", "charge"]), st.sampled_from(NAMES), st.integers(0, 3)))


@given(acts, st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
def test_the_first_of_those_who_wait_were_served_least_what_they_run_counted_in_advance(
    acts: list[tuple[str, str, int]], waiting: list[str]
) -> None:
    shares = Shares()
    for act, name, n in acts:
        if act == "come":
            shares.on_arrive(name, weight=1.0 + n, alone=n == 0)
        elif act == "begin":
            shares.on_start(name)
        else:
            shares.charge(name, float(n))
    before = shares.of("nobody yet").served
    those = [shares.of(name) for name in waiting]
    running = [share.running / share.weight for share in those]
    standings = [(share.served + n * shares.usual, n) for share, n in zip(those, running, strict=True)]
    assert shares.first(waiting) == [i for i, each in enumerate(standings) if each == min(standings)]
    assert shares.of("a newcomer").served == max(before, min(share.served for share in those)), "their time goes on"
