"""`holdfast tenants` against a router behind a real HTTP server, with a real Redis."""

import asyncio
import csv
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fake_backend import FakeBackend, World
from redis_server import RedisServer
from waiting import PATIENCE_S, until_async

from holdfast.cluster.cli import main
from holdfast.router.config import RouterConfig
from holdfast.router.entry.audit import Audit
from holdfast.router.entry.quotas import Quotas
from holdfast.router.entry.tenant_store import TenantStore
from holdfast.router.entry.usage import UsageBooks
from holdfast.router.records.store import Records, RedisAddress
from holdfast.router.tenants import TenantDirectory, hash_key


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    up, served = threading.Event(), []

    async def serve() -> None:
        store = Records(RedisAddress(redis.url), 5.0)
        config = RouterConfig(admin_key_hashes=(hash_key("admin"),))
        directory = TenantDirectory(exposed=True)
        tenants, books = TenantStore(store, directory), UsageBooks(config, Quotas(store))
        await tenants.start()
        world = World(
            FakeBackend(),
            directory,
            config,
            tenant_store=tenants,
            books=books,
            audit=Audit(store),
        )
        server = uvicorn.Server(uvicorn.Config(world.app, port=0, log_level="warning", lifespan="off"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined,unused-ignore]
        running = asyncio.create_task(server.serve())
        await until_async(lambda: server.started)
        served.extend([server, server.servers[0].sockets[0].getsockname()[1]])
        up.set()
        await running
        await tenants.close()
        await books.close()
        await store.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert up.wait(PATIENCE_S)
    yield f"http://127.0.0.1:{served[1]}"
    served[0].should_exit = True
    thread.join(PATIENCE_S)
    redis.kill()


@pytest.fixture
def holdfast(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    key = tmp_path / "key"
    key.write_text("admin\n")

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["tenants", *arguments, "--url", url, "--admin-key-file", str(key)]) == status
        told = capsys.readouterr()
        return told.err if status else told.out

    return run


def chat(url: str, key: str) -> int:
    body = {"model": "pocket", "messages": [{"role": "user", "content": key}]}
    head = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=head, trust_env=False).status_code


def key_in(text: str) -> str:
    return text.splitlines()[0].rpartition(" ")[2]


def test_a_tenants_life(holdfast: Any, url: str) -> None:
    first = key_in(holdfast("add", "acme", "--limit", "requests_per_minute=2", "--weight", "3", "--expires-in", "90d"))
    assert [chat(url, first) for _ in range(3)] == [200, 200, 429]
    assert "requests_per_minute=50" in holdfast("limit", "acme", "--limit", "requests_per_minute=50")
    second = key_in(holdfast("rotate", "acme", "--retire-in", "0s", "--id", "ci"))
    assert [chat(url, key) for key in (first, second)] == [401, 200]
    listed = json.loads(holdfast("list", "--json"))["tenants"]
    assert [(each["name"], each["weight"]) for each in listed] == [("acme", 3.0)]
    table = holdfast("list")
    for word in ("acme", "ci", "infer", "usage", "requests_per_minute=50"):
        assert word in table
    assert "acme" in holdfast("usage")
    rows = list(csv.DictReader(io.StringIO(holdfast("usage", "acme", "--records", "csv"))))
    assert [row["outcome"] for row in rows] == ["completed", "cached", "completed"]
    assert len(holdfast("usage", "--records", "jsonl").splitlines()) == 3
    acts = [json.loads(line)["act"] for line in holdfast("audit").splitlines()]
    assert [act for act in acts if act != "refused"] == ["key rotated", "tenant changed", "tenant added"]
    holdfast("remove", "acme", "--key", "ci")
    holdfast("remove", "acme")
    assert chat(url, second) in (401, 403)  # once no tenant is left, this server lets only callers of its machine in
    assert len(holdfast("usage", "acme", "--records", "jsonl").splitlines()) == 3, "the books outlive it"


def test_what_is_cached_for_a_tenant(holdfast: Any, url: str) -> None:
    head = {"authorization": f"Bearer {key_in(holdfast('add', 'keeps'))}"}

    def cached(**headers: str) -> str:
        body = {"model": "pocket", "messages": [{"role": "user", "content": "again"}]}
        told = httpx.post(f"{url}/v1/chat/completions", json=body, headers={**head, **headers}, trust_env=False)
        return told.headers["x-holdfast-cache"]

    assert [cached(), cached()] == ["miss", "hit"]
    assert holdfast("purge", "keeps") == "purged keeps\n"
    assert [cached(), cached()] == ["miss", "hit"]
    assert holdfast("cache", "keeps", "--age", "10m", "--size", "1") == "on; age 600 s; size 1 bytes\n"
    assert [cached(**{"cache-control": "no-cache"}), cached()] == ["bypass", "miss"], "a byte is too little"
    assert holdfast("cache", "keeps", "--off") == "off\n"
    assert cached() == "bypass"
    [told] = [each for each in json.loads(holdfast("list", "--json"))["tenants"] if each["name"] == "keeps"]
    assert told["cache"] == {"enabled": False, "ttl_s": None, "bytes": None}
    acts = [json.loads(line)["act"] for line in holdfast("audit").splitlines()]
    acts = [act for act in acts if act != "refused"]
    assert acts[:4] == ["tenant changed", "tenant changed", "cache purged", "tenant added"]
    assert "no tenant" in holdfast("purge", "nobody", status=2)
    holdfast("remove", "keeps")


def test_what_a_tenant_may_have_of_the_cells(holdfast: Any, url: str) -> None:
    holdfast("add", "roomy")
    holdfast("add", "other")
    assert holdfast("cells", "roomy", "--floor", "0.6", "--ceiling", "0.8") == "floor=0.6 ceiling=0.8 pinned=1\n"
    assert "floors" in holdfast("cells", "other", "--floor", "0.5", status=2), "there is not so much for both"
    assert "floor" in holdfast("cells", "other", "--floor", "0.3", "--ceiling", "0.2", status=2)
    [told] = [each for each in json.loads(holdfast("list", "--json"))["tenants"] if each["name"] == "roomy"]
    assert told["cells"] == {"floor": 0.6, "ceiling": 0.8, "pinned": 1.0}
    holdfast("remove", "roomy")
    holdfast("remove", "other")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("remove", "nobody"), "no tenant"),
        (("add", "x", "--limit", "requests=1"), "requests"),
        (("add", "x", "--limit", "many"), "NAME=N"),
        (("add", "x", "--expires-in", "soon"), "12h"),
        (("add", "x", "--scopes", "everything"), "scopes"),
        (("usage", "x", "--records", "csv", "--from", "yesterday"), "date"),
    ],
)
def test_what_is_wrong_is_said(holdfast: Any, arguments: tuple[str, ...], word: str) -> None:
    assert word in holdfast(*arguments, status=2)


def test_without_its_key_nothing_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tenants", "list", "--url", url]) == 2
    assert "HOLDFAST_ADMIN_KEY" in capsys.readouterr().err
