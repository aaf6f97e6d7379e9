"""Lines of requests against a sorted list."""

import heapq
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.types import Priority
from holdfast.router.lines import NOBODY, Lines, Payer, SlotShares


def test_a_replica_takes_the_first_of_its_line_and_the_line_for_any():
    lines: Lines[str] = Lines(10)
    lines.enter((3.0,), "third", None)
    lines.enter((2.0,), "second", "a")
    lines.enter((1.0,), "elsewhere", "b")
    assert [lines.take("a") for _ in range(3)] == ["second", "third", None]
    assert lines.take("b") == "elsewhere"


def test_equal_keys_are_first_in_first_out():
    lines: Lines[int] = Lines(10)
    for i in range(5):
        lines.enter((1.0,), i, "a" if i % 2 else None)
    assert [lines.take("a") for _ in range(5)] == list(range(5))


def test_one_too_many_is_refused():
    lines: Lines[str] = Lines(1)
    place = lines.enter((1.0,), "only", None)
    with pytest.raises(OverloadedError):
        lines.enter((0.0,), "more", None)
    lines.leave(place)
    lines.leave(place)
    assert len(lines) == 0
    lines.enter((0.0,), "more", None)


def test_who_waits_for_a_replica_that_goes_waits_for_any():
    lines: Lines[str] = Lines(10)
    lines.enter((1.0,), "orphan", "a")
    lines.keep({"b"})
    assert lines.take("b") == "orphan"


def test_what_was_given_up_is_let_go():
    lines: Lines[int] = Lines(10)
    lines.enter((0.0,), -1, "a")
    for i in range(1000):
        lines.leave(lines.enter((1.0,), i, "a"))
    assert sum(len(line) for of_home in lines._lines.values() for line in of_home.values()) < 200


steps = st.tuples(st.sampled_from(["enter", "take", "leave", "free", "keep"]), st.integers(0, 5), st.sampled_from("ab"))


@given(st.lists(steps, max_size=60))
def test_any_use_agrees_with_a_sorted_list(operations):
    lines: Lines[int] = Lines(1000)
    places, homes = {}, {}  # of those that wait
    for n, (what, value, replica) in enumerate(operations):
        if what == "enter":
            homes[n] = replica if value % 2 else None
            places[n] = lines.enter((value,), n, homes[n])
        elif what == "keep":
            lines.keep({replica})
            homes = {each: home if home == replica else None for each, home in homes.items()}
        elif what == "take":
            waiting = [each for each, home in homes.items() if home in (None, replica)]
            # Of equals the one whose present wait began first; a line that was left for another is a new one.
            first = min((places[each].key for each in waiting), default=None)
            taken = lines.take(replica)
            assert (taken is None) == (first is None)
            if taken is not None:
                assert places[taken].key == first
                assert taken in waiting
                del homes[taken], places[taken]
        elif homes:
            chosen = list(homes)[value % len(homes)]
            if what == "free":
                lines.free(places[chosen])
                homes[chosen] = None
            else:
                lines.leave(places.pop(chosen))
                del homes[chosen]
        assert len(lines) == len(homes)


# ---- tenants that share slots ----


class Slots:
    """So many slots for tenants that always have somebody waiting; holding one takes as long as it is told."""

    def __init__(self, slots: int, payers: list[Payer]) -> None:
        self.now, self.shares, self.lines = 0.0, SlotShares(), Lines[Payer](10**6)
        self.payers = payers
        self.turns: dict[str, tuple[float, float]] = {}
        self.ends: list[tuple[float, int, Payer]] = []
        self.had: Counter[str] = Counter()  # seconds of slots
        self.order: list[str] = []
        self._number = 0
        for payer in payers:
            self.come(payer)
            self.come(payer)
        self._slots = slots

    def come(self, payer: Payer) -> None:
        """The first payer's programs are the oldest, and each comes before those of all others."""
        self._number += 1
        self.lines.enter((self.payers.index(payer), self._number), payer, None, payer.line)
        self.turns[payer.tenant] = self.shares.come(payer, self.now)

    def take(self, seconds: float) -> str:
        """The next slot that comes free goes to somebody, for so long."""
        if len(self.ends) == self._slots:
            self.now, _, payer = heapq.heappop(self.ends)
            self.shares.give_back(payer, self.now)
        payer = self.lines.take("r", self.shares.first(self.lines.lines("r"), self.now))
        self.shares.take(payer, self.now, self.turns[payer.tenant])
        heapq.heappush(self.ends, (self.now + seconds, len(self.order), payer))
        self.order.append(payer.tenant)
        self.had[payer.tenant] += seconds
        self.come(payer)
        return payer.tenant


weights = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4)


@given(st.integers(1, 6), weights, st.lists(st.floats(0.5, 2.0), min_size=8, max_size=40))
def test_slots_are_shared_by_weight_whoever_has_the_oldest_programs(slots, given_weights, seconds):
    payers = [Payer(f"t{i}", weight) for i, weight in enumerate(given_weights)]
    world = Slots(slots, payers)
    for i in range(100 * len(payers)):
        world.take(seconds[i % len(seconds)])
    # Nobody is further from the others than by what is in the slots and one more, each of two seconds at most.
    had = [world.had[payer.tenant] / payer.weight for payer in payers]
    assert max(had) - min(had) <= 2.0 * (slots + 2) / min(given_weights)


def test_one_slot_goes_from_tenant_to_tenant():
    world = Slots(1, [Payer("old"), Payer("new")])
    for _ in range(20):
        world.take(1.0)
    assert all(abs(world.order[:n].count("old") - world.order[:n].count("new")) <= 1 for n in range(20))


def test_what_a_tenant_does_not_use_is_lent_and_not_owed():
    shares, a, b = SlotShares(), Payer("a"), Payer("b")
    for second in range(100):  # `b` is away
        turn = shares.come(a, float(second))
        assert shares.first([a.line], float(second)) == a.line
        shares.take(a, float(second), turn)
        shares.give_back(a, second + 1.0)
    now, order = 100.0, []
    turns = {payer: shares.come(payer, now) for payer in (a, b)}
    for _ in range(20):
        order.append(shares.first([a.line, b.line], now).tenant)
        payer = a if order[-1] == "a" else b
        shares.take(payer, now, turns[payer])
        now += 1.0
        shares.give_back(payer, now)
        turns[payer] = shares.come(payer, now)
    assert abs(order[2:].count("a") - order[2:].count("b")) <= 2, "being away earned nothing"


def test_what_is_nobodys_goes_first():
    shares, a = SlotShares(), Payer("a")
    shares.come(a, 0.0)
    turn = shares.come(NOBODY, 0.0)
    assert shares.first([a.line, NOBODY.line], 0.0) == NOBODY.line
    shares.take(NOBODY, 0.0, turn)
    shares.give_back(NOBODY, 1.0)


keys = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 3)), max_size=40)


@given(keys)
def test_each_tenant_is_served_in_order_and_its_last_gives_way(entries):
    lines: Lines[int] = Lines(1000)
    for n, (tenant, home, key) in enumerate(entries):
        lines.enter((key,), n, home if key % 2 else None, tenant)
    for tenant in {each[0] for each in entries}:
        own = [n for n, each in enumerate(entries) if each[0] == tenant]
        assert lines.waiting()[tenant] == len(own)
        if len(own) > 1:
            last = next(lines.lasts(tenant))
            assert [entries[each.waiter][2] for each in lines.lasts(tenant)] == sorted(
                (entries[n][2] for n in own), reverse=True
            )
            lines.leave(last)
            own.remove(last.waiter)
        served = [lines.take("x", tenant) for _ in own]
        mine = [n for n in own if not (entries[n][2] % 2 and entries[n][1] == "y")]
        assert [entries[n][2] for n in served if n is not None] == sorted(entries[n][2] for n in mine)
    assert lines.lines("x") == []


def test_batch_waits_behind_interactive_requests_of_all_tenants_and_is_not_starved():
    shares = SlotShares(batch_share=0.1)
    now_, later = Payer("a"), Payer("b", 1.0, Priority.BATCH)
    turns = {payer: shares.come(payer, 0.0) for payer in (now_, later)}
    now, had = 0.0, Counter()
    for _ in range(400):
        line = shares.first([now_.line, later.line], now)
        payer = now_ if line == now_.line else later
        shares.take(payer, now, turns[payer])
        now += 0.1
        shares.give_back(payer, now)
        had[payer.tenant] += 0.1
        turns[payer] = shares.come(payer, now)
    assert had["b"] / now == pytest.approx(0.1, abs=0.03)


def test_what_a_tenant_has_at_other_routers_counts():
    shares, a, b = SlotShares(), Payer("a"), Payer("b")
    turns = {payer: shares.come(payer, 0.0) for payer in (a, b)}
    now, order = 0.0, Counter()
    for _ in range(200):
        payer = a if shares.first([a.line, b.line], now) == a.line else b
        shares.take(payer, now, turns[payer])
        now += 1.0
        shares.give_back(payer, now)
        turns[payer] = shares.come(payer, now)
        order[payer.tenant] += 1
        if payer is b:
            shares.learn({"interactive/b": 3.0, "interactive/nobody": 1.0, "other/b": 1.0})
    assert order["a"] == pytest.approx(160, abs=5)
    assert shares.contended["interactive/b"] == pytest.approx(order["b"], abs=1)
