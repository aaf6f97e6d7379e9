"""The request router that Ray Serve runs in front of the replicas: placement by program, waiting in program order.

Every name of Ray that is not public is used in this file and nowhere else; `tests/router/test_affinity*.py` check that
they are still there. Where Serve has a trap, a comment starts with "Trap:". Which replica is `placement`'s decision,
where they wait is `gate`.

The state below lives once per ingress process: each keeps the order of the requests it has.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast
from uuid import uuid4
from weakref import WeakSet

import ray
from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import ActorUnavailableError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context, _serve_request_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from holdfast.replicas.errors import DeadlineError, OverloadedError, SessionLostError, UnavailableError
from holdfast.replicas.requests import GenerateRequest
from holdfast.replicas.stats import LoadReport
from holdfast.replicas.types import Priority
from holdfast.router import elsewhere, fleet
from holdfast.router.backend import ANYWHERE, Place
from holdfast.router.gate import Gate
from holdfast.router.line_stats import LineStats, show
from holdfast.router.lines import NOBODY, Payer
from holdfast.router.placement import Ask, Choice, Placement, PlacementConfig, Prefix, Reason

MEANT = "holdfast-replica"  # header of a call to a replica: the one that it is meant for
HINT = "place"  # keyword argument of a call: the `Place` where it would best be served
ASK = "_holdfast_ask"  # attribute of a pending request: what is known for its placement
ENTERED = "_holdfast_entered"  # attribute of a pending request: when it came, on the monotonic clock
DEADLINE = "_holdfast_deadline"  # attribute of a pending request: when its answer is wanted, on the monotonic clock
LOST = "_holdfast_lost"  # attribute of a pending request: since when replicas do not take it, on the monotonic clock
COUNTS = "drawn"  # the call by which a router asks what was done for requests that were cut off
LEAVING = 64  # replicas that may still answer it after Serve has taken them out
KNOWN_S = 2.0  # within which a router learns of a replica that others know
REFUSED_S = 2.0  # how long a replica is passed by whose machine refuses connections
ANOTHERS = (StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED)  # what servers that are none of ours say to a call
LATE_S = 1.0  # a look that comes so late says that this process stood still: what was told meanwhile is yet to be read


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
    say how they are. `fair`: tenants share the slots of full replicas by their weights, and programs wait behind others
    of their own tenant only.
    """

    def initialize_state(self, control_calls: int = 0, fair: bool = False, **kwargs: Any) -> None:
        self._control_calls = control_calls
        self._config = PlacementConfig(**kwargs)
        self._pins = Pins(self._config.pins)
        self._placement = Placement(self._config, random.Random())
        most, tokens = self._config.max_waiting, self._config.max_waiting_tokens
        self._gate = Gate(most, self._placement, control_calls, fair=fair, max_waiting_tokens=tokens)
        elsewhere.LINES.add(self._gate.shares)
        self._tally = LineStats()
        self._by_id: dict[str, RunningReplica] = {}  # those that are there and not silent
        self._listed: set[str] = set()  # the replicas that Serve listed last
        self._leaving: dict[str, RunningReplica] = {}  # those that are not there any more, the latest ones
        self._calls: WeakSet[Call] = WeakSet()
        # Trap: Serve copies this module into the process by value, and with it every object that it names: what is to
        # be found there stands in other modules, and is named through them.
        show(self)
        fleet.FLEET.watch(self)

    @property
    def line_stats(self) -> LineStats:
        balance = self._placement.balance
        waiting, tokens = len(self._gate), self._gate.tokens
        return replace(self._tally, waiting=waiting, tokens=tokens, replicas=len(self._by_id), balance=balance)

    # ---- choosing ----

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that is to have this request, once it has room and nobody is before it.

        Raises UnavailableError where there is none, OverloadedError where too many wait or this one does too long,
        DeadlineError where it would, or does, wait longer than its client.
        """
        request_id = pending_request.metadata.internal_request_id
        _waited(pending_request)  # it waits from now on
        # Serve lists no replica that stops, but only that one knows what it did for a request that was cut off.
        if pending_request.metadata.call_method == COUNTS and not is_retry:
            leaving = self._leaving.get(self._ask(pending_request).home or "")
            if leaving is not None:
                return self._watched(leaving)
        while True:
            # Trap: with no replica left Serve waits for the next one without a bound.
            if not self._by_id:
                await self._wait_for_a_replica()
            if time.monotonic() - getattr(pending_request, LOST, math.inf) > self._config.no_replica_s:
                raise UnavailableError(f"no replica has taken the request within {self._config.no_replica_s:g} s")
            ask = self._ask(pending_request)
            choice = self._placement.choose(ask)
            if choice is None:
                continue
            if ask.bound and choice.reason is not Reason.HOME:
                await self._wait_for(ask.home)
                continue
            # Once refused by the replica, where too many such calls are, it waits as others do.
            if self._control_calls and not is_retry and _turn(pending_request) is None:
                return self._watched(self._by_id[choice.replica_id])
            taken = self._take(ask, choice, pending_request) or await self._wait_in_line(ask, choice, pending_request)
            if taken is None:
                continue
            if (replica := self._by_id.get(taken.replica_id)) is not None:
                self._foretell(taken.replica_id, pending_request)
                self._tally = self._tally.placed_for(taken.reason)
                return self._watched(replica)
            self._gate.give_back(taken.replica_id, request_id)

    def _foretell(self, replica_id: str, pending_request: PendingRequest) -> None:
        """Raises DeadlineError where the replica would refuse the request, as it has just refused one like it."""
        turn = _turn(pending_request)
        if turn is None or not (expected_s := fleet.FLEET.expected_s(replica_id, turn, self._config.foretold_s)):
            return
        if expected_s > (given_s := _left(pending_request, turn)):
            self._gate.give_back(replica_id, pending_request.metadata.internal_request_id)
            self._tally = replace(self._tally, foretold=self._tally.foretold + 1)
            told = f"an answer is expected in {expected_s:.1f} s, and the request gives it {given_s:.1f} s"
            raise DeadlineError(told, "timeout", retry_after_s=expected_s - given_s)

    def _take(self, ask: Ask, choice: Choice, pending_request: PendingRequest) -> Choice | None:
        """A slot where the request is to go, or where a new program may go instead; None: it has to wait."""
        request_id, payer = pending_request.metadata.internal_request_id, _payer(pending_request)
        if self._gate.take(choice.replica_id, request_id, payer):
            return choice
        if choice.reason is Reason.HOME:
            if ask.bound or _waited(pending_request) < self._placement.patience(ask):
                return None
            other = self._placement.elsewhere(ask)
            if other is not None and self._gate.take(other.replica_id, request_id, payer):
                return other
        found = self._gate.take_any(request_id, payer)
        return None if found is None else _found(found, ask)

    async def _wait_in_line(self, ask: Ask, choice: Choice, pending_request: PendingRequest) -> Choice | None:
        """The replica that took this request; None once its program has waited long enough for its own alone, or
        where the last replica has gone.
        """
        waited, turn = _waited(pending_request), _turn(pending_request)
        left = self._config.queue_timeout_s - waited
        if turn is not None and turn.within_s < math.inf:
            given = _left(pending_request, turn)
            # A program that goes on has its place before those that came later, so for it nothing is foretold.
            expected = 0.0 if turn.program_turns else self._gate.expected_s
            if expected > given or given <= 0:
                told = f"a replica is expected to have room in {expected:.1f} s, and the request gives it {given:.1f} s"
                raise DeadlineError(told, "timeout", retry_after_s=expected - given if expected > given else None)
            left = min(left, given)
        patience = self._placement.patience(ask) - waited if choice.reason is Reason.HOME else 0.0
        if ask.bound:
            patience = left
        home = choice.replica_id if ask.bound or 0 < patience < left else None
        if home is not None and not ask.bound and turn is not None:
            fleet.FLEET.expect(home, turn.scope, turn.program_id, patience)
        # As the engine orders its queue: whose state is kept first, then by when programs began; work ahead is last.
        ahead = turn is not None and turn.background is not None
        key = (float(ahead), float(ask.home not in self._by_id), _arrival(pending_request), pending_request.created_at)
        request_id = pending_request.metadata.internal_request_id
        began = time.monotonic()
        try:
            within_s = left if home is None else patience
            payer = _payer(pending_request)
            chosen = await self._gate.wait(key, home, request_id, within_s, payer, ask.tokens)
        finally:
            again = home is None and ask.home is not None and waited > 0
            self._tally = self._tally.waited(time.monotonic() - began, again, for_home=home is not None)
        waited = _waited(pending_request)
        if chosen is None and turn is not None and turn.within_s < math.inf and _left(pending_request, turn) <= 0:
            raise DeadlineError("the time that the request gave was over before a replica had room", "timeout")
        if chosen is None and waited >= self._config.queue_timeout_s:
            raise OverloadedError("the request waited too long for a replica with room")
        if chosen is not None and ask.bound and chosen != home:  # which went meanwhile
            self._gate.give_back(chosen, request_id)
            return None
        return None if chosen is None else _found(chosen, ask)

    async def _wait_for(self, home: str | None) -> None:
        """Until the replica is there to which a request is bound.

        Raises UnavailableError where it is silent, SessionLostError where it is none of the replicas.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                while home not in self._by_id:
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()
                return
        if any(each.replica_id.unique_id == home for each in self._replicas.values()):
            raise UnavailableError("the session's replica does not answer")
        raise SessionLostError("the session's replica is gone", "session_id")

    async def _wait_for_a_replica(self) -> None:
        try:
            async with asyncio.timeout(self._config.no_replica_s):
                while not self._by_id:
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()
        except TimeoutError:
            raise UnavailableError(f"no replica came up within {self._config.no_replica_s:g} s") from None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best one, then the others: for callers of Serve that choose without sending."""
        choice = self._placement.choose(self._ask(pending_request)) if pending_request is not None else None
        best = [each for each in candidate_replicas if choice and each.replica_id.unique_id == choice.replica_id]
        return [best, [each for each in candidate_replicas if each not in best]] if best else [candidate_replicas]

    def _ask(self, pending_request: PendingRequest) -> Ask:
        """What is known for the placement of a request, which asks again, as the same object, once it was refused."""
        ask: Ask | None = getattr(pending_request, ASK, None)
        if ask is None:
            program = pending_request.metadata.session_id
            place: Place = pending_request.kwargs.pop(HINT, ANYWHERE)
            if place.last_replica in self._by_id:
                self._pins.put(program, place.last_replica)
            home = place.last_replica if place.bound else self._pins.get(program) or place.last_replica
            ask = Ask(
                place.tokens,
                (
                    *(Prefix(digest, tokens) for digest, tokens in place.histories),
                    *(Prefix(digest, place.prefix_tokens) for digest in place.prefixes),
                ),
                home,
                place.tokens if home is not None else 0,
                place.near_replica,
                "" if place.shared or not program else program,
                place.bound,
            )
            setattr(pending_request, ASK, ask)
        return ask

    # ---- replicas that do not answer ----

    def _watched(self, replica: RunningReplica) -> RunningReplica:
        """`replica` for one call, whose answers are waited for as long as it is heard.

        Trap: Serve waits for ever for the acceptance of a call, and for what a stream brings; where a machine is gone
        without a word, TCP learns of it after minutes.
        """

        def send(pending_request: PendingRequest, with_rejection: bool) -> ReplicaResult:
            turn = _turn(pending_request)
            if turn is not None and turn.within_s < math.inf:  # what is left of its time
                now = replace(turn, within_s=_left(pending_request, turn))
                pending_request.args = [now if each is turn else each for each in pending_request.args]
            if turn is not None:
                fleet.FLEET.sent(turn.request_id, replica.replica_id.unique_id)
            result = replica.try_send_request(pending_request, with_rejection=with_rejection)
            call = Call(replica, result)
            self._calls.add(call)
            watched: Any = Watched(result, call, pending_request, self._config)
            return cast(ReplicaResult, watched)

        return Sending(replica, send)

    def _lose_silent(self) -> None:
        """End the calls of replicas that are silent, but for streams that bring something all the same."""
        now, quiet_s = time.monotonic(), self._config.silent_s / 2
        silent = [call for call in self._calls if fleet.FLEET.silent(call.replica_id) and not call.lost]
        for call in silent:
            if now - call.at >= quiet_s:
                call.lose()
        if not all(call.lost for call in silent):
            asyncio.get_running_loop().call_later(quiet_s, self._lose_silent)

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
            self._placement.holds(replica_id.unique_id, self._ask(pending_request).prefixes)
            turns = self._gate.accepted(replica_id.unique_id, pending_request.metadata.internal_request_id)
            if turns is not None:
                self._placement.ongoing(replica_id.unique_id, turns)

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
        before = dict(self._replicas)
        super().update_replicas(replicas)
        self._leaving |= {each.unique_id: before[each] for each in before.keys() - self._replicas.keys()}
        for gone in list(self._leaving)[:-LEAVING]:
            del self._leaving[gone]
        # Counted here alone: Serve drops a dead replica from its list once. A call that meets the death comes earlier,
        # a list from before the death may follow it, and a silent replica is not dead.
        listed = {each.replica_id.unique_id for each in replicas}
        joined, lost = len(listed - self._listed), len(self._listed - listed)
        self._listed, self._tally = listed, self._tally.changed(joined, lost)
        for replica in self._replicas.values():
            address(replica)
        self.replicas_changed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._leaving.pop(replica_id.unique_id, None)
        self.replicas_changed()

    def replicas_changed(self) -> None:
        """There are others, or one of them has fallen silent or is heard again."""
        there = {each.replica_id.unique_id: each for each in self._replicas.values()}
        fleet.FLEET.keep(set(there))
        now = {each: replica for each, replica in there.items() if not fleet.FLEET.silent(each)}
        joined = now.keys() - self._by_id.keys()
        self._by_id = now
        capacity = {each: self._room(replica) for each, replica in now.items()}
        self._placement.update(capacity)
        for each in joined:
            if (report := fleet.FLEET.latest(each)) is not None:
                self._placement.report(each, report)
        self._gate.replicas(capacity)
        if now:
            self._replicas_updated_event.set()
        if len(now) < len(there):
            self._lose_silent()

    # ---- what replicas tell ----

    def told(self, replica_id: str, report: LoadReport) -> None:
        """A replica has told how it is."""
        self._placement.report(replica_id, report)

    def _room(self, replica: RunningReplica) -> int:
        """How many turns a replica takes at once."""
        return int(replica.max_ongoing_requests) - self._control_calls


class Call:
    """A call that was sent to a replica; `at`: when something of it was heard last, on the monotonic clock."""

    def __init__(self, replica: RunningReplica, result: ReplicaResult) -> None:
        self.replica_id: str = replica.replica_id.unique_id
        self.at = time.monotonic()
        self.lost = False
        self._actor = replica.actor_id
        self._result = result
        self._bound: asyncio.Timeout | None = None
        self._look_again: asyncio.TimerHandle | None = None

    async def heard(self, coming: Callable[[], Awaitable[Any]], left_s: Callable[[], float] | None = None) -> Any:
        """What comes next of it; raises ActorUnavailableError where nothing does while there is time left, where the
        call is lost, or where it has come to another server, which knows no such calls.
        """
        self._bound = asyncio.timeout(0.0 if self.lost else None)
        try:
            async with self._bound:
                if left_s is not None:
                    self._look(asyncio.get_running_loop().time(), left_s)
                found = await coming()
        except TimeoutError:
            if not self._bound.expired():
                raise
            self.lost = True
            self._result.cancel()
            raise ActorUnavailableError("the replica does not answer", self._actor.binary()) from None
        except (AioRpcError, RuntimeError) as error:
            if not _of_another(error):
                raise
            raise ActorUnavailableError("another server has the replica's port", self._actor.binary()) from None
        finally:
            self._bound = None  # it holds the task, whose result holds the call
            if self._look_again is not None:
                self._look_again.cancel()
                self._look_again = None
        self.at = time.monotonic()
        return found

    def _look(self, due: float, left_s: Callable[[], float]) -> None:
        """Whether time is left, which was to be looked at when it was `due`; once there is none, the call is lost."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        left = LATE_S if now - due > LATE_S else left_s()
        if left > 0:
            self._look_again = loop.call_at(now + left, self._look, now + left, left_s)
        else:
            self.lose()

    def lose(self) -> None:
        """Nothing is to be waited for any more."""
        self.lost = True
        if self._bound is not None:
            with suppress(RuntimeError):  # nobody waits just now
                self._bound.reschedule(asyncio.get_running_loop().time())


class Addressed:
    """The calls of a replica's gRPC stub, each with the name of the replica that it is meant for."""

    def __init__(self, stub: Any, replica_id: str) -> None:
        self._stub = stub
        self._metadata = ((MEANT, replica_id),)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self._stub, name), metadata=self._metadata)


def address(replica: RunningReplica) -> None:
    """From now on whoever gets a call to `replica` knows for whom it is: another one has its port once it has died."""
    if not isinstance(replica.stub, Addressed):
        replica._stub = Addressed(replica.stub, replica.replica_id.unique_id)


class Sending:
    """A replica as Serve is to send one call to it: all but `try_send_request` is the replica's."""

    def __init__(self, replica: RunningReplica, send: Callable[[PendingRequest, bool], ReplicaResult]) -> None:
        self._replica = replica
        self._send = send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        return self._send(pr, with_rejection)


class Watched:
    """What a call brings, as Serve is to read it: waited for as long as the call is heard. All else is the result's.

    Nothing that it holds holds it, so that it is gone with its call, and no garbage is to be collected.
    """

    def __init__(self, result: ReplicaResult, call: Call, pending: PendingRequest, config: PlacementConfig) -> None:
        self._result = result
        self._call = call
        self._pending = pending
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    async def get_rejection_response(self) -> Any:
        # Trap: a call that does not stream is told to be accepted when it is over.
        left_s = self._acceptance_s if self._pending.metadata.is_streaming else None
        try:
            return await self._call.heard(self._result.get_rejection_response, left_s)
        except ActorUnavailableError:
            vars(self._pending).setdefault(LOST, time.monotonic())
            silent_s = self._config.silent_s if self._call.lost else REFUSED_S
            fleet.FLEET.pass_by(self._call.replica_id, silent_s)
            raise

    async def get_async(self) -> Any:
        try:
            return await self._result.get_async()
        finally:
            let_go(self._result)

    async def __anext__(self) -> Any:
        try:
            return await self._call.heard(self._result.__anext__)
        except StopAsyncIteration:
            let_go(self._result)
            raise

    def _acceptance_s(self) -> float:
        """For how long it may yet go unaccepted: as long as nothing at all is heard of its replica, or `silent_s`.

        One that tells how it is is there, and late: on a busy machine replicas that were would all be passed by, one
        after the other, and each time their programs would move.
        """
        accept_s, now = self._config.accept_s, time.monotonic()
        heard = max(self._call.at, now - fleet.FLEET.quiet_s(self._call.replica_id))
        return min(heard + accept_s, self._call.at + max(accept_s, self._config.silent_s)) - now


def let_go(result: ReplicaResult) -> None:
    """Take apart what a call that is over was made of, so that it leaves no garbage to be collected.

    Trap: a call of gRPC that goes through interceptors, as those of Serve do, holds the call within, which holds who
    waits for its end, and so the outer one. Of fifty such objects a request, collections took 60 ms, with all waiting.
    """
    call: Any = getattr(result, "_call", None)
    if hasattr(call, "_interceptors_task") and call.done():
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        over.set_exception(asyncio.InvalidStateError("the call is over"))
        over.exception()  # somebody has looked at it
        call._interceptors_task = over


def _of_another(error: AioRpcError | RuntimeError) -> bool:
    """Whether this is what a call meets at a port that was a dead replica's and is another server's by now.

    Trap: where that ends a stream before it has begun, Serve tells of it by a RuntimeError with the status in its text.
    """
    if isinstance(error, AioRpcError):
        return error.code() in ANOTHERS
    return str(error).startswith(tuple(f"Unexpected error ({code})" for code in (StatusCode.UNAVAILABLE, *ANOTHERS)))


def _found(replica_id: str, ask: Ask) -> Choice:
    """A replica that had room when the one that was wanted had none."""
    if ask.home is None:
        return Choice(replica_id, Reason.LOAD)
    return Choice(replica_id, Reason.HOME if replica_id == ask.home else Reason.WAITED)


def _waited(pending_request: PendingRequest) -> float:
    """Seconds since this process first had the request; its `created_at` is of a clock that may be set meanwhile."""
    now = time.monotonic()
    # Trap: a request that a replica refused comes back, as the same object: the time stays on it.
    return now - float(vars(pending_request).setdefault(ENTERED, now))


def _left(pending_request: PendingRequest, turn: GenerateRequest) -> float:
    """Seconds until the answer is wanted."""
    now = time.monotonic()
    # Trap: as above; and what is sent says what was left then.
    return float(vars(pending_request).setdefault(DEADLINE, now - _waited(pending_request) + turn.within_s)) - now


def _arrival(pending_request: PendingRequest) -> float:
    """When the program of a call began; a call that is no turn of a program keeps nobody waiting."""
    turn = _turn(pending_request)
    return turn.program_arrival if turn else 0.0


def _payer(pending_request: PendingRequest) -> Payer:
    """What a request counts for. Work ahead, which nobody waits for, goes with batch."""
    turn = _turn(pending_request)
    if turn is None:
        return NOBODY
    priority = turn.priority if turn.background is None else Priority.BATCH
    return Payer(turn.scope, turn.weight, priority, turn.root or turn.program_id or turn.request_id)


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
