"""The cluster's status: what it tells, and to whom."""

from dataclasses import replace

import pytest
from fake_backend import CALL, FakeBackend, World, bearer, chat_body

from holdfast.replicas.retention.latency import Called
from holdfast.replicas.stats import EngineStats, Occupancy, replica_status
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

PATH = "/v1/cluster/status"
CHAT = "/v1/chat/completions"
FRESH = {"cache-control": "no-store"}
OCCUPANCY = Occupancy(2, 1, 3, 100, 60, 30, 10, pins=1, cells_pinned=16)


def waiting_for_a_tool() -> FakeBackend:
    done = replace(CALL[-1][-1], called=Called(("get_weather",)))
    return FakeBackend((*CALL[:-1], (done,)))


def test_replicas_tenants_and_programs() -> None:
    world = World(waiting_for_a_tool())
    stats = EngineStats(steps=7, completion=9)
    world.backend.statuses = [replica_status(name, "pocket", "cpu", stats, OCCUPANCY) for name in ("r2", "r1")]
    turn = {"json": chat_body(program_id="trip")}
    answer = world.calls([("POST", CHAT, turn), ("POST", CHAT, {"json": {}}), ("GET", PATH, {})])[-1]
    assert "hello" not in answer.text, "nothing that a client wrote is in it"
    told = answer.json()
    assert [each["replica_id"] for each in told["replicas"]] == ["r1", "r2"]
    assert told["replicas"][0].items() >= {"steps": 7, "completion": 9, "cells_total": 100, "pins": 1}.items()
    assert (told["router"], told["store"]) == ("router", "ok")
    (tenant,) = told["tenants"]
    tokens = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3}
    counts = {"ended": 2, "rejected": 1, "running": 0, "failed": 0, "cached_answers": 0}
    assert tenant == {"name": "default", **counts, **tokens, "drafted_tokens": 0, "accepted_tokens": 0}
    (program,) = told["programs"]
    assert program.pop("since_s") > 0  # the world's clock is not the router's
    assert program.pop("age_s") > 0
    names = {"program": "trip", "tenant": "default", "replica": "r1", "tools": "get_weather"}
    assert program == {**names, "state": "tools", "turns": 1}


def test_the_latest_programs_first_and_no_more_than_asked_for() -> None:
    world = World()
    turns = [("POST", CHAT, {"json": chat_body(program_id=name), "headers": FRESH}) for name in "abca"]
    *_, all_of_them, two, none = world.calls(
        [*turns, ("GET", PATH, {}), ("GET", f"{PATH}?programs=2", {}), ("GET", f"{PATH}?programs=0", {})]
    )
    assert [each["program"] for each in all_of_them.json()["programs"]] == ["a", "c", "b"]
    assert {each["state"] for each in all_of_them.json()["programs"]} == {"idle"}
    assert [each["program"] for each in two.json()["programs"]] == ["a", "c"]
    assert none.json()["programs"] == []
    for wrong in ("x", "-1", "1001", "1" * 5000):
        refused = world.call("GET", f"{PATH}?programs={wrong}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "programs")


def test_programs_at_tools_are_counted_beyond_the_list() -> None:
    world = World(waiting_for_a_tool())
    turns = [("POST", CHAT, {"json": chat_body(program_id=name), "headers": FRESH}) for name in "abc"]
    *_, one, none = world.calls([*turns, ("GET", f"{PATH}?programs=1", {}), ("GET", f"{PATH}?programs=0", {})])
    assert [len(answer.json()["programs"]) for answer in (one, none)] == [1, 0]
    assert [answer.json()["at_tools"] for answer in (one, none)] == [3, 3]


@pytest.mark.parametrize("path", [PATH, "/metrics"])
@pytest.mark.parametrize(
    ("exposed", "peer", "statuses"),
    [
        (True, "127.0.0.1", [401, 401, 403, 200]),
        (False, "203.0.113.9", [401, 401, 403, 200]),
        (False, "127.0.0.1", [200, 200, 200, 200]),
    ],
)
def test_it_is_for_this_machine_and_for_operators(path, exposed, peer, statuses) -> None:
    tenants = [Tenant(name, (hash_key(name),), operator=name == "ops") for name in ("acme", "ops")]
    world = World(tenants=TenantDirectory(tenants, exposed=exposed))
    callers = ({}, bearer("wrong"), bearer("acme"), bearer("ops"))
    assert [world.call("GET", path, peer, headers=headers).status_code for headers in callers] == statuses
    assert World().call("GET", path, peer="203.0.113.9").status_code == 403
    assert World().call("GET", path).status_code == 200
