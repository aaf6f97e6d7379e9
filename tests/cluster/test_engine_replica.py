"""Replicas as Serve makes them, over a real Redis, with engines that are driven by hand."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_world import World, words
from redis_server import RedisServer
from waiting import until_async

from holdfast.cluster import engine_replica, model_files
from holdfast.cluster.engine_replica import EngineReplica
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.model.progress import Progress, Tell
from holdfast.replicas.requests import (
    DescribeSession,
    Errored,
    GenerateRequest,
    ModelCard,
    Notice,
    ServedElsewhere,
    ToolLatencies,
)
from holdfast.replicas.service import Service
from holdfast.router.config import RouterConfig
from holdfast.router.records.store import Records, RedisAddress
from holdfast.router.records.tool_latency import ToolLatencies as RouterLatencies

LOOK_S = 0.01
PATIENT = 60.0


class Driven:
    """Steps of one sequence, a second each, that are taken when a test says so."""

    def __init__(self, config: EngineConfig, tell: Tell | None) -> None:
        self.tell = tell
        self.world = World(order="fair", max_sequences=1, queue_timeout_s=1e9)  # type: ignore[no-untyped-call]
        self.world.step_s = 1.0
        self.heard = Counter[str]()
        self.engine = self.world.engine
        self.card = ModelCard("pocket", 128, 100)
        self.bridge: Any = SimpleNamespace(thread=SimpleNamespace(hung=False))

    async def close(self) -> None:
        pass

    def notice(self, notice: Notice) -> None:
        if isinstance(notice, ServedElsewhere):
            self.heard.update(notice.seconds)
        self.world.give(notice)

    def serve(self, *tenants: str) -> list[str]:
        """A request of each, which all wait for one of nobody's: whose came in which order."""
        first = f"first {len(self.world.commands)}"
        self.world.submit(first, words(99, 4), 3, scope="nobody")
        self.world.step()
        names = {f"{first} {i}": tenant for i, tenant in enumerate(tenants)}
        for i, (name, tenant) in enumerate(names.items()):
            self.world.submit(name, words(i, 4), 3, scope=tenant, program=name)
        self.world.run()
        return [names[name] for name in sorted(names, key=lambda name: self.world.end(name).timing.finished)]


class Outside(EngineReplica):
    """One outside of Serve, which would await its end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """It runs, and what is Serve's and Ray's is left out."""
    monkeypatch.setattr(Service, "load", Driven)
    monkeypatch.setattr(engine_replica.serve_private, "patch_replica", lambda: None)
    monkeypatch.setattr(engine_replica.logs, "configure", lambda *_: None)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"))
    monkeypatch.setattr(engine_replica.serve, "get_replica_context", lambda: context)
    with RedisServer(tmp_path) as server:  # type: ignore[no-untyped-call]
        yield server


def test_a_replica_writes_how_far_it_is_where_the_console_looks(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setenv("HOLDFAST_LOADING", str(tmp_path / "loading"))
        replica = Outside.__new__(Outside)
        await replica.__init__(EngineConfig(), RedisAddress(redis.url), RouterConfig(), every_s=LOOK_S)  # type: ignore[misc]
        driven = replica._service
        assert isinstance(driven, Driven)
        assert driven.tell is not None
        driven.tell(Progress(1, 2, 3.0))
        assert model_files.read_progress(tmp_path / "loading") == Progress(1, 2, 3.0)
        await EngineReplica.__del__(replica)

    asyncio.run(scenario())


def test_a_tenant_that_another_engine_serves_gives_way_at_this_one(redis: RedisServer) -> None:
    async def scenario() -> None:
        address = RedisAddress(redis.url)
        made = [Outside.__new__(Outside) for _ in range(2)]
        for each in made:
            await each.__init__(EngineConfig(), address, RouterConfig(), every_s=LOOK_S)  # type: ignore[misc]
        here, there = drivens = [each._service for each in made]
        assert isinstance(here, Driven)
        assert isinstance(there, Driven)
        for each in drivens:
            assert each.serve(*"ababab") == [*"ababab"]

        def heard() -> bool:
            there.serve(*"aaaa")
            return here.heard["interactive/a"] >= 20.0

        await until_async(heard)
        assert here.serve(*"ababab")[-2:] == ["a", "a"], "what it had there counts from its next one here on"
        for each in made:
            await EngineReplica.__del__(each)

    asyncio.run(scenario())


def test_a_call_for_another_replica_is_refused_before_it_is_read(redis: RedisServer) -> None:
    """That one has died, and this one has its port by now. The router sends the request elsewhere."""

    async def scenario() -> None:
        replica = Outside.__new__(Outside)
        await replica.__init__(EngineConfig(), RedisAddress(redis.url), RouterConfig(), every_s=LOOK_S)  # type: ignore[misc]
        request = GenerateRequest("r", replica="another")
        routed = await replica.generate(request)
        (batch,) = [each async for each in replica.stream(request)]
        told = await replica.session(DescribeSession("t", "s"), "another")
        for reply in (routed.reply, *batch.pieces, told):
            assert isinstance(reply, Errored)
            assert reply.error.kind is ErrorKind.UNAVAILABLE
        assert (routed.replica_id, batch.replica_id) == ("r", "r")
        assert await replica.drawn(["r"], "another") is None
        await EngineReplica.__del__(replica)

    asyncio.run(scenario())


def test_tool_latencies_reach_the_replica_through_a_loss_of_redis(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RouterConfig, "tool_latency_s", LOOK_S)
    monkeypatch.setattr(RouterConfig, "store_retry_s", LOOK_S)

    async def scenario() -> None:
        replica = Outside.__new__(Outside)
        await replica.__init__(  # type: ignore[misc]
            EngineConfig(), RedisAddress(redis.url), RouterConfig()
        )
        learned: dict[str, ToolLatencies] = {}

        def learn(notice: Notice) -> None:
            if isinstance(notice, ToolLatencies):
                learned["last"] = notice

        replica._service.notice = learn  # type: ignore[method-assign]
        store = Records(RedisAddress(redis.url), PATIENT, LOOK_S)
        latencies = RouterLatencies(store)

        def count(tool: str) -> float:
            return learned["last"].latency.of("a", tool).count if learned else 0

        latencies.record("a", "ls", 1.0)
        await until_async(lambda: count("ls") > 0)
        redis.kill()  # type: ignore[no-untyped-call]
        assert await store.info() is None
        redis.socket.unlink(missing_ok=True)
        redis.start()  # type: ignore[no-untyped-call]
        await until_async(store.info)
        latencies.record("a", "sed", 2.0)
        await until_async(lambda: count("sed") > 0)
        assert learned["last"].latency.of("a", "ls").mean == 1.0, "what is known is not forgotten"
        for each in (latencies, store):
            await each.close()
        await EngineReplica.__del__(replica)

    asyncio.run(scenario())
