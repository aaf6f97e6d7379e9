"""Single flight over router processes and a real Redis."""

import select
import time
from collections import Counter

import pytest
from flight_routers import LEASE_S, SECONDS, RouterProcess
from redis_server import RedisServer


@pytest.fixture(scope="module")
def routers(tmp_path_factory):
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    processes = [RouterProcess(redis.url, f"r{i}") for i in range(3)]
    for each in processes:
        each.told()
    yield processes
    for each in processes:
        each.kill()
    redis.kill()


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
    first.ask(["leaves"], seconds=30.0, leave_s=1.0)
    time.sleep(0.5)  # the first one has the lease
    for each in (second, third):
        each.ask(["leaves"], 4)
    began = time.monotonic()
    told = [each.told() for each in routers]
    assert time.monotonic() - began < LEASE_S + SECONDS + 5.0
    assert not told[0]["answers"]
    assert sum(each["computed"] - n for each, n in zip(told[1:], before, strict=True)) == 1
    assert results(told[1:])["miss"] == 1
    assert len(texts(told[1:])) == 1


def test_what_a_router_computed_that_dies_is_left_to_others(routers):
    first, second, third = routers
    before = computed((second, third))
    first.ask(["dies"], seconds=30.0)
    time.sleep(0.5)
    for each in (second, third):
        each.ask(["dies"], 4)
    time.sleep(2 * LEASE_S)  # as long as it lives its lease does not run out
    assert not select.select([second.process.stdout], [], [], 0.0)[0], "it still waits"
    first.kill()
    told = [each.told() for each in (second, third)]
    assert sum(each["computed"] - n for each, n in zip(told, before, strict=True)) == 1
    assert len(texts(told)) == 1


def computed(routers):
    for each in routers:
        each.ask([])
    return [each.told()["computed"] for each in routers]
