"""Laws of the ring: whoever knows the same replicas agrees, few names move, and no choice looks at all replicas."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router import ring
from holdfast.router.placement import Ask, Placement, PlacementConfig, Reason
from holdfast.router.ring import Ring

NAMES = [f"acme/program-{i}" for i in range(200)]
some = st.sets(st.sampled_from("abcdefgh"), min_size=1)


def over(*steps: set[str]) -> Ring:
    made = Ring()
    for step in steps:
        made.keep(step)
    return made


@given(st.lists(some, max_size=4), some)
def test_it_does_not_matter_how_replicas_came_and_went(before: list[set[str]], now: set[str]) -> None:
    one, other = over(*before, now), over(now)
    assert [one.owner(name) for name in NAMES] == [other.owner(name) for name in NAMES]
    assert {one.owner(name) for name in NAMES} <= now


@given(some, st.sampled_from("abcdefgh"))
def test_only_what_pointed_to_a_replica_moves_when_it_goes(there: set[str], gone: str) -> None:
    before, after = over(there | {gone}), over(there - {gone} or {"z"})
    for name in NAMES:
        if before.owner(name) != gone and there - {gone}:
            assert after.owner(name) == before.owner(name)


def test_names_spread() -> None:
    made = over(set("abcdefgh"))
    counts = Counter(made.owner(f"program-{i}") for i in range(8000))
    assert min(counts.values()) > 500
    assert max(counts.values()) < 2000


def test_one_of_a_thousand_replicas_is_found_by_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Placement(PlacementConfig(), random.Random(0))
    made.update({f"replicas#{i:06d}": 9 for i in range(1000)})
    digests, digest = [], ring._digest
    monkeypatch.setattr(ring, "_digest", lambda text, size: digests.append(text) or digest(text, size))
    choice = made.choose(Ask(1000, name="acme/p"))
    assert choice is not None
    assert choice.reason is Reason.HASH
    assert digests == ["acme/p"]
    made.update({f"replicas#{i:06d}": 9 for i in range(1001)})
    assert len(digests) == 1 + ring.POINTS // 8  # of the one that came
