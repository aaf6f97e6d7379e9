"""The names of Ray Serve that are used although they are private, and the router class on a made-up deployment."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import constants, router
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.context import _get_serve_request_context
from ray.serve.request_router import PendingRequest, RequestRouter

from holdfast.replicas.errors import UnavailableError
from holdfast.router.affinity import HINT, AffinityRouter, Pins, own_request

DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


def replica(name: str) -> Any:
    """What the router looks at of a running replica."""
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=4)


def pending(program: str, waited_s: float = 0.0, **kwargs: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id=program)
    request = PendingRequest(args=[], kwargs=kwargs, metadata=metadata)
    request.created_at -= waited_s
    return request


def affinity(**config: Any) -> AffinityRouter:
    made = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state(**config)
    return made


async def first_choice(made: AffinityRouter, replicas: list[Any], request: PendingRequest) -> str:
    ranking = await made.choose_replicas(replicas, request)
    return str(ranking[0][0].replica_id.unique_id)


class TestPrivateNames:
    """A release of Ray that changes one of these breaks the router silently; these tests do not."""

    def test_hooks_of_the_request_router(self) -> None:
        choose = inspect.signature(RequestRouter._choose_replica_for_request).parameters
        assert list(choose) == ["self", "pending_request", "is_retry"]
        for name, parameters in {
            "on_request_routed": ["self", "pending_request", "replica_id", "result"],
            "on_new_queue_len_info": ["self", "replica_id", "num_ongoing_requests"],
            "decrement_queue_len_cache": ["self", "replica_id"],
            "update_replicas": ["self", "replicas"],
            "choose_replicas": ["self", "candidate_replicas", "pending_request"],
        }.items():
            assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == parameters

    def test_hooks_are_called(self) -> None:
        source = inspect.getsource(router)
        for name in ("_choose_replica_for_request", "on_request_routed", "on_new_queue_len_info"):
            assert f"router.{name}(" in source

    def test_state_of_the_request_router(self) -> None:
        async def look() -> None:
            made = affinity()
            assert made._replicas == {}
            assert isinstance(made._replicas_updated_event, asyncio.Event)

        asyncio.run(look())

    def test_controller(self) -> None:
        from ray.serve._private.controller import ServeController

        assert constants.SERVE_CONTROLLER_NAME
        assert constants.SERVE_NAMESPACE
        assert callable(ServeController.get_http_config)

    def test_calls_get_a_request_of_their_own(self) -> None:
        outer = _get_serve_request_context()
        with own_request():
            first = _get_serve_request_context()._internal_request_id
        with own_request():
            second = _get_serve_request_context()._internal_request_id
        assert first
        assert second
        assert first != second
        assert _get_serve_request_context() is outer


def test_a_routed_program_stays_when_others_come_and_moves_once_when_its_replica_goes() -> None:
    async def live() -> None:
        made = affinity()
        a, b, c = replica("a"), replica("b"), replica("c")
        home = await first_choice(made, [a, b], pending("t/p"))
        made.on_request_routed(pending("t/p"), ReplicaID(home, DEPLOYMENT), None)
        for _ in range(3):
            assert await first_choice(made, [a, b, c], pending("t/p")) == home
        left = [each for each in (a, b, c) if each.replica_id.unique_id != home]
        moved = await first_choice(made, left, pending("t/p"))
        made.on_request_routed(pending("t/p"), ReplicaID(moved, DEPLOYMENT), None)
        assert await first_choice(made, [a, b, c], pending("t/p")) == moved

    asyncio.run(live())


def test_the_hint_is_taken_out_of_the_call_and_believed_until_more_is_known() -> None:
    async def live() -> None:
        made = affinity()
        replicas = [replica(name) for name in "abcdef"]
        for name in "abcdef":
            request = pending(f"t/{name}", **{HINT: name})
            assert await first_choice(made, replicas, request) == name
            assert request.kwargs == {}
            other = pending(f"t/{name}", **{HINT: "a"})
            assert await first_choice(made, replicas, other) == name

    asyncio.run(live())


def test_a_full_replica_is_waited_for_with_back_off_and_then_left() -> None:
    async def live() -> None:
        made = affinity(patience_s=2.0)
        a, b = replica("a"), replica("b")
        made.on_request_routed(pending("t/p"), a.replica_id, None)
        request = pending("t/p")
        assert await made.choose_replicas([a, b], request) == [[a]]
        assert request.routing_context.should_backoff
        assert await made.choose_replicas([a, b], pending("t/p", waited_s=3.0)) == [[a], [b]]

    asyncio.run(live())


def test_what_replicas_have_in_hand_decides_for_requests_without_a_program() -> None:
    async def live() -> None:
        made = affinity()
        a, b = replica("a"), replica("b")
        made.on_new_queue_len_info(a.replica_id, 3)
        made.on_new_queue_len_info(b.replica_id, 2)
        assert await first_choice(made, [a, b], pending("")) == "b"
        for _ in range(2):
            made.decrement_queue_len_cache(a.replica_id)
        assert await first_choice(made, [a, b], pending("")) == "a"

    asyncio.run(live())


def test_without_replicas_a_request_waits_no_longer_than_configured() -> None:
    async def live() -> None:
        made = affinity(no_replica_s=0.0)
        with pytest.raises(UnavailableError):
            await made._choose_replica_for_request(pending("t/p"))

    asyncio.run(live())


def test_pins_forget_the_program_routed_longest_ago() -> None:
    pins = Pins(2)
    pins.put("a", "1")
    pins.put("b", "1")
    pins.put("a", "2")
    pins.put("c", "1")
    assert [pins.get(program) for program in "abc"] == ["2", None, "1"]
    assert len(pins) == 2
