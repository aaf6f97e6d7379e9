"""The cluster's statistics of tools, against a real Redis: right, shared, and none the worse for its loss."""

import asyncio
import random
import signal
from collections.abc import Callable

import pytest
from redis_server import RedisServer
from waiting import until_async

from holdfast.replicas.retention.latency import RECENT, LatencyBook, ToolLatency
from holdfast.router import tool_latency
from holdfast.router.records import Records, RedisAddress
from holdfast.router.tool_latency import TTL_S, Reader, ToolLatencies

PATIENT = 60.0  # seconds a slow machine may take where the test is not about time
RETRY = 0.01


def store_at(server: RedisServer) -> Records:
    return Records(RedisAddress(server.url), PATIENT, RETRY)


class LosesAnswers:
    """A store whose scripts run, and whose first answers are lost: `after` is called after each of these."""

    degraded = False

    def __init__(self, store: Records, lost: int, after: Callable[[], None] = lambda: None):
        self.store, self.lost, self.after = store, lost, after

    async def try_script(self, source, keys, arguments):
        answer = await self.store.try_script(source, keys, arguments)
        if not self.lost:
            return answer
        self.lost -= 1
        self.after()
        return None


def close_to(found: ToolLatency, expected: ToolLatency) -> bool:
    return (
        found.count == expected.count
        and found.mean == pytest.approx(expected.mean, rel=1e-4)
        and found.variance == pytest.approx(expected.variance, rel=1e-3, abs=1e-9)
        and found.recent == pytest.approx(expected.recent, rel=1e-4)
    )


async def until_away(store: Records) -> None:
    await until_async(lambda: store.degraded)


async def written(latencies: ToolLatencies) -> None:
    await until_async(lambda: not latencies._pending)
    await latencies.drain()


def test_redis_and_a_process_come_to_the_same_figures(server):
    async def scenario():
        store, other = store_at(server), store_at(server)
        writers = [ToolLatencies(store, RETRY), ToolLatencies(other, RETRY)]
        book, rng = LatencyBook(), random.Random(1)
        for i in range(RECENT + 90):
            tenant, tools, seconds = rng.choice("ab"), rng.choice(["ls", "grep,sed", "x/y"]), rng.expovariate(1.0)
            writers[i % 2].record(tenant, tools, seconds)
            book.record(tenant, tools, float(f"{seconds:.6g}"))
            if i % 50 == 0:  # two routers write at once, each in its own order
                await asyncio.sleep(0)
        for writer in writers:
            await written(writer)
        reader, expected = Reader(other), book.snapshot()
        assert await reader.refresh()
        found = reader.snapshot
        assert set(found.tools) == set(expected.tools)
        assert all(close_to(found.tools[key], latency) for key, latency in expected.tools.items())
        assert (found.overall.count, len(found.overall.recent)) == (expected.overall.count, RECENT)
        assert found.overall.mean == pytest.approx(expected.overall.mean, rel=1e-4)
        for each in (*writers, store, other):
            await each.close()

    asyncio.run(scenario())


def test_a_reader_reads_what_has_changed(server, monkeypatch):
    monkeypatch.setattr(tool_latency, "BATCH", 2)

    async def scenario():
        store = store_at(server)
        latencies, reader = ToolLatencies(store, RETRY), Reader(store)
        assert not await reader.refresh()
        for i in range(5):  # more sets than one script reads
            latencies.record("a", f"tool{i}", 1.0)
        await written(latencies)
        assert await reader.refresh()
        assert set(reader.snapshot.tools) == {("a", f"tool{i}") for i in range(5)}
        before = reader.snapshot
        assert not await reader.refresh()
        latencies.record("a", "tool3", 3.0)
        await written(latencies)
        assert await reader.refresh()
        changed = {key for key, latency in reader.snapshot.tools.items() if latency is not before.tools[key]}
        assert changed == {("a", "tool3")}
        assert reader.snapshot.of("a", "tool3").mean == 2.0
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


class Counts:
    """A store that counts the bytes of what its scripts answer."""

    degraded = False

    def __init__(self, store: Records):
        self.store, self.size = store, 0

    async def try_script(self, source, keys, arguments):
        answer = await self.store.try_script(source, keys, arguments)
        self.size += size_of(answer)
        return answer


def size_of(answer) -> int:
    return sum(map(size_of, answer)) if isinstance(answer, list) else len(answer or b"")


def test_a_reader_that_follows_fetches_the_new_intervals_and_no_windows(server):
    """With 200 sets of tools whose windows are full."""

    async def scenario():
        store = store_at(server)
        latencies, counts = ToolLatencies(store, RETRY), Counts(store)
        for seconds in range(RECENT):
            for tool in range(200):
                latencies.record("a", f"tool {tool}", float(seconds))
            await written(latencies)
        reader = Reader(counts)
        assert await reader.refresh()
        everything = counts.size
        for tool in range(200):
            latencies.record("a", f"tool {tool}", 7.5)
        await written(latencies)
        counts.size = 0
        assert await reader.refresh()
        assert counts.size < everything / 20
        assert counts.size < 200 * 50
        fresh = Reader(store)
        await fresh.refresh()
        for key, latency in fresh.snapshot.tools.items():
            assert close_to(reader.snapshot.tools[key], latency)
        assert len(reader.snapshot.tools) == len(fresh.snapshot.tools) == 200
        assert close_to(reader.snapshot.overall, fresh.snapshot.overall)
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_a_reader_that_was_away_for_longer_than_the_log_reaches_back_reads_whole_statistics(server, monkeypatch):
    monkeypatch.setattr(tool_latency, "LOG", 3)
    monkeypatch.setattr(tool_latency, "BATCH", 2)

    async def scenario():
        store = store_at(server)
        latencies, reader = ToolLatencies(store, RETRY), Reader(store)
        rng, sizes = random.Random(2), [1, 2, 9, 3, 4, 1, 30, 2]
        for size in sizes:
            for _ in range(size):
                latencies.record("a", f"tool {rng.randrange(6)}", rng.expovariate(1.0))
            await written(latencies)
            assert await reader.refresh()
            fresh = Reader(store)
            await fresh.refresh()
            assert set(reader.snapshot.tools) == set(fresh.snapshot.tools)
            assert all(close_to(reader.snapshot.tools[key], each) for key, each in fresh.snapshot.tools.items())
            assert close_to(reader.snapshot.overall, fresh.snapshot.overall)
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_the_sets_of_tools_are_bounded(server, monkeypatch):
    monkeypatch.setattr(tool_latency, "MOST_SETS", 3)

    async def scenario():
        store = store_at(server)
        latencies, reader = ToolLatencies(store, RETRY), Reader(store)
        for tool in ("one", "two", "three", "one", "four"):
            latencies.record("a", tool, 1.0)
            await written(latencies)
            await reader.refresh()
        assert set(reader.snapshot.tools) == {("a", "three"), ("a", "one"), ("a", "four")}
        assert all([0 < await store._redis.ttl(key) <= TTL_S for key in await store._redis.keys("*{tools}*")])
        assert len(await store._redis.keys("*of/*")) == 2 * 3
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_a_tenant_that_invents_tools_pushes_out_its_own(server, monkeypatch):
    monkeypatch.setattr(tool_latency, "MOST_SETS", 6)

    async def scenario():
        store = store_at(server)
        latencies, follower = ToolLatencies(store, RETRY), Reader(store)
        for tool in ("grep", "sed"):
            latencies.record("quiet", tool, 1.0)
        for i in range(40):
            latencies.record("noisy", f"t{i}", 1.0)
            latencies.record("noisy", "used", 1.0)
            await written(latencies)
            await follower.refresh()
        late = Reader(store)
        await late.refresh()
        noisy = {("noisy", name) for name in ("t37", "t38", "t39", "used")}
        for known in (late.snapshot, follower.snapshot, latencies._own.snapshot()):
            assert set(known.tools) == {("quiet", "grep"), ("quiet", "sed")} | noisy
        assert late.snapshot.of("noisy", "used").count == 40
        assert len(await store._redis.keys("*of/*")) == 2 * 6
        await store._redis.delete(*await store._redis.keys("*sets/*"))  # Redis was short of memory
        for i in range(9):
            latencies.record("other", f"t{i}", 1.0)
            await written(latencies)
        assert len(await store._redis.keys("*of/*")) <= 2 * 6
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_intervals_of_the_time_without_redis_are_added_when_it_is_back(server):
    async def scenario():
        store = store_at(server)
        latencies, reader = ToolLatencies(store, RETRY), Reader(store)
        latencies.record("a", "ls", 1.0)
        await written(latencies)
        await reader.refresh()
        server.kill()
        latencies.record("a", "ls", 3.0)
        latencies.record("a", "sed", 5.0)
        await until_away(store)
        assert (await latencies.known()).of("a", "sed").mean == 5.0, "what this process knows"
        assert not await reader.refresh()
        assert reader.snapshot.of("a", "ls").mean == 1.0, "the last snapshot stands"
        server.socket.unlink(missing_ok=True)
        server.start()  # and has lost what it had
        await written(latencies)
        assert await reader.refresh()
        assert reader.snapshot.of("a", "ls").mean == 3.0
        assert reader.snapshot.of("a", "sed").mean == 5.0
        assert (await latencies.known()).of("a", "ls").mean == 3.0
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_a_batch_whose_answer_was_lost_counts_once(server, monkeypatch):
    monkeypatch.setattr(tool_latency, "PENDING", 3)

    async def scenario():
        def more():  # the first of the batch have to go for these
            for _ in range(2):
                latencies.record("a", "sed", 5.0)

        store = store_at(server)
        latencies, reader = ToolLatencies(LosesAnswers(store, 2, more), RETRY), Reader(store)
        for seconds in (1.0, 2.0):
            latencies.record("a", "ls", seconds)
        await written(latencies)
        await reader.refresh()
        assert reader.snapshot.of("a", "ls").recent == (1.0, 2.0)
        assert reader.snapshot.of("a", "sed").count == 3
        assert 0 < min([await store._redis.ttl(key) for key in await store._redis.keys("*done/*")]) <= 60
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_a_server_that_was_slow_counts_once(server):
    async def scenario():
        store = Records(RedisAddress(server.url), 0.5, RETRY)
        latencies, reader = ToolLatencies(store, RETRY), Reader(store)
        latencies.record("a", "ls", 1.0)
        await written(latencies)
        server.process.send_signal(signal.SIGSTOP)
        try:
            latencies.record("a", "ls", 3.0)
            await until_away(store)
        finally:
            server.process.send_signal(signal.SIGCONT)
        await written(latencies)
        await reader.refresh()
        assert reader.snapshot.of("a", "ls").recent == (1.0, 3.0)
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_recording_waits_for_nobody_and_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tool_latency, "PENDING", 7)

    async def scenario():
        store = store_at(RedisServer(tmp_path))  # there never was one
        latencies = ToolLatencies(store, RETRY)
        for i in range(50):
            latencies.record("a", "ls", float(i))
        assert len(latencies._pending) == 7
        assert latencies._pending[-1] == ("a/ls", "49")
        await until_away(store)
        await latencies.close()
        await store.close()

    asyncio.run(scenario())


def test_without_a_store_a_process_knows_its_own():
    async def scenario():
        latencies = ToolLatencies()
        latencies.record("a", "ls", 2.0)
        latencies.record("a", "", 9.0)
        latencies.record("a", "ls", float("inf"))
        found = await latencies.known()
        assert found.overall == found.of("a", "ls") == ToolLatency(1, 2.0, 0.0, (2.0,))
        await latencies.close()

    asyncio.run(scenario())


def test_foreign_bytes_in_redis_do_no_harm(server):
    async def scenario():
        store = store_at(server)
        latencies, reader = ToolLatencies(store, RETRY), Reader(store)
        latencies.record("a", "ls", 2.0)
        await written(latencies)
        await store._redis.delete("holdfast/{tools}/of/a/ls")  # evicted, for the server was full
        await reader.refresh()
        assert reader.snapshot.of("a", "ls") == ToolLatency()
        await latencies.close()
        await store.close()

    asyncio.run(scenario())
