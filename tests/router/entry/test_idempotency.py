"""Requests under an `Idempotency-Key`: the same one gets the same answer, and another one is refused."""

import re

import pytest
from fake_backend import CALL, DONE, FORMATS, HELLO, FakeBackend, World, bearer, chat_body, config_of, keyed
from redis_server import records_away

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.tenants import Tenant, TenantDirectory, TenantLimits, hash_key

CHAT = "/v1/chat/completions"
KEY = {"Idempotency-Key": "k-1"}


def ask(world, path=CHAT, headers=KEY, **body):
    return world.call("POST", path, json=body or chat_body(), headers=headers)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"cache-control": "no-store"}, {"x-holdfast-fresh-draw": "true"}])
def test_the_same_request_gets_the_same_answer(form, stream, more):
    """To the byte, with its ids, whatever it asks of the response cache. It is no other turn of its program."""
    world = World(FakeBackend(CALL))
    asked = [ask(world, form.path, {**KEY, **more}, **{**form.streamed(), "stream": stream}) for _ in range(3)]
    assert [answer.status_code for answer in asked] == [200] * 3
    assert asked[0].content == asked[1].content == asked[2].content
    assert [answer.headers.get("idempotent-replayed") for answer in asked] == [None, "true", "true"]
    assert len({answer.headers["content-type"] for answer in asked}) == 1
    assert len({answer.headers["x-request-id"] for answer in asked}) == 3
    assert len(world.backend.requests) == 1
    assert world.outcomes() == {"completed": 1, "cached": 2}
    assert world.in_flight() == 0


def test_an_answer_of_the_response_cache_is_kept_as_it_was_told():
    world = World(FakeBackend(CALL))
    ask(world, headers={})
    first, again = ask(world), ask(world)
    assert (first.headers["x-holdfast-cache"], again.headers["idempotent-replayed"]) == ("hit", "true")
    assert re.findall(r'"id":"[^"]+"', first.text) == re.findall(r'"id":"[^"]+"', again.text)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_kept_together(stream):
    world = World()
    first, again = (ask(world, **chat_body(n=3, stream=stream)) for _ in range(2))
    assert first.content == again.content
    assert len(world.backend.requests) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(max_tokens=3)),
        (CHAT, chat_body(stream=True)),
        ("/v1/completions", {"model": "pocket", "prompt": "hello"}),
        ("/v1/messages", {**chat_body(), "max_tokens": 3}),
    ],
)
def test_another_request_under_the_same_key_is_refused(path, body):
    world = World()
    ask(world)
    answer = ask(world, path, **body)
    assert answer.status_code == 422
    if path != "/v1/messages":
        told = answer.json()["error"]
        assert (told["code"], told["param"]) == ("idempotency_key_reused", "idempotency-key")
    assert len(world.backend.requests) == 1
    assert ask(world, path, {"Idempotency-Key": "k-2"}, **body).status_code == 200


def test_a_key_is_its_tenants_own():
    world = World(tenants=keyed("acme", "other"))
    for name in ("acme", "other"):
        answer = ask(world, headers={**KEY, **bearer(name)})
        assert "idempotent-replayed" not in answer.headers
    assert len(world.backend.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_what_failed_is_tried_again(stream, began):
    lost = (Errored(ErrorInfo(ErrorKind.INTERNAL, "lost")),)
    world = World(FakeBackend([(TextDelta("half"),), lost] if began else [lost]))
    ask(world, **chat_body(stream=stream))
    world.backend.script = HELLO
    again = ask(world, **chat_body(stream=stream))
    assert (again.status_code, "Hel" in again.text) == (200, True)
    assert "idempotent-replayed" not in again.headers
    assert len(world.backend.requests) == 2


def test_an_answer_that_is_too_long_is_computed_again_and_its_key_still_taken():
    script = ((TextDelta("x" * 1000),), (DONE,))
    world = World(FakeBackend(script), config=config_of(cache_answer_bytes=500))
    for _ in range(2):
        assert "idempotent-replayed" not in ask(world).headers
    assert len(world.backend.requests) == 2
    assert ask(world, **chat_body(max_tokens=3)).status_code == 422


def test_a_store_that_fails_or_is_away_takes_no_answer_away(monkeypatch):
    async def broken(*_arguments, **_settings):
        raise ZeroDivisionError

    world = World()
    monkeypatch.setattr(world.records, "put", broken)
    for each in (world, World(records=records_away())):
        assert [ask(each, **chat_body(stream=stream)).status_code for stream in (False, True)] == [200, 200]


def test_a_replay_counts_as_a_call():
    tenants = TenantDirectory([Tenant("acme", (hash_key("a"),), limits=TenantLimits(requests_per_minute=3))])
    world = World(tenants=tenants)
    asked = [ask(world, headers={**KEY, **bearer("a")}) for _ in range(4)]
    assert [answer.status_code for answer in asked] == [200, 200, 200, 429]
    assert len(world.backend.requests) == 1
