"""Other ways to place turns, which a real server is compared with: they are what they are called."""

from collections import Counter
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st
from placements_in_serve import BOUND, Ways

from holdfast.loadgen.simulator.routing import ROUTINGS
from holdfast.router.placement import PlacementRequest, Prefix

loads = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1)
PROMPT = PlacementRequest(100, (Prefix("whole", 100), Prefix("begins", 40)))


def test_they_are_those_of_the_simulator() -> None:
    assert set(Ways().by_name) == {name for name in ROUTINGS if not name.startswith("ours")}


@settings(max_examples=30)
@given(loads, st.text("xyz", min_size=1))
def test_where_a_turn_goes(turns: dict[str, int], program: str) -> None:
    ways = Ways()
    went = {name: way(program, PROMPT, turns) for name, way in ways.by_name.items()}
    assert set(went.values()) <= turns.keys()
    assert len(turns) == 1 or turns[went["two-choices"]] <= sorted(turns.values())[-2], "never the only fullest"
    assert turns[went["bounded-hash"]] < ceil(BOUND * (sum(turns.values()) + 1) / len(turns))
    assert turns[went["prefix"]] == min(turns.values())
    again = {name: way(program, PROMPT, turns) for name, way in ways.by_name.items()}
    assert [again[name] for name in ("consistent-hash", "prefix")] == [
        went[name] for name in ("consistent-hash", "prefix")
    ]


def test_round_robin_goes_round_and_a_prefix_stays_however_much_waits_there() -> None:
    ways, turns = Ways(), dict.fromkeys("abcd", 0)
    assert set(Counter(ways.round_robin(str(i), PROMPT, turns) for i in range(8)).values()) == {2}
    first = ways.prefix("p", PROMPT, turns)
    other = PlacementRequest(80, (Prefix("other", 80), Prefix("begins", 40)))
    assert ways.prefix("q", other, turns | {first: 100}) == first
