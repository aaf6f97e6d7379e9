"""What the router uses of Ray Serve though Serve does not promise it: a release that changes it fails here."""

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import grpc
import pytest
from ray._private.authentication import grpc_authentication_server_interceptor as keys
from ray.exceptions import ActorUnavailableError
from ray.serve._private import constants, replica, router
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
)
from ray.serve.context import _get_serve_request_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub, add_ASGIServiceServicer_to_server
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from waiting import until_async

from holdfast.router.dispatch.affinity import AffinityRouter
from holdfast.router.dispatch.replica_health import ReplicaHealth
from holdfast.router.dispatch.serve_private import answers_of_each, own_request

pytestmark = pytest.mark.anyio

DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """gRPC may tell the loop of a test that is over about a call's end."""
    yield  # noqa: PT022 - the loop stays as long as this fixture does


class Told:
    """A broadcast whose replicas answer so; an exception is raised, None never comes."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = outcomes
        self.left: list[int] = []

    async def _fetch_replica_results_async(self) -> list[Any]:
        if not self.outcomes:
            raise DeploymentUnavailableError(DEPLOYMENT)
        return [SimpleNamespace(get_async=partial(self.answer, i)) for i in range(len(self.outcomes))]

    async def answer(self, i: int) -> Any:
        if (outcome := self.outcomes[i]) is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.append(i)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def test_replicas_that_answer_late_do_not_keep_back_what_others_say() -> None:
    died = ValueError("died")
    broadcast = Told("a", None, died, "d")
    first, late, gone, last = await answers_of_each(broadcast, 0.01)  # type: ignore[arg-type]
    assert (first, last, gone) == ("a", "d", died)
    assert isinstance(late, TimeoutError)
    assert broadcast.left == [1], "nobody waits for it any more"
    assert await answers_of_each(Told(), 0.01) == []  # type: ignore[arg-type]


async def test_time_that_runs_out_before_the_calls_are_sent_is_no_answer_of_nobody() -> None:
    class Unsent(Told):
        async def _fetch_replica_results_async(self) -> list[Any]:
            return [await asyncio.Event().wait()]

    with pytest.raises(TimeoutError):
        await answers_of_each(Unsent("a"), 0.01)  # type: ignore[arg-type]


def test_serve_itself_gets_them_by_these_names() -> None:
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
    source = inspect.getsource(DeploymentBroadcastResponse.results_async)
    assert "rr.get_async() for rr in replica_results" in source


def test_hooks_of_the_request_router() -> None:
    choose = inspect.signature(RequestRouter._choose_replica_for_request).parameters
    assert list(choose) == ["self", "pending_request", "is_retry"]
    for name, parameters in {
        "on_request_routed": ["self", "pending_request", "replica_id", "result"],
        "on_new_queue_len_info": ["self", "replica_id", "num_ongoing_requests"],
        "decrement_queue_len_cache": ["self", "replica_id"],
        "update_replicas": ["self", "replicas"],
        "choose_replicas": ["self", "candidate_replicas", "pending_request"],
        "on_request_completed": ["self", "replica_id", "internal_request_id"],
        "on_replica_actor_died": ["self", "replica_id"],
    }.items():
        assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == parameters


def test_hooks_are_called() -> None:
    source = inspect.getsource(router)
    for name in (
        "_choose_replica_for_request",
        "on_request_routed",
        "on_new_queue_len_info",
        "on_request_completed",
        "on_replica_actor_died",
    ):
        assert f"router.{name}(" in source


def test_a_replica_is_chosen_once_and_has_the_request_at_once() -> None:
    """Between the choice and the sending nothing else runs, and whoever was chosen is told of the end once."""
    source = inspect.getsource(router.AsyncioRouter._route_and_send_request_once)
    chosen = source.index("._choose_replica_for_request(")
    sent = source.index(".try_send_request(")
    assert "await" not in source[chosen:sent]
    assert source.count("._choose_replica_for_request(") == 1
    assert source.count("self._register_completion_callback(result, replica, pr)") == 1
    assert "if replica is not None and not callback_registered:" in source
    assert "is_retry = True" in inspect.getsource(router.AsyncioRouter.route_and_send_request)


def test_whom_a_replica_accepted_is_told_with_what_it_said() -> None:
    """At once after the number, and of a rejected request never."""
    source = inspect.getsource(router.AsyncioRouter._route_and_send_request_once)
    said = source.index(".on_new_queue_len_info(")
    routed = source.index(".on_request_routed(")
    assert "await" not in source[said:routed]
    assert "if queue_info.accepted:" in source[said:routed]


async def test_state_of_the_request_router() -> None:
    made = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    assert made.listed == {}
    assert isinstance(made.changed, asyncio.Event)


def test_controller() -> None:
    from ray.serve._private.controller import ServeController

    assert constants.SERVE_CONTROLLER_NAME
    assert constants.SERVE_NAMESPACE
    assert callable(ServeController.get_http_config)


def test_calls_get_a_request_of_their_own() -> None:
    outer = _get_serve_request_context()
    with own_request():
        first = _get_serve_request_context()._internal_request_id
    with own_request():
        second = _get_serve_request_context()._internal_request_id
    assert first
    assert second
    assert first != second
    assert _get_serve_request_context() is outer


class Serving(replica.Replica):  # type: ignore[misc]
    """Serve's replica of this name, as far as calls by gRPC are concerned."""

    def __init__(self, name: str) -> None:
        self._replica_id = ReplicaID(name, DEPLOYMENT)

    async def handle_request_with_rejection(self, metadata: RequestMetadata, *args: Any) -> AsyncIterator[Any]:
        yield ReplicaQueueLengthInfo(accepted=True, num_ongoing_requests=1)
        yield f"by {self._replica_id.unique_id}"


@asynccontextmanager
async def listening(*interceptors: grpc.aio.ServerInterceptor, name: str = "") -> AsyncIterator[RunningReplica]:
    """Replica "a" as routers know it; at its port is the one of this `name`, or none."""
    server = grpc.aio.server(interceptors=interceptors)
    if name:
        add_ASGIServiceServicer_to_server(Serving(name), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    known = RunningReplica.__new__(RunningReplica)
    known._replica_info = SimpleNamespace(
        node_ip="127.0.0.1",
        port=port,
        replica_id=ReplicaID("a", DEPLOYMENT),
        is_cross_language=False,
        max_ongoing_requests=4,
    )
    known._actor_handle = SimpleNamespace(_actor_id=SimpleNamespace(binary=lambda: b"a" * 16))
    known._channel = known._stub = known._grpc_replica_wrapper = known._actor_replica_wrapper = None
    assert known.stub is not None  # made at its first use, with the channel
    try:
        yield known
    finally:
        await known._channel.close()
        await server.stop(None)


def sent(known: RunningReplica, health: ReplicaHealth, *, stream: bool) -> Any:
    """What comes of a call that a router sends to it."""
    router = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state(health=health)
    router._replicas[known.replica_id] = known
    router.on_replicas_changed()
    ways = {"_by_reference": False, "_on_separate_loop": False}  # as a router's
    metadata = RequestMetadata(request_id="r", internal_request_id="i", is_streaming=stream, **ways)
    request = PendingRequest(args=["x"], kwargs={}, metadata=metadata)
    return router._guarded(known).try_send_request(request, with_rejection=True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("who", ["another cluster", "another server"])
async def test_a_call_that_meets_another_server_at_a_dead_replicas_port_ends_as_if_the_replica_were_gone(
    monkeypatch: pytest.MonkeyPatch, who: str, stream: bool
) -> None:
    """So it is sent elsewhere. Another replica of this cluster refuses it by itself (`EngineReplica`)."""
    monkeypatch.setattr(keys, "_authenticate_request", lambda metadata: False)  # as with a key of its own
    guards = [keys.AsyncAuthenticationServerInterceptor()] if who == "another cluster" else []
    health = ReplicaHealth()
    async with listening(*guards, name="b" if guards else "") as known:
        with pytest.raises(ActorUnavailableError):
            await sent(known, health, stream=stream).get_rejection_response()
        assert health.unresponsive("a")


async def all_of(call: Any) -> AsyncIterator[Any]:
    with suppress(StopAsyncIteration):
        while True:
            yield await call.__anext__()


class PassingOne(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """In the place of what sends the cluster's token."""

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


class PassingMany(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(details, request)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_over_is_gone_and_no_garbage(stream: bool) -> None:
    async def serve(known: RunningReplica) -> list[ref[Any]]:
        async def routed() -> Any:
            call = sent(known, ReplicaHealth(), stream=stream)
            call.add_done_callback(lambda _: None)
            assert (await call.get_rejection_response()).accepted
            return call

        call = await asyncio.create_task(routed())
        assert ([each async for each in all_of(call)] if stream else [await call.get_async()]) == ["by a"]
        assert not call.cancel()
        return [ref(call), ref(call._result), ref(call._result._call)]

    async with listening(name="a") as known:
        await known._channel.close()
        at = f"127.0.0.1:{known._replica_info.port}"
        known._channel = grpc.aio.insecure_channel(at, interceptors=[PassingOne(), PassingMany()])
        known._stub = ASGIServiceStub(known._channel)
        gc.disable()
        try:
            left = await serve(known)
            await until_async(lambda: not any(each() for each in left))
        finally:
            gc.enable()
