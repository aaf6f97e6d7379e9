"""Records in a real Redis: versions, expiry, bytes per owner, encryption, and what happens while Redis is away."""

import asyncio
import base64
import contextlib
import os
import signal

import pytest
from redis_server import PATIENT, RedisServer, key_file, shared_records, shared_server
from waiting import until_async

from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.router.records.store import ABSENT, Encryption, PasswordFile, PutResult, Records, RedisAddress

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def opened(server, **settings):
    """The records of a server that the test kills or configures."""
    records = server.records(**settings)
    try:
        yield records
    finally:
        await records.close()


async def value(records, key):
    record = await records.get(key)
    return None if record is None else record.value


async def recovered(records):
    async with asyncio.timeout(PATIENT):
        await until_async(lambda: not records.degraded)


async def test_a_record_is_put_read_and_deleted_by_every_router(records):
    two, other = shared_records(records), shared_records()
    assert await records.get("k/t/a") is None
    assert await records.put("k/t/a", b"\x00\xff", 60.0) is PutResult.STORED
    assert await value(two, "k/t/a") == b"\x00\xff"
    assert await other.get("k/t/a") is None
    assert [each and each.value for each in await two.get_all(["k/t/b", "k/t/a"])] == [None, b"\x00\xff"]
    assert await two.delete("k/t/a")
    assert not await two.delete("k/t/a")
    assert await records.get("k/t/a") is None


async def test_of_several_changes_of_one_version_the_first_is_stored(records):
    assert await records.put("k/t/a", b"1", 60.0, version=ABSENT) is PutResult.STORED
    assert await records.put("k/t/a", b"2", 60.0, version=ABSENT) is PutResult.CONFLICT
    seen = await records.get("k/t/a")
    puts = await asyncio.gather(*(records.put("k/t/a", each, 60.0, version=seen.version) for each in (b"3", b"4")))
    assert puts == [PutResult.STORED, PutResult.CONFLICT]
    await records.delete("k/t/a")
    assert await records.put("k/t/a", b"5", 60.0, version=seen.version) is PutResult.CONFLICT
    assert await records.get("k/t/a") is None


@pytest.mark.parametrize("encrypted", [False, True])
async def test_parts_are_appended_to_the_version_that_was_read(tmp_path, encrypted):
    records = shared_records(key_file=key_file(tmp_path) if encrypted else "")
    assert await records.append("k/t/a", b"head", b"part", 60.0, 1000, "none") is PutResult.CONFLICT
    await records.put("k/t/a", b"head 0", 60.0)
    first = await records.get("k/t/a")
    assert await records.append("k/t/a", b"head 1", b"one", 60.0, 1000, first.version) is PutResult.STORED
    assert await records.append("k/t/a", b"head 1", b"uno", 60.0, 1000, first.version) is PutResult.CONFLICT
    second = await records.get("k/t/a")
    assert (second.value, second.parts) == (b"head 1", ())
    assert await records.append("k/t/a", b"head 2", b"two", 60.0, 1000, second.version) is PutResult.STORED
    whole = await records.read("k/t/a")
    assert (whole.value, whole.parts) == (b"head 2", (b"one", b"two"))
    assert await records.put("k/t/a", b"head 3", 60.0, version=whole.version) is PutResult.STORED
    assert (await records.read("k/t/a")).parts == ()


async def test_the_records_of_an_owner_take_its_limit_and_no_more(records):
    puts = [await records.put(f"k/greedy/{n}", b"x" * 40, 60.0, 100) for n in range(3)]
    assert puts == [PutResult.STORED, PutResult.STORED, PutResult.FULL]
    assert await records.put("k/other/a", b"x" * 40, 60.0, 100) is PutResult.STORED
    assert await records.put("other/greedy/a", b"x" * 40, 60.0, 100) is PutResult.STORED
    assert await records.put("k/greedy/0", b"x" * 60, 60.0, 100) is PutResult.STORED  # replaces its own 40
    kept = await records.get("k/greedy/1")
    assert await records.append("k/greedy/1", b"x" * 20, b"x" * 21, 60.0, 100, kept.version) is PutResult.FULL
    assert await records.append("k/greedy/1", b"x" * 20, b"x" * 20, 60.0, 100, kept.version) is PutResult.STORED
    await records.delete("k/greedy/0")
    assert await records.put("k/greedy/2", b"x" * 60, 60.0, 100) is PutResult.STORED
    await records.delete_owner("k/greedy", "2")
    assert [each is None for each in await records.get_all([f"k/greedy/{n}" for n in range(3)])] == [True, True, False]
    await records.delete_owner("k/greedy")
    assert await records.get_all([f"k/greedy/{n}" for n in range(3)]) == [None] * 3
    assert await records.put("k/greedy/0", b"x" * 100, 60.0, 100) is PutResult.STORED
    assert await records.get("k/other/a") is not None


async def test_a_record_that_expired_leaves_room(records):
    await records.put("k/t/a", b"12345678", 0.05, 10)
    assert await records.put("k/t/b", b"12345678", 60.0, 10) is PutResult.FULL
    while await records.get("k/t/a") is not None:  # noqa: ASYNC110 (Redis tells nobody)
        await asyncio.sleep(0)
    assert await records.put("k/t/b", b"12345678", 60.0, 10) is PutResult.STORED


async def test_reading_with_a_ttl_makes_records_live_on(records):
    for name in "ab":
        await records.put(f"k/t/{name}", b"x", 5.0)
    found = await records.get_all(["k/t/a", "k/t/missing"], 60.0)
    assert [record is None for record in found] == [False, True]
    with shared_server().client() as client:
        longer, as_before = (client.pttl(f"{records.namespace}/records/k/t/{name}") for name in "ab")
        assert longer > 5000 >= as_before
        times = client.zrange(f"{records.namespace}/owners/k/t/deadlines", 0, -1, withscores=True)
        assert [name for name, _ in times] == [b"b", b"a"]
        assert client.pttl(f"{records.namespace}/owners/k/t/sizes") > 5000


# ---- encryption ----


async def test_encrypted_records_are_read_under_their_own_key_only(tmp_path):
    records = shared_records(key_file=key_file(tmp_path))
    await records.put("k/t/a", b"secret", 60.0)
    await records.append("k/t/a", b"secret", b"more secret", 60.0, 1000, (await records.get("k/t/a")).version)
    with shared_server().client() as client:
        at = f"{records.namespace}/records/k"
        assert [b"secret" in each for each in client.lrange(f"{at}/t/a", 0, -1)] == [False, False]
        assert client.copy(f"{at}/t/a", f"{at}/other/a")
    assert (await records.read("k/t/a")).parts == (b"more secret",)
    assert await records.get("k/other/a") is None
    new, old = os.urandom(32), b"k" * 32
    assert await value(shared_records(records, key_file=key_file(tmp_path, new, old)), "k/t/a") == b"secret"
    assert await value(shared_records(records, key_file=key_file(tmp_path, new)), "k/t/a") is None


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"short").decode()])
def test_a_key_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Encryption(tmp_path / "keys")
    assert caught.value.field == "router.cache_key_file"


# ---- while Redis is away ----


async def test_every_operation_says_that_redis_is_away_and_works_once_it_is_back(tmp_path):
    server = RedisServer(tmp_path)  # which has never been there
    async with opened(server) as records:
        for work in (
            records.get("k/t/a"),
            records.read("k/t/a"),
            records.put("k/t/a", b"2", 60.0),
            records.append("k/t/a", b"2", b"", 60.0, 10, ""),
            records.delete("k/t/a"),
            records.delete_owner("k/t"),
            records.script("return {1}", [], []),
        ):
            with pytest.raises(UnavailableError):
                await work
        assert await records.try_script("return {1}", [], []) is None
        assert await records.info() is None
        assert records.degraded
        server.start()
        await recovered(records)
        assert await records.put("k/t/a", b"3", 60.0) is PutResult.STORED
        server.kill()
        with pytest.raises(UnavailableError):
            await records.get("k/t/a")


async def test_a_server_that_hangs_is_waited_for_once(server):
    async with opened(server, timeout_s=0.3) as records:
        await until_async(records.info)
        await recovered(records)
        server.process.send_signal(signal.SIGSTOP)
        try:
            reads = (records.get("k/t/a") for _ in range(50))
            results = await asyncio.gather(*reads, return_exceptions=True)
            assert {type(result) for result in results} == {UnavailableError}
            # With the breaker open nothing waits: an operation ends without the loop turning.
            with pytest.raises(UnavailableError):
                records.get("k/t/a").send(None)
            assert [message async for message in records.listen("channel", 0.1)] == []
        finally:
            server.process.send_signal(signal.SIGCONT)
        await recovered(records)


async def test_a_probe_that_raises_is_tried_again(records, monkeypatch):
    ping, raised = records._redis.ping, []

    async def odd():
        if not raised:
            raised.append(True)
            raise ValueError("a password file that is no text")
        return await ping()

    monkeypatch.setattr(records._redis, "ping", odd)
    records._probe = asyncio.create_task(records._wait_for_redis())
    await recovered(records)


# ---- the connection ----


async def test_a_script_runs_also_on_a_server_that_was_restarted(records):
    for n in range(1, 4):
        assert await records.script("return {redis.call('INCR', KEYS[1])}", ["n"], []) == [n]
        shared_server().client().script_flush()


async def test_many_at_once_share_the_connections(records):
    await asyncio.gather(*(records.put(f"k/t/{n}", b"x", 60.0) for n in range(200)))
    found = await asyncio.gather(*(records.get(f"k/t/{n}") for n in range(200)))
    assert all(record.value == b"x" for record in found)
    assert not records.degraded


async def test_a_password_that_changes_is_read_again(server, tmp_path):
    file = tmp_path / "password"
    file.write_text("p:a/s@s\n")
    with server.client() as open_to_all:
        open_to_all.config_set("requirepass", "p:a/s@s")
        records = Records(RedisAddress(server.url, file), PATIENT, 0.01)
        await records.put("k/t/a", b"1", 60.0)
        open_to_all.config_set("requirepass", "new")
    await records._redis.connection_pool.disconnect()  # as by a server that was started anew
    with pytest.raises(UnavailableError):
        await records.get("k/t/a")
    file.write_text("new")
    await recovered(records)
    assert await value(records, "k/t/a") == b"1"
    await records.close()


@pytest.mark.parametrize(
    ("url", "credentials"),
    [
        ("redis://h:1/0", ("pw",)),
        ("rediss://a%40b@h:1/0", ("a@b", "pw")),
        ("unix:///s?db=1", ("pw",)),
        ("redis://u:old@h", ("u", "pw")),
    ],
)
def test_the_user_of_an_address_keeps_a_password_in_a_file(tmp_path, url, credentials):
    (tmp_path / "password").write_text("pw\n")
    assert PasswordFile(url, tmp_path / "password").get_credentials() == credentials
    records = Records(RedisAddress(url, tmp_path / "password"))
    records._redis.connection_pool.make_connection()  # raises where the user is named twice


async def test_an_operation_that_is_cancelled_ends_wherever_that_finds_it(records):
    """The client library swallows some cancellations, and closing the loop would wait for ever."""

    async def work() -> None:
        while True:
            await records.publish("channel", b"1")

    for steps in range(20, 80):
        task = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=PATIENT)
        assert done, steps


async def test_an_operation_makes_no_task(store):
    """The client makes one of each command that has a limit of its own, which takes as long as the command."""
    made = []

    def count(loop, work, **named):
        made.append(work)
        return asyncio.Task(work, loop=loop, **named)

    await store.put("k/t/a", b"1", 60.0)  # connects
    asyncio.get_running_loop().set_task_factory(count)
    await store.put("k/t/a", b"2", 60.0)
    assert await value(store, "k/t/a") == b"2"
    assert not made
