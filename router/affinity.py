"""The request router that Ray Serve runs in front of the replicas: placement by program, waiting in program order.

Every name of Ray that is not public is used in this file and nowhere else; `tests/router/test_affinity*.py` check that
they are still there. Where Serve has a trap, a comment starts with "Trap:". Which replica is `placement`'s decision,
where they wait is `gate`.

The state below lives once per ingress process: each keeps the order of the requests it has.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context, _serve_request_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from holdfast.replicas.errors import OverloadedError, UnavailableError
from holdfast.replicas.requests import GenerateRequest
from holdfast.router.backend import ANYWHERE, Place
from holdfast.router.gate import Gate
from holdfast.router.line_stats import LineStats, show
from holdfast.router.placement import Group, PlacementConfig, ReplicaView, rank

HINT = "place"  # keyword argument of a call: the `Place` where it would best be served
NEAR = "_holdfast_near"  # attribute of a pending request: what it is to be placed with
ENTERED = "_holdfast_entered"  # attribute of a pending request: when it came, on the monotonic clock


class Pins:
    """Where each program was last served: a map of bounded size, least recently routed out first.

    `programs` counts those of each replica.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._replica: OrderedDict[str, str] = OrderedDict()
        self.programs: Counter[str] = Counter()

    def get(self, program: str) -> str | None:
        return self._replica.get(program)

    def put(self, program: str, replica_id: str) -> None:
        self._leave(self._replica.pop(program, None))
        self._replica[program] = replica_id  # the last one
        self.programs[replica_id] += 1
        if len(self._replica) > self._size:
            self._leave(self._replica.popitem(last=False)[1])

    def _leave(self, replica_id: str | None) -> None:
        if replica_id is None:
            return
        self.programs[replica_id] -= 1
        if not self.programs[replica_id]:
            del self.programs[replica_id]

    def __len__(self) -> int:
        return len(self._replica)


# Trap: Serve's own loop polls full replicas with a growing pause, so requests come out of it in no order, and its FIFO
# mixin hands a chosen replica to whichever request waits longest, which splits programs. Both are passed by.
# Trap: the `ConsistentHashRouter` that ships with Serve moves a program twice over a crash, away and back; pins
# move it once.
class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Keeps a program on the replica that holds its state, and lets programs wait in the order they began.

    The program is the handle's `session_id`; when it began stands in the `GenerateRequest`, and a call without one goes
    first. A call may carry the keyword argument `place`, which is taken out here and does not reach the replica. Its
    `last_replica`, from the cluster's record of the program, counts more than what this process remembers.

    Of what Serve lets a replica take at once, `control_calls` are kept for calls that are no turn: full replicas still
    say how they are.
    """

    def initialize_state(self, control_calls: int = 0, **kwargs: Any) -> None:
        self._control_calls = control_calls
        self._config = PlacementConfig(**kwargs)
        self._pins = Pins(self._config.pins)
        self._gate = Gate(self._config.max_waiting, control_calls)
        self._tally = LineStats()
        self._known: frozenset[str] = frozenset()
        # Trap: Serve copies this module into the process by value, so what is to be found there stands in another one.
        show(self)

    @property
    def line_stats(self) -> LineStats:
        return replace(self._tally, waiting=len(self._gate), replicas=len(self._known))

    # ---- choosing ----

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that is to have this request, once it has room and nobody is before it.

        Raises UnavailableError where there is none, OverloadedError where too many wait or this one does too long.
        """
        request_id = pending_request.metadata.internal_request_id
        while True:
            # Trap: with no replica left Serve waits for the next one without a bound.
            if not self._replicas:
                await self._wait_for_a_replica()
            ranking = self._rank(pending_request, by_id := _by_id(self._replicas.values()))
            # Once refused by the replica, where too many such calls are, it waits as others do.
            if self._control_calls and not is_retry and _turn(pending_request) is None:
                return by_id[ranking[0]]
            chosen = self._gate.take(ranking, request_id) or await self._wait_in_line(pending_request, ranking)
            if chosen is None:
                continue
            if (replica := _by_id(self._replicas.values()).get(chosen)) is not None:
                return replica
            self._gate.give_back(chosen, request_id)

    async def _wait_in_line(self, pending_request: PendingRequest, ranking: tuple[str, ...]) -> str | None:
        """The replica that took this request; None once its program has waited long enough for its own alone, or
        where the last replica has gone.
        """
        waited = _waited(pending_request)
        patience, left = self._config.patience_s - waited, self._config.queue_timeout_s - waited
        home = ranking[0] if len(ranking) == 1 and 0 < patience < left else None
        key = (_arrival(pending_request), pending_request.created_at)
        request_id = pending_request.metadata.internal_request_id
        began = time.monotonic()
        try:
            chosen = await self._gate.wait(key, home, request_id, left if home is None else patience)
        finally:
            self._tally = self._tally.waited(time.monotonic() - began, again=waited >= self._config.patience_s)
        if chosen is None and _waited(pending_request) >= self._config.queue_timeout_s:
            raise OverloadedError("the request waited too long for a replica with room")
        return chosen

    async def _wait_for_a_replica(self) -> None:
        try:
            async with asyncio.timeout(self._config.no_replica_s):
                while not self._replicas:
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()
        except TimeoutError:
            raise UnavailableError(f"no replica came up within {self._config.no_replica_s:g} s") from None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Best first, each alone in its rank: for callers of Serve that choose without sending."""
        if pending_request is None:
            return [candidate_replicas]
        by_id = _by_id(candidate_replicas)
        return [[by_id[replica_id]] for replica_id in self._rank(pending_request, by_id)]

    def _rank(self, pending_request: PendingRequest, by_id: Mapping[str, RunningReplica]) -> tuple[str, ...]:
        program = pending_request.metadata.session_id
        place = pending_request.kwargs.pop(HINT, ANYWHERE)
        if place.last_replica in by_id:
            self._pins.put(program, place.last_replica)
        if place.near:  # a request that was refused or waits is ranked again, as the same object
            setattr(pending_request, NEAR, place)
        near: Place | None = getattr(pending_request, NEAR, None)
        count = self._pins.programs
        views = [ReplicaView(each, self._gate.load(each), self._room(by_id[each]), count[each]) for each in by_id]
        group = Group(near.near, near.near_replica or self._pins.get(near.near)) if near else None
        return rank(program, views, self._pins.get(program), _waited(pending_request), self._config, group)

    # ---- what Serve tells ----

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        # Learned here, when the replica has accepted, and not when it was chosen: a choice may be rejected.
        # Trap: this memory is one process's. A second ingress agrees with it through the hash and through the
        # program table's `last_replica`, which is why that counts more.
        if program := pending_request.metadata.session_id:
            self._pins.put(program, replica_id.unique_id)
        # Trap: what the replica said on this was told just before, but not whom it answered: a control call may itself
        # be what makes the number high. And of a call that does not stream it comes at the very end, after
        # `on_request_completed`.
        if _turn(pending_request) is not None:
            self._gate.accepted(replica_id.unique_id, pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        # Trap: also called for broadcasts, which take no slot, and of a rejected request perhaps after the next try.
        self._gate.give_back(replica_id.unique_id, internal_request_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        # Trap: Serve's own cache of these numbers forgets after ten seconds, so a replica busy with long streams
        # would look idle; what a replica says when it accepts, less what has ended since, does not age.
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._gate.told(replica_id.unique_id, num_ongoing_requests)

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._gate.ended(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._replicas_changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        replicas = _by_id(self._replicas.values())
        now = frozenset(replicas)
        self._tally = self._tally.changed(joined=len(now - self._known), lost=len(self._known - now))
        self._known = now
        self._gate.replicas({each: self._room(replica) for each, replica in replicas.items()})

    def _room(self, replica: RunningReplica) -> int:
        """How many turns a replica takes at once."""
        return int(replica.max_ongoing_requests) - self._control_calls


def _by_id(replicas: Iterable[RunningReplica]) -> dict[str, RunningReplica]:
    return {replica.replica_id.unique_id: replica for replica in replicas}


def _waited(pending_request: PendingRequest) -> float:
    """Seconds since this process first had the request; its `created_at` is of a clock that may be set meanwhile."""
    now = time.monotonic()
    # Trap: a request that a replica refused comes back, as the same object: the time stays on it.
    return now - float(vars(pending_request).setdefault(ENTERED, now))


def _arrival(pending_request: PendingRequest) -> float:
    """When the program of a call began; a call that is no turn of a program keeps nobody waiting."""
    turn = _turn(pending_request)
    return turn.program_arrival if turn else 0.0


def _turn(pending_request: PendingRequest) -> GenerateRequest | None:
    return next((each for each in pending_request.args if isinstance(each, GenerateRequest)), None)


async def from_each(broadcast: DeploymentBroadcastResponse, timeout_s: float) -> list[Any]:
    """What each replica answers to a call on all of them, or its exception: TimeoutError where it takes longer.

    Empty where there is no replica. Raises TimeoutError where the time runs out before it is known whom to wait for.
    Trap: by the public way to them one late answer is a TimeoutError for all.
    """
    calls: list[asyncio.Future[Any]] = []
    try:
        async with asyncio.timeout(timeout_s):
            results = await broadcast._fetch_replica_results_async()
            calls += [asyncio.ensure_future(each.get_async()) for each in results]
            await asyncio.gather(*calls, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    except TimeoutError:
        if not calls:
            raise
    return [TimeoutError() if call.cancelled() else call.exception() or call.result() for call in calls]


@contextmanager
def own_request() -> Iterator[None]:
    """Calls on a handle made inside count as a request of their own.

    Trap: calls made while one HTTP request is served share its `internal_request_id`, by which Serve finds what is
    to be cancelled or sent: one of them would be taken for another.
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
