"""`/openapi.json` and `/docs`: that they tell of all there is, to whom; and a short run of `make fuzz`."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from fake_backend import CALL, DONE, FORMATS, HELLO, USAGE, FakeBackend, World, bearer, keyed

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Completed, Errored, LogprobText, Piece, ReasoningDelta, TextDelta
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints.openapi import EVENTS
from holdfast.router.entry.http import AnswerHeaders
from holdfast.router.entry.quotas import Quotas, RateLimitStatus
from holdfast.router.entry.usage import UsageBooks
from holdfast.router.tenants import TenantLimits

ITSELF = {("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/"), ("GET", "/page/{name}")}  # for people


@pytest.fixture(scope="module")
def document() -> Any:
    return World().call("GET", "/openapi.json").json()


def test_every_operation_is_in_it_with_a_summary(document: Any) -> None:
    paths = document["paths"].items()
    operations = {(method.upper(), path): each for path, methods in paths for method, each in methods.items()}
    assert set(operations) == World().operations() - ITSELF
    assert all(each["summary"] for each in operations.values())


def test_every_reference_leads_somewhere_and_the_page_shows_all() -> None:
    world = World()
    answer = world.call("GET", "/openapi.json")
    schemas = answer.json()["components"]["schemas"]
    components = answer.json()["components"]
    for kind, name in re.findall(r'"#/components/(\w+)/([\w-]+)"', answer.text):
        assert name in components[kind]
    page = world.call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(f"id=schemas-{name}>" in page.text for name in schemas)
    assert all(path in page.text for path in answer.json()["paths"])
    assert not re.search(r"<script|src=|https?://", page.text)
    targets = set(re.findall(r"id=([\w-]+)>", page.text))
    assert set(re.findall(r"href=#([\w-]+)>", page.text)) <= targets


SCORED = TextDelta("Hi", (LogprobText("Hi", b"Hi", -0.5, (LogprobText("Yo", b"Yo", -1.0),)),))
SCRIPTS: Sequence[Sequence[Sequence[Piece]]] = (
    HELLO,
    ((ReasoningDelta("Let me see."),), *CALL),
    ((SCORED,), (Completed("length", USAGE, DONE.timing),)),
    ((DONE,),),
    ((TextDelta("half"),), (Errored(ErrorInfo(ErrorKind.INTERNAL, "broke")),)),
)
STREAMED = [(each.path, each.streamed()) for each in FORMATS]
STREAMED.append(("/v1/completions", {"model": "pocket", "stream": True, "prompt": "hello"}))


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=[path for path, _ in STREAMED])
@pytest.mark.parametrize("script", SCRIPTS, ids=["text", "thoughts and a call", "cut, scored", "nothing", "failed"])
def test_every_event_of_a_stream_is_as_the_document_says(document, path, body, script) -> None:
    event = document["paths"][path]["post"]["responses"]["200"]["content"][EVENTS]["schema"]
    data = event["properties"]["data"]
    json_data, *ends = data.get("anyOf", [data])
    assert ends == ([] if path == "/v1/messages" else [{"const": "[DONE]"}])
    form = {**json_data["contentSchema"], "components": document["components"]}
    if "completions" in path:
        body = {**body, "stream_options": {"include_usage": True}}
    text = World(FakeBackend(script)).call("POST", path, json=body).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    validator = jsonschema.Draft202012Validator(form)
    for each in data:
        if each != "[DONE]":
            validator.validate(json.loads(each))
    assert len(data) > 1
    assert not validator.is_valid({**json.loads(data[0]), "more": 1}), "nothing else is in them"


def test_every_header_that_is_sent_or_read_is_in_it(document: Any) -> None:
    """By its name; that the values are as it says, and that none is missing, is `make fuzz`'s."""
    limits = TenantLimits(
        requests_per_minute=1, input_tokens_per_minute=1, uncached_tokens_per_minute=1, output_tokens_per_minute=1
    )
    status = RateLimitStatus(limits, defaultdict(float))
    sent = set()
    for anthropic in (False, True):
        at_times = {"replayed": True, "same_draw": True, "tools_as_text": True, "rate_limit": status}
        headers = AnswerHeaders("r", age_s=0.0, server_timing="x", skipped="x", anthropic=anthropic, **at_times)
        sent |= {name.decode() for name, _ in headers.encode()}
    assert set(document["components"]["headers"]) == sent | {"retry-after"}
    config = RouterConfig()
    read = {*config.program_headers, *config.placement_headers, *config.deadline_headers, *config.parent_headers}
    read |= {"x-request-id", "idempotency-key", "cache-control", "x-priority", "x-holdfast-fresh-draw"}
    read |= {"anthropic-version"}
    assert set(document["components"]["parameters"]) == read
    parameters = document["paths"]["/v1/chat/completions"]["post"]["parameters"]
    chat = {each["$ref"].rpartition("/")[2] for each in parameters}
    assert chat == read - {"anthropic-version"}


def test_models_are_told_to_those_who_may_know() -> None:
    world = World(tenants=keyed("acme"))
    for headers, model in ((bearer("acme"), {"type": "string", "enum": ["pocket"]}), ({}, {"type": "string"})):
        told = world.call("GET", "/openapi.json", headers=headers).json()
        assert told["components"]["schemas"]["ModelName"] == model


def test_no_generated_case_finds_a_fault() -> None:
    """As `make fuzz`, with few cases of each operation."""
    pytest.importorskip("schemathesis")
    from api_fuzz import NoBooks, Talker, fuzz

    with World(Talker(), books=UsageBooks(RouterConfig(), Quotas(NoBooks()))).served() as address:
        results = fuzz(address, 25)
    assert not results.faults, next(iter(results.faults.values()))
    assert results.share > 0.5, results.summary()
    assert results.cases > 80
