"""What was served elsewhere, over a real Redis: every second is heard of once by all others, also over a loss."""

import asyncio

import pytest
from waiting import until_async

from holdfast.router.elsewhere import Ledger, Lines, Served, Sums
from holdfast.router.records import Records, RedisAddress

PATIENT = 60.0
RETRY = 0.01


def store_at(server) -> Records:
    return Records(RedisAddress(server.url), PATIENT, RETRY)


class Away:
    async def try_script(self, source, keys, arguments):
        return None


class One:
    """Who shares: what it has served, and what it has heard that others have."""

    def __init__(self) -> None:
        self.contended: dict[str, float] = {}
        self.heard: dict[str, float] = {}

    def serve(self, name: str, seconds: float) -> None:
        self.contended[name] = self.contended.get(name, 0.0) + seconds

    def learn(self, elsewhere) -> None:
        for name, seconds in elsewhere.items():
            self.heard[name] = self.heard.get(name, 0.0) + seconds


def test_each_hears_what_the_others_have_served_since_it_takes_part(server):
    async def scenario():
        store = store_at(server)
        parties = [(Sums(store, "steps"), One()) for _ in range(3)]
        for sums, one in parties:
            one.serve("interactive/a", 1.0)
            one.learn(await sums.look(one.contended))
        for _, one in parties:
            one.heard.clear()  # the last to come has heard less
        for _ in range(4):
            for i, (_, one) in enumerate(parties):
                one.serve("interactive/a", 1.0 + i)
            for sums, one in [*parties, *parties]:
                one.learn(await sums.look(one.contended))
        heard = [one.heard["interactive/a"] for _, one in parties]
        # The first two also hear of what was served before the others took part.
        assert heard == pytest.approx([4 * 5 + 2, 4 * 4 + 1, 4 * 3])
        await store.close()

    asyncio.run(scenario())


def test_what_was_served_while_redis_was_away_is_told_afterwards(server):
    async def scenario():
        store = store_at(server)
        mine, other, one = Sums(store, "steps"), Sums(store, "steps"), One()
        one.serve("batch/a", 1.0)
        await mine.look(one.contended)
        await other.look({"batch/a": 5.0})
        mine._scripts = Away()
        one.serve("batch/a", 2.0)
        assert await mine.look(one.contended) == {}
        mine._scripts = store
        one.serve("batch/a", 4.0)
        assert await mine.look(one.contended) == pytest.approx({"batch/a": 5.0})
        assert await other.look({"batch/a": 5.0}) == pytest.approx({"batch/a": 6.0})
        await store.close()

    asyncio.run(scenario())


def test_who_was_forgotten_begins_again_and_takes_nothing_back():
    ledger, told = Ledger(), dict[str, float]()

    def look(own: dict[str, float]) -> None:
        news = ledger.news(own)
        for name, seconds in news.seconds.items():
            assert seconds >= 0.0
            told[name] = told.get(name, 0.0) + seconds
        ledger.answered(news, [told[name] for name in news.seconds])

    look({"batch/a": 9.0, "batch/b": 1.0})
    look({"batch/b": 2.0})  # a is forgotten
    look({"batch/a": 0.5, "batch/b": 3.0})
    assert told == {"batch/a": 9.5, "batch/b": 3.0}
    look({"batch/a": 0.25, "batch/b": 3.0})  # forgotten and back between two looks
    look({"batch/a": 1.25, "batch/b": 3.0})
    assert told == {"batch/a": 10.5, "batch/b": 3.0}
    look({})
    assert not ledger._told
    assert not ledger._idle


def test_a_redis_that_has_lost_the_sums_invents_nothing(server):
    async def scenario():
        store = store_at(server)
        mine, other = Sums(store, "steps"), Sums(store, "steps")
        await mine.look({"interactive/a": 100.0})
        await other.look({"interactive/a": 50.0})
        await mine.look({"interactive/a": 100.0})
        await store._redis.flushall()
        assert await mine.look({"interactive/a": 101.0}) == {}
        assert await other.look({"interactive/a": 53.0}) == {}
        assert await mine.look({"interactive/a": 101.0}) == pytest.approx({"interactive/a": 3.0})
        await store.close()

    asyncio.run(scenario())


def test_whoever_shares_is_told(server):
    async def scenario():
        store, lines, one, two = store_at(server), Lines(), One(), One()
        lines.add(one)
        looking = [Served(store, "slots", lines, 0.01), Served(store, "slots", two, 0.01)]

        def heard():
            for each in (one, two):
                each.serve("interactive/a", 1.0)
            return one.heard.get("interactive/a") and two.heard.get("interactive/a")

        await until_async(heard)
        for each in looking:
            await each.close()
        await store.close()

    asyncio.run(scenario())
