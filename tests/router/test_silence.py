"""Replicas that do not answer: calls on them end, and others are chosen until they are heard again."""

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable
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
from waiting import go_by, run_virtual

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.replicas.stats import LoadReport
from holdfast.router import fleet
from holdfast.router.affinity import LOST, AffinityRouter
from holdfast.router.backend import Place
from holdfast.router.fleet import Fleet
from holdfast.router.placement import PlacementConfig

DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


class Result:
    """What sending gives: nothing is accepted and nothing comes, or what `says` raises."""

    def __init__(self, says: Callable[[], Awaitable[Any]]) -> None:
        self.cancelled = False
        self.get_rejection_response = self.__anext__ = says  # type: ignore[method-assign,assignment]

    def cancel(self) -> None:
        self.cancelled = True


class Watcher:
    """Hears of changes, as a request router does."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def told(self, replica_id: str, report: LoadReport) -> None:
        return

    def replicas_changed(self) -> None:
        self.changed.set()


async def nothing() -> None:
    await asyncio.Event().wait()


async def refused() -> None:
    raise ActorUnavailableError("refused", None)


async def another() -> None:
    """Another server has its port by now."""
    raise AioRpcError(StatusCode.UNIMPLEMENTED, Metadata(), Metadata())


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """What this test knows of replicas, and no other. All time is the loop's."""

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr("holdfast.router.affinity.time", SimpleNamespace(monotonic=now))
    made = Fleet(now)
    monkeypatch.setattr(fleet, "FLEET", made)
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
    made.replicas_changed()
    return made, sent


def turn(stream: bool = True) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id="p", is_streaming=stream)
    request = GenerateRequest("r", RawPrompt("x"), Sampling())
    return PendingRequest(args=[request], kwargs={"place": Place("a")}, metadata=metadata)


async def sent_to(made: AffinityRouter, request: PendingRequest) -> tuple[str, Any]:
    replica = await made._choose_replica_for_request(request)
    return replica.replica_id.unique_id, replica.try_send_request(request, with_rejection=True)


@pytest.mark.parametrize("says", [nothing, refused, another])
def test_a_replica_that_does_not_accept_is_passed_by(says: Callable[[], Awaitable[Any]]) -> None:
    async def work() -> None:
        made, sent = router(says, accept_s=0.01)
        name, result = await sent_to(made, turn())
        assert name == "a"
        with pytest.raises(ActorUnavailableError):
            await result.get_rejection_response()
        assert sent[0].cancelled is (says is nothing)
        assert (await sent_to(made, turn()))[0] == "b"

    run_virtual(work())


@pytest.mark.parametrize("late", [True, False])
def test_a_replica_that_tells_how_it_is_may_be_late_to_accept(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """It is there. One that does not accept for `silent_s` is passed by all the same."""
    reporting = Fleet(lambda: 0.0)  # what it told is never old
    monkeypatch.setattr(fleet, "FLEET", reporting)

    async def work() -> None:
        accepted: asyncio.Queue[str] = asyncio.Queue()
        made, _ = router(accepted.get, accept_s=0.01, silent_s=60.0 if late else 0.1, report_s=0.01)
        reporting.tell("a", LoadReport())
        _, result = await sent_to(made, turn())
        waiting = asyncio.ensure_future(result.get_rejection_response())
        await go_by(0.05)
        assert not waiting.done()
        if late:
            accepted.put_nowait("accepted")
            assert await waiting == "accepted"
        else:
            with pytest.raises(ActorUnavailableError):
                await waiting
        assert (await sent_to(made, turn()))[0] == ("a" if late else "b")

    run_virtual(work())


def test_a_call_that_does_not_stream_may_take_long_to_be_accepted(known: Fleet) -> None:
    async def work() -> None:
        made, _ = router(nothing, accept_s=0.01, silent_s=0.2, report_s=0.01)
        _, result = await sent_to(made, turn(stream=False))
        waiting = asyncio.ensure_future(result.get_rejection_response())
        await go_by(0.05)
        assert not waiting.done()
        known.pass_by("a", 60.0)
        with pytest.raises(ActorUnavailableError):
            await waiting

    run_virtual(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_over_is_gone_without_a_collection(stream: bool) -> None:
    async def work() -> None:
        came: asyncio.Queue[int] = asyncio.Queue()
        made, sent = router(came.get)
        _, result = await sent_to(made, turn(stream))
        for n in range(2):
            came.put_nowait(n)
        assert [await result.get_rejection_response(), await result.__anext__()] == [0, 1]
        sent.clear()
        assert len(made._calls) == 1
        del result
        assert len(made._calls) == 0

    gc.collect()
    gc.disable()
    try:
        run_virtual(work())
    finally:
        gc.enable()


@pytest.mark.parametrize("flows", [False, True])
def test_a_stream_on_a_silent_replica_ends_unless_it_flows(known: Fleet, flows: bool) -> None:
    async def work() -> None:
        came: asyncio.Queue[int] = asyncio.Queue()
        made, _ = router(came.get, silent_s=0.2, report_s=0.01)
        _, result = await sent_to(made, turn())
        waiting = asyncio.ensure_future(result.__anext__())
        await asyncio.sleep(0)
        known.pass_by("a", 60.0)
        if flows:
            came.put_nowait(1)
            assert await waiting == 1
        else:
            with pytest.raises(ActorUnavailableError):
                await waiting

    run_virtual(work())


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_machine_that_vanishes_is_passed_by_within_ten_seconds(told: float, looked: float) -> None:
    """By default, whenever it told something last and whenever routers look."""
    config, now = PlacementConfig(), [0.0]
    heard = Fleet(lambda: now[0])
    heard.tell("gone", LoadReport())
    now[0] = told * config.report_s  # it vanishes
    vanished = now[0]
    now[0] += looked * config.report_s
    while not heard.silent("gone"):
        now[0] += config.report_s
        heard.look(config.silent_s, math.inf)
    assert now[0] - vanished <= 10.0
    assert max(config.accept_s + config.report_s, config.silent_s) <= 10.0  # for a call that is not accepted


def test_a_replica_is_heard_again_after_its_time(known: Fleet) -> None:
    async def work() -> None:
        made, _ = router(nothing)
        watcher = Watcher()
        known.pass_by("a", 0.01)
        known.watch(watcher)
        assert (await sent_to(made, turn()))[0] == "b"
        known.tell("a", LoadReport())  # it tells how it is, and takes no calls all the same
        assert known.silent("a")
        await watcher.changed.wait()
        assert (await sent_to(made, turn()))[0] == "a"

    run_virtual(work())


def test_a_request_that_no_replica_takes_is_told_so() -> None:
    async def work() -> None:
        made, _ = router(nothing, no_replica_s=5.0)
        request = turn()
        setattr(request, LOST, -10.0)
        with pytest.raises(UnavailableError, match="no replica has taken"):
            await made._choose_replica_for_request(request)

    run_virtual(work())
