"""Laws of placement: who is tried, in which order, and who moves when the replica set changes."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ConfigError
from holdfast.router.placement import (
    Ask,
    Group,
    LoadReport,
    Placement,
    PlacementConfig,
    Prefix,
    ReplicaView,
    Weights,
    rank,
)

CONFIG = PlacementConfig()
LONG = CONFIG.patience_s + 1.0

names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
programs = st.text(min_size=1, max_size=20)
views = st.lists(
    st.builds(ReplicaView, names, st.integers(0, 50), st.integers(1, 40)),
    max_size=8,
    unique_by=lambda view: view.replica_id,
)


def idle(*replica_ids: str) -> list[ReplicaView]:
    return [ReplicaView(replica_id, 0, 100) for replica_id in replica_ids]


@given(st.one_of(st.just(""), programs), views, st.one_of(st.none(), names), st.floats(0, 100))
def test_a_ranking_names_replicas_once_and_is_empty_only_without_any(
    program: str, replicas: list[ReplicaView], pinned: str | None, waited_s: float
) -> None:
    ranking = rank(program, replicas, pinned, waited_s, CONFIG)
    assert len(set(ranking)) == len(ranking)
    assert set(ranking) <= {view.replica_id for view in replicas}
    assert bool(ranking) == bool(replicas)


@given(programs, views, st.data())
def test_a_program_keeps_its_replica_alone_until_its_patience_ends(
    program: str, replicas: list[ReplicaView], data: st.DataObject
) -> None:
    if not replicas:
        return
    home = data.draw(st.sampled_from(replicas)).replica_id
    assert rank(program, replicas, home, 0.0, CONFIG) == (home,)
    after = rank(program, replicas, home, LONG, CONFIG)
    assert after[0] == home
    assert set(after) == {view.replica_id for view in replicas}


@given(programs, st.lists(names, min_size=2, max_size=8, unique=True))
def test_losing_another_replica_does_not_move_a_program(program: str, replica_ids: list[str]) -> None:
    first = rank(program, idle(*replica_ids), None, 0.0, CONFIG)
    for lost in first[1:]:
        left = [replica_id for replica_id in replica_ids if replica_id != lost]
        assert rank(program, idle(*left), None, 0.0, CONFIG)[0] == first[0]


@given(programs, st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_the_replicas_does_not_matter(program: str, replica_ids: list[str]) -> None:
    assert rank(program, idle(*replica_ids), None, 0.0, CONFIG) == rank(
        program, idle("a", "b", "c", "d"), None, 0.0, CONFIG
    )


def test_programs_spread_evenly() -> None:
    firsts = [rank(f"tenant/{i}", idle("a", "b", "c", "d"), None, 0.0, CONFIG)[0] for i in range(2000)]
    assert all(400 < firsts.count(replica_id) < 600 for replica_id in "abcd")


def test_a_dead_pin_counts_as_none() -> None:
    assert rank("p", idle("a", "b"), "gone", 0.0, CONFIG) == rank("p", idle("a", "b"), None, 0.0, CONFIG)


def test_a_new_program_leaves_a_crowded_replica() -> None:
    home, other = rank("p", idle("a", "b"), None, 0.0, CONFIG)
    busy = [ReplicaView(home, CONFIG.imbalance, 100), ReplicaView(other, 0, 100)]
    assert rank("p", busy, None, 0.0, CONFIG) == (other, home)
    busy = [ReplicaView(home, CONFIG.imbalance - 1, 100), ReplicaView(other, 0, 100)]
    assert rank("p", busy, None, 0.0, CONFIG) == (home, other)


def test_a_new_program_leaves_a_full_replica() -> None:
    home, other = rank("p", idle("a", "b"), None, 0.0, CONFIG)
    assert rank("p", [ReplicaView(home, 2, 2), ReplicaView(other, 1, 2)], None, 0.0, CONFIG) == (other, home)


def test_past_its_patience_a_program_goes_to_the_least_busy_other() -> None:
    replicas = [ReplicaView("home", 9, 9), ReplicaView("busy", 5, 9), ReplicaView("idle", 1, 9)]
    assert rank("p", replicas, "home", LONG, CONFIG) == ("home", "idle", "busy")


def test_without_a_program_the_load_decides() -> None:
    replicas = [ReplicaView("a", 3, 9), ReplicaView("b", 1, 9), ReplicaView("c", 0, 0)]
    assert rank("", replicas, None, 0.0, CONFIG) == ("b", "a", "c")


@pytest.mark.parametrize("wrong", [{"pins": 0}, {"imbalance": 0}, {"patience_s": -1.0}, {"no_replica_s": -1.0}])
def test_impossible_settings_name_their_field(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        PlacementConfig(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(wrong))


def test_a_group_is_served_together_while_there_is_room() -> None:
    group = Group("parent", "b")
    assert rank("p", idle("a", "b", "c"), None, 0.0, CONFIG, group)[0] == "b"
    assert rank("p", idle("a", "b", "c"), "a", 0.0, CONFIG, group) == ("a",), "what it has counts more"
    crowded = [ReplicaView("a", 0, 100), ReplicaView("b", CONFIG.imbalance, 100)]
    assert rank("p", crowded, None, 0.0, CONFIG, group)[0] == "a"
    many = [ReplicaView("a", 0, 100, 10), ReplicaView("b", 0, 100, 20)]
    assert set(rank("p", many, None, 0.0, CONFIG, group)) == {"a", "b"}
    assert [rank(f"p{i}", many, None, 0.0, CONFIG, group)[0] for i in range(50)].count("b") < 50


def test_routers_that_know_nothing_of_a_group_agree_on_its_place() -> None:
    places = {rank(f"p{i}", idle("a", "b", "c", "d"), None, 0.0, CONFIG, Group("key"))[0] for i in range(50)}
    assert len(places) == 1


def test_a_share_below_the_mean_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        PlacementConfig(group_load=0.5)
    assert refused.value.field == "group_load"


WEIGHTS = Weights()
LONG_PREFIX = Prefix("preamble", 20 * WEIGHTS.turn_tokens)
NEW = Ask(LONG_PREFIX.tokens + 100, (LONG_PREFIX,))


def placement(*replica_ids: str, seed: int = 0) -> Placement:
    made = Placement(WEIGHTS, random.Random(seed))
    made.update(dict.fromkeys(replica_ids, 100))
    return made


def chosen(made: Placement, ask: Ask) -> tuple[str, str]:
    choice = made.choose(ask)
    assert choice is not None
    return choice.replica_id, choice.reason


def send(made: Placement, replica_id: str, turns: int, *prefixes: Prefix) -> None:
    for _ in range(turns):
        made.sent(replica_id, prefixes)


def test_without_replicas_there_is_no_choice() -> None:
    assert placement().choose(NEW) is None


def test_a_new_program_goes_where_its_prefix_was_sent_or_is_told_of_until_that_is_dearer() -> None:
    made = placement("a", "b", "c")
    send(made, "b", 1, LONG_PREFIX)
    assert chosen(made, NEW) == ("b", "prefix")
    send(made, "b", 30)
    assert chosen(made, NEW)[1] == "load"
    made.report("c", LoadReport(running=2, prefixes={"preamble": LONG_PREFIX.tokens}))
    assert chosen(made, NEW) == ("c", "prefix")


def test_the_longest_prefix_that_anybody_holds_counts() -> None:
    made = placement("a", "b", "c")
    send(made, "a", 1, Prefix("short", 5000))
    send(made, "b", 1, Prefix("long", 9000))
    assert chosen(made, Ask(9100, (Prefix("longest", 9050), Prefix("long", 9000), Prefix("short", 5000))))[0] == "b"
    assert chosen(made, Ask(9100, (Prefix("unknown", 9050), Prefix("short", 5000))))[0] == "a"


def test_others_turns_are_known_from_reports_and_own_ones_at_once() -> None:
    made = placement("a", "b")
    made.report("a", LoadReport(running=3, waiting=2))
    assert chosen(made, Ask(10))[0] == "b"
    send(made, "b", 6)
    assert chosen(made, Ask(10))[0] == "a"
    made.report("b", LoadReport(running=6))  # these six: nothing new
    for _ in range(2):
        made.ended("b")
    assert chosen(made, Ask(10))[0] == "b"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 50_000))
def test_a_program_leaves_its_home_only_for_what_saves_more_than_it_computes_again(turns: list[int], held: int) -> None:
    made = placement(*map(str, range(len(turns))))
    for number, count in enumerate(turns):
        send(made, str(number), count)
    replica_id, reason = chosen(made, Ask(held + 10, home="0", held=held))
    saved = (turns[0] - min(turns) - 1) * WEIGHTS.turn_tokens
    assert (reason == "crowded") == (saved > WEIGHTS.move_factor * held)
    assert turns[int(replica_id)] == (min(turns) if reason == "crowded" else turns[0])


def test_a_home_that_is_gone_counts_as_none() -> None:
    made = placement("a", "b")
    send(made, "b", 1, LONG_PREFIX)
    made.update({"a": 100})
    assert chosen(made, Ask(NEW.tokens, NEW.prefixes, home="b", held=5000)) == ("a", "load")


def test_sub_agents_go_where_their_parent_is_while_there_is_room() -> None:
    made = placement("a", "b", "c")
    send(made, "b", 2)
    child = Ask(NEW.tokens, NEW.prefixes, near="b")
    assert chosen(made, child) == ("b", "near")
    send(made, "b", 30)
    assert chosen(made, child)[0] != "b"


def test_a_full_replica_is_passed_by() -> None:
    made = placement("a", "b")
    made.update({"a": 1, "b": 100})
    send(made, "a", 1, LONG_PREFIX)
    send(made, "b", 5)
    assert chosen(made, NEW)[0] == "b"


def test_a_slow_replica_is_chosen_less() -> None:
    made = placement("slow", "fast")
    made.report("slow", LoadReport(running=1, seconds_per_token=1e-2, prefixes={"preamble": 100}))
    made.report("fast", LoadReport(running=2, seconds_per_token=1e-4))
    assert chosen(made, Ask(5000, (Prefix("preamble", 100),)))[0] == "slow", (
        "the least loaded one is all that is looked at"
    )
    made.report("fast", LoadReport(running=2, prefixes={"preamble": 100}))
    assert chosen(made, Ask(5000, (Prefix("preamble", 100),)))[0] == "fast"


def test_routers_that_know_the_same_spread() -> None:
    places = Counter(chosen(placement("a", "b", "c", "d", seed=seed), Ask(10))[0] for seed in range(200))
    assert min(places[replica_id] for replica_id in "abcd") > 20


@pytest.mark.parametrize("wrong", [{"turn_tokens": 0}, {"crowded_load": 0.5}, {"move_factor": -1.0}, {"prefixes": 0}])
def test_impossible_weights_name_their_field(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        Weights(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(wrong))
