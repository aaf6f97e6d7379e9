"""Ways to place turns, each by what it is known for."""

from collections import Counter

import pytest

from holdfast.loadgen.program import Beginning, Program, sized, sized_turn
from holdfast.loadgen.simulator.routing import ROUTINGS, Placing, Routing, routing


def program(number: int, preamble: int = 0) -> Program:
    return sized(number, (sized_turn(5100, 10, "a", 0.1), sized_turn(50, 10)), 0.0, Beginning(5000, preamble))


def place(router: Routing, which: Program, at: int = 0, home: int | None = None) -> int:
    return router.place(Placing(which, at, 5100, home, None))


def test_round_robin_takes_turns_and_of_two_the_less_loaded_is_chosen() -> None:
    router = routing("round-robin")(3)
    assert [place(router, program(0)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    router = routing("two-choices")(2)
    assert sorted(Counter(place(router, program(i)) for i in range(20)).values()) == [10, 10]


def test_a_hash_keeps_a_program_and_a_bound_does_not_let_it_crowd() -> None:
    plain, bounded = routing("consistent-hash")(8), routing("bounded-hash")(8)
    assert len({place(plain, program(7)) for _ in range(40)}) == 1
    counts = Counter(place(bounded, program(7)) for _ in range(40))
    assert max(counts.values()) <= 7  # 1.25 times the mean of 5
    eight, nine = ([place(routing("consistent-hash")(n), program(i)) for i in range(40)] for n in (8, 9))
    assert sum(before != after for before, after in zip(eight, nine, strict=True)) < 15


def test_prefix_goes_where_it_was_whatever_waits_there() -> None:
    router = routing("prefix")(4)
    assert len({place(router, program(i, preamble=1)) for i in range(50)}) == 1
    other = place(router, program(60, preamble=2))
    assert other != place(router, program(61, preamble=1))


@pytest.mark.parametrize("name", ["ours", "ours-4-routers"])
def test_ours_shares_a_preamble_until_that_is_dearer(name: str) -> None:
    router = routing(name)(4)
    places = Counter(place(router, program(i, preamble=1)) for i in range(50))
    assert len(places) == 4
    assert max(places.values()) < 25
    home = place(router, program(100))
    assert place(router, program(100), at=1, home=home) == home


@pytest.mark.parametrize("name", ROUTINGS)
def test_what_has_ended_counts_no_more(name: str) -> None:
    router = routing(name)(4)
    first = [place(router, program(i)) for i in range(8)]
    for i, replica in enumerate(first):
        router.ended(replica, program(i), 0)
    assert sorted(Counter(place(router, program(i, preamble=i + 1)) for i in range(100, 104)).values())[-1] <= 4
