import asyncio

from prometheus_client import CollectorRegistry
from redis_server import RedisServer

from holdfast.router.accounts import Accounts
from holdfast.router.line_stats import LineStats
from holdfast.router.metrics import RouterMetrics
from holdfast.router.placement import Reason
from holdfast.router.records import Records, RedisAddress, RedisInfo
from holdfast.router.tenants import Principal, Tenant, TenantDirectory, TenantLimits, hash_key
from holdfast.router.watching import watch_accounts, watch_line, watch_redis, watch_tenants


def test_redis_says_what_it_holds_and_nothing_once_it_is_gone(tmp_path):
    async def main():
        server = RedisServer(tmp_path)
        server.start()
        metrics = RouterMetrics(CollectorRegistry())
        store = Records(RedisAddress(server.url), timeout_s=60.0, observe=metrics.stored)
        watch_redis(metrics, store)
        value = metrics.registry.get_sample_value
        try:
            await store.script("return {redis.call('INCR', KEYS[1])}", ["a"], [])
            await metrics.exposition()
            assert value("holdfast_redis_up") == 1
            assert value("holdfast_redis_keys") == 1
            assert value("holdfast_redis_memory_bytes") > 100_000
            assert value("holdfast_store_operations_total", {"result": "done"}) == 2
        finally:
            server.kill()
        await store.try_script("return {1}", [], [])
        await metrics.exposition()
        assert value("holdfast_redis_up") == 0
        assert value("holdfast_redis_keys") is None
        assert value("holdfast_store_operations_total", {"result": "failed"}) >= 1
        await store.close()

    asyncio.run(main())


def test_a_server_that_leaves_something_out():
    assert RedisInfo.of({"db0": {"keys": 2}, "db1": {"keys": 3}, "db_x": "y"}) == RedisInfo(0, 0, 0, 5, 0)


def test_a_router_that_goes_by_its_own_part_of_the_quotas_says_so(tmp_path):
    registry = CollectorRegistry()
    server = RedisServer(tmp_path)
    server.start()

    async def run():
        store = Records(RedisAddress(server.url), 60.0)
        accounts = Accounts(store=store)
        watch_accounts(RouterMetrics(registry), accounts)
        who, told = Principal(Tenant("t", limits=TenantLimits(requests_per_minute=9))), []
        for lost in (False, True):
            if lost:
                server.kill()
            await accounts.admission(who).charge()
            told.append(registry.get_sample_value("holdfast_quota_local"))
        await accounts.close()
        await store.close()
        return told

    assert asyncio.run(run()) == [0.0, 1.0]


def test_tenants_that_come_later_have_series_and_limits():
    def tenant(name, **limits):
        return Tenant(name, (hash_key(name),), limits=TenantLimits(**limits))

    metrics, directory = RouterMetrics(CollectorRegistry()), TenantDirectory([tenant("a")])
    watch_tenants(metrics, directory, {"a": 0, "b": 1}.__getitem__, most=2)
    assert metrics.tenant("b") == "other"
    directory.replace([tenant("a"), tenant("b", max_concurrent=3)])
    assert metrics.tenant("b") == "b"
    value = metrics.registry.get_sample_value
    assert value("holdfast_tenant_limit", {"tenant": "b", "limit": "max_concurrent"}) == 3
    assert value("holdfast_tenant_requests_in_flight", {"tenant": "b"}) == 1


def test_the_line_is_read_when_it_is_asked_for():
    metrics, stats = RouterMetrics(CollectorRegistry()), [LineStats()]
    watch_line(metrics, lambda: stats[0])
    waited = LineStats(waiting=3, balance=1.5).waited(2.0, again=False, for_home=True).waited(1.0, True, False)
    stats[0] = waited.changed(joined=2, lost=1).placed_for(Reason.HOME).placed_for(Reason.HOME)

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
    one = LineStats(waiting=1, replicas=4, balance=2.0, placed={Reason.HOME: 1, Reason.LOAD: 2})
    two = LineStats(waiting=2, waits=3, placed={Reason.HOME: 5})
    together = LineStats(waiting=3, waits=3, replicas=4, balance=2.0, placed={Reason.HOME: 6, Reason.LOAD: 2})
    assert LineStats.total([one, two]) == together
    assert LineStats.total([]) == LineStats()
