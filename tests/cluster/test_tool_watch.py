"""A replica's view of the tools' latencies follows Redis, and stands while that is away."""

import asyncio

from redis_server import RedisServer
from waiting import until_async

from holdfast.cluster.tool_watch import ToolWatch
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.router.records import Records, RedisAddress
from holdfast.router.tool_latency import ToolLatencies

PATIENT = 60.0


def store_at(server: RedisServer) -> Records:
    return Records(RedisAddress(server.url), PATIENT, 0.01)


def test_what_routers_record_reaches_the_replicas_through_a_loss_of_redis(tmp_path):
    server = RedisServer(tmp_path)
    server.start()

    async def scenario():
        learned: asyncio.Queue[LatencySnapshot] = asyncio.Queue()
        store = store_at(server)
        latencies = ToolLatencies(store, 0.01)
        stores = [store_at(server) for _ in range(2)]
        watches = [ToolWatch(each, 0.01, learned.put) for each in stores]

        async def seen_by_both(tool: str) -> LatencySnapshot:
            async with asyncio.timeout(PATIENT):
                for _ in watches:
                    while (snapshot := await learned.get()).of("a", tool).count == 0:
                        pass
            return snapshot

        latencies.record("a", "ls", 1.0)
        await seen_by_both("ls")
        server.kill()
        latencies.record("a", "sed", 2.0)
        server.socket.unlink(missing_ok=True)
        server.start()
        after = await seen_by_both("sed")
        assert after.of("a", "ls").mean == 1.0, "what is known is not forgotten"
        for each in (*watches, *stores, latencies, store):
            await each.close()

    try:
        asyncio.run(scenario())
    finally:
        server.kill()


def test_a_watch_that_never_finds_redis_disturbs_nobody(tmp_path):
    async def scenario():
        learned: list[LatencySnapshot] = []

        async def learn(snapshot: LatencySnapshot) -> None:
            learned.append(snapshot)

        store = store_at(RedisServer(tmp_path))
        watch = ToolWatch(store, 0.01, learn)
        await until_async(lambda: store.degraded)
        await watch.close()
        await store.close()
        assert learned == []

    asyncio.run(scenario())
