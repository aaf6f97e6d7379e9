"""While Redis is away, what only Redis may know is answered with 503: clients take 400 and 404 for final."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend, World, chat_body
from redis_server import RedisServer
from waiting import until_async

from holdfast.router.records import Records, RedisAddress
from holdfast.router.store import MemoryStore, RedisStore

PATIENT = 60.0  # seconds that an operation may take on a slow machine
PREFILL = {"model": "pocket", "messages": [{"role": "user", "content": "hello"}]}
RESPONSE = {"model": "pocket", "input": "hello"}


class Away(MemoryStore):
    """As a router has it while Redis does not answer: what it keeps meanwhile is found."""

    @property
    def degraded(self) -> bool:
        return True


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

    assert ask(World(shared=MemoryStore(100, 2**20))).status_code == otherwise
    answer = ask(World(shared=Away(100, 2**20)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["/v1/sessions/no such name", "/v1/sessions/no such name/questions"])
def test_what_cannot_be_a_name_is_unknown_whoever_is_away(path: str) -> None:
    assert World(shared=Away(100, 2**20)).call("GET", path).status_code == 404


def test_what_was_kept_meanwhile_is_found() -> None:
    world = World(shared=Away(100, 2**20))
    first = world.call("POST", "/v1/responses", json=RESPONSE).json()
    assert world.call("GET", f"/v1/responses/{first['id']}").status_code == 200
    assert (
        world.call("POST", "/v1/responses", json={**RESPONSE, "previous_response_id": first["id"]}).status_code == 200
    )
    prefill = world.call("POST", "/v1/prefills", json=PREFILL).json()
    assert world.call("GET", f"/v1/prefills/{prefill['id']}").status_code == 200
    # Redis may have one that was put there before: whoever deletes is told to come again.
    assert world.call("DELETE", f"/v1/responses/{first['id']}").status_code == 503


def test_a_chain_and_a_prefill_go_on_once_redis_is_back(server: RedisServer) -> None:
    async def run() -> None:
        store = RedisStore(Records(RedisAddress(server.url), PATIENT, retry_s=0.01), MemoryStore(100, 2**20))
        world = World(FakeBackend(), shared=store)
        transport = httpx.ASGITransport(world.app, client=("127.0.0.1", 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            first = (await client.post("/v1/responses", json=RESPONSE)).json()
            made = (await client.post("/v1/prefills", json=PREFILL)).json()
            calls: list[Callable[[], Awaitable[httpx.Response]]] = [
                lambda: client.post("/v1/responses", json={**RESPONSE, "previous_response_id": first["id"]}),
                lambda: client.get(f"/v1/responses/{first['id']}"),
                lambda: client.get(f"/v1/prefills/{made['id']}"),
                lambda: client.post("/v1/chat/completions", json=chat_body(prefill_id=made["id"])),
            ]
            kept = server.client().dump(f"holdfast/responses/default/{first['id']}")
            handle = server.client().dump(f"holdfast/prefills/default/{made['id']}")
            server.kill()
            assert [(await call()).status_code for call in calls] == [503] * 4
            server.start()
            server.client().restore(f"holdfast/responses/default/{first['id']}", 0, kept)
            server.client().restore(f"holdfast/prefills/default/{made['id']}", 0, handle)
            await until_async(lambda: not store.degraded)
            assert [(await call()).status_code for call in calls] == [200] * 4
        await store.close()

    asyncio.run(run())
