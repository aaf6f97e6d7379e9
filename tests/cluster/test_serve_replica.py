"""That Serve's replica still is what is changed of it. What a whole cluster listens on: `test_serving`."""

import asyncio
import gc
import inspect
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any
from weakref import ref

import grpc
import pytest
import ray
from ray._private.authentication import grpc_authentication_server_interceptor as keys
from ray.exceptions import ActorUnavailableError
from ray.serve._private import replica
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
)
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub, add_ASGIServiceServicer_to_server
from ray.serve.request_router import PendingRequest, RunningReplica
from waiting import until_async

from holdfast.cluster import serve_replica
from holdfast.router import fleet
from holdfast.router.affinity import Addressed, AffinityRouter, address
from holdfast.router.fleet import Fleet

DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


class Server:
    """Of gRPC what is used of it."""

    def add_insecure_port(self, address: str) -> str:
        return address


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "add_port_to_grpc_server", serve_replica._serves_address)
    monkeypatch.setattr(replica.Replica, "_perform_graceful_shutdown", serve_replica._serves_stop)
    for name, served in serve_replica._SERVES.items():
        monkeypatch.setattr(replica.Replica, name, served)
    monkeypatch.setattr(serve_replica, "TOLD", [])
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    serve_replica.install()
    serve_replica.install()


def bound(monkeypatch: pytest.MonkeyPatch, node: str, address: str) -> Any:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    return replica.add_port_to_grpc_server(Server(), address)


def test_on_a_cluster_of_one_machine_they_listen_on_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "127.0.0.1", "[::]:0") == "127.0.0.1:0"
    assert bound(monkeypatch, "127.0.0.1", "10.0.0.1:5") == "10.0.0.1:5"


def test_where_other_machines_call_they_listen_as_serve_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "10.0.0.1", "[::]:0") == "[::]:0"


def test_serve_binds_them_by_that_function_to_every_interface() -> None:
    started = inspect.getsource(replica.Replica._on_initialized)
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in started


def test_who_is_to_be_told_of_a_stop_is_told_before_serve_waits_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one way in which Serve stops a replica, whoever asks for it, and once."""
    happened = []

    async def serves_own(self: Any) -> None:
        happened.append("waits")

    monkeypatch.setattr(serve_replica, "_serves_stop", serves_own)
    serve_replica.install(lambda: happened.append("told"))

    async def scenario() -> None:
        made = replica.Replica.__new__(replica.Replica)
        made._event_loop, made._graceful_shutdown_task = asyncio.get_running_loop(), None
        await made.perform_graceful_shutdown()
        await made.perform_graceful_shutdown()

    asyncio.run(scenario())
    assert happened == ["told", "waits"]


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
    address(known)
    try:
        yield known
    finally:
        await known._channel.close()
        await server.stop(None)


def sent(known: RunningReplica, *, stream: bool) -> Any:
    """What comes of a call that a router sends to it."""
    router = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state()
    router._replicas[known.replica_id] = known
    router.replicas_changed()
    ways = {"_by_reference": False, "_on_separate_loop": False}  # as a router's
    metadata = RequestMetadata(request_id="r", internal_request_id="i", is_streaming=stream, **ways)
    request = PendingRequest(args=["x"], kwargs={}, metadata=metadata)
    return router._watched(known).try_send_request(request, with_rejection=True)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet()
    monkeypatch.setattr(fleet, "FLEET", made)
    return made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("who", ["another replica", "another cluster", "another server"])
def test_a_dead_replicas_port_is_none_of_its_own_once_another_has_it(
    monkeypatch: pytest.MonkeyPatch, heard: Fleet, who: str, stream: bool
) -> None:
    """The call ends as one does whose replica is gone, so it is sent elsewhere, and nothing of it was read."""
    monkeypatch.setattr(keys, "_authenticate_request", lambda metadata: False)  # as with a key of its own
    guards = [keys.AsyncAuthenticationServerInterceptor()] if who == "another cluster" else []

    async def work() -> None:
        async with listening(*guards, name="" if who == "another server" else "b") as known:
            call = sent(known, stream=stream)
            with pytest.raises(ActorUnavailableError):
                await call.get_rejection_response()
            assert heard.silent("a")

    asyncio.run(work())


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_serves_the_calls_that_are_meant_for_it(heard: Fleet, stream: bool) -> None:
    async def work() -> None:
        async with listening(name="a") as known:
            call = sent(known, stream=stream)
            assert (await call.get_rejection_response()).accepted
            assert await (call.__anext__() if stream else call.get_async()) == "by a"
            assert not heard.silent("a")

    asyncio.run(work())


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
def test_a_call_that_is_over_is_gone_and_no_garbage(heard: Fleet, stream: bool) -> None:
    async def serve(known: RunningReplica) -> list[ref[Any]]:
        async def routed() -> Any:
            call = sent(known, stream=stream)
            call.add_done_callback(lambda _: None)
            assert (await call.get_rejection_response()).accepted
            return call

        call = await asyncio.create_task(routed())
        assert ([each async for each in all_of(call)] if stream else [await call.get_async()]) == ["by a"]
        assert not call.cancel()
        return [ref(call), ref(call._result), ref(call._result._call)]

    async def work() -> list[Any]:
        async with listening(name="a") as known:
            await known._channel.close()
            at = f"127.0.0.1:{known._replica_info.port}"
            known._channel = grpc.aio.insecure_channel(at, interceptors=[PassingOne(), PassingMany()])
            known._stub = Addressed(ASGIServiceStub(known._channel), "a")
            gc.disable()
            try:
                left = await serve(known)
                await until_async(lambda: not any(each() for each in left))
                return [each() for each in left]
            finally:
                gc.enable()

    assert asyncio.run(work()) == [None, None, None]


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(serve_replica, "LOOKS", 3)
    monkeypatch.setattr(serve_replica, "_looks", itertools.count(1))
    thresholds = gc.get_threshold()
    serve_replica.freeze_what_stays()
    serve_replica.freeze_what_stays()
    assert gc.get_threshold() == (*thresholds[:2], serve_replica.YOUNG)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(serve_replica._freeze)
    assert serve_replica._freeze not in gc.callbacks
    gc.unfreeze()


def test_collections_leave_alone_what_stays_until_they_look_through_everything(frozen: None) -> None:
    stays, new = Cycle(), Cycle()
    of_old, of_new = ref(stays), ref(new)
    del new
    gc.collect()
    assert of_new() is None
    assert gc.get_freeze_count() > 0
    del stays
    gc.collect()
    assert of_old() is not None, "it was there at the collection before"
    gc.collect()  # the third: the next one has all before it
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert of_old() is None
    assert gc.get_freeze_count() > 0


def test_serve_has_no_other_calls_of_replicas_than_those_that_are_looked_at() -> None:
    assert {name for name in vars(replica.Replica) if name.startswith("Handle")} == set(serve_replica._SERVES)
