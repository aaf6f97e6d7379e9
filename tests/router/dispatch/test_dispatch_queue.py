"""The queue in front of full replicas: capacity, order and shares against plain counts, and that no slot is lost."""

import asyncio
import heapq
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.types import Priority
from holdfast.router.dispatch.dispatch_queue import (
    UNSHARED,
    Capacity,
    DispatchQueue,
    FairShareKey,
    ReplicaQueues,
    SlotShares,
)

pytestmark = pytest.mark.anyio

LONG = 60.0


def capacity(control_calls: int = 0, **most: int) -> Capacity:
    made = Capacity(1.0, control_calls)
    made.update(most)
    return made


def test_a_replica_that_is_full_is_asked_again_once_something_ends_there():
    made = capacity(a=2)
    made.take("a", "r1")
    made.on_report("a", 2, now=5.0)
    made.release("a", "r1")
    assert not made.room("a", 5.0), "that may be the request which was refused"
    made.on_end("a")
    assert made.room("a", 5.0)


def test_what_a_replica_said_to_requests_that_have_ended_says_nothing():
    """Serve tells it at the end of those that do not stream."""
    made = capacity(control_calls=2, a=5)
    requests = [f"r{i}" for i in range(5)]
    for request in requests:
        made.take("a", request)
    for before, request in enumerate(requests, 1):
        made.release("a", request)
        made.on_report("a", before, now=5.0)
        assert made.on_accept("a", request, now=5.0) is None
        made.on_end("a")
        assert made.room("a", 5.0)


@given(st.lists(st.tuples(st.sampled_from(["take", "end", "late"]), st.sampled_from("ab"), st.sampled_from("rst"))))
def test_any_use_agrees_with_a_count(operations):
    """A request may try a replica twice, and the end of its first try may be told after the second began."""
    made, held = capacity(a=3, b=2), []
    for what, replica, request in operations:
        if what == "take" and made.room(replica, 0.0):
            made.take(replica, request)
            held.append((replica, request))
        elif what != "take":
            assert made.release(replica, request) == ((replica, request) in held)
            if (replica, request) in held:
                held.remove((replica, request))
        for each, most in (("a", 3), ("b", 2)):
            n = sum(of == each for of, _ in held)
            assert made.room(each, 0.0) == (n < most)


def test_equal_members_are_first_in_first_out():
    lines: ReplicaQueues[int] = ReplicaQueues(10)
    for i in range(5):
        lines.enter((1.0,), i, "a" if i % 2 else None)
    assert [lines.take("a") for _ in range(5)] == list(range(5))


def test_what_was_given_up_is_let_go():
    lines: ReplicaQueues[int] = ReplicaQueues(10)
    lines.enter((0.0,), -1, "a")
    for i in range(1000):
        lines.leave(lines.enter((1.0,), i, "a"))
    assert sum(len(line) for of_home in lines._heaps.values() for line in of_home.values()) < 200


steps = st.tuples(st.sampled_from(["enter", "take", "leave", "keep"]), st.integers(0, 5), st.sampled_from("ab"))


@given(st.lists(steps, max_size=60))
def test_any_use_agrees_with_a_sorted_list(operations):
    lines: ReplicaQueues[int] = ReplicaQueues(1000)
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
            lines.leave(places.pop(chosen))
            del homes[chosen]
        assert len(lines) == len(homes)


# ---- tenants that share slots ----


class SlotWorld:
    """So many slots for tenants that always have somebody waiting; holding one takes as long as it is told."""

    def __init__(self, slots: int, members: list[FairShareKey]) -> None:
        self.now, self.shares, self.lines = 0.0, SlotShares(), ReplicaQueues[FairShareKey](10**6)
        self.members = members
        self.turns: dict[str, tuple[float, float]] = {}
        self.ends: list[tuple[float, int, FairShareKey]] = []
        self.had: Counter[str] = Counter()  # seconds of slots
        self.order: list[str] = []
        self._number = 0
        for share in members:
            self.arrive(share)
            self.arrive(share)
        self._slots = slots

    def arrive(self, share: FairShareKey) -> None:
        """The first share's programs are the oldest, and each comes before those of all others."""
        self._number += 1
        self.lines.enter((self.members.index(share), self._number), share, None, share.line)
        self.turns[share.tenant] = self.shares.on_arrive(share, self.now)

    def take(self, seconds: float) -> str:
        """The next slot that comes free goes to somebody, for so long."""
        if len(self.ends) == self._slots:
            self.now, _, share = heapq.heappop(self.ends)
            self.shares.on_end(share, self.now)
        share = self.lines.take("r", self.shares.first(self.lines.lines("r"), self.now))
        self.shares.on_start(share, self.now, self.turns[share.tenant])
        heapq.heappush(self.ends, (self.now + seconds, len(self.order), share))
        self.order.append(share.tenant)
        self.had[share.tenant] += seconds
        self.arrive(share)
        return share.tenant


weights = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4)


@given(st.integers(1, 6), weights, st.lists(st.floats(0.5, 2.0), min_size=8, max_size=40))
def test_slots_are_shared_by_weight_whoever_has_the_oldest_programs(slots, given_weights, seconds):
    members = [FairShareKey(f"t{i}", weight) for i, weight in enumerate(given_weights)]
    world = SlotWorld(slots, members)
    for i in range(100 * len(members)):
        world.take(seconds[i % len(seconds)])
    # Nobody is further from the others than by what is in the slots and one more, each of two seconds at most.
    had = [world.had[share.tenant] / share.weight for share in members]
    assert max(had) - min(had) <= 2.0 * (slots + 2) / min(given_weights)


def test_what_is_nobodys_goes_first():
    shares, a = SlotShares(), FairShareKey("a")
    shares.on_arrive(a, 0.0)
    turn = shares.on_arrive(UNSHARED, 0.0)
    assert shares.first([a.line, UNSHARED.line], 0.0) == UNSHARED.line
    shares.on_start(UNSHARED, 0.0, turn)
    shares.on_end(UNSHARED, 1.0)


keys = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 3)), max_size=40)


@given(keys)
def test_each_tenant_is_served_in_order_and_its_last_gives_way(entries):
    lines: ReplicaQueues[int] = ReplicaQueues(1000)
    for n, (tenant, home, key) in enumerate(entries):
        lines.enter((key,), n, home if key % 2 else None, tenant)
    for tenant in {each[0] for each in entries}:
        own = [n for n, each in enumerate(entries) if each[0] == tenant]
        assert lines.waiting[tenant] == len(own)
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
    now_, later = FairShareKey("a"), FairShareKey("b", 1.0, Priority.BATCH)
    turns = {share: shares.on_arrive(share, 0.0) for share in (now_, later)}
    now, had = 0.0, Counter()
    for _ in range(400):
        line = shares.first([now_.line, later.line], now)
        share = now_ if line == now_.line else later
        shares.on_start(share, now, turns[share])
        now += 0.1
        shares.on_end(share, now)
        had[share.tenant] += 0.1
        turns[share] = shares.on_arrive(share, now)
    assert had["b"] / now == pytest.approx(0.1, abs=0.03)


async def turns(n: int = 10) -> None:
    """Let every task go on as far as it can."""
    for _ in range(n):
        await asyncio.sleep(0)


class TurnCounter(Counter[str]):
    """Counts what each replica has."""

    def sent(self, replica_id: str) -> None:
        self[replica_id] += 1

    def ended(self, replica_id: str) -> None:
        self[replica_id] -= 1


def queue(most: int = 100, *, fair: bool = False, **capacity: int) -> DispatchQueue:
    made = DispatchQueue(most, TurnCounter(), fair=fair)
    made.update(capacity)
    return made


async def test_a_request_that_is_given_up_gives_its_slot_to_the_next() -> None:
    made = queue(a=1)
    made.take("a", "first")
    given_up = asyncio.create_task(made.wait((1.0,), None, "given up", LONG))
    other = asyncio.create_task(made.wait((2.0,), None, "other", LONG))
    await turns()
    made.release("a", "first")  # the slot is given up's now, who has not seen it yet
    given_up.cancel()
    assert await other == "a"
    made.release("a", "other")
    assert made._counter["a"] == 0


async def test_a_new_replica_takes_those_who_wait_for_any() -> None:
    made = queue(a=1)
    made.take("a", "first")
    loyal = asyncio.create_task(made.wait((1.0,), "a", "loyal", LONG))
    other = asyncio.create_task(made.wait((2.0,), None, "other", LONG))
    await turns()
    made.update({"a": 1, "b": 1})
    assert await other == "b"
    made.update({"b": 2})  # a has gone
    assert await loyal == "b"


@pytest.mark.parametrize(("fair", "after"), [(False, 50), (True, 1)])
async def test_a_tenant_with_many_old_programs_is_not_before_anothers_new_one(fair: bool, after: int) -> None:
    """Where tenants share; else the oldest programs come first."""
    made, served = queue(fair=fair, a=1), []
    many, one = FairShareKey("many"), FairShareKey("one")
    assert made.take("a", "first", many)

    async def request(name: str, share: FairShareKey, began: float) -> None:
        replica = await made.wait((began,), None, name, LONG, share)
        assert replica is not None
        served.append(share.tenant)
        await asyncio.sleep(0)
        made.release(replica, name)

    tasks = [asyncio.create_task(request(f"m{i}", many, i / 100)) for i in range(50)]
    tasks.append(asyncio.create_task(request("new", one, 100.0)))
    await turns()
    made.release("a", "first")
    await asyncio.gather(*tasks)
    assert served.index("one") <= after
    assert made._counter["a"] == len(made) == 0
    assert not made._holders


async def test_in_a_full_line_the_last_of_who_has_most_of_it_gives_way() -> None:
    made = queue(4, fair=True, a=1)
    many, one = FairShareKey("many"), FairShareKey("one")
    assert made.take("a", "first", many)
    tasks = [asyncio.create_task(made.wait((float(i),), None, f"m{i}", LONG, many)) for i in (3, 1, 0, 2)]
    await turns()
    with pytest.raises(OverloadedError):
        await made.wait((0.0,), None, "one more", LONG, many)
    mine = [asyncio.create_task(made.wait((9.0,), None, f"o{i}", LONG, one)) for i in range(2)]
    await turns()
    assert [task.done() for task in tasks] == [True, False, False, True]
    assert all(isinstance(task.exception(), OverloadedError) for task in (tasks[0], tasks[3]))
    with pytest.raises(OverloadedError):
        await made.wait((0.0,), None, "its third", LONG, one)
    assert not any(task.done() for task in mine), "who has no more than the other gives way to nobody"
    made.update({})
    await asyncio.gather(tasks[1], tasks[2], *mine)


async def test_batch_leaves_slots_to_interactive_requests_and_waits_behind_them() -> None:
    made, batch = queue(a=8), FairShareKey("", priority=Priority.BATCH)
    assert [made.take("a", f"b{i}", batch) for i in range(8)] == [True] * 7 + [False]
    assert made.take("a", "now")
    waiting = [asyncio.create_task(made.wait((0.0,), None, "late", LONG, batch))]
    waiting.append(asyncio.create_task(made.wait((9.0,), None, "soon", LONG)))
    await turns()
    made.release("a", "b0")
    await turns()
    assert [task.done() for task in waiting] == [False, True]
    for name in ("now", "soon", "b1"):
        made.release("a", name)
    assert await waiting[0] == "a"
    assert made._counter["a"] == 6


@pytest.mark.parametrize(("most", "most_tokens"), [(2, 10**6), (100, 10)], ids=["of requests", "of tokens"])
async def test_where_the_line_is_full_the_last_of_a_lower_class_gives_way(most: int, most_tokens: int) -> None:
    made = DispatchQueue(most, TurnCounter(), max_waiting_tokens=most_tokens)
    made.update({"a": 1})
    assert made.take("a", "first")

    def wait(name: str, tokens: int, priority: Priority) -> asyncio.Task[str | None]:
        share = FairShareKey("", priority=priority)
        return asyncio.create_task(made.wait((1.0,), None, name, LONG, share, tokens=tokens))

    low = [wait(f"low{i}", 4, Priority.BATCH) for i in range(2)]
    await turns()
    assert made.tokens == 8
    more = wait("more", 4, Priority.BATCH)
    high = wait("high", 4, Priority.INTERACTIVE)
    await turns()
    assert all(isinstance(task.exception(), OverloadedError) for task in (more, low[1]))
    assert not low[0].done()
    assert made.tokens == 8
    for name in ("first", "high", "low0"):
        made.release("a", name)
        await turns()
    assert (low[0].result(), high.result()) == ("a", "a")
    assert made.tokens == 0
    assert made.take("a", "x")
    huge = wait("huge", 1000, Priority.BATCH)  # where nobody waits there is a place for any
    await turns()
    made.release("a", "x")
    await turns()
    assert huge.result() == "a"


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from("xyz"),  # the tenant
        st.sampled_from(Priority),
        st.integers(0, 3),  # its key
        st.integers(1, 12),  # tokens
        st.sampled_from(["a", "b", None]),  # the replica that it wants
        st.integers(0, 2),  # slots that come free before it
    ),
    max_size=30,
)


@settings(deadline=None)
@given(ARRIVALS, st.booleans(), st.integers(1, 5), st.integers(1, 24))
def test_nobody_gives_way_in_vain(arrivals, fair, most, most_tokens) -> None:
    """Each request ends once: it has a slot, or is told that too much waits. Who gives way does so for one that is
    taken, and for which there was no room with it.
    """

    async def live() -> None:
        made = DispatchQueue(most, TurnCounter(), fair=fair, max_waiting_tokens=most_tokens)
        made.update({"a": 1, "b": 1})
        held = []  # replicas with the request that has their slot
        for name in ("a", "b"):
            assert made.take(name, name)
            held.append((name, name))
        tasks: dict[str, asyncio.Task[str | None]] = {}
        sizes = {}

        async def request(name: str, key: int, home: str | None, share: FairShareKey, tokens: int) -> str | None:
            if home is None:
                replica = made.take_any(name, share)
            else:
                replica = home if made.take(home, name, share) else None
            replica = replica or await made.wait((key,), home, name, LONG, share, tokens)
            held.append((replica, name))
            return replica

        for number, (tenant, priority, key, tokens, home, free) in enumerate(arrivals):
            for _ in range(free):
                if held:
                    made.release(*held.pop(0))
                    await turns()
            share, name, sizes[f"r{number}"] = FairShareKey(tenant, priority=priority), f"r{number}", tokens
            before = {each for each, task in tasks.items() if not task.done()}
            tasks[name] = asyncio.create_task(request(name, key, home, share, tokens))
            await turns()
            gone = {each for each in before if tasks[each].done()}
            refused = tasks[name].done() and isinstance(tasks[name].exception(), OverloadedError)
            assert not (gone and refused)
            assert len(made) <= most
            for each in gone:
                assert isinstance(tasks[each].exception(), OverloadedError)
                assert len(made) + 1 > most or made.tokens + sizes[each] > most_tokens
        while held:
            made.release(*held.pop(0))
            await turns()
        assert all(task.exception() or task.result() in ("a", "b") for task in tasks.values())
        assert (len(made), made.tokens) == (0, 0)

    asyncio.run(live())


async def test_how_long_a_line_takes_is_learned_while_somebody_stands_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = queue(a=1)
    now = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    assert made.take("a", "r0")
    tasks = [asyncio.create_task(made.wait((float(i),), None, f"r{i}", LONG)) for i in range(1, 12)]
    await turns(20)
    assert made.expected_s == 0.0
    for i in range(10):
        now[0] += 2.0
        made.release("a", f"r{i}")
        await turns(20)
    assert made.expected_s == pytest.approx(4.0)  # behind one more
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert made.expected_s == 0.0
