"""The program table against a real Redis: one record whichever router a turn comes to, and what becomes of a loss."""

import asyncio
import math
import random
import time
from dataclasses import asdict, replace

import pytest
from waiting import until_async

from holdfast.router import programs
from holdfast.router.programs import Begun, ProgramTable, Run
from holdfast.router.records import Records, RedisAddress

PATIENT = 60.0  # seconds a slow machine may take where the test is not about time
RETRY = 0.01
DAY = 86400.0


class Router:
    """A program table with a connection of its own, its machine's clock off by `clock_off` seconds."""

    def __init__(self, server, clock_off=0.0, rest_s=3600.0, namespace="holdfast"):
        address = RedisAddress(server.url, namespace=namespace)
        self.store = Records(address, PATIENT, RETRY)
        self.table = ProgramTable(self.store, 100, DAY, rest_s, RETRY, lambda: time.time() + clock_off)

    async def __aenter__(self):
        return self.table

    async def __aexit__(self, *_):
        await self.table.close()
        await self.store.close()


def alone(clock, rest_s=3600.0):
    return ProgramTable(None, 100, DAY, rest_s, clock=clock)


async def turn(table: ProgramTable, key: str, replica="r1", tools="", over=False) -> Begun:
    begun = await table.begin(key)
    await table.end(begun, replica, tools, over=over)
    return begun


class Dated:
    """A store whose scripts are told that what happens now happened `ago()` seconds before."""

    degraded = False

    def __init__(self, store, ago):
        self.store, self.ago = store, ago

    async def try_script(self, source, keys, arguments):
        return await self.store.try_script(source, keys, [arguments[0], self.ago(), *arguments[2:]])


class Away:
    """A store that is not there."""

    degraded = True

    async def try_script(self, source, keys, arguments):
        return None


def test_turns_that_alternate_between_routers_are_all_counted_and_each_finds_the_last_replica(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            seen = []
            for i in range(8):
                begun = await turn((one, two)[i % 2], "acme/p", f"r{i}", "ls")
                seen.append((begun.program.turns, begun.program.last_replica, begun.program.arrival))
            arrival = seen[0][2]
            assert seen == [(i, f"r{i - 1}" if i else None, arrival) for i in range(8)]

    asyncio.run(scenario())


def test_a_pause_is_measured_by_one_clock_and_told_once(server):
    """The routers' own clocks differ by two hours."""

    async def scenario():
        async with Router(server, 3600.0) as one, Router(server, -3600.0) as two:
            begun = await one.begin("acme/p")
            one._scripts = Dated(one._scripts, lambda: 2.0)
            await one.end(begun, "r1", "grep,sed")
            one._scripts = one._scripts.store
            both = await asyncio.gather(two.begin("acme/p"), one.begin("acme/p"))
            told = [each.pause for each in both if each.pause is not None]
            assert len(told) == 1
            assert told[0].tools == "grep,sed"
            assert told[0].seconds == pytest.approx(2.0, abs=0.5)

    asyncio.run(scenario())


def test_who_comes_after_the_clock_was_set_back_is_not_before_the_others(server):
    async def scenario():
        async with Router(server, namespace="set-back") as table:
            scripts = table._scripts
            table._scripts = Dated(scripts, lambda: -3600.0)
            first = await turn(table, "acme/p")
            table._scripts = scripts
            second = await turn(table, "acme/q")
            assert second.program.arrival >= first.program.arrival
            assert (await table.begin("acme/p")).program.arrival == first.program.arrival

    asyncio.run(scenario())


def test_a_turn_that_ends_after_the_next_has_come_begins_no_pause_and_still_counts(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            first = await one.begin("acme/p")
            second = await two.begin("acme/p")
            await two.end(second, "r2", "ls")
            await one.end(first, "r1", "sed")
            third = await one.begin("acme/p")
            assert third.pause is not None
            assert third.pause.tools == "ls"
            assert (third.program.turns, third.program.last_replica) == (2, "r2")

    asyncio.run(scenario())


def test_what_one_router_forgets_no_other_remembers_and_no_late_end_brings_back(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            await turn(one, "acme/p", "r1", "ls")
            running = await one.begin("acme/p")
            assert await two.forget("acme/p")
            await one.end(running, "r1", "ls")
            assert not await one.forget("acme/p")
            assert not await two.forget("acme/never seen")
            again = await one.begin("acme/p")
            assert (again.program.turns, again.program.last_replica, again.pause) == (0, None, None)
            assert again.program.arrival > running.program.arrival
            await one.end(running, "r1", "ls")  # of its earlier life
            assert (await two.begin("acme/p")).program.turns == 0

    asyncio.run(scenario())


def test_runs_end_with_answers_and_each_has_an_arrival_of_its_own(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            first = await turn(one, "acme/p", tools="ls")
            second = await two.begin("acme/p")
            run = await two.end(second, "r1", over=True)
            assert run is not None
            assert run.turns == 2
            third = await one.begin("acme/p")
            assert first.program.arrival == second.program.arrival < third.program.arrival
            assert (third.program.turns, third.program.answered_turns) == (2, 2)

    asyncio.run(scenario())


def test_a_claim_on_a_conversation_is_granted_once(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            await one.begin("acme/~p", "head 1")
            both = await asyncio.gather(*(each.go_on("acme/~p", "head 2", "head 1") for each in (one, two)))
            assert [each is None for each in both].count(True) == 1
            assert await two.go_on("acme/~q", "head 2", "head 1") is None
            assert await two.go_on("acme/~p", "head 3", "head 2") is not None

    asyncio.run(scenario())


def test_a_tenant_that_invents_names_without_end_pushes_out_its_own_oldest_ones(server):
    async def scenario():
        router = Router(server)
        async with router as one:
            table = ProgramTable(router.store, 100, DAY, 3600.0, RETRY, most=8)
            await turn(table, "quiet/p")
            for i in range(30):
                await turn(table, f"noisy/{i}")
                await turn(table, "noisy/used")
            left = await router.store._redis.keys("*/programs/{noisy}/*")
            assert {name.rpartition(b"/")[2] for name in left} == {b"used", *(str(i).encode() for i in range(23, 30))}
            assert (await one.begin("noisy/used")).program.turns == 30
            assert (await one.begin("quiet/p")).program.turns == 1
            assert (await one.begin("noisy/0")).program.turns == 0
            await table.close()

    asyncio.run(scenario())


def test_in_a_processes_memory_too():
    async def scenario():
        table = ProgramTable(None, 8, DAY, 3600.0)
        await turn(table, "quiet/p")
        for i in range(30):
            await turn(table, f"noisy/{i}")
        assert (await table.begin("quiet/p")).program.turns == 1

    asyncio.run(scenario())


def test_two_deployments_at_one_redis_do_not_meet(server):
    async def scenario():
        async with Router(server) as one, Router(server, namespace="holdfast/other/2.0") as two:
            await turn(one, "acme/p")
            assert (await two.begin("acme/p")).program.turns == 0
            assert not await two.forget("acme/q")

    asyncio.run(scenario())


def test_memory_does_what_the_scripts_do(server):
    """The same random story, told to Redis and to a table that has none, at the same times."""
    rng, start, now = random.Random(5), math.floor(time.time() - 1e6) + 0.25, [0.0]

    async def scenario():
        lone = ProgramTable(None, 100, 2e6, 1000.5, clock=lambda: start + now[0])
        async with Router(server, rest_s=1000.5) as shared:
            shared._scripts = Dated(shared._scripts, lambda: time.time() - start - now[0])
            running: list[tuple[Begun, Begun]] = []
            for _ in range(500):
                now[0] += rng.choice([1.0, 10.0, 10.0, 1500.0])
                key, what = f"acme/p{rng.randrange(3)}", rng.random()
                if what < 0.5 or not running:
                    running.append((await shared.begin(key), await lone.begin(key)))
                    assert told(running[-1][0]) == told(running[-1][1])
                elif what < 0.95:
                    one, two = running.pop(rng.randrange(len(running)))
                    tools, over = rng.choice([("ls", False), ("", False), ("", True), ("sed", False)])
                    replica = rng.choice(["", "r1", "r2"])
                    ended = await shared.end(one, replica, tools, over=over)
                    assert told(ended) == told(await lone.end(two, replica, tools, over=over))
                else:
                    assert await shared.forget(key) == await lone.forget(key)

    asyncio.run(scenario())


def told(found: Begun | Run | None) -> object:
    """What can be compared: times to half a second, and nothing that is drawn."""
    if found is None:
        return None
    drawn = {"life", "version", "told", "shared"}
    names = {name: value for name, value in asdict(found).items() if name not in drawn}
    program = {name: value for name, value in names.pop("program", {}).items() if name not in drawn}
    pause = names.pop("pause", None) or {}
    return [
        [(name, round(value) if isinstance(value, float) else value) for name, value in each.items()]
        for each in (names, program, pause)
    ]


def test_turns_without_redis_are_counted_and_told_when_it_is_back(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            await turn(one, "acme/p", "r1", "ls")
            await turn(two, "acme/p", "r2", "ls")
            server.kill()
            begun = [await turn(two, "acme/p", f"r{i}", "ls") for i in range(3)]
            assert [each.program.turns for each in begun] == [2, 3, 4], "what this process knows"
            assert await two.forget("acme/q") is False
            server.socket.unlink(missing_ok=True)
            server.start()  # and has lost what it had
            await until_async(lambda: not two._untold)
            after = await one.begin("acme/p")
            assert (after.program.turns, after.program.last_replica) == (5, "r2")
            assert after.pause is not None
            assert after.program.arrival == begun[0].program.arrival

    asyncio.run(scenario())


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_is_told_late_counts_and_changes_nothing_that_came_after_it(server, forgotten):
    """One router misses Redis for a turn. Told of it later, Redis sent the program back to where that turn had been."""

    async def scenario():
        async with Router(server) as one, Router(server) as two:
            await turn(one, "acme/p", "r1", "ls")
            await turn(two, "acme/p", "r1", "ls")
            scripts, two._scripts = two._scripts, Away()
            await turn(two, "acme/p", "r2", "sed")
            await two.placed("acme/p", "r2")
            untold = two._untold.get("acme/p", 0.0)
            untold.extend([replace(untold.popleft(), at=time.monotonic() - 5.0) for _ in range(len(untold))])
            if forgotten:
                assert await one.forget("acme/p")
            else:
                await turn(one, "acme/p", "r3", "cat")
            two._scripts = scripts
            await two._tell_all()
            assert not two.untold
            if forgotten:
                assert await one.look("acme/p") is None
                return
            seen = await one.look("acme/p")
            assert (seen.turns, seen.came, seen.run_turns) == (4, 4, 4)
            assert (seen.last_replica, seen.tools) == ("r3", "cat")
            assert (await two.begin("acme/p")).pause.tools == "cat"

    asyncio.run(scenario())


def test_a_turn_that_a_delete_overtakes_begins_anew(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            await turn(one, "acme/p", "r1", "ls")
            assert await one.forget("acme/p")
            two._scripts = Dated(two._scripts, iter([5.0, 0.0]).__next__)
            begun = await two.begin("acme/p")
            assert (begun.program.gone, begun.program.came, begun.program.turns) == (False, 1, 0)

    asyncio.run(scenario())


def test_a_flood_without_redis_pushes_out_nothing_of_other_tenants(server, monkeypatch):
    monkeypatch.setattr(programs, "UNTOLD", 8)

    async def scenario():
        async with Router(server) as one, Router(server) as two:
            scripts, two._scripts = two._scripts, Away()
            await turn(two, "quiet/p", "r1", "ls")
            for i in range(30):
                await turn(two, f"noisy/{i}")
            two._scripts = scripts
            await two._tell_all()
            assert not two.untold
            assert (await one.begin("quiet/p")).program.turns == 1
            assert (await one.begin("noisy/29")).program.turns == 1
            assert (await one.begin("noisy/0")).program.turns == 0

    asyncio.run(scenario())


def test_a_turn_that_began_without_redis_and_ends_with_it_is_counted(server):
    """The router that took it had never met its program, which another one had."""

    async def scenario():
        async with Router(server) as one, Router(server) as two:
            await turn(one, "acme/p", "r1", "ls")
            scripts, two._scripts = two._scripts, Away()
            begun = await two.begin("acme/p")
            two._scripts = scripts
            await until_async(lambda: not two._untold)
            await two.end(begun, "r2", "sed")
            after = await one.begin("acme/p")
            assert (after.program.turns, after.program.last_replica) == (2, "r2")
            assert after.pause is not None
            assert after.pause.tools == "sed"

    asyncio.run(scenario())


def test_a_step_that_ran_although_its_answer_was_lost_counts_once(server):
    class LosesAnswers:
        degraded = False

        def __init__(self, store, lost):
            self.store, self.lost = store, lost

        async def try_script(self, source, keys, arguments):
            answer = await self.store.try_script(source, keys, arguments)
            self.lost -= 1
            return None if self.lost >= 0 else answer

    async def scenario():
        router = Router(server)
        async with router as one:
            table = ProgramTable(LosesAnswers(router.store, 2), 100, DAY, 3600.0, RETRY)
            await turn(table, "acme/p", "r1", "ls")
            await turn(table, "acme/p", "r1", "ls")
            await table.close()
            assert (await one.begin("acme/p")).program.turns == 2

    asyncio.run(scenario())


def test_a_program_is_forgotten_a_while_after_its_last_turn(server):
    async def scenario():
        router = Router(server)
        async with router as one:
            await turn(one, "acme/p")
            (key,) = await router.store._redis.keys("*programs/*/*")
            assert DAY - 60 < await router.store._redis.ttl(key) <= DAY
        now = [0.0]
        table = alone(lambda: now[0])
        await turn(table, "acme/p")
        now[0] = DAY + 1
        assert (await table.begin("acme/p")).program.turns == 0

    asyncio.run(scenario())


def test_work_ahead_says_where_the_next_turn_is_best_served_and_counts_as_none(server):
    async def scenario():
        async with Router(server) as one, Router(server) as two:
            assert await two.look("acme/p") is None
            await one.placed("acme/p", "r1")  # before its first turn
            begun = await two.begin("acme/p")
            assert (begun.program.last_replica, begun.program.turns, begun.program.run_turns) == ("r1", 0, 1)
            await two.end(begun, "r2", "ls")
            await one.placed("acme/p", "r3")
            seen = await two.look("acme/p")
            assert (seen.last_replica, seen.turns, seen.tools) == ("r3", 1, "ls")
            again = await one.begin("acme/p")
            assert (again.pause.tools, again.program.last_replica) == ("ls", "r3")
            assert await two.forget("acme/p")
            assert await one.look("acme/p") is None
            await one.placed("acme/p", "r4")
            assert (await two.look("acme/p")).last_replica == "r4"

    asyncio.run(scenario())


def test_without_redis_a_router_remembers_it_by_itself():
    async def scenario():
        for table in alone(lambda: 5.0), ProgramTable(Away(), 100, DAY, 3600.0, RETRY, lambda: 5.0):
            await table.placed("acme/p", "r1")
            assert (await table.look("acme/p")).last_replica == "r1"
            begun = await turn(table, "acme/p", "r2", "ls")
            assert begun.program.last_replica == "r1"
            await table.placed("acme/p", "r3")
            assert ((await table.look("acme/p")).last_replica, (await table.look("acme/p")).tools) == ("r3", "ls")

    asyncio.run(scenario())


@pytest.mark.parametrize("away", [False, True])
def test_a_sub_agent_counts_for_the_program_at_the_top(server, away):
    async def scenario():
        async with Router(server) as shared:
            table = alone(time.time) if away else shared
            await table.begin("acme/top")
            child = await table.begin("acme/child", parent="acme/top")
            grandchild = await table.begin("acme/grandchild", parent="acme/child")
            orphan = await table.begin("acme/orphan", parent="acme/never seen")
            own = await table.begin("acme/own", parent="acme/own")
            late = await table.begin("acme/top", parent="acme/orphan")
            roots = [each.root for each in (child, grandchild, orphan, own, late)]
            assert roots == ["acme/top", "acme/top", "acme/never seen", "acme/own", "acme/top"]
            assert (await table.begin("acme/child")).root == "acme/top", "its later turns need not say so"

    asyncio.run(scenario())
