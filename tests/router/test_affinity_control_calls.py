"""Calls that are no turn, at replicas that take four calls at once and keep some of those for them."""

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.router.affinity import AffinityRouter

DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")
A = ReplicaID("a", DEPLOYMENT)
numbers = count()


def pending(*args: Any) -> PendingRequest:
    number = f"i{next(numbers)}"
    return PendingRequest(args=list(args), kwargs={}, metadata=RequestMetadata("r", number, session_id=""))


def turn() -> PendingRequest:
    return pending(GenerateRequest("r", RawPrompt("x"), Sampling(), program_arrival=1.0))


def affinity(control_calls: int) -> AffinityRouter:
    made = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state(control_calls)
    made._replicas = {A: SimpleNamespace(replica_id=A, max_ongoing_requests=4)}
    made.replicas_changed()
    return made


def choose(made: AffinityRouter, request: PendingRequest, **again: bool) -> asyncio.Task[Any]:
    return asyncio.create_task(made._choose_replica_for_request(request, **again))


def accept(made: AffinityRouter, request: PendingRequest, ongoing: int) -> None:
    """What Serve tells when the replica takes a request, which makes it so many calls there."""
    made.on_new_queue_len_info(A, ongoing)
    made.on_request_routed(request, A, None)


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_full_replica_has_room_for_calls_that_are_no_turns() -> None:
    async def live() -> None:
        made = affinity(3)
        await choose(made, turn())  # of the four one is for turns
        second = choose(made, turn())
        for _ in range(5):
            await choose(made, pending())
        refused = choose(made, pending(), is_retry=True)
        await turns()
        assert not second.done()
        assert not refused.done(), "the replica has said that it takes no more"
        for task in (second, refused):
            task.cancel()

    asyncio.run(live())


@pytest.mark.parametrize("ended", [True, False])
def test_a_call_that_is_no_turn_closes_no_replica_with_room(ended: bool) -> None:
    """Of two turns one runs. What a replica says on a call that does not stream is told after that has ended."""

    async def live() -> None:
        made, card = affinity(2), pending()
        await choose(made, turn())
        await choose(made, card)
        if ended:
            made.on_request_completed(A, card.metadata.internal_request_id)
        accept(made, card, ongoing=2)
        second = choose(made, turn())
        await turns()
        assert second.done()

    asyncio.run(live())


def test_a_turn_closes_a_replica_that_has_enough_of_others() -> None:
    async def live() -> None:
        made, first = affinity(2), turn()
        await choose(made, first)
        accept(made, first, ongoing=2)
        second = choose(made, turn())
        await turns()
        assert not second.done()
        await second  # asked again after a while

    asyncio.run(live())


def test_a_replica_that_takes_nothing_any_more_is_closed_whomever_it_told() -> None:
    async def live() -> None:
        made, refused = affinity(2), pending()
        await choose(made, refused)
        made.on_new_queue_len_info(A, 4)
        second = choose(made, turn())
        await turns()
        assert not second.done()
        await second

    asyncio.run(live())
