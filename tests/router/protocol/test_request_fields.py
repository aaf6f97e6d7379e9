"""The class of a request, its salt, and the program that it counts for, on their way to a replica."""

import pytest
from fake_backend import World, chat_body

from holdfast.replicas.types import Priority
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE
KEY = {"authorization": "Bearer k"}


def chat(world: World, headers=None, **body):
    return world.call("POST", "/v1/chat/completions", json=chat_body(**body), headers=headers or {})


def asked(world: World) -> Priority:
    return world.backend.requests[-1].priority


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, INTERACTIVE),
        ({"service_tier": "flex"}, {}, BATCH),
        ({"service_tier": "auto"}, {}, INTERACTIVE),
        ({"service_tier": "priority"}, {}, INTERACTIVE),
        ({"priority": "batch"}, {}, BATCH),
        ({"priority": "interactive", "service_tier": "flex"}, {}, INTERACTIVE),
        ({"priority": 7}, {}, INTERACTIVE),
        ({}, {"X-Priority": "Batch"}, BATCH),
        ({"priority": "interactive"}, {"X-Priority": "batch"}, INTERACTIVE),
    ],
)
def test_a_body_counts_before_a_tier_and_that_before_a_header(body, headers, expected):
    world = World()
    assert chat(world, headers=headers, **body).status_code == 200
    assert asked(world) is expected


def test_other_formats_say_it_too():
    world = World()
    message = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "priority": "batch"}
    for path, body in (
        ("/v1/completions", {"model": "m", "prompt": "x", "service_tier": "flex"}),
        ("/v1/responses", {"model": "m", "input": "x", "service_tier": "flex"}),
        ("/v1/messages", message),
    ):
        answer = world.call("POST", path, json={**body, "model": world.backend.cards[0].name})
        assert answer.status_code == 200, answer.text
        assert asked(world) is BATCH
        if path == "/v1/responses":
            assert answer.json()["service_tier"] == "flex"


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"priority": [1]}])
def test_a_class_that_there_is_not_is_refused(wrong):
    world = World()
    assert chat(world, **wrong).status_code == 400
    assert chat(world, headers={"x-priority": "high"}).status_code == 400
    assert not world.backend.requests


def test_a_tenant_has_a_usual_class_and_those_that_it_may_ask_for():
    tenant = Tenant("acme", (hash_key("k"),), priority=BATCH, priorities=())
    world = World(tenants=TenantDirectory([tenant]))
    assert chat(world, headers=KEY).status_code == 200
    assert asked(world) is BATCH
    refused = chat(world, headers=KEY, priority="interactive", seed=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert chat(world, headers=KEY, priority="batch", seed=2).status_code == 200


def test_the_class_is_no_part_of_an_answer():
    world = World()
    chat(world)
    assert chat(world, priority="batch").headers["x-holdfast-cache"] == "hit"


def test_a_sub_agent_names_its_parent_and_counts_for_the_program_at_the_top():
    world = World()
    chat(world, program_id="top")
    chat(world, program_id="child", headers={"X-Parent-Session-ID": "top"}, seed=1)
    chat(world, program_id="grandchild", headers={"X-Parent-Session-ID": "child"}, seed=2)
    chat(world, headers={"X-Parent-Session-ID": "grandchild"}, seed=3)
    chat(world, headers={"X-Correlation-ID": "top"}, seed=4)
    roots = [request.root for request in world.backend.requests]
    assert roots[:4] == ["default/top"] * 4
    assert roots[4] == world.backend.requests[4].program_id, "a hint of placement is no parent"


def test_a_salt_narrows_the_response_cache_and_travels_with_the_request():
    world = World()
    for salt, expected in ((None, "miss"), ("a", "miss"), ("a", "hit"), ("b", "miss"), ("", "hit")):
        told = {} if salt is None else {"cache_salt": salt}
        begins = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        assert chat(world, messages=begins, **told).headers["x-holdfast-cache"] == expected
    assert [request.cache_salt for request in world.backend.requests] == ["", "a", "b"]
    digests = {place.prefixes for place in world.backend.places}
    assert len(digests) == 3, "nor is it placed with others"
