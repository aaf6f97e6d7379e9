from collections import Counter

import pytest
from fake_backend import Ends, NoRedis
from prometheus_client import CollectorRegistry

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.dispatch_queue import QueueStats
from holdfast.router.endpoints.metrics_endpoints import watch_line, watch_redis
from holdfast.router.entry.admission import Entry
from holdfast.router.entry.audit import Audit
from holdfast.router.entry.metrics import RouterMetrics
from holdfast.router.placement import Reason
from holdfast.router.records.store import RedisInfo
from holdfast.router.tenants import Tenant, TenantDirectory, TenantLimits, hash_key

pytestmark = pytest.mark.anyio


async def test_redis_says_what_it_holds_and_nothing_once_it_is_gone(server):
    metrics = RouterMetrics(CollectorRegistry())
    store = server.records(observe=metrics.stored)
    watch_redis(metrics, store)
    value = metrics.registry.get_sample_value
    await store.script("return {redis.call('INCR', KEYS[1])}", ["a"], [])
    await metrics.exposition()
    assert value("holdfast_redis_up") == 1
    assert value("holdfast_redis_keys") == 1
    assert value("holdfast_redis_memory_bytes") > 100_000
    assert value("holdfast_store_operations_total", {"result": "done"}) == 2
    server.kill()
    await store.try_script("return {1}", [], [])
    await metrics.exposition()
    assert value("holdfast_redis_up") == 0
    assert value("holdfast_redis_keys") is None
    assert value("holdfast_store_operations_total", {"result": "failed"}) >= 1
    await store.close()


def test_a_server_that_leaves_something_out():
    assert RedisInfo.of({"db0": {"keys": 2}, "db1": {"keys": 3}, "db_x": "y"}) == RedisInfo(0, 0, 0, 5, 0)


def test_tenants_that_come_later_have_series_and_limits():
    def tenant(name, **limits):
        return Tenant(name, (hash_key(name),), limits=TenantLimits(**limits))

    metrics, directory = RouterMetrics(CollectorRegistry()), TenantDirectory([tenant("a")])
    entry = Entry(directory, metrics, RouterConfig(metrics_tenants=2), Ends(), Audit(NoRedis()))
    assert metrics.tenant("b") == "other"
    directory.replace([tenant("a"), tenant("b", max_concurrent=3)])
    assert metrics.tenant("b") == "b"
    value = metrics.registry.get_sample_value
    with entry.place(directory.tenants[1]):
        assert value("holdfast_tenant_limit", {"tenant": "b", "limit": "max_concurrent"}) == 3
        assert value("holdfast_tenant_requests_in_flight", {"tenant": "b"}) == 1


def test_the_line_is_read_when_it_is_asked_for():
    metrics, stats = RouterMetrics(CollectorRegistry()), [QueueStats()]
    watch_line(metrics, lambda: stats[0])
    waits = {"waiting": 3, "waits": 1, "home_waits": 1, "wait_s": 3.0, "home_wait_s": 2.0}
    stats[0] = QueueStats(**waits, joined=2, lost=1, balance=1.5, placed=Counter({Reason.HOME: 2}))

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"holdfast_{name}", labels)

    assert value("requests_in_line") == 3
    assert [value("line_waits_total", **{"for": what}) for what in ("home", "any")] == [1, 0]
    assert [value("line_wait_seconds_total", **{"for": what}) for what in ("home", "any")] == [2.0, 1.0]
    assert [value(name) for name in ("replicas_joined_total", "replicas_lost_total")] == [2, 1]
    assert value("placements_total", reason="home") == 2
    assert value("placements_total", reason="load") == 0
    assert value("replica_balance") == 1.5


def test_the_stats_of_several_add_up():
    one = QueueStats(waiting=1, replicas=4, balance=2.0, placed=Counter({Reason.HOME: 1, Reason.LOAD: 2}))
    two = QueueStats(waiting=2, waits=3, placed=Counter({Reason.HOME: 5}))
    together = QueueStats(waiting=3, waits=3, replicas=4, balance=2.0, placed=Counter({Reason.HOME: 6, Reason.LOAD: 2}))
    assert QueueStats.total([one, two]) == together
    assert QueueStats.total([]) == QueueStats()
