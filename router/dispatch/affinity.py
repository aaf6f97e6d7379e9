"""The request router that Ray Serve runs in front of the replicas: placement by program, waiting in program order.

`placement` decides which replica, `dispatch_queue` makes requests wait for room, `replica_health` knows who answers.
Where Serve has a trap, a comment starts with "Trap:". The state lives once per ingress process: each keeps the order
of the requests it has.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakSet

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RunningReplica

from holdfast.replicas.errors import DeadlineError, OverloadedError, SessionLostError, UnavailableError
from holdfast.replicas.requests import GenerateRequest
from holdfast.replicas.stats import LoadReport
from holdfast.replicas.types import Priority
from holdfast.router.backend import ANYWHERE, RoutingHint
from holdfast.router.dispatch import replica_health
from holdfast.router.dispatch.dispatch_queue import UNSHARED, DispatchQueue, FairShareKey, QueueStats
from holdfast.router.dispatch.replica_health import ReplicaHealth
from holdfast.router.dispatch.serve_private import GuardedCall, GuardedReplica, RouterHooks
from holdfast.router.placement import (
    WEIGHTS,
    Decision,
    Placement,
    PlacementConfig,
    PlacementRequest,
    Prefix,
    Reason,
    Weights,
)
from holdfast.router.records import Lru

HINT = "hint"  # keyword argument of a call: its `RoutingHint`, taken out before the call is sent
USED = "drawn"  # the method by which a router gets the usage of requests that were cut off
STOPPING = 64  # replicas that Serve has taken out and that may still answer `USED`
PROGRAMS = 65536  # programs remembered with their home; the least recently routed is forgotten first
KNOWN_S = 2.0  # a router learns of a new replica within this time
TOKENS_PER_WAITING = 1024  # the queue holds so many tokens for each of `max_waiting` requests


@dataclass(slots=True)
class Pending:
    """The router's state of a pending request. Trap: Serve passes a refused one again as the same object, which keeps
    this.
    """

    turn: GenerateRequest | None  # None: a control call
    arrived: float  # on the monotonic clock: `created_at` is of one that may be set meanwhile
    placement: PlacementRequest | None = None
    refused_since: float = math.inf  # since when replicas do not accept it

    @classmethod
    def of(cls, request: PendingRequest) -> Pending:
        pending: Pending | None = getattr(request, "_holdfast", None)
        if pending is None:
            turn = next((each for each in request.args if isinstance(each, GenerateRequest)), None)
            pending = cls(turn, time.monotonic())
            request._holdfast = pending
        return pending

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.arrived

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return math.inf if self.turn is None else self.turn.within_s - self.waited_s

    @property
    def share_key(self) -> FairShareKey:
        """Background prefill counts as batch."""
        turn = self.turn
        if turn is None:
            return UNSHARED
        priority = turn.priority if turn.background is None else Priority.BATCH
        return FairShareKey(turn.scope, turn.weight, priority, turn.root or turn.program_id or turn.request_id)

    def refused(self) -> None:
        """A replica did not accept it."""
        self.refused_since = min(self.refused_since, time.monotonic())


# Trap: the `ConsistentHashRouter` that ships with Serve moves a program twice over a crash, away and back; a remembered
# home moves it once.
class AffinityRouter(RouterHooks):
    """Keeps a program on the replica that holds its state, and lets programs wait in the order they began.

    The program is the handle's `session_id`; when it began stands in the `GenerateRequest`. A call without one is a
    control call and goes first: of what Serve lets a replica take at once, `control_calls` are kept for those. A home
    in a call's `RoutingHint` comes from the cluster's record of the program, and counts more than what this process
    remembers. `fair`: tenants share the slots of full replicas by weight.
    """

    def initialize_state(
        self,
        control_calls: int = 0,
        fair: bool = False,
        weights: Weights = WEIGHTS,
        health: ReplicaHealth | None = None,
        **options: Any,
    ) -> None:
        self._control_calls = control_calls
        self._config = config = PlacementConfig(**options)
        self._homes: Lru[str] = Lru(PROGRAMS)  # the replica that served each program last
        self._placement = Placement(random.Random(), weights)
        tokens = TOKENS_PER_WAITING * config.max_waiting
        self._queue = DispatchQueue(
            config.max_waiting, self._placement, control_calls, fair=fair, max_waiting_tokens=tokens
        )
        self._stats = QueueStats()
        self._available: dict[str, RunningReplica] = {}  # replicas that answer
        self._listed_ids: set[str] = set()  # replicas that Serve listed last
        self._stopping: dict[str, RunningReplica] = {}  # replicas that Serve has taken out, the latest ones
        self._calls: WeakSet[GuardedCall] = WeakSet()
        # Trap: Serve copies this module into the process by value, so a global of it would be another object.
        self._health = health or replica_health.HEALTH
        self._health.routers.add(self)

    @property
    def stats(self) -> QueueStats:
        return replace(
            self._stats,
            waiting=len(self._queue),
            tokens=self._queue.tokens,
            replicas=len(self._available),
            balance=self._placement.balance,
            placed=self._stats.placed.copy(),
        )

    # ---- choosing ----

    async def choose(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        """The replica for a request, once the replica has room and the request is first in the queue.

        Raises UnavailableError without a replica. Raises OverloadedError if too many requests wait, or this one waits
        too long. Raises DeadlineError if the wait exceeds, or would exceed, the client's timeout.
        """
        pending = Pending.of(pending_request)
        # Serve does not list a replica that stops, but only that one knows what it did for a request that was cut off.
        if pending_request.metadata.call_method == USED and not is_retry:
            stopping = self._stopping.get(self._request(pending_request).home or "")
            if stopping is not None:
                return self._guarded(stopping)
        while True:
            # Trap: without a replica Serve waits for the next one without a bound.
            if not self._available:
                await self._wait_for_a_replica()
            if time.monotonic() - pending.refused_since > self._config.no_replica_s:
                raise UnavailableError(f"no replica has accepted the request in {self._config.no_replica_s:g} s")
            request = self._request(pending_request)
            decision = self._placement.choose(request)
            if decision is None:
                continue
            if request.bound and decision.reason is not Reason.HOME:
                await self._wait_for_home(request.home)
                continue
            # A control call that the replica has refused, because it has too many, waits as turns do.
            if self._control_calls and not is_retry and pending.turn is None:
                return self._guarded(self._available[decision.replica_id])
            slot = self._take(request, decision, pending_request) or await self._wait(
                request, decision, pending_request
            )
            if slot is None:
                continue
            if (replica := self._available.get(slot.replica_id)) is not None:
                self._stats.placed[slot.reason] += 1
                return self._guarded(replica)
            self._queue.release(slot.replica_id, pending_request.metadata.internal_request_id)

    def _take(self, request: PlacementRequest, decision: Decision, pending_request: PendingRequest) -> Decision | None:
        """A slot at the chosen replica, or elsewhere for a program that need not wait for it; None: it has to wait."""
        request_id, pending = pending_request.metadata.internal_request_id, Pending.of(pending_request)
        if self._queue.take(decision.replica_id, request_id, pending.share_key):
            return decision
        if decision.reason is Reason.HOME:
            if request.bound or pending.waited_s < self._placement.patience(request):
                return None
            elsewhere = self._placement.elsewhere(request)
            if elsewhere is not None and self._queue.take(elsewhere.replica_id, request_id, pending.share_key):
                return elsewhere
        replica_id = self._queue.take_any(request_id, pending.share_key)
        return None if replica_id is None else _with_room(replica_id, request)

    async def _wait(
        self, request: PlacementRequest, decision: Decision, pending_request: PendingRequest
    ) -> Decision | None:
        """A slot that came free. None: the program has waited long enough for its home alone, or no replica is left."""
        pending, request_id = Pending.of(pending_request), pending_request.metadata.internal_request_id
        waited, turn, deadline_s = pending.waited_s, pending.turn, pending.left_s
        if turn is not None and deadline_s < math.inf:
            # A next turn is before the programs that came later, so the queue's length says nothing of its wait.
            expected = 0.0 if turn.program_turns else self._queue.expected_s
            if expected > deadline_s or deadline_s <= 0:
                text = f"a replica will have room in about {expected:.1f} s; the request's time is {deadline_s:.1f} s"
                retry_s = expected - deadline_s if expected > deadline_s else None
                raise DeadlineError(text, "timeout", retry_after_s=retry_s)
        left = min(self._config.queue_timeout_s - waited, deadline_s)
        patience = self._placement.patience(request) - waited if decision.reason is Reason.HOME else 0.0
        at_home = request.bound or 0 < patience < left
        home = decision.replica_id if at_home else None
        # The engine's order: work ahead last, programs with kept state first, then by when programs began.
        order = (
            float(turn is not None and turn.background is not None),
            float(request.home not in self._available),
            turn.program_arrival if turn else 0.0,
            pending_request.created_at,
        )
        began = time.monotonic()
        try:
            timeout_s = patience if at_home and not request.bound else left
            slot = await self._queue.wait(order, home, request_id, timeout_s, pending.share_key, request.tokens)
        finally:
            again, seconds = not at_home and request.home is not None and waited > 0, time.monotonic() - began
            self._stats.waits += not again
            self._stats.wait_s += seconds
            if at_home:
                self._stats.home_waits += 1
                self._stats.home_wait_s += seconds
        if slot is None:
            if pending.left_s <= 0:
                raise DeadlineError("the request's deadline passed before a replica had room", "timeout")
            if pending.waited_s >= self._config.queue_timeout_s:
                raise OverloadedError("the request waited too long for a replica with room")
            return None
        if request.bound and slot != home:  # the home went meanwhile
            self._queue.release(slot, request_id)
            return None
        return _with_room(slot, request)

    async def _wait_for_home(self, home: str | None) -> None:
        """Wait until a bound request's replica is there.

        Raises UnavailableError if it does not answer, SessionLostError if there is no such replica.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                while home not in self._available:
                    self.changed.clear()
                    await self.changed.wait()
                return
        if any(each.replica_id.unique_id == home for each in self.listed.values()):
            raise UnavailableError("the session's replica does not answer")
        raise SessionLostError("the session's replica is gone", "session_id")

    async def _wait_for_a_replica(self) -> None:
        try:
            async with asyncio.timeout(self._config.no_replica_s):
                while not self._available:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise UnavailableError(f"no replica came up within {self._config.no_replica_s:g} s") from None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best one, then the others: for callers of Serve that choose without sending."""
        decision = self._placement.choose(self._request(pending_request)) if pending_request is not None else None
        best = [each for each in candidate_replicas if decision and each.replica_id.unique_id == decision.replica_id]
        return [best, [each for each in candidate_replicas if each not in best]] if best else [candidate_replicas]

    def _request(self, pending_request: PendingRequest) -> PlacementRequest:
        """The placement request, built once: a refused request asks again."""
        pending = Pending.of(pending_request)
        if pending.placement is None:
            program = pending_request.metadata.session_id
            hint: RoutingHint = pending_request.kwargs.pop(HINT, ANYWHERE)
            if hint.home in self._available:
                self._homes.put(program, hint.home, math.inf)
            home = hint.home if hint.bound else self._homes.get(program, 0.0) or hint.home
            pending.placement = PlacementRequest(
                hint.tokens,
                (
                    *(Prefix(digest, tokens) for digest, tokens in hint.histories),
                    *(Prefix(digest, hint.prefix_tokens) for digest in hint.prefixes),
                ),
                home,
                hint.tokens if home is not None else 0,
                hint.parent,
                "" if hint.shared or not program else program,
                hint.bound,
            )
        return pending.placement

    # ---- sending ----

    def _guarded(self, replica: RunningReplica) -> RunningReplica:
        """`replica` for one call, whose answers are awaited while the replica responds."""

        def send(pending_request: PendingRequest, with_rejection: bool) -> ReplicaResult:
            pending, replica_id = Pending.of(pending_request), replica.replica_id.unique_id
            if (turn := pending.turn) is not None:
                self._health.on_send(turn.request_id, replica_id)
                now = replace(turn, within_s=pending.left_s, replica=replica_id)
                pending_request.args = [
                    now if isinstance(each, GenerateRequest) else each for each in pending_request.args
                ]
            result = replica.try_send_request(pending_request, with_rejection=with_rejection)
            streams = pending_request.metadata.is_streaming
            call = GuardedCall(replica, result, self._health, self._config.silent_s, streams, pending.refused)
            self._calls.add(call)
            return cast(ReplicaResult, call)

        return cast(RunningReplica, GuardedReplica(replica, send))

    def _lose_unresponsive(self) -> None:
        """End the calls of unresponsive replicas. A stream that still brings something goes on."""
        now, quiet_s = time.monotonic(), self._config.silent_s / 2
        calls = [call for call in self._calls if self._health.unresponsive(call.replica_id) and not call.lost]
        for call in calls:
            if now - call.at >= quiet_s:
                call.lose()
        if not all(call.lost for call in calls):
            asyncio.get_running_loop().call_later(quiet_s, self._lose_unresponsive)

    # ---- what Serve says ----

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        # Learned here, where the replica has accepted: a chosen one may refuse.
        # Trap: another ingress process does not see this. It agrees through the program's record.
        if program := pending_request.metadata.session_id:
            self._homes.put(program, replica_id.unique_id, math.inf)
        # Trap: Serve told the replica's count just before, but not for whom: a control call may itself make it high.
        # For a call that does not stream this comes at the very end, after `on_request_completed`.
        if Pending.of(pending_request).turn is not None:
            self._placement.holds(replica_id.unique_id, self._request(pending_request).prefixes)
            turns = self._queue.on_accept(replica_id.unique_id, pending_request.metadata.internal_request_id)
            if turns is not None:
                self._placement.ongoing(replica_id.unique_id, turns)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        # Trap: also called for broadcasts, which take no slot, and for a refused request perhaps after the next try.
        self._queue.release(replica_id.unique_id, internal_request_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        # Trap: Serve's own cache of these counts forgets after ten seconds, so a replica busy with long streams would
        # look idle. What a replica said at an acceptance, less what has ended since, does not age.
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._queue.on_report(replica_id.unique_id, num_ongoing_requests)

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._queue.on_end(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = dict(self.listed)
        super().update_replicas(replicas)
        self._stopping |= {each.unique_id: before[each] for each in before.keys() - self.listed.keys()}
        for replica_id in list(self._stopping)[:-STOPPING]:
            del self._stopping[replica_id]
        # Counted here alone, because Serve drops a dead replica from its list once: a call that meets the death comes
        # earlier, and an older list may follow that.
        listed = {each.replica_id.unique_id for each in replicas}
        self._stats.joined += len(listed - self._listed_ids)
        self._stats.lost += len(self._listed_ids - listed)
        self._listed_ids = listed
        self.on_replicas_changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._stopping.pop(replica_id.unique_id, None)
        self.on_replicas_changed()

    # ---- what `replica_health` says ----

    def on_replicas_changed(self) -> None:
        """Serve's list of replicas changed, a replica became unresponsive, or one answers again."""
        listed = {each.replica_id.unique_id: each for each in self.listed.values()}
        self._health.keep(set(listed))
        available = {each: replica for each, replica in listed.items() if not self._health.unresponsive(each)}
        joined = available.keys() - self._available.keys()
        self._available = available
        capacity = {each: int(r.max_ongoing_requests) - self._control_calls for each, r in available.items()}
        self._placement.update(capacity)
        for each in joined:
            if (report := self._health.latest(each)) is not None:
                self._placement.report(each, report)
        self._queue.update(capacity)
        if available:
            self.changed.set()
        if len(available) < len(listed):
            self._lose_unresponsive()

    def on_report(self, replica_id: str, report: LoadReport) -> None:
        """A replica reported its load."""
        self._placement.report(replica_id, report)


def _with_room(replica_id: str, request: PlacementRequest) -> Decision:
    """A replica that had a slot when the chosen one had none."""
    if request.home is None:
        return Decision(replica_id, Reason.LOAD)
    return Decision(replica_id, Reason.HOME if replica_id == request.home else Reason.WAITED)
