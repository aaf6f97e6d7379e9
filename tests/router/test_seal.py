"""Stored answers encrypted: opaque, bound to their place, and readable while their key is there."""

import asyncio
import base64
import secrets

import pytest
from fake_backend import HELLO, FakeBackend, World
from redis_server import RedisServer
from waiting import until_async

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import ReasoningDelta
from holdfast.router.config import RouterConfig
from holdfast.router.records import Records, RedisAddress
from holdfast.router.seal import ITEM_KEY, AnotherTenantsError, ItemSeal, Seal
from holdfast.router.store import MemoryStore, RedisStore
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key


def key_file(folder, *keys):
    path = folder / "keys"
    path.write_text("\n".join(base64.b64encode(key).decode() for key in keys) + "\n")
    return path


def test_what_is_closed_opens_under_its_name_only(tmp_path):
    seal = Seal(key_file(tmp_path, secrets.token_bytes(32)))
    closed = seal.close("cache/acme/1", b"secret answer")
    assert b"secret" not in closed
    assert seal.close("cache/acme/1", b"secret answer") != closed
    assert seal.open("cache/acme/1", closed) == b"secret answer"
    for name, value in (("cache/other/1", closed), ("cache/acme/1", closed[:-1]), ("cache/acme/1", b"")):
        with pytest.raises(ValueError, match="not encrypted"):
            seal.open(name, value)


def test_a_new_key_is_put_in_front(tmp_path):
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    closed = Seal(key_file(tmp_path, old)).close("k", b"value")
    assert Seal(key_file(tmp_path, new, old)).open("k", closed) == b"value"
    with pytest.raises(ValueError, match="not encrypted"):
        Seal(key_file(tmp_path, new)).open("k", closed)


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"short").decode()])
def test_a_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    for path in (tmp_path / "keys", tmp_path / "none"):
        with pytest.raises(ConfigError) as caught:
            Seal(path)
        assert caught.value.field == "router.cache_key_file"


def test_the_store_has_no_answer_that_could_be_read(tmp_path):
    path = key_file(tmp_path, secrets.token_bytes(32))
    store = MemoryStore(100, 2**20)

    world = World(config=RouterConfig(cache_key_file=str(path)), store=store)
    assert world.chat().headers["x-holdfast-cache"] == "miss"
    values = [entry[0] for key, entry in store._values._entries.items() if key.startswith("cache/")]
    assert values
    assert not any(b"Hello" in value for value in values)
    again = World(config=RouterConfig(cache_key_file=str(path)), store=store)  # a router that remembers nothing itself
    assert again.chat().headers["x-holdfast-cache"] == "hit"
    other = World(config=RouterConfig(), store=store)
    assert other.chat().headers["x-holdfast-cache"] == "miss"


def test_an_answer_of_another_key_is_as_good_as_none(tmp_path):
    store = MemoryStore(100, 2**20)
    for _ in range(2):
        path = key_file(tmp_path, secrets.token_bytes(32))
        world = World(config=RouterConfig(cache_key_file=str(path)), store=store)
        assert world.chat().headers["x-holdfast-cache"] == "miss"


# ---- what clients keep ----

THOUGHT = ((ReasoningDelta("Private thoughts."),), *HELLO)
TENANTS = TenantDirectory([Tenant("acme", (hash_key("a"),)), Tenant("other", (hash_key("o"),))])
PLAIN = "hf1." + base64.b64encode(b"Private thoughts.").decode()  # as servers without a key file once gave it out


def ask(world, key="a", **body):
    body = {"model": "pocket", "input": "hello", "store": False, **body}
    return world.call("POST", "/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})


def thoughts(world, **body):
    answer = ask(world, include=["reasoning.encrypted_content"], **body).json()
    return answer["output"][0]["encrypted_content"]


def said(content, kind="reasoning"):
    item = {"type": kind, "encrypted_content": content, **({"summary": []} if kind == "reasoning" else {})}
    return [{"role": "user", "content": "hello"}, item, {"role": "user", "content": "so?"}]


def shown(world):
    """The thoughts in the latest prompt."""
    return [m["reasoning_content"] for m in world.backend.requests[-1].prompt.messages if "reasoning_content" in m]


@pytest.mark.parametrize("filed", [False, True])
def test_items_are_sealed_and_their_tenants_own(tmp_path, filed):
    config = RouterConfig(cache_key_file=str(key_file(tmp_path, bytes(32))) if filed else "")
    world = World(FakeBackend(THOUGHT), TENANTS, config)
    compaction = ask(world, input=[{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]).json()
    for kind, content in (
        ("reasoning", thoughts(world)),
        ("compaction", compaction["output"][0]["encrypted_content"]),
    ):
        assert b"Private" not in base64.b64decode(content.split(".")[1])
        assert ask(world, input=said(content, kind)).status_code == 200
        assert shown(world) == (["Private thoughts."] if kind == "reasoning" else [])
        answer = ask(world, "o", input=said(content, kind))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1.encrypted_content")
        disguised = content.rpartition(".")[0] + "." + thoughts(world, key="o").rpartition(".")[2]
        assert ask(world, "o", input=said(disguised, kind)).status_code == (200 if kind == "reasoning" else 400)
        assert shown(world) == []


@pytest.mark.parametrize("content", [PLAIN, "hf1.", "hf1.!!!", "hf1.AAAA", "gAAAAB"])
def test_thoughts_that_nobody_can_read_are_left_out_and_a_compaction_is_refused(content):
    world = World(tenants=TENANTS)
    assert ask(world, input=said(content)).status_code == 200
    assert shown(world) == []
    answer = ask(world, input=said(content, "compaction"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1.encrypted_content")


def test_a_content_of_a_key_file_from_before_tenants_were_named_is_read(tmp_path):
    path = key_file(tmp_path, bytes(32))
    sealed = Seal(path).close("items/acme", b"Earlier thoughts.")
    world = World(tenants=TENANTS, config=RouterConfig(cache_key_file=str(path)))
    assert ask(world, input=said("hf1." + base64.b64encode(sealed).decode())).status_code == 200
    assert shown(world) == ["Earlier thoughts."]


def test_routers_share_a_key_and_give_it_back_to_a_redis_that_lost_it(server: RedisServer):
    async def run():
        def router():
            store = RedisStore(Records(RedisAddress(server.url), 60.0, retry_s=0.01), MemoryStore(10, 1000))
            return store, ItemSeal(store, "")

        (one_store, one), (two_store, two) = router(), router()
        await asyncio.gather(one.prepare(), two.prepare())
        sealed = one.close("acme", "text")
        assert two.open("acme", sealed) == "text"
        with pytest.raises(AnotherTenantsError):
            two.open("other", sealed)
        server.client().flushall()
        await two.prepare()
        three_store, three = router()
        await three.prepare()
        assert three.open("acme", sealed) == "text"
        assert server.client().pttl(f"holdfast/{ITEM_KEY}") > 0

        # While Redis is away a router goes on with the key that it knows, a new one with one of its own.
        server.kill()
        four_store, four = router()
        for each in (one, four):
            await each.prepare()
            assert each.open("acme", each.close("acme", "text")) == "text"
        alone = four.close("acme", "alone")
        server.start()
        for store in (one_store, four_store):
            await until_async(lambda store=store: not store.degraded)
        await one.prepare()
        await four.prepare()
        assert four.open("acme", one.close("acme", "text")) == "text"
        assert four.open("acme", alone) == "alone"
        for store in (one_store, two_store, three_store, four_store):
            await store.close()

    asyncio.run(run())
