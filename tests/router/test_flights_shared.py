"""Single flight over router processes and a real Redis."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import ClassVar

import pytest
from flight_routers import RouterProcess
from redis_server import RedisServer
from waiting import go_by, run_virtual

from holdfast.router.background import Background
from holdfast.router.response_cache import Leases


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def routers(redis):
    processes = [RouterProcess(redis.url, f"r{i}") for i in range(3)]
    for each in processes:
        each.told()
    yield processes
    for each in processes:
        each.kill()


def results(told):
    return Counter(result for each in told for answers in each["answers"].values() for _, result in answers)


def texts(told):
    return {text for each in told for answers in each["answers"].values() for text, _ in answers}


def test_of_all_routers_requests_at_once_one_is_computed(routers):
    for each in routers:
        each.ask(["all at once"], 6, seconds=1.0)
    told = [each.told() for each in routers]
    assert sum(each["computed"] for each in told) == 1
    found = results(told)
    assert found["miss"] == 1
    assert found["joined"] >= 5, "those that came while it was computed"
    assert found["joined"] + found["hit"] == 17
    assert len(texts(told)) == 1
    assert sum(each["outcomes"].get("completed", 0) for each in told) == 1
    assert sum(each["outcomes"].get("cached", 0) for each in told) == 17
    for each in routers:
        each.ask(["all at once"])
    assert results([each.told() for each in routers]) == {"hit": 3}


def test_where_the_client_of_who_computes_leaves_another_router_goes_on(routers):
    first, second, third = routers
    before = computed((second, third))
    first.hold("leaves")
    for each in (second, third):
        each.hold("leaves", 4)
        each.stay()
    first.leave()
    told = [each.told() for each in routers]
    assert not told[0]["answers"]
    assert sum(each["computed"] - n for each, n in zip(told[1:], before, strict=True)) == 1
    assert results(told[1:])["miss"] == 1
    assert len(texts(told[1:])) == 1


def test_a_lease_is_renewed_as_long_as_it_is_held_and_then_no_more():
    class Store:
        extended: ClassVar[list[float]] = []

        async def take(self, key, lease, owner, lease_s):
            return True

        async def extend(self, leases, owner, lease_s=0.0):
            if lease_s:
                self.extended.append(asyncio.get_running_loop().time())

    async def main():
        leases = Leases(Store(), 0.9, Background())
        await leases.take("k", "flight/k")
        await go_by(30.0)
        leases.give_back("flight/k")
        await go_by(30.0)
        await leases.close()

    run_virtual(main())
    times = [0.0, *Store.extended]
    assert max(after - before for before, after in pairwise(times)) <= 0.45
    assert 29.5 < times[-1] < 30.9


def test_what_a_router_computed_that_dies_is_left_to_others(redis, routers):
    first, second, third = routers
    before = computed((second, third))
    first.hold("dies")
    for each in (second, third):
        each.hold("dies", 4)
        each.stay()
    first.kill()
    (lease,) = redis.client().keys("flights/flight/*")
    redis.client().pexpire(lease, 1)
    told = [each.told() for each in (second, third)]
    assert sum(each["computed"] - n for each, n in zip(told, before, strict=True)) == 1
    assert len(texts(told)) == 1


def computed(routers):
    for each in routers:
        each.ask([])
    return [each.told()["computed"] for each in routers]
