"""Laws of placement: who is tried, in which order, and who moves when the replica set changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ConfigError
from holdfast.router.placement import Group, PlacementConfig, ReplicaView, rank

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
