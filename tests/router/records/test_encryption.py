"""Encryption of stored answers, and of the items that clients keep. Records themselves are tested in `test_records`."""

import asyncio
import base64
import secrets
from pathlib import Path

import pytest
from fake_backend import HELLO, FakeBackend, World, bearer, keyed
from redis_server import RedisServer, key_file, shared_records, shared_server
from waiting import until_async

from holdfast.replicas.requests import ReasoningDelta
from holdfast.router.config import RouterConfig
from holdfast.router.records.store import Encryption
from holdfast.router.records.stored_responses import ITEM_KEY, AnotherTenantsError, ItemEncryption

pytestmark = pytest.mark.anyio


def test_redis_has_no_answer_that_could_be_read(tmp_path):
    def world(*keys):
        config = RouterConfig(cache_key_file=key_file(tmp_path, *keys) if keys else "")
        return World(config=config, records=shared_records(first, key_file=config.cache_key_file))

    def result(*keys):
        return world(*keys).chat().headers["x-holdfast-cache"]

    first, old, new = shared_records(), secrets.token_bytes(32), secrets.token_bytes(32)
    assert result(old) == "miss"
    with shared_server().client() as client:
        (key,) = client.keys(f"{first.namespace}/records/cache/*")
        assert not any(b"Hello" in value for value in client.lrange(key, 0, -1))
    assert [result(old), result(new, old)] == ["hit", "hit"]  # by routers that remember nothing themselves
    assert [result(), result(new)] == ["miss", "miss"]


# ---- what clients keep ----

THOUGHT = ((ReasoningDelta("Private thoughts."),), *HELLO)
TENANTS = keyed("acme", "other")
PLAIN = "hf1." + base64.b64encode(b"Private thoughts.").decode()  # as servers without a key file once gave it out


def ask(world, key="acme", **body):
    body = {"model": "pocket", "input": "hello", "store": False, **body}
    return world.call("POST", "/v1/responses", json=body, headers=bearer(key))


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
    config = RouterConfig(cache_key_file=key_file(tmp_path) if filed else "")
    world = World(FakeBackend(THOUGHT), TENANTS, config)
    compaction = ask(world, input=[{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]).json()
    for kind, content in (("reasoning", thoughts(world)), ("compaction", compaction["output"][0]["encrypted_content"])):
        assert b"Private" not in base64.b64decode(content.split(".")[1])
        assert ask(world, input=said(content, kind)).status_code == 200
        assert shown(world) == (["Private thoughts."] if kind == "reasoning" else [])
        answer = ask(world, "other", input=said(content, kind))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1.encrypted_content")
        disguised = content.rpartition(".")[0] + "." + thoughts(world, key="other").rpartition(".")[2]
        assert ask(world, "other", input=said(disguised, kind)).status_code == (200 if kind == "reasoning" else 400)
        assert shown(world) == []


@pytest.mark.parametrize("content", [PLAIN, "hf1.", "hf1.!!!", "hf1.AAAA", "gAAAAB"])
def test_thoughts_that_nobody_can_read_are_left_out_and_a_compaction_is_refused(content):
    world = World(tenants=TENANTS)
    assert ask(world, input=said(content)).status_code == 200
    assert shown(world) == []
    answer = ask(world, input=said(content, "compaction"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1.encrypted_content")


def test_a_content_of_a_key_file_from_before_tenants_were_named_is_read(tmp_path):
    path = key_file(tmp_path)
    sealed = Encryption(Path(path)).encrypt("items/acme", b"Earlier thoughts.")
    world = World(tenants=TENANTS, config=RouterConfig(cache_key_file=path))
    assert ask(world, input=said("hf1." + base64.b64encode(sealed).decode())).status_code == 200
    assert shown(world) == ["Earlier thoughts."]


async def test_routers_share_a_key_and_give_it_back_to_a_redis_that_lost_it(server: RedisServer):
    def router():
        records = server.records()
        return records, ItemEncryption(records, "")

    (one_records, one), (two_records, two) = router(), router()
    await asyncio.gather(one.prepare(), two.prepare())
    item = one.encrypt("acme", "text")
    assert two.decrypt("acme", item) == "text"
    with pytest.raises(AnotherTenantsError):
        two.decrypt("other", item)
    server.client().flushall()
    await two.prepare()
    three_records, three = router()
    await three.prepare()
    assert three.decrypt("acme", item) == "text"
    assert server.client().pttl(f"holdfast/{ITEM_KEY}") > 0

    # While Redis is away a router goes on with the key that it knows, a new one with one of its own.
    server.kill()
    four_records, four = router()
    for each in (one, four):
        await each.prepare()
        assert each.decrypt("acme", each.encrypt("acme", "text")) == "text"
    alone = four.encrypt("acme", "alone")
    server.start()
    for records in (one_records, four_records):
        await until_async(lambda records=records: not records.degraded)
    await one.prepare()
    await four.prepare()
    assert four.decrypt("acme", one.encrypt("acme", "text")) == "text"
    assert four.decrypt("acme", alone) == "alone"
    for records in (one_records, two_records, three_records, four_records):
        await records.close()
