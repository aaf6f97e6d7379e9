import asyncio

from holdfast.router.programs import Pause, Program, ProgramTable
from holdfast.router.store import MemoryStore


class SlowStore(MemoryStore):
    """Counts what it is asked, and answers only when it is let."""

    def __init__(self):
        super().__init__(100, 2**20)
        self.reads = 0
        self.open = asyncio.Event()
        self.open.set()

    async def set_if_absent(self, key, value, ttl_s):
        self.reads += 1
        await self.open.wait()
        return await super().set_if_absent(key, value, ttl_s)

    async def set(self, key, value, ttl_s):
        await self.open.wait()
        await super().set(key, value, ttl_s)


def table(store, now):
    return ProgramTable(store, 100, 3600.0, clock=lambda: now)


def test_the_first_router_to_see_a_program_sets_its_arrival():
    async def scenario():
        store = MemoryStore(100, 2**20)
        assert await table(store, 5.0).begin("acme/p") == Program(5.0)
        assert (await table(store, 9.0).begin("acme/p")).arrival == 5.0
        assert (await table(store, 9.0).begin("acme/q")).arrival == 9.0

    asyncio.run(scenario())


def test_turns_and_the_last_replica_are_kept_and_shared():
    async def scenario():
        store = MemoryStore(100, 2**20)
        programs = table(store, 5.0)
        await programs.begin("acme/p")
        programs.finish("acme/p", "r1")
        programs.finish("acme/p", "r2")
        assert await programs.begin("acme/p") == Program(5.0, 2, "r2")
        await programs.drain()
        assert await table(store, 9.0).begin("acme/p") == Program(5.0, 2, "r2")

    asyncio.run(scenario())


def test_a_known_program_waits_for_no_store():
    async def scenario():
        store = SlowStore()
        programs = table(store, 5.0)
        await programs.begin("acme/p")
        store.open.clear()
        programs.finish("acme/p", "r1")
        assert await programs.begin("acme/p") == Program(5.0, 1, "r1")
        assert store.reads == 1
        store.open.set()
        await programs.drain()

    asyncio.run(scenario())


def test_two_first_turns_at_once_agree():
    async def scenario():
        store = SlowStore()
        store.open.clear()
        programs = ProgramTable(store, 100, 3600.0, clock=iter(range(100)).__next__)
        both = asyncio.gather(programs.begin("acme/p"), programs.begin("acme/p"))
        await asyncio.sleep(0)
        store.open.set()
        one, two = await both
        assert one == two

    asyncio.run(scenario())


def test_a_turn_without_a_replica_enters_its_program_behind_the_request():
    async def scenario():
        store = MemoryStore(100, 2**20)
        programs = table(store, 5.0)
        programs.note("acme/p")
        await programs.drain()
        assert (await table(store, 9.0).begin("acme/p")).arrival == 5.0

    asyncio.run(scenario())


def test_ending_a_program_waits_for_no_later_turn_of_another():
    """Turns end all the time: each write is under way until the next one is."""

    class Busy(MemoryStore):
        programs: ProgramTable
        writes = 0

        async def set(self, key, value, ttl_s):
            await super().set(key, value, ttl_s)
            self.writes += 1
            if self.writes < 100:
                self.programs.finish("acme/other", "r1")

    async def scenario():
        store = Busy(100, 2**20)
        programs = store.programs = table(store, 5.0)
        await programs.begin("acme/p")
        programs.finish("acme/p", "r1")
        assert await programs.end("acme/p")
        assert store.writes < 100
        await programs.drain()
        assert await store.get("program/acme/p") is None

    asyncio.run(scenario())


def test_turns_up_to_the_last_answer_are_told_from_those_since():
    async def scenario():
        programs = table(MemoryStore(100, 2**20), 5.0)
        found = []
        for last in (False, True, True, False, True, False):
            found.append((await programs.begin("acme/p")).answered_turns)
            programs.resume("acme/p")
            programs.finish("acme/p", "r1", "" if last else "ls")
            if last:
                programs.over("acme/p")
        assert found == [0, 0, 2, 3, 3, 5]
        for _ in range(20):
            programs.resume("acme/p")  # turns that no replica has served, as yet
        assert (await programs.begin("acme/p")).answered_turns == 0

    asyncio.run(scenario())


def test_foreign_bytes_in_the_store_do_not_fail_a_turn():
    async def scenario():
        store = MemoryStore(100, 2**20)
        await store.set("program/acme/p", b'{"not": "ours"}', 60.0)
        assert await table(store, 5.0).begin("acme/p") == Program(5.0)

    asyncio.run(scenario())


def test_a_program_is_forgotten_a_while_after_its_last_turn():
    async def scenario():
        now = [0.0]
        store = MemoryStore(100, 2**20, clock=lambda: now[0])
        programs = ProgramTable(store, 100, 10.0, clock=lambda: now[0])
        await programs.begin("acme/p")
        now[0] = 8.0
        programs.finish("acme/p", "r1")
        await programs.drain()
        now[0] = 17.0
        assert (await programs.begin("acme/p")).turns == 1
        now[0] = 18.0
        assert await programs.begin("acme/p") == Program(18.0)

    asyncio.run(scenario())


def test_the_arrival_stays_the_clusters_when_a_process_forgets_it_or_learns_it_late():
    async def scenario():
        store = MemoryStore(100, 2**20)
        first = ProgramTable(store, 1, 3600.0, clock=lambda: 5.0)
        await first.begin("acme/p")
        later = ProgramTable(store, 1, 3600.0, clock=lambda: 9.0)
        later.finish("acme/p", "r1")  # began elsewhere, or was forgotten while its turn ran
        await later.drain()
        assert await later.begin("acme/p") == Program(5.0, 1, "r1")
        assert await table(store, 12.0).begin("acme/p") == Program(5.0, 1, "r1")

    asyncio.run(scenario())


def test_a_program_keeps_its_arrival_on_whatever_replica_and_ingress():
    async def scenario():
        store = MemoryStore(100, 2**20)
        arrivals = []
        for turn, ingress in enumerate([table(store, 5.0), table(store, 7.0), table(store, 9.0)]):
            arrivals.append((await ingress.begin("acme/p")).arrival)
            ingress.finish("acme/p", f"r{turn}")
            await ingress.drain()
        assert arrivals == [5.0, 5.0, 5.0]

    asyncio.run(scenario())


def test_a_pause_is_told_once_and_to_whichever_router_the_next_turn_comes():
    async def scenario():
        store = MemoryStore(100, 2**20)
        here = table(store, 5.0)
        await here.begin("acme/p")
        assert here.resume("acme/p") is None, "its first turn waited for nothing"
        here.finish("acme/p", "r1", tools="grep,sed")
        await here.drain()
        there = table(store, 8.5)
        await there.begin("acme/p")
        assert there.resume("acme/p") == Pause("grep,sed", 3.5)
        assert there.resume("acme/p") is None
        assert here.resume("acme/unknown") is None
        behind = table(store, 4.0)
        await behind.begin("acme/p")
        assert behind.resume("acme/p") == Pause("grep,sed", 0.0), "its clock is late"

    asyncio.run(scenario())


def test_a_turn_that_called_nothing_begins_no_pause():
    async def scenario():
        programs = table(MemoryStore(100, 2**20), 5.0)
        await programs.begin("acme/p")
        programs.finish("acme/p", "r1", tools="ls")
        programs.finish("acme/p", "r1")
        assert programs.resume("acme/p") is None

    asyncio.run(scenario())


def test_a_program_that_is_over_is_forgotten_even_while_its_turn_is_written():
    async def scenario():
        store = MemoryStore(100, 2**20)
        programs = table(store, 5.0)
        await programs.begin("acme/p")
        programs.finish("acme/p", "r1")
        assert await programs.end("acme/p")
        assert not await programs.end("acme/p")
        assert await table(store, 9.0).begin("acme/p") == Program(9.0)
        there = table(store, 9.0)
        await there.begin("acme/q")
        assert await programs.end("acme/q"), "another router has seen it"

    asyncio.run(scenario())
