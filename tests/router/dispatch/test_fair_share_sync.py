"""Contended service over a real Redis: every second reaches all others once, also over a loss of Redis."""

import pytest
from waiting import until_async

from holdfast.router.dispatch.fair_share_sync import FairShareSync, Ledger

pytestmark = pytest.mark.anyio


class Away:
    async def try_script(self, source, keys, arguments):
        return None


class One:
    """A participant: what it has served, and what it has heard that others have."""

    def __init__(self) -> None:
        self.contended: dict[str, float] = {}
        self.heard: dict[str, float] = {}

    def serve(self, name: str, seconds: float) -> None:
        self.contended[name] = self.contended.get(name, 0.0) + seconds

    def learn(self, elsewhere) -> None:
        for name, seconds in elsewhere.items():
            self.heard[name] = self.heard.get(name, 0.0) + seconds


async def look(sync: FairShareSync) -> dict[str, float]:
    """What others added since the last look."""
    sync._sharing.heard.clear()
    await sync.sync()
    return dict(sync._sharing.heard)


async def test_each_hears_what_the_others_have_served_since_it_takes_part(records):
    parties = [One() for _ in range(3)]
    syncs = [FairShareSync(records, one) for one in parties]
    for sync, one in zip(syncs, parties, strict=True):
        one.serve("interactive/a", 1.0)
        await sync.sync()
    for one in parties:
        one.heard.clear()  # the last participant has heard less
    for _ in range(4):
        for i, one in enumerate(parties):
            one.serve("interactive/a", 1.0 + i)
        for sync in [*syncs, *syncs]:
            await sync.sync()
    heard = [one.heard["interactive/a"] for one in parties]
    # The first two also hear of what was served before the others took part.
    assert heard == pytest.approx([4 * 5 + 2, 4 * 4 + 1, 4 * 3])


async def test_what_was_served_while_redis_was_away_is_told_afterwards(records):
    one, two = One(), One()
    mine, other = FairShareSync(records, one), FairShareSync(records, two)
    one.serve("batch/a", 1.0)
    await mine.sync()
    two.serve("batch/a", 5.0)
    await other.sync()
    mine._scripts = Away()
    one.serve("batch/a", 2.0)
    assert await look(mine) == {}
    mine._scripts = records
    one.serve("batch/a", 4.0)
    assert await look(mine) == pytest.approx({"batch/a": 5.0})
    assert await look(other) == pytest.approx({"batch/a": 6.0})


def test_a_tenant_that_was_forgotten_begins_again_and_takes_nothing_back():
    ledger, sums = Ledger(), dict[str, float]()

    def look(total: dict[str, float]) -> None:
        delta = ledger.delta(total)
        for name, seconds in delta.seconds.items():
            assert seconds >= 0.0
            sums[name] = sums.get(name, 0.0) + seconds
        ledger.elsewhere(delta, [sums[name] for name in delta.seconds])

    look({"batch/a": 9.0, "batch/b": 1.0})
    look({"batch/b": 2.0})  # a is forgotten
    look({"batch/a": 0.5, "batch/b": 3.0})
    assert sums == {"batch/a": 9.5, "batch/b": 3.0}
    look({"batch/a": 0.25, "batch/b": 3.0})  # forgotten and back between two looks
    look({"batch/a": 1.25, "batch/b": 3.0})
    assert sums == {"batch/a": 10.5, "batch/b": 3.0}
    look({})
    assert not ledger._added
    assert not ledger._idle


async def test_a_redis_that_has_lost_the_sums_invents_nothing(store):
    one, two = One(), One()
    mine, other = FairShareSync(store, one), FairShareSync(store, two)
    one.serve("interactive/a", 100.0)
    two.serve("interactive/a", 50.0)
    for sync in (mine, other, mine):
        await sync.sync()
    await store._redis.flushall()
    one.serve("interactive/a", 1.0)
    assert await look(mine) == {}
    two.serve("interactive/a", 3.0)
    assert await look(other) == {}
    assert await look(mine) == pytest.approx({"interactive/a": 3.0})


async def test_it_syncs_by_itself(records):
    one, two = One(), One()
    syncs = [FairShareSync(records, each) for each in (one, two)]
    for sync in syncs:
        sync.start(0.01)

    def heard():
        for each in (one, two):
            each.serve("interactive/a", 1.0)
        return one.heard.get("interactive/a") and two.heard.get("interactive/a")

    await until_async(heard)
    for sync in syncs:
        await sync.close()
