"""Laws of placement: where a turn goes, and who leaves its home."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.stats import LoadReport
from holdfast.router.placement import Ask, Placement, PlacementConfig, Prefix

CONFIG = PlacementConfig()
LONG_PREFIX = Prefix("preamble", 20 * CONFIG.turn_tokens)
NEW = Ask(LONG_PREFIX.tokens + 100, (LONG_PREFIX,))


def placement(*replica_ids: str, seed: int = 0) -> Placement:
    made = Placement(CONFIG, random.Random(seed))
    made.update(dict.fromkeys(replica_ids, 100))
    return made


def chosen(made: Placement, ask: Ask) -> tuple[str, str]:
    choice = made.choose(ask)
    assert choice is not None
    return choice.replica_id, choice.reason


def send(made: Placement, replica_id: str, turns: int, *prefixes: Prefix) -> None:
    for _ in range(turns):
        made.sent(replica_id)
    made.holds(replica_id, prefixes)


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
    saved = (turns[0] - min(turns) - 1) * CONFIG.turn_tokens
    assert (reason == "crowded") == (saved > CONFIG.move_factor * held)
    assert turns[int(replica_id)] == (min(turns) if reason == "crowded" else turns[0])


def test_a_home_that_is_gone_counts_as_none() -> None:
    made = placement("a", "b")
    send(made, "b", 1, LONG_PREFIX)  # and no report after that says that it holds it
    made.update({"a": 100})
    assert chosen(made, Ask(NEW.tokens, NEW.prefixes, home="b", held=5000)) == ("a", "lost")


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


def test_a_crowd_counts_more_than_its_turns() -> None:
    made = placement("a", "b", "c", "d")
    send(made, "a", 12, Prefix("preamble", 14 * CONFIG.turn_tokens))
    prefix = Prefix("preamble", 14 * CONFIG.turn_tokens)
    assert chosen(made, Ask(prefix.tokens + 10, (prefix,)))[1] == "load", "12 turns would be less than 14"
    send(made, "b", 12)
    send(made, "c", 12)
    assert chosen(made, Ask(prefix.tokens + 10, (prefix,)))[1] == "prefix", "where all have much to do it is no crowd"


@pytest.mark.parametrize(
    "wrong", [{"pins": 0}, {"turn_tokens": 0}, {"crowded_load": 0.5}, {"move_factor": -1.0}, {"no_replica_s": -1.0}]
)
def test_impossible_settings_name_their_field(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        PlacementConfig(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(wrong))
