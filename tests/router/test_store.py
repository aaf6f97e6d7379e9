import asyncio
import contextlib
import signal

import pytest
from redis_server import RedisServer
from waiting import until_async

from holdfast.router.store import Ends, MemoryStore, PasswordFile, Put, RedisAddress, RedisStore, version_of

PATIENT = 60.0  # seconds a slow machine may take where the test is not about time


def memory():
    return MemoryStore(100, 2**20)


@contextlib.asynccontextmanager
async def redis_store(server, **settings):
    store = RedisStore(RedisAddress(server.url), memory(), **{"timeout_s": PATIENT, "retry_s": 0.01, **settings})
    try:
        yield store
    finally:
        await store.close()


async def recovered(store):
    if store.degraded:
        async with asyncio.timeout(PATIENT):
            await store._probe
    assert not store.degraded


async def same_behaviour(store):
    assert await store.get("a") is None
    await store.set("a", b"\x00\xff", 60.0)
    assert await store.get("a") == b"\x00\xff"
    await store.set("b", b"first", 60.0)
    assert await store.get("b") == b"first"
    assert not store.degraded


async def chains(store):
    for name, value in (("1", b"\nfirst"), ("2", b"1\n\x00\nsecond"), ("3", b"1 2\n"), ("4", b"gone 3\n")):
        await store.set(f"chain/{name}", value, 60.0)
    assert await store.follow("chain/1", 90.0) == [b"\nfirst"]
    assert await store.follow("chain/3", 90.0) == [b"\nfirst", b"1\n\x00\nsecond", b"1 2\n"]
    assert await store.follow("chain/4", 90.0) == await store.follow("chain/gone", 90.0) == []


async def growth(store):
    """A value grows where it is what its ends say, within what its owner may have."""

    async def grow(key, more, at=None, most=20, **how):
        return await store.grow(key, more, 60.0, "owner", most, at, **how)

    assert await store.ends("a", 4, 2) is None
    assert await grow("a", b"x", Ends(b"no", b"ne")) is Put.CHANGED
    assert await grow("a", b"head:1\x00", anew=True) is Put.DONE
    seen = await store.ends("a", 5, 2)
    assert seen == Ends(b"head:", b"1\x00")
    assert await grow("a", b"head:", anew=True) is Put.CHANGED  # there is one
    assert await grow("a", b"2\xff", seen) is Put.DONE
    assert await grow("a", b"3", seen) is Put.CHANGED
    now = await store.ends("a", 5, 2)
    assert (now, await store.get("a")) == (Ends(b"head:", b"2\xff"), b"head:1\x002\xff")
    assert await grow("a", b"", now) is Put.DONE  # it lives on
    assert await grow("b", b"12345678", most=16) is Put.FULL
    assert await grow("b", b"1234567", most=16) is Put.DONE
    assert await grow("a", b"!", now, most=16) is Put.FULL
    assert await store.get("a") == b"head:1\x002\xff"
    assert await grow("a", b"head:3", now, most=16, anew=True) is Put.DONE  # which is less
    assert await store.grow("c", b"12345678", 60.0, "another", 16, None) is Put.DONE
    await store.delete("b", "owner")
    assert await store.get("b") is None
    assert await grow("b", b"1234567890", most=16) is Put.DONE


def test_memory_keeps_values():
    asyncio.run(same_behaviour(memory()))
    asyncio.run(chains(memory()))
    asyncio.run(growth(memory()))


def test_what_has_expired_leaves_room(server):
    async def scenario(store, later):
        assert await store.grow("a", b"12345678", 0.05, "owner", 10, None) is Put.DONE
        assert await store.grow("b", b"12345678", 60.0, "owner", 10, None) is Put.FULL
        await later()
        assert await store.grow("b", b"12345678", 60.0, "owner", 10, None) is Put.DONE

    async def in_memory():
        now = [0.0]

        async def later():
            now[0] = 1.0

        await scenario(MemoryStore(10, 2**20, clock=lambda: now[0]), later)

    async def in_redis():
        async with redis_store(server) as store:

            async def later():
                with server.client() as client:
                    while client.exists("holdfast/a"):
                        pass

            await scenario(store, later)

    asyncio.run(in_memory())
    asyncio.run(in_redis())


def test_redis_lets_values_grow_and_nothing_does_while_it_is_away(server):
    async def scenario():
        async with redis_store(server) as store:
            await growth(store)
            at = await store.ends("a", 5, 1)
            server.kill()
            assert await store.grow("a", b"x", 60.0, "owner", 100, at) is Put.AWAY
            assert await store.grow("new", b"x", 60.0, "owner", 100, None) is Put.AWAY
            assert await store.ends("a", 5, 1) is None
            await store.delete("a", "owner")
            server.start()

    asyncio.run(scenario())


def test_a_chain_of_values_is_read_in_one_trip(server):
    async def scenario():
        trips = []
        async with redis_store(server, observe=lambda *_: trips.append(1)) as store:
            await chains(store)
            assert len(trips) == 8, "four were put, and four times one was asked for"
            ends = [await store._redis.pttl(f"holdfast/chain/{name}") for name in "123"]
            assert min(ends) > 60_000

    asyncio.run(scenario())


def test_values_that_are_renewed_live_on():
    now = [0.0]
    store = MemoryStore(10, 2**20, clock=lambda: now[0])

    async def scenario():
        for key in "ab":
            await store.set(key, key.encode(), 10.0)
        now[0] = 9.0
        assert await store.renew(["x", "b"], 10.0) == [None, b"b"]
        now[0] = 12.0
        assert [await store.get(key) for key in "ab"] == [None, b"b"]

    asyncio.run(scenario())


def test_redis_renews_what_it_has_and_finds_what_was_put_while_it_was_away(server):
    async def scenario():
        async with redis_store(server) as store:
            await store.set("a", b"1", 5.0)
            server.kill()
            await store.set("b", b"2", 60.0)
            assert await store.renew(["a", "b"], 60.0) == [None, b"2"]
            server.start()
            await recovered(store)
            await store.set("a", b"1", 5.0)
            assert await store.renew(["a", "b", "c"], 60.0) == [b"1", b"2", None]
            assert await store._redis.pttl("holdfast/a") > 5000

    asyncio.run(scenario())


def test_memory_forgets_at_the_deadline_and_beyond_its_size():
    now = [0.0]
    store = MemoryStore(2, 2**20, clock=lambda: now[0])

    async def scenario():
        for key in "abc":
            await store.set(key, b"x", 10.0)
        now[0] = 9.0
        assert [await store.get(key) for key in "abc"] == [None, b"x", b"x"]
        now[0] = 10.0
        assert await store.get("c") is None

    asyncio.run(scenario())


def test_redis_keeps_values_under_a_prefix_with_a_time_to_live(server):
    async def scenario():
        async with redis_store(server) as store:
            await same_behaviour(store)
            assert sorted(await store._redis.keys()) == [b"holdfast/a", b"holdfast/b"]
            assert 0 < await store._redis.ttl("holdfast/b") <= 60

    asyncio.run(scenario())


def test_routers_share_values(server):
    async def scenario():
        async with redis_store(server) as one, redis_store(server) as two:
            await one.set("p", b"one", 60.0)
            assert await two.get("p") == b"one"

    asyncio.run(scenario())


def test_namespaces_at_one_server_do_not_meet(server):
    async def scenario():
        async with redis_store(server) as one:
            other = RedisStore(RedisAddress(server.url, namespace="blue/pocket/1.0"), memory(), PATIENT, 0.01)
            await one.set("p", b"one", 60.0)
            assert await other.get("p") is None
            await other.set("p", b"two", 60.0)
            assert await one.get("p") == b"one"
            assert sorted(await one._redis.keys()) == [b"blue/pocket/1.0/p", b"holdfast/p"]
            await other.close()

    asyncio.run(scenario())


def test_a_killed_server_fails_nothing_and_is_used_again_when_it_is_back(server):
    async def scenario():
        async with redis_store(server) as store:
            await store.set("before", b"1", 60.0)
            server.kill()
            assert await store.get("before") is None
            assert store.degraded
            await store.set("during", b"2", 60.0)
            assert await store.get("during") == b"2"
            server.socket.unlink(missing_ok=True)
            server.start()
            await recovered(store)
            await store.set("after", b"4", 60.0)
            assert await store._redis.get("holdfast/after") == b"4"

    asyncio.run(scenario())


def test_a_server_that_hangs_is_waited_for_once(server):
    async def scenario():
        async with redis_store(server, timeout_s=1.0) as store:
            await until_async(store.info)
            await recovered(store)
            server.process.send_signal(signal.SIGSTOP)
            try:
                results = await asyncio.gather(*(store.get("a") for _ in range(50)))
                assert results == [None] * 50
                assert store.degraded
                # With the breaker open nothing waits: an operation is done without the loop turning.
                with pytest.raises(StopIteration):
                    store.set("b", b"x", 60.0).send(None)
                with pytest.raises(StopIteration, match="x"):
                    store.get("b").send(None)
            finally:
                server.process.send_signal(signal.SIGCONT)
            await recovered(store)

    asyncio.run(scenario())


def test_a_server_that_never_was_there(tmp_path):
    async def scenario():
        async with redis_store(RedisServer(tmp_path)) as store:
            assert not await store.info()
            assert await store.get("a") is None
            assert store.degraded
            await store.set("a", b"x", 60.0)
            assert await store.get("a") == b"x"

    asyncio.run(scenario())


def test_many_at_once_share_the_connections(server):
    async def scenario():
        async with redis_store(server) as store:
            await asyncio.gather(*(store.set(str(n), b"x", 60.0) for n in range(200)))
            found = await asyncio.gather(*(store.get(str(n)) for n in range(200)))
            assert found == [b"x"] * 200
            assert not store.degraded

    asyncio.run(scenario())


def test_a_password_that_changes_is_read_again(server, tmp_path):
    file = tmp_path / "password"
    file.write_text("p:a/s@s\n")

    async def scenario():
        async with redis_store(server) as open_to_all:
            await open_to_all._redis.config_set("requirepass", "p:a/s@s")
            address = RedisAddress(server.url, file)
            store = RedisStore(address, memory(), PATIENT, 0.01)
            await same_behaviour(store)
            await open_to_all._redis.config_set("requirepass", "new")
            await store._redis.connection_pool.disconnect()  # as by a server that was started anew
            assert await store.get("a") is None
            assert store.degraded
            file.write_text("new")
            await recovered(store)
            assert await store.get("b") == b"first"
            await store.close()

    asyncio.run(scenario())


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
    store = RedisStore(RedisAddress(url, tmp_path / "password"), memory())
    store._redis.connection_pool.make_connection()  # raises where the user is named twice


def test_an_owner_has_its_allowance_and_no_more(server):
    async def scenario():
        async with redis_store(server) as store:
            for number in range(4):
                await store.set_shared(f"a{number}", b"x" * 40, 60.0, "greedy", 100)
            await store.set_shared("b", b"x" * 40, 60.0, "other", 100)
            assert [await store.get(f"a{number}") is not None for number in range(4)] == [True, True, False, False]
            assert await store.get("b") is not None
            assert 0 < await store._redis.pttl("holdfast/put/greedy") <= 60_000
            assert 0 < await store._redis.pttl("holdfast/a0") <= 60_000

    asyncio.run(scenario())


async def one_of_two_changes(store):
    assert await store.set_shared("v", b"1", 60.0, "t", 1000) is Put.DONE
    seen = version_of(b"1")
    puts = [await store.set_shared("v", value, 60.0, "t", 1000, seen) for value in (b"2", b"3")]
    assert puts == [Put.DONE, Put.CHANGED]
    assert await store.get("v") == b"2"
    assert await store.set_shared("v", b"x" * 2000, 60.0, "t", 1000, version_of(b"2")) is Put.FULL
    await store.delete("v")
    assert await store.set_shared("v", b"4", 60.0, "t", 10_000, version_of(b"2")) is Put.CHANGED
    assert await store.get("v") is None


def test_of_two_that_change_a_value_at_once_one_does(server):
    async def scenario():
        await one_of_two_changes(memory())
        async with redis_store(server) as store:
            await one_of_two_changes(store)

    asyncio.run(scenario())


def test_a_tenants_flood_leaves_others_their_answers_in_memory():
    async def scenario():
        store = MemoryStore(1000, 1000)
        await store.set_shared("mine", b"x" * 90, 60.0, "small", 10**6)
        await store.set("plain", b"x" * 90, 60.0)
        for number in range(100):
            await store.set_shared(f"theirs{number}", b"x" * 90, 60.0, "big", 10**6)
        assert await store.get("mine") is not None
        assert await store.get("plain") is not None

    asyncio.run(scenario())


def test_an_operation_that_is_cancelled_ends_wherever_that_finds_it(tmp_path):
    """The client library swallows some cancellations; whoever closes a loop that uses the store would wait for ever."""
    server = RedisServer(tmp_path)
    server.start()

    async def scenario():
        store = RedisStore(RedisAddress(server.url), MemoryStore(1, 1), 5.0)

        async def work() -> None:
            while True:
                await store.publish("channel", b"1")

        for steps in range(20, 80):
            task = asyncio.create_task(work())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=PATIENT)
            assert done, steps
        await store.close()

    try:
        asyncio.run(scenario())
    finally:
        server.kill()


def test_an_operation_makes_no_task(server):
    """The client makes one of each command that has a limit of its own, which takes as long as the command."""

    async def scenario():
        made = []

        def count(loop, work, **named):
            made.append(work)
            return asyncio.Task(work, loop=loop, **named)

        async with redis_store(server) as store:
            await store.set("a", b"1", 60.0)  # connects
            asyncio.get_running_loop().set_task_factory(count)
            await store.set("a", b"2", 60.0)
            await store.set_shared("b", b"3", 60.0, "owner", 100)
            assert await store.get("a") == b"2"
            assert not made

    asyncio.run(scenario())


def test_a_server_that_hangs_tells_no_listener_anything(server):
    async def scenario():
        async with redis_store(server, timeout_s=0.5) as store:
            server.process.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(PATIENT):
                    assert [message async for message in store.listen("channel", 0.1)] == []
            finally:
                server.process.send_signal(signal.SIGCONT)

    asyncio.run(scenario())


def test_a_probe_that_raises_is_tried_again(server, monkeypatch):
    async def scenario():
        async with redis_store(server) as store:
            ping, raised = store._redis.ping, []

            async def odd():
                if not raised:
                    raised.append(True)
                    raise ValueError("a password file that is no text")
                return await ping()

            monkeypatch.setattr(store._redis, "ping", odd)
            store._probe = asyncio.create_task(store._wait_for_redis())
            await recovered(store)
            assert raised

    asyncio.run(scenario())
