"""The request router that Ray Serve runs in front of the replicas: placement by program, with a memory.

Every name of Ray that is not public is used in this file and nowhere else; `tests/router/test_affinity.py` checks that
they are still there. Where Serve has a trap, a comment starts with "Trap:". The decision itself is `placement`'s.

Program-ordered waiting belongs in `_choose_replica_for_request`, the one hook through which Serve hands over a
request before it queues it. The state below lives once per ingress process.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context, _serve_request_context
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from holdfast.replicas.errors import UnavailableError
from holdfast.router.placement import PlacementConfig, ReplicaView, rank

HINT = "last_replica"  # keyword argument of a call that names the replica of the program's last turn


class Pins:
    """Where each program was last served: a map of bounded size, least recently routed out first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._replica: OrderedDict[str, str] = OrderedDict()

    def get(self, program: str) -> str | None:
        return self._replica.get(program)

    def put(self, program: str, replica_id: str) -> None:
        self._replica[program] = replica_id
        self._replica.move_to_end(program)
        if len(self._replica) > self._size:
            self._replica.popitem(last=False)

    def __len__(self) -> int:
        return len(self._replica)


# Trap: Serve's FIFO mixin hands a chosen replica to whichever request waits longest, which splits programs over
# replicas; without it (no mixin here) a replica goes to the request it was chosen for.
# Trap: the `ConsistentHashRouter` that ships with Serve moves a program twice over a crash, away and back; pins
# move it once.
class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Keeps a program on the replica that holds its state.

    The program is the handle's `session_id`. A call may carry the keyword argument `last_replica`, believed when this
    router knows nothing better; it is taken out here and does not reach the replica.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._config = PlacementConfig(**kwargs)
        self._pins = Pins(self._config.pins)
        self._ongoing: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Trap: without this a request to a full replica is tried again at once and for ever, a busy loop.
        pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        program = pending_request.metadata.session_id
        # Trap: Serve passes over a replica whose queue length it cannot learn within 0.1 s, a full one or merely a slow
        # one, and takes the next in the ranking; so `rank` names a program's own replica alone at first.
        hint = pending_request.kwargs.pop(HINT, None)
        if hint in by_id and self._pins.get(program) not in by_id:
            self._pins.put(program, hint)
        ranking = rank(
            program,
            [self._view(replica) for replica in candidate_replicas],
            self._pins.get(program),
            time.time() - pending_request.created_at,
            self._config,
        )
        return [[by_id[replica_id]] for replica_id in ranking]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        # Learned here, when the replica has accepted, and not when it was chosen: a choice may be rejected.
        # Trap: this memory is one process's. A second ingress agrees with it through the hash and through the
        # program table's `last_replica` alone.
        if program := pending_request.metadata.session_id:
            self._pins.put(program, replica_id.unique_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        # Trap: Serve's own cache of these numbers forgets after ten seconds, so a replica busy with long streams
        # would look idle; what a replica says when it accepts, less what has ended since, does not age.
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._ongoing[replica_id.unique_id] = num_ongoing_requests

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._ongoing[replica_id.unique_id] = max(0, self._ongoing.get(replica_id.unique_id, 0) - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        live = {replica.replica_id.unique_id for replica in replicas}
        self._ongoing = {replica_id: count for replica_id, count in self._ongoing.items() if replica_id in live}

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Trap: with no replica left Serve waits for the next one without a bound.
        if not self._replicas:
            await self._wait_for_a_replica()
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def _wait_for_a_replica(self) -> None:
        try:
            async with asyncio.timeout(self._config.no_replica_s):
                while not self._replicas:
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()
        except TimeoutError:
            raise UnavailableError(f"no replica came up within {self._config.no_replica_s:g} s") from None

    def _view(self, replica: RunningReplica) -> ReplicaView:
        replica_id = replica.replica_id.unique_id
        return ReplicaView(replica_id, self._ongoing.get(replica_id, 0), replica.max_ongoing_requests)


@contextmanager
def own_request() -> Iterator[None]:
    """Calls on a handle made inside count as a request of their own.

    Trap: calls made while one HTTP request is served share its `internal_request_id`, and of two that wait for
    a replica at once one hangs for ever, because waiting requests are looked up by that id alone.
    """
    context = _get_serve_request_context()
    token = _serve_request_context.set(replace(context, _internal_request_id=uuid4().hex))
    try:
        yield
    finally:
        _serve_request_context.reset(token)


async def proxy_host() -> str:
    """The address that Serve's proxies listen on, as they were really started."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    return str((await controller.get_http_config.remote()).host)
