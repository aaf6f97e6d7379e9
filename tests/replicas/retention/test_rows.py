"""Places between turns: programs give way in the order of their last use, sessions do not; and what was rewritten."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.retention.rows import Parking, Place
from holdfast.replicas.sequences import Histories, Owner


def program(name: str) -> Owner:
    return Owner("", name, session=False)


def test_the_least_recently_parked_program_gives_way_and_a_session_never_does():
    parking = Parking()
    parking.park(Owner("", "s", session=True), Place(1, 9, NO_PAGES))
    for row, name in enumerate("abc"):
        assert parking.park(program(name), Place(1, row, NO_PAGES)) is None
    assert parking.park(program("a"), Place(2, 0, NO_PAGES)).n_tokens == 1
    assert parking.rows == 3
    assert [parking.give_way() for _ in range(4)] == [1, 2, 0, None]
    assert parking.find(Owner("", "s", session=True)).row == 9


def test_a_place_is_taken_once_and_a_program_is_no_session():
    parking = Parking()
    parking.park(program("x"), Place(1, 0, NO_PAGES))
    assert parking.find(Owner("", "x", session=True)) is None
    assert parking.find(Owner("tenant", "x", session=False)) is None
    assert parking.find(None) is None
    assert parking.take(program("x")).row == 0
    assert parking.take(program("x")) is None


def test_an_owner_is_the_session_before_the_program():
    assert Owner.of("", "s", "p") == Owner("", "s", session=True)
    assert Owner.of("", "", "p") == program("p")
    assert Owner.of("", "", "") is None


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.asarray(ids, np.int32))


@given(tokens, tokens, st.integers(0, 12))
def test_rewritten_is_what_lies_behind_the_first_changed_token(before, prompt, n_cached):
    histories = Histories(100)
    histories.remember(program("p"), before)
    common = next(
        (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt))
    )
    lost = histories.rewritten(program("p"), prompt, n_cached)
    changed = common < len(before) and common < len(prompt)
    assert lost == (len(before) - common if changed and n_cached <= common else 0)
    assert histories.rewritten(program("q"), prompt, 0) == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=30))
def test_histories_are_bounded_and_forget_the_oldest(turns):
    histories, model = Histories(50), {}
    for name, n in turns:
        histories.remember(program(name), np.zeros(n, np.int32))
        model.pop(name, None)
        model[name] = n
        while sum(model.values()) > 50:
            del model[next(iter(model))]
        assert histories.held == sum(model.values())
