"""The cluster's statistics of tools in a real Redis: right, shared, and none the worse for its loss."""

import random

import pytest
from redis_server import records_away

from holdfast.replicas.retention.latency import RECENT, LatencyBook, LatencySnapshot, ToolLatency
from holdfast.router.records import tool_latency
from holdfast.router.records.tool_latency import STREAM, TTL_S, Reader, ToolLatencies

pytestmark = pytest.mark.anyio


async def test_readers_come_to_the_figures_of_one_process(records, monkeypatch):
    monkeypatch.setattr(tool_latency, "BATCH", 7)

    writers = [ToolLatencies(records), ToolLatencies(records)]
    follower, book, rng = Reader(records), LatencyBook(), random.Random(1)
    for i in range(RECENT + 90):
        tenant, tools, seconds = rng.choice("ab"), rng.choice(["ls", "grep,sed", "x/y"]), rng.expovariate(1.0)
        writers[i % 2].record(tenant, tools, seconds)
        book.record(tenant, tools, float(f"{seconds:.6g}"))
        if i % 50 == 0:
            for writer in writers:
                await writer.close()
            await follower.refresh()
    for writer in writers:
        await writer.close()
    late, expected = Reader(records), book.snapshot()
    assert await late.refresh()
    assert await follower.refresh()
    for found in (late.snapshot, follower.snapshot, await writers[0].known()):
        assert set(found.tools) == set(expected.tools)
        assert all(found.tools[key].count == latency.count for key, latency in expected.tools.items())
        assert found.overall.count == expected.overall.count
        assert found.overall.mean == pytest.approx(expected.overall.mean, rel=1e-4)


async def test_a_reader_reads_what_is_new(records):
    latencies, reader = ToolLatencies(records), Reader(records)
    assert not await reader.refresh()
    for tool in ("ls", "sed"):
        latencies.record("a", tool, 1.0)
    latencies.record("a", "", 9.0)
    latencies.record("a", "ls", float("inf"))
    await latencies.close()
    assert await reader.refresh()
    assert reader.snapshot.of("a", "sed") == ToolLatency(1, 1.0, 0.0, (1.0,))
    assert not await reader.refresh()
    latencies.record("a", "ls", 3.0)
    await latencies.close()
    assert await reader.refresh()
    found = reader.snapshot.of("a", "ls")
    assert (found.count, found.recent) == (2, (1.0, 3.0))
    assert (found.mean, found.variance) == pytest.approx((2.0, 2.0), rel=1e-3)
    assert 0 < await records._redis.ttl(f"{records.namespace}/{STREAM}") <= TTL_S


async def test_the_stream_and_what_a_reader_knows_are_bounded(records, monkeypatch):
    monkeypatch.setattr(tool_latency, "LENGTH", 100)
    monkeypatch.setattr(tool_latency, "MOST_SETS", 6)

    latencies = ToolLatencies(records)
    for i in range(1000):
        latencies.record("noisy", f"t{i}", 1.0)
    for tool in ("grep", "sed"):
        latencies.record("quiet", tool, 1.0)
    for i in range(40):
        latencies.record("noisy", f"t{i}", 1.0)
    known = await latencies.known()
    assert {("quiet", "grep"), ("quiet", "sed")} < set(known.tools)
    assert len(known.tools) == 6
    assert await records._redis.xlen(f"{records.namespace}/{STREAM}") < 300  # Redis trims whole nodes


async def test_while_redis_is_away_nothing_waits_and_the_last_figures_stand():
    latencies = ToolLatencies(records_away())
    for i in range(50):
        latencies.record("a", "ls", float(i))
    assert await latencies.known() == LatencySnapshot()
    assert latencies._pending == []
