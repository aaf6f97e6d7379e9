"""The gate on an event loop: who gets a slot, and that none is lost."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.replicas.types import Priority
from holdfast.router.gate import Gate
from holdfast.router.lines import Payer

LONG = 60.0


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Hand(Counter[str]):
    """Counts what each replica has."""

    def sent(self, replica_id: str) -> None:
        self[replica_id] += 1

    def ended(self, replica_id: str) -> None:
        self[replica_id] -= 1


def gate(most: int = 100, *, fair: bool = False, **capacity: int) -> Gate:
    made = Gate(most, Hand(), fair=fair)
    made.replicas(capacity)
    return made


def test_slots_go_to_who_waits_in_order() -> None:
    async def live() -> None:
        made, served = gate(a=1), []
        assert made.take("a", "first")

        async def request(key: float) -> None:
            name = f"r{key}"
            replica = await made.wait((key,), None, name, LONG)
            assert replica == "a"
            served.append(key)
            made.give_back(replica, name)

        tasks = [asyncio.create_task(request(key)) for key in (3.0, 1.0, 2.0)]
        await turns()
        assert not made.take("a", "late")
        assert len(made) == 3
        made.give_back("a", "first")
        await asyncio.gather(*tasks)
        assert served == [1.0, 2.0, 3.0]
        assert len(made) == 0
        assert made._hand["a"] == 0

    asyncio.run(live())


def test_nobody_waits_where_there_is_no_replica() -> None:
    async def live() -> None:
        made = gate(a=1)
        made.take("a", "first")
        homes = ("a", None)
        tasks = [asyncio.create_task(made.wait((1.0,), home, str(home), LONG)) for home in homes]
        given_up = asyncio.create_task(made.wait((1.0,), None, "given up", LONG))
        await turns()
        made.replicas({})
        given_up.cancel()
        await turns()
        assert all(task.done() for task in tasks)
        assert [task.result() for task in tasks] == [None, None]
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert len(made) == 0
        made.replicas({"b": 1})
        assert made.take_any("late") == "b"

    asyncio.run(live())


def test_a_request_that_is_given_up_gives_its_slot_to_the_next() -> None:
    async def live() -> None:
        made = gate(a=1)
        made.take("a", "first")
        given_up = asyncio.create_task(made.wait((1.0,), None, "given up", LONG))
        other = asyncio.create_task(made.wait((2.0,), None, "other", LONG))
        await turns()
        made.give_back("a", "first")  # the slot is given up's now, who has not seen it yet
        given_up.cancel()
        assert await other == "a"
        made.give_back("a", "other")
        assert made._hand["a"] == 0

    asyncio.run(live())


def test_who_waited_in_vain_leaves_the_line() -> None:
    async def live() -> None:
        made = gate(most=1, a=1)
        made.take("a", "first")
        assert await made.wait((1.0,), "a", "late", 0.0) is None
        assert len(made) == 0
        waiting = asyncio.create_task(made.wait((1.0,), None, "only", LONG))
        await turns()
        with pytest.raises(OverloadedError):
            await made.wait((0.0,), None, "more", LONG)
        made.give_back("a", "first")
        assert await waiting == "a"

    asyncio.run(live())


def test_a_new_replica_takes_those_who_wait_for_any() -> None:
    async def live() -> None:
        made = gate(a=1)
        made.take("a", "first")
        loyal = asyncio.create_task(made.wait((1.0,), "a", "loyal", LONG))
        other = asyncio.create_task(made.wait((2.0,), None, "other", LONG))
        await turns()
        made.replicas({"a": 1, "b": 1})
        assert await other == "b"
        made.replicas({"b": 2})  # a has gone
        assert await loyal == "b"

    asyncio.run(live())


def test_a_replica_full_with_others_requests_is_tried_again() -> None:
    async def live() -> None:
        made = gate(a=1)
        made.told("a", 1)
        assert not made.take("a", "r")
        assert await made.wait((1.0,), None, "r", LONG) == "a"

    asyncio.run(live())


@pytest.mark.parametrize(("fair", "after"), [(False, 50), (True, 1)])
def test_a_tenant_with_many_old_programs_is_not_before_anothers_new_one(fair: bool, after: int) -> None:
    """Where tenants share; else the oldest programs come first."""

    async def live() -> None:
        made, served = gate(fair=fair, a=1), []
        many, one = Payer("many"), Payer("one")
        assert made.take("a", "first", many)

        async def request(name: str, payer: Payer, began: float) -> None:
            replica = await made.wait((began,), None, name, LONG, payer)
            assert replica is not None
            served.append(payer.tenant)
            await asyncio.sleep(0)
            made.give_back(replica, name)

        tasks = [asyncio.create_task(request(f"m{i}", many, i / 100)) for i in range(50)]
        tasks.append(asyncio.create_task(request("new", one, 100.0)))
        await turns()
        made.give_back("a", "first")
        await asyncio.gather(*tasks)
        assert served.index("one") <= after
        assert made._hand["a"] == len(made) == 0
        assert not made._payers

    asyncio.run(live())


def test_in_a_full_line_the_last_of_who_has_most_of_it_gives_way() -> None:
    async def live() -> None:
        made = gate(4, fair=True, a=1)
        many, one = Payer("many"), Payer("one")
        assert made.take("a", "first", many)
        tasks = [asyncio.create_task(made.wait((float(i),), None, f"m{i}", LONG, many)) for i in (3, 1, 0, 2)]
        await turns()
        with pytest.raises(OverloadedError):
            await made.wait((0.0,), None, "one more", LONG, many)
        mine = [asyncio.create_task(made.wait((9.0,), None, f"o{i}", LONG, one)) for i in range(2)]
        await turns()
        assert [task.done() for task in tasks] == [True, False, False, True]
        for task in (tasks[0], tasks[3]):
            with pytest.raises(OverloadedError):
                await task
        with pytest.raises(OverloadedError):
            await made.wait((0.0,), None, "its third", LONG, one)
        assert not any(task.done() for task in mine), "who has no more than the other gives way to nobody"
        made.replicas({})
        await asyncio.gather(tasks[1], tasks[2], *mine)

    asyncio.run(live())


def test_batch_leaves_slots_to_interactive_requests_and_waits_behind_them() -> None:
    async def live() -> None:
        made, batch = gate(a=8), Payer("", priority=Priority.BATCH)
        assert [made.take("a", f"b{i}", batch) for i in range(8)] == [True] * 7 + [False]
        assert made.take("a", "now")
        waiting = [asyncio.create_task(made.wait((0.0,), None, "late", LONG, batch))]
        waiting.append(asyncio.create_task(made.wait((9.0,), None, "soon", LONG)))
        await turns()
        made.give_back("a", "b0")
        await turns()
        assert [task.done() for task in waiting] == [False, True]
        for name in ("now", "soon", "b1"):
            made.give_back("a", name)
        assert await waiting[0] == "a"
        assert made._hand["a"] == 6

    asyncio.run(live())


def test_in_a_full_line_batch_gives_way_to_interactive_requests() -> None:
    async def live() -> None:
        made, batch = gate(2, a=1), Payer("", priority=Priority.BATCH)
        assert made.take("a", "first")
        tasks = [asyncio.create_task(made.wait((float(i),), None, f"b{i}", LONG, batch)) for i in range(2)]
        await turns()
        mine = asyncio.create_task(made.wait((9.0,), None, "now", LONG))
        await turns()
        assert [task.done() for task in tasks] == [False, True]
        with pytest.raises(OverloadedError):
            await tasks[1]
        made.give_back("a", "first")
        assert await mine == "a"
        made.replicas({})
        await tasks[0]

    asyncio.run(live())


def test_where_the_lines_are_full_of_tokens_the_last_of_a_lower_class_gives_way() -> None:
    async def live() -> None:
        made = Gate(100, Hand(), max_waiting_tokens=10)
        made.replicas({"a": 1})
        assert made.take("a", "first")

        def wait(name: str, tokens: int, priority: Priority) -> asyncio.Task[str | None]:
            payer = Payer("", priority=priority)
            return asyncio.create_task(made.wait((1.0,), None, name, LONG, payer, tokens=tokens))

        low = [wait(f"low{i}", 4, Priority.BATCH) for i in range(2)]
        await turns()
        assert made.tokens == 8
        more = wait("more", 4, Priority.BATCH)
        high = wait("high", 4, Priority.INTERACTIVE)
        await turns()
        for given_way in (more, low[1]):
            with pytest.raises(OverloadedError):
                given_way.result()
        assert not low[0].done()
        assert made.tokens == 8
        for name in ("first", "high", "low0"):
            made.give_back("a", name)
            await turns()
        assert (low[0].result(), high.result()) == ("a", "a")
        assert made.tokens == 0
        assert made.take("a", "x")
        huge = wait("huge", 1000, Priority.BATCH)  # where nobody waits there is a place for any
        await turns()
        made.give_back("a", "x")
        await turns()
        assert huge.result() == "a"

    asyncio.run(live())


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
        made = Gate(most, Hand(), fair=fair, max_waiting_tokens=most_tokens)
        made.replicas({"a": 1, "b": 1})
        held = []  # replicas with the request that has their slot
        for name in ("a", "b"):
            assert made.take(name, name)
            held.append((name, name))
        tasks: dict[str, asyncio.Task[str | None]] = {}
        sizes = {}

        async def request(name: str, key: int, home: str | None, payer: Payer, tokens: int) -> str | None:
            if home is None:
                replica = made.take_any(name, payer)
            else:
                replica = home if made.take(home, name, payer) else None
            replica = replica or await made.wait((key,), home, name, LONG, payer, tokens)
            held.append((replica, name))
            return replica

        for number, (tenant, priority, key, tokens, home, free) in enumerate(arrivals):
            for _ in range(free):
                if held:
                    made.give_back(*held.pop(0))
                    await turns()
            payer, name, sizes[f"r{number}"] = Payer(tenant, priority=priority), f"r{number}", tokens
            before = {each for each, task in tasks.items() if not task.done()}
            tasks[name] = asyncio.create_task(request(name, key, home, payer, tokens))
            await turns()
            gone = {each for each in before if tasks[each].done()}
            refused = tasks[name].done() and isinstance(tasks[name].exception(), OverloadedError)
            assert not (gone and refused)
            assert len(made) <= most
            for each in gone:
                assert isinstance(tasks[each].exception(), OverloadedError)
                assert len(made) + 1 > most or made.tokens + sizes[each] > most_tokens
        while held:
            made.give_back(*held.pop(0))
            await turns()
        assert all(task.done() for task in tasks.values())
        assert all(task.exception() or task.result() in ("a", "b") for task in tasks.values())
        assert (len(made), made.tokens) == (0, 0)

    asyncio.run(live())


def test_how_long_a_line_takes_is_learned_while_somebody_stands_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        made = gate(a=1)
        now = [0.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        assert made.take("a", "r0")
        tasks = [asyncio.create_task(made.wait((float(i),), None, f"r{i}", LONG)) for i in range(1, 12)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert made.expected_s == 0.0
        for i in range(10):
            now[0] += 2.0
            made.give_back("a", f"r{i}")
            for _ in range(20):
                await asyncio.sleep(0)
        assert made.expected_s == pytest.approx(4.0)  # behind one more
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert made.expected_s == 0.0

    asyncio.run(live())
