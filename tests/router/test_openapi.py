"""`/openapi.json` and `/docs`: that they tell of all there is, to whom; and a short run of `make fuzz`."""

import json
import re

import pytest
from fake_backend import World
from starlette.routing import Route

from holdfast.router.protocol.openapi import OPERATIONS
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key
from holdfast.router.usage import Books

ITSELF = {("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/"), ("GET", "/page/{name}")}  # for people


def test_every_operation_is_in_it() -> None:
    world = World()
    routes = [route for route in world.app.router.routes if isinstance(route, Route)]
    served = {
        (method, route.path.replace(":path", ""))
        for route in routes
        for method in (route.methods or set())
        if method != "HEAD"
    }
    assert served - ITSELF == set(OPERATIONS)
    told = world.call("GET", "/openapi.json").json()
    assert {(method.upper(), path) for path, methods in told["paths"].items() for method in methods} == set(OPERATIONS)


def test_every_reference_leads_somewhere_and_the_page_shows_all() -> None:
    world = World()
    answer = world.call("GET", "/openapi.json")
    schemas = answer.json()["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', answer.text)) <= set(schemas)
    page = world.call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(f"id={name}>" in page.text for name in schemas)
    assert all(path in page.text for _, path in OPERATIONS)
    assert not re.search(r"<script|src=|https?://", page.text)


def test_models_are_told_to_those_who_may_know() -> None:
    world = World(tenants=TenantDirectory([Tenant("acme", (hash_key("k"),))]))

    def model(**headers: str) -> object:
        told = world.call("GET", "/openapi.json", headers=headers).json()
        return told["components"]["schemas"]["ChatBody"]["properties"]["model"]

    assert model(Authorization="Bearer k") == {"type": "string", "enum": ["pocket"]}
    assert "enum" not in json.dumps(model())


def test_no_case_that_is_made_of_it_finds_a_fault() -> None:
    """As `make fuzz`, with few cases of each operation."""
    pytest.importorskip("schemathesis")
    from api_fuzz import NoBooks, Talker, fuzz

    with World(Talker(), books=Books(NoBooks())).served() as address:
        found = fuzz(address, 60)
    assert not found.faults, next(iter(found.faults.values()))
    assert found.share > 0.5, found.told()
    assert found.cases > 100
