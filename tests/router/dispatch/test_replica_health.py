"""Replicas that report and replicas that do not answer: through a real Redis, and by calls that Serve makes."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest
from redis_server import RedisServer
from waiting import VIRTUAL, go_by, until_async

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.replicas.stats import LoadReport
from holdfast.router.backend import RoutingHint
from holdfast.router.dispatch import replica_health, serve_private
from holdfast.router.dispatch.affinity import HINT, AffinityRouter, Pending
from holdfast.router.dispatch.dispatch_queue import QueueStats
from holdfast.router.dispatch.replica_health import REPORT_S, Listener, ReplicaHealth, Reporter, decode, encode
from holdfast.router.placement import PlacementConfig
from holdfast.router.records.store import Records

OFTEN = 0.01
SILENT = 10 * OFTEN
DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


@pytest.fixture
def anyio_backend() -> object:
    return VIRTUAL


class Watcher:
    """A request router. Its time goes on as "b" reports, so "b" is never silent, however busy a machine."""

    stats = QueueStats()

    def __init__(self) -> None:
        self.heard: dict[str, LoadReport] = {}
        self.changes = 0
        self.changed = asyncio.Event()
        self.now = 0.0
        self.asked = 0  # how often somebody looked what time it is

    def clock(self) -> float:
        self.asked += 1
        return self.now

    def on_report(self, replica_id: str, report: LoadReport) -> None:
        self.heard[replica_id] = report
        if replica_id == "b":
            self.now += OFTEN / 4

    def on_replicas_changed(self) -> None:
        self.changes += 1
        self.changed.set()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # Redis is not of a virtual time
async def test_reports_cross_redis_and_its_loss(server: RedisServer) -> None:
    watcher = Watcher()
    health = ReplicaHealth(watcher.clock)
    health.routers.add(watcher)
    stores = [server.records() for _ in range(3)]
    loads: dict[str, LoadReport | None] = {
        "a": LoadReport(running=1),
        "b": LoadReport(prefixes={"d": 7}, seconds_per_token=0.5),
    }

    def reporter(name: str, store: Records) -> Reporter:
        return Reporter(store, name, lambda: loads[name], OFTEN)

    listener = Listener(stores[0], health, SILENT, OFTEN)
    reporters = {name: reporter(name, store) for name, store in zip("ab", stores[1:], strict=True)}
    try:
        await until_async(lambda: watcher.heard == loads)
        server.kill()
        server.socket.unlink(missing_ok=True)
        await until_async(lambda: all(store.degraded for store in stores[1:]))
        for _ in range(20):  # too slowly for a process that stood still
            watcher.now += OFTEN
            looked = watcher.asked
            await until_async(lambda looked=looked: watcher.asked > looked + 2)
        assert not health.unresponsive("a"), "nobody can be heard while Redis is away"
        server.start()
        loads["a"] = LoadReport(running=3)
        await until_async(lambda: watcher.heard == loads)
        await reporters.pop("a").close()
        await until_async(lambda: health.unresponsive("a"))
        assert not health.unresponsive("b")
        assert watcher.changes == 1
        reporters["a"] = reporter("a", stores[1])
        await until_async(lambda: not health.unresponsive("a"))
        assert watcher.changes == 2
        loads["a"] = None  # a step of it hangs
        await until_async(lambda: health.unresponsive("a"))
    finally:
        for each in (listener, *reporters.values(), *stores):
            await each.close()


def test_a_report_of_a_newer_release_is_read_as_far_as_it_is_known() -> None:
    report = LoadReport(running=1, prefixes={"d": 3})
    message = encode("a", report)
    assert decode(message) == ("a", report)
    assert decode(message.replace(b'"running"', b'"unknown":5,"running"')) == ("a", report)


def test_a_replica_that_has_gone_is_forgotten() -> None:
    health = ReplicaHealth(lambda: 0.0)
    health.report("a", LoadReport(running=1))
    assert health.latest("a") == LoadReport(running=1)
    health.keep(set())
    assert health.latest("a") is None


class Channel:
    """A store's channels without a store: what is published comes to `published`."""

    def __init__(self) -> None:
        self.published: asyncio.Queue[bytes] = asyncio.Queue()

    async def publish(self, channel: str, message: bytes) -> None:
        await self.published.put(message)


@pytest.mark.anyio
async def test_a_replica_whose_load_cannot_be_read_once_reports_it_the_next_time() -> None:
    asked = count(1)

    def how() -> LoadReport:
        if (n := next(asked)) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return LoadReport(running=n)

    channel = Channel()
    reporter = Reporter(channel, "a", how, OFTEN)  # type: ignore[arg-type]
    assert decode(await channel.published.get()) == ("a", LoadReport(running=2))
    await reporter.close()


class Result:
    """What sending gives: nothing is accepted and nothing comes, or what `says` raises."""

    def __init__(self, says: Callable[[], Awaitable[Any]]) -> None:
        self.cancelled = False
        self.get_rejection_response = self.__anext__ = says  # type: ignore[method-assign,assignment]

    def cancel(self) -> None:
        self.cancelled = True


async def nothing() -> None:
    await asyncio.Event().wait()


async def refused() -> None:
    raise ActorUnavailableError("refused", None)


async def another() -> None:
    """Another server has its port by now."""
    raise AioRpcError(StatusCode.UNIMPLEMENTED, Metadata(), Metadata())


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> ReplicaHealth:
    """What this test knows of replicas, and no other. All time is the loop's."""

    def now() -> float:
        return asyncio.get_running_loop().time()

    for module in ("affinity", "serve_private"):
        monkeypatch.setattr(f"holdfast.router.dispatch.{module}.time", SimpleNamespace(monotonic=now))
    made = ReplicaHealth(now)
    monkeypatch.setattr(replica_health, "HEALTH", made)
    return made


def router(says: Callable[[], Awaitable[Any]], **config: Any) -> tuple[AffinityRouter, list[Result]]:
    """One over two replicas, of which the first is the home of what is asked."""
    made = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state(**config)
    sent: list[Result] = []

    def send(pending_request: PendingRequest, with_rejection: bool) -> Result:
        sent.append(Result(says))
        return sent[-1]

    for name in ("a", "b"):
        actor = SimpleNamespace(binary=lambda: b"a" * 16)
        replica_id = ReplicaID(name, DEPLOYMENT)
        each = SimpleNamespace(replica_id=replica_id, max_ongoing_requests=4, actor_id=actor, try_send_request=send)
        made._replicas[replica_id] = each
    made.on_replicas_changed()
    return made, sent


def turn(stream: bool = True) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id="p", is_streaming=stream)
    request = GenerateRequest("r", RawPrompt("x"), Sampling())
    return PendingRequest(args=[request], kwargs={HINT: RoutingHint("a")}, metadata=metadata)


async def sent_to(made: AffinityRouter, request: PendingRequest) -> tuple[str, Any]:
    replica = await made.choose(request)
    return replica.replica_id.unique_id, replica.try_send_request(request, with_rejection=True)


@pytest.mark.anyio
@pytest.mark.parametrize("says", [nothing, refused, another])
async def test_a_replica_that_does_not_accept_is_ejected(says: Callable[[], Awaitable[Any]]) -> None:
    made, sent = router(says)
    name, result = await sent_to(made, turn())
    assert name == "a"
    with pytest.raises(ActorUnavailableError):
        await result.get_rejection_response()
    assert sent[0].cancelled is (says is nothing)
    assert (await sent_to(made, turn()))[0] == "b"


@pytest.mark.anyio
@pytest.mark.parametrize("late", [True, False])
async def test_a_replica_that_reports_may_accept_late(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """It is there. A replica that does not accept for `silent_s` is ejected all the same."""
    reporting = ReplicaHealth(lambda: 0.0)  # its report is never old
    monkeypatch.setattr(replica_health, "HEALTH", reporting)
    accepted: asyncio.Queue[str] = asyncio.Queue()
    made, _ = router(accepted.get, silent_s=60.0 if late else 6.0)
    reporting.report("a", LoadReport())
    _, result = await sent_to(made, turn())
    waiting = asyncio.ensure_future(result.get_rejection_response())
    await go_by(4.0)
    assert not waiting.done()
    if late:
        accepted.put_nowait("accepted")
        assert await waiting == "accepted"
    else:
        with pytest.raises(ActorUnavailableError):
            await waiting
    assert (await sent_to(made, turn()))[0] == ("a" if late else "b")


@pytest.mark.anyio
async def test_a_call_that_does_not_stream_may_take_long_to_be_accepted(known: ReplicaHealth) -> None:
    made, _ = router(nothing)
    _, result = await sent_to(made, turn(stream=False))
    waiting = asyncio.ensure_future(result.get_rejection_response())
    await go_by(4.0)
    assert not waiting.done()
    known.eject("a", 60.0)
    with pytest.raises(ActorUnavailableError):
        await waiting


@pytest.mark.anyio
@pytest.mark.parametrize("flows", [False, True])
async def test_a_stream_on_a_silent_replica_ends_unless_it_flows(known: ReplicaHealth, flows: bool) -> None:
    came: asyncio.Queue[int] = asyncio.Queue()
    made, _ = router(came.get)
    _, result = await sent_to(made, turn())
    waiting = asyncio.ensure_future(result.__anext__())
    await asyncio.sleep(0)
    known.eject("a", 60.0)
    if flows:
        came.put_nowait(1)
        assert await waiting == 1
    else:
        with pytest.raises(ActorUnavailableError):
            await waiting


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_machine_that_vanishes_is_ejected_within_ten_seconds(told: float, looked: float) -> None:
    """By default, whenever it reported last and whenever routers check."""
    config, now = PlacementConfig(), [0.0]
    heard = ReplicaHealth(lambda: now[0])
    heard.report("gone", LoadReport())
    now[0] = told * REPORT_S  # it vanishes
    vanished = now[0]
    now[0] += looked * REPORT_S
    while not heard.unresponsive("gone"):
        now[0] += REPORT_S
        heard.check(config.silent_s, math.inf)
    assert now[0] - vanished <= 10.0
    assert max(serve_private.ACCEPT_S + REPORT_S, config.silent_s) <= 10.0  # for a call that is not accepted


@pytest.mark.anyio
async def test_an_ejected_replica_is_back_after_its_time(known: ReplicaHealth) -> None:
    made, _ = router(nothing)
    watcher = Watcher()
    known.eject("a", 0.01)
    known.routers.add(watcher)
    assert (await sent_to(made, turn()))[0] == "b"
    known.report("a", LoadReport())  # it reports, and takes no calls all the same
    assert known.unresponsive("a")
    await watcher.changed.wait()
    assert (await sent_to(made, turn()))[0] == "a"


@pytest.mark.anyio
async def test_a_request_that_no_replica_takes_is_told_so() -> None:
    made, _ = router(nothing, no_replica_s=5.0)
    request = turn()
    Pending.of(request).refused_since = -10.0
    with pytest.raises(UnavailableError, match="no replica has accepted"):
        await made.choose(request)
