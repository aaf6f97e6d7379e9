"""Laws of placement: where turns go, what moves them, and that no choice looks at all replicas."""

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.stats import LoadReport
from holdfast.router.placement import (
    HOLDERS,
    WEIGHTS,
    Decision,
    Placement,
    PlacementConfig,
    PlacementRequest,
    Prefix,
    Reason,
    Weights,
    rendezvous,
)

names = st.sampled_from("abcdefgh")
digests = st.sampled_from(("p", "q", "r"))
asks = st.builds(
    PlacementRequest,
    st.integers(0, 20_000),
    st.lists(st.builds(Prefix, digests, st.integers(1, 9000)), max_size=2).map(tuple),
    st.none() | names,
    st.integers(0, 20_000),
    st.none() | names,
    st.sampled_from(("", "t/p")),
)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("sent"), names),
        st.tuples(st.just("ended"), names),
        st.tuples(st.just("ongoing"), names, st.integers(0, 9)),
        st.tuples(st.just("update"), st.dictionaries(names, st.integers(1, 4), max_size=8)),
        st.tuples(
            st.just("report"),
            names,
            st.builds(
                LoadReport,
                st.integers(0, 5),
                st.integers(0, 5),
                cells_total=st.integers(0, 9000),
                cells_pinned=st.integers(0, 9000),
                seconds_per_token=st.floats(0, 0.01),
                prefixes=st.dictionaries(digests, st.integers(1, 9000)),
            ),
        ),
        st.tuples(st.just("holds"), names, st.lists(st.builds(Prefix, digests, st.just(100)), max_size=2)),
    ),
    max_size=30,
)


def placement(*replica_ids: str, capacity: int = 100, **config: float) -> Placement:
    """At a parent's replica crowds count no more than their turns, unless a test says so."""
    weights = Weights(**{"crowded_parent": 100.0} | config)  # type: ignore[arg-type]
    made = Placement(random.Random(0), weights)
    made.update(dict.fromkeys(replica_ids, capacity))
    return made


def send(made: Placement, replica_id: str, turns: int) -> None:
    for _ in range(turns):
        made.sent(replica_id)


def first(made: Placement, ask: PlacementRequest) -> Decision:
    choice = made.choose(ask)
    assert choice is not None
    return choice


@given(happenings, asks)
def test_a_choice_is_a_replica_that_is_there_and_there_is_none_only_without_any(
    happened: list[tuple[str, ...]], ask: PlacementRequest
) -> None:
    made, there = placement("a", "b"), {"a", "b"}
    for what, *about in happened:
        getattr(made, what)(*about)
        if what == "update":
            there = set(about[0])
        choice = made.choose(ask)
        assert (choice is None) == (not there)
        assert choice is None or choice.replica_id in there
        assert made.balance >= 1.0


@given(happenings)
def test_who_holds_what_is_what_replicas_told_last_and_what_was_sent_there(happened: list[tuple[Any, ...]]) -> None:
    made = placement("a", "b")
    told: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    held: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    for name, *with_ in happened:
        getattr(made, name)(*with_)
        if name == "update":
            told, held = ({each: known.get(each, {}) for each in with_[0]} for known in (told, held))
        elif with_[0] not in held:
            continue
        elif name == "holds":
            for each in with_[1]:
                held[with_[0]].setdefault(each.digest, 0)
        elif name == "report":
            before, now = told[with_[0]], dict(with_[1].prefixes)
            held[with_[0]] = {each: n for each, n in held[with_[0]].items() if each not in before} | now
            told[with_[0]] = now
    found = {(each, digest): n for digest, holders in made._prefixes._holders.items() for each, n in holders.items()}
    assert found == {(each, digest): n for each, known in held.items() for digest, n in known.items()}


def test_a_program_goes_home_until_that_is_so_crowded_that_computing_all_again_is_clearly_less() -> None:
    made = placement("a", "b", turn_tokens=1000, move_factor=4.0)
    ask = PlacementRequest(3000, home="a", held=3000)
    send(made, "a", 16)
    assert first(made, ask) == Decision("a", Reason.HOME)
    send(made, "a", 1)
    assert first(made, ask) == Decision("b", Reason.CROWDED)
    made.ended("a")
    assert first(made, ask) == Decision("a", Reason.HOME)


def test_a_program_whose_home_has_gone_is_placed_anew() -> None:
    made = placement("b", "c")
    made.report("c", LoadReport(prefixes={"p": 500}))
    assert first(made, PlacementRequest(1000, (Prefix("p", 500),), home="a", held=900)) == Decision("c", Reason.LOST)


@pytest.mark.parametrize("at_once", [True, False])
def test_new_programs_spread_evenly(at_once: bool) -> None:
    """Also where each is over when the next one comes."""
    made, counts = placement(*"abcdefgh"), Counter[str]()
    for _ in range(800):
        chosen = first(made, PlacementRequest(1000)).replica_id
        made.sent(chosen)
        counts[chosen] += 1
        if not at_once:
            made.ended(chosen)
    assert set(counts.values()) == {100}


def test_routers_that_know_the_same_begin_differently() -> None:
    found = Counter[str]()
    for seed in range(200):
        made = Placement(random.Random(seed))
        made.update(dict.fromkeys("abcd", 9))
        found[first(made, PlacementRequest(10)).replica_id] += 1
    assert min(found[name] for name in "abcd") > 20


def test_a_known_beginning_is_gone_to_while_it_saves_more_than_the_turns_there_cost() -> None:
    made = placement("a", "b", turn_tokens=1000)
    made.report("b", LoadReport(prefixes={"p": 2500}))
    ask = PlacementRequest(3000, (Prefix("unknown", 2900), Prefix("p", 10)))  # the replica knows how long it is
    for _ in range(3):
        assert first(made, ask) == Decision("b", Reason.PREFIX)
        made.sent("b")
    assert first(made, ask) == Decision("a", Reason.LOAD)


def test_a_beginning_of_several_replicas_is_worth_so_many_turns_however_long_it_is() -> None:
    ask = PlacementRequest(30_000, (Prefix("p", 29_000),))
    for holders, turns, reason in (("b", 20, Reason.PREFIX), ("bc", 3, Reason.PREFIX), ("bc", 4, Reason.LOAD)):
        made = placement("a", "b", "c", "d", turn_tokens=1000, shared_turns=3.0)
        for name in holders:
            made.report(name, LoadReport(prefixes={"p": 29_000}))
            send(made, name, turns)
        for name in {"b", "c", "d"} - set(holders):
            send(made, name, 100)
        assert first(made, ask).reason is reason


def test_programs_that_begin_alike_and_pause_for_long_fill_no_replica_while_others_are_empty() -> None:
    """They come one at a time, so turns in hand never tell a full cache from an empty one."""
    room, names, each = 65_536, "abcdefgh", 2_000
    made = placement(*names)
    pinned = dict.fromkeys(names, 0)
    for number in range(256):
        chosen = first(made, PlacementRequest(each, (Prefix("own" + str(number), each), Prefix("p", 1_500)))).replica_id
        made.sent(chosen)
        made.holds(chosen, (Prefix("p", 1_500),))
        made.ended(chosen)
        pinned[chosen] += each
        made.report(chosen, LoadReport(cells_total=room, cells_pinned=pinned[chosen], prefixes={"p": 1_500}))
        assert max(pinned.values()) <= room + each  # one more, where what it finds is worth what it takes
    assert min(pinned.values()) > 0


def test_what_a_replica_tells_of_no_more_has_been_evicted() -> None:
    made = placement("a", "b")
    made.report("b", LoadReport(prefixes={"p": 2500}))
    made.sent("b")
    ask = PlacementRequest(3000, (Prefix("p", 2500),))
    assert first(made, ask) == Decision("b", Reason.PREFIX)
    made.report("b", LoadReport(running=1))
    assert first(made, ask) == Decision("a", Reason.LOAD)


def test_a_child_goes_to_its_parent_while_there_is_room() -> None:
    made = placement("a", "b", turn_tokens=1000, capacity=2)
    ask = PlacementRequest(3000, (Prefix("p", 2500),), parent="b")
    assert first(made, ask) == Decision("b", Reason.NEAR)
    send(made, "b", 2)
    assert first(made, ask) == Decision("a", Reason.LOAD)


def test_a_branch_goes_where_its_history_is_while_that_saves_more_than_the_turns_there_cost() -> None:
    """It was sent there by this router; no replica tells of it. Short of that, where the shorter beginning is."""
    made = placement("a", "b", "c", turn_tokens=1000)
    history, begins = Prefix("history", 6000), Prefix("p", 2500)
    made.report("b", LoadReport(prefixes={"p": 2500}))
    made.holds("c", (history, begins))
    ask = PlacementRequest(6500, (Prefix("own", 6500), history, begins))
    assert first(made, ask) == Decision("c", Reason.PREFIX)
    send(made, "c", 4)
    assert first(made, ask) == Decision("b", Reason.PREFIX)
    send(made, "b", 6)
    assert first(made, ask) == Decision("c", Reason.PREFIX)
    send(made, "c", 4)
    assert first(made, ask) == Decision("a", Reason.LOAD)


def test_other_routers_turns_count_as_replicas_tell_of_them() -> None:
    made = placement("a", "b")
    made.sent("b")
    made.report("a", LoadReport(running=3, waiting=2))
    made.report("b", LoadReport(running=1))
    assert first(made, PlacementRequest(10)).replica_id == "b"
    assert made.balance == 5 / 3
    made.ended("a")
    made.ongoing("a", 0)
    assert first(made, PlacementRequest(10)).replica_id == "a"


def test_a_slow_replica_gets_less() -> None:
    made = placement("a", "b")
    for name, seconds in (("a", 0.004), ("b", 0.001)):
        made.report(name, LoadReport(prefixes={"p": 100}, seconds_per_token=seconds))
    send(made, "b", 1)
    assert first(made, PlacementRequest(1000, (Prefix("p", 100),))).replica_id == "b"


def test_a_turn_waits_for_its_home_as_long_as_computing_there_would_take() -> None:
    made = placement("a", "b", patience_s=10.0)
    ask = PlacementRequest(2000, home="a", held=2000)
    assert made.patience(ask) == 10.0, "nothing is known of what computing takes"
    made.report("a", LoadReport(seconds_per_token=0.001))
    assert made.patience(ask) == pytest.approx(2.0)
    assert made.patience(PlacementRequest(10**6, home="a", held=10**6)) == 10.0
    assert made.elsewhere(ask) in (Decision("b", Reason.WAITED), Decision("a", Reason.LOAD))


def test_routers_that_share_nothing_agree_by_a_programs_name() -> None:
    found = {first(placement(*order), PlacementRequest(10, name="t/p")) for order in ("abcd", "dcba", "cabd")}
    assert len(found) == 1
    assert found.pop().reason is Reason.HASH


def test_a_crowd_counts_more_than_its_turns() -> None:
    """Above the mean; at a parent's replica above `crowded_parent` times the mean."""
    begins = PlacementRequest(9000, (Prefix("p", 8000),))
    child = replace(begins, parent="a")
    for ask, load, goes in ((begins, 100.0, "b"), (child, 100.0, "a"), (child, 1.5, "b")):
        made = placement("a", "b", "c", "d", turn_tokens=1000, crowded_parent=load)
        made.report("a", LoadReport(prefixes={"p": 8000}))
        for name, turns in (("a", 6), ("b", 0), ("c", 1), ("d", 1)):
            send(made, name, turns)
        assert first(made, ask).replica_id == goes


def test_no_choice_looks_at_more_replicas_than_may_suit_it() -> None:
    """However many there are, and however many hold its prefix."""
    looked = Counter[str]()

    class Counted(dict[str, Any]):
        def __getitem__(self, replica_id: str) -> Any:
            looked[replica_id] += 1
            return super().__getitem__(replica_id)

    made = placement(*map(str, range(1000)))
    for replica_id in map(str, range(500)):
        made.report(replica_id, LoadReport(running=int(replica_id) % 7, prefixes={"p": 2000}))
    made._loads = Counted(made._loads)
    for ask in (PlacementRequest(3000, (Prefix("p", 2000),), parent="7"), PlacementRequest(3000, home="5", held=3000)):
        looked.clear()
        first(made, ask)
        assert len(looked) <= HOLDERS + 3


@pytest.mark.parametrize(
    "wrong", [{"max_waiting": 0}, {"queue_timeout_s": -1.0}, {"no_replica_s": -1.0}, {"silent_s": 2.0}]
)
def test_impossible_settings_name_their_field(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PlacementConfig(**wrong)  # type: ignore[arg-type]


def behind_one_key(tokens: int, in_hand: int) -> list[int]:
    """How many of 1,024 programs each of eight replicas got, whose prompts begin with the same `tokens`, as those that
    a gateway sends with one key. The oldest turns end as soon as more than `in_hand` are.

    A program is new here, and has no place but what it shares.
    """
    made = placement(*"abcdefgh", crowded_parent=WEIGHTS.crowded_parent)
    shared, hand, got = (Prefix("key", tokens),), deque[str](), Counter[str]()
    for _ in range(1024):
        chosen = first(made, PlacementRequest(tokens + 1000, shared)).replica_id
        least = min(Counter({name: hand.count(name) for name in "abcdefgh"}).values())
        # What is computed there once more is worth no more turns before it than that.
        assert (hand.count(chosen) - least) * WEIGHTS.turn_tokens <= tokens
        made.holds(chosen, shared)
        made.sent(chosen)
        hand.append(chosen)
        got[chosen] += 1
        while len(hand) > in_hand:
            made.ended(hand.popleft())
    return sorted(got.values())


@pytest.mark.parametrize("tokens", [200, 1500, 6000])
def test_programs_behind_one_key_fill_all_replicas_while_their_turns_are_in_hand(tokens: int) -> None:
    got = behind_one_key(tokens, in_hand=64)
    assert len(got) == 8
    assert got[-1] <= 1.25 * 1024 / 8


def test_programs_behind_one_key_that_come_one_at_a_time_are_all_where_the_first_is() -> None:
    """Nobody waits there, and everybody has less to compute. No replica tells of cells that are kept in pauses."""
    assert behind_one_key(1500, in_hand=0) == [1024]


# ---- the hash of a name ----

NAMES = [f"acme/program-{i}" for i in range(50)]


@given(st.sets(names, min_size=2), names)
def test_names_move_only_with_their_replica(replicas: set[str], gone: str) -> None:
    before = {name: rendezvous(name, replicas) for name in NAMES}
    assert set(before.values()) <= replicas
    left = replicas - {gone}
    assert all(rendezvous(name, left) == home for name, home in before.items() if home != gone)


def test_names_spread() -> None:
    counts = Counter(rendezvous(f"program-{i}", "abcdefgh") for i in range(8000))
    assert min(counts.values()) > 800
    assert max(counts.values()) < 1200
