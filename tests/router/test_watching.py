import asyncio

from prometheus_client import CollectorRegistry
from redis_server import RedisServer

from holdfast.router.limits import Limiter
from holdfast.router.line_stats import LineStats
from holdfast.router.metrics import RouterMetrics
from holdfast.router.redis_info import RedisInfo
from holdfast.router.store import MemoryStore, RedisAddress, RedisStore
from holdfast.router.tenants import Tenant, TenantDirectory, TenantLimits, hash_key
from holdfast.router.watching import watch_line, watch_redis, watch_tenants


def test_redis_says_what_it_holds_and_nothing_once_it_is_gone(tmp_path):
    async def main():
        server = RedisServer(tmp_path)
        server.start()
        metrics = RouterMetrics(CollectorRegistry())
        store = RedisStore(RedisAddress(server.url), MemoryStore(10, 1000), timeout_s=2.0, observe=metrics.stored)
        watch_redis(metrics, store)
        value = metrics.registry.get_sample_value
        try:
            await store.set("a", b"1", 60.0)
            await metrics.exposition()
            assert value("holdfast_redis_up") == 1
            assert value("holdfast_redis_keys") == 1
            assert value("holdfast_redis_memory_bytes") > 100_000
            assert value("holdfast_store_operations_total", {"result": "done"}) == 2
        finally:
            server.kill()
        await store.get("a")
        await metrics.exposition()
        assert value("holdfast_redis_up") == 0
        assert value("holdfast_redis_keys") is None
        assert value("holdfast_store_operations_total", {"result": "failed"}) >= 1
        await store.close()

    asyncio.run(main())


def test_a_server_that_leaves_something_out():
    assert RedisInfo.of({"db0": {"keys": 2}, "db1": {"keys": 3}, "db_x": "y"}) == RedisInfo(0, 0, 0, 5, 0)


def test_tenants_that_come_later_have_series_and_limits():
    def tenant(name, **limits):
        return Tenant(name, (hash_key(name),), limits=TenantLimits(**limits))

    metrics, directory, limiter = RouterMetrics(CollectorRegistry()), TenantDirectory([tenant("a")]), Limiter(9)
    watch_tenants(metrics, directory, limiter, most=2)
    assert metrics.tenant("b") == "other"
    directory.replace([tenant("a"), tenant("b", max_concurrent=3)])
    assert metrics.tenant("b") == "b"
    limiter.enter(directory.tenants[1], 0.0)
    value = metrics.registry.get_sample_value
    assert value("holdfast_tenant_limit", {"tenant": "b", "limit": "max_concurrent"}) == 3
    assert value("holdfast_tenant_requests_in_flight", {"tenant": "b"}) == 1


def test_the_line_is_read_when_it_is_asked_for():
    metrics, stats = RouterMetrics(CollectorRegistry()), [LineStats()]
    watch_line(metrics, lambda: stats[0])
    stats[0] = LineStats(waiting=3).waited(2.0, again=False).waited(1.0, again=True).changed(joined=2, lost=1)
    found = {
        name: metrics.registry.get_sample_value(f"holdfast_{name}")
        for name in (
            "requests_in_line",
            "line_waits_total",
            "line_wait_seconds_total",
            "replicas_joined_total",
            "replicas_lost_total",
        )
    }
    assert list(found.values()) == [3, 1, 3.0, 2, 1]


def test_the_stats_of_several_add_up():
    assert LineStats.total([LineStats(1, 2, 3.0, 4, 5, 6)] * 2) == LineStats(2, 4, 6.0, 8, 10, 12)
    assert LineStats.total([]) == LineStats()
