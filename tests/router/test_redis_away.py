"""While Redis is away, what only Redis may know is answered with 503: clients take 400 and 404 for final."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend, World, chat_body
from redis_server import RedisServer, records_away
from waiting import until_async

from holdfast.router.records.store import Records

pytestmark = pytest.mark.anyio

PREFILL = {"model": "pocket", "messages": [{"role": "user", "content": "hello"}]}
RESPONSE = {"model": "pocket", "input": "hello"}


@pytest.mark.parametrize(
    ("method", "path", "body", "otherwise"),
    [
        ("GET", "/v1/responses/resp_1", None, 404),
        ("GET", "/v1/responses/resp_1/input_items", None, 404),
        ("DELETE", "/v1/responses/resp_1", None, 404),
        ("POST", "/v1/responses/resp_1/cancel", None, 404),
        ("POST", "/v1/responses", {**RESPONSE, "previous_response_id": "resp_1"}, 400),
        ("POST", "/v1/responses", {**RESPONSE, "previous_response_id": "resp_1", "stream": True}, 400),
        ("POST", "/v1/responses/compact", {**RESPONSE, "previous_response_id": "resp_1"}, 400),
        ("POST", "/v1/responses/input_tokens", {**RESPONSE, "previous_response_id": "resp_1"}, 400),
        ("GET", "/v1/prefills/prefill_1", None, 404),
        ("DELETE", "/v1/prefills/prefill_1", None, 404),
        ("POST", "/v1/prefills/prefill_1/extend", {"messages": PREFILL["messages"]}, 404),
        ("POST", "/v1/chat/completions", chat_body(prefill_id="prefill_1"), 404),
        ("GET", "/v1/sessions/s", None, 404),
        ("DELETE", "/v1/sessions/s", None, 404),
        ("POST", "/v1/sessions/s/append", {"text": "x"}, 404),
        ("POST", "/v1/sessions/s/query", {"model": "pocket", "text": "x", "max_tokens": 3}, 404),
        ("POST", "/v1/sessions/s/fork", {"id": "t"}, 404),
        ("GET", "/v1/sessions/s/questions", None, 404),
        ("DELETE", "/v1/programs/p", None, 404),
    ],
)
def test_what_may_be_there_is_no_404(method: str, path: str, body: Any, otherwise: int) -> None:
    def ask(world: World) -> httpx.Response:
        return world.call(method, path, json=body)

    assert ask(World()).status_code == otherwise
    answer = ask(World(records=records_away()))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["/v1/sessions/no such name", "/v1/sessions/no such name/questions"])
def test_what_cannot_be_a_name_is_unknown_whoever_is_away(path: str) -> None:
    assert World(records=records_away()).call("GET", path).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body()),
        ("/v1/chat/completions", chat_body(stream=True)),
        ("/v1/chat/completions", chat_body(program_id="p")),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", {**chat_body(), "max_tokens": 3}),
    ],
)
def test_generation_goes_on(path: str, body: Any) -> None:
    world = World(records=records_away())
    for _ in range(2):
        answer = world.call("POST", path, json=body)
        assert (answer.status_code, "Hello" in answer.text or "Hel" in answer.text) == (200, True)
    if path == "/v1/responses":
        assert answer.json()["store"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/prefills", PREFILL),
        ("/v1/sessions", {"model": "pocket", "text": "x"}),
        ("/v1/programs/p/heartbeat", {"within_s": 60}),
    ],
)
def test_what_could_not_be_stored_is_refused(path: str, body: Any) -> None:
    world = World(records=records_away())
    answer = world.call("POST", path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_chain_and_a_prefill_go_on_once_redis_is_back(server: RedisServer, store: Records) -> None:
    async with World(FakeBackend(), records=store).client() as client:
        first = (await client.post("/v1/responses", json=RESPONSE)).json()
        made = (await client.post("/v1/prefills", json=PREFILL)).json()
        calls: list[Callable[[], Awaitable[httpx.Response]]] = [
            lambda: client.post("/v1/responses", json={**RESPONSE, "previous_response_id": first["id"]}),
            lambda: client.get(f"/v1/responses/{first['id']}"),
            lambda: client.get(f"/v1/prefills/{made['id']}"),
            lambda: client.post("/v1/chat/completions", json=chat_body(prefill_id=made["id"])),
        ]
        keys = [f"holdfast/records/{each['object']}s/default/{each['id']}" for each in (first, made)]
        kept = {key: server.client().dump(key) for key in keys}
        server.kill()
        assert [(await call()).status_code for call in calls] == [503] * 4
        server.start()
        for key, value in kept.items():
            server.client().restore(key, 0, value)
        await until_async(lambda: not store.degraded)
        assert [(await call()).status_code for call in calls] == [200] * 4
