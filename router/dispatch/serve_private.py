"""Every use that the router makes of undocumented parts of Ray Serve.

`tests/router/dispatch/test_serve_private.py` checks each use. With a new release of Ray, run that file and
`tests/cluster/test_serve_private.py` first: a failure names the use that changed.

    RouterHooks      the only hook that keeps program order among requests that wait (Serve's own polls in no order)
    GuardedReplica   ends calls to replicas that vanished: TCP notices after minutes, and Serve waits without a bound
    release_cycle    50 objects of garbage a request: collections took 60 ms, with every request waiting
    own_request      calls of one HTTP request share an id, and Serve takes one for another
    answers_of_each  one late answer to a broadcast would be a TimeoutError for all
    proxy_host       whether strangers can connect: a server without keys refuses them

What the cluster uses beside these is in `cluster/serve_private.py`. The two are the only such files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import ray
from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import ActorUnavailableError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.context import _get_serve_request_context, _serve_request_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import PendingRequest, ReplicaResult, RequestRouter, RunningReplica

from holdfast.router.dispatch.replica_health import ReplicaHealth

ACCEPT_S = 3.0  # a replica that neither accepts a call nor reports for so long is ejected
REFUSED_S = 2.0  # a replica whose machine refuses connections is ejected for so long
LATE_S = 1.0  # a timer that fires so late says that this process stood still: reports are yet to be read
FOREIGN = (StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED)  # answers of servers that are not of this cluster


class RouterHooks(RequestRouter):  # type: ignore[misc]
    """Serve's request router, with public names for what a subclass needs."""

    # Trap: Serve's own loop polls full replicas with a growing pause, so requests leave it in no order, and its FIFO
    # mixin gives a chosen replica to whichever request waits longest, which splits programs.
    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        return await self.choose(pending_request, is_retry=is_retry)

    async def choose(self, pending_request: PendingRequest, *, is_retry: bool) -> RunningReplica:
        """The replica that gets this request; `is_retry`: a replica has refused it before."""
        raise NotImplementedError

    @property
    def listed(self) -> dict[Any, RunningReplica]:
        """The replicas that Serve knows, by ReplicaID, less those whose death a call met."""
        return cast("dict[Any, RunningReplica]", self._replicas)

    @property
    def changed(self) -> asyncio.Event:
        """Set when the replicas change."""
        return cast(asyncio.Event, self._replicas_updated_event)


class GuardedReplica:
    """A replica for one call, which `send` sends. All else is the replica's."""

    def __init__(self, replica: RunningReplica, send: Callable[[PendingRequest, bool], ReplicaResult]) -> None:
        self._replica = replica
        self._send = send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        return self._send(pr, with_rejection)


class GuardedCall:
    """A call's result, which Serve reads. It ends with ActorUnavailableError once its replica is unresponsive.

    It ends so too if another server has the replica's port. All else is the result's. It is part of no reference
    cycle, so it is gone with its call.
    """

    def __init__(
        self,
        replica: RunningReplica,
        result: ReplicaResult,
        health: ReplicaHealth,
        silent_s: float,
        streams: bool,
        on_refused: Callable[[], object],
    ) -> None:
        self.replica_id: str = replica.replica_id.unique_id
        self.at = time.monotonic()  # when anything came of it last
        self.lost = False
        self._actor = replica.actor_id
        self._result = result
        self._health = health
        self._silent_s = silent_s
        self._streams = streams
        self._on_refused = on_refused
        self._timeout: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    def lose(self) -> None:
        """Stop waiting for it."""
        self.lost = True
        if self._timeout is not None:
            with suppress(RuntimeError):  # nobody waits just now
                self._timeout.reschedule(asyncio.get_running_loop().time())

    async def get_rejection_response(self) -> Any:
        # Trap: a call that does not stream is accepted when it is over.
        left_s = self._acceptance_s if self._streams else None
        try:
            return await self._guard(self._result.get_rejection_response, left_s)
        except ActorUnavailableError:
            self._on_refused()
            self._health.eject(self.replica_id, self._silent_s if self.lost else REFUSED_S)
            raise

    async def get_async(self) -> Any:
        try:
            return await self._result.get_async()
        finally:
            release_cycle(self._result)

    async def __anext__(self) -> Any:
        try:
            return await self._guard(self._result.__anext__)
        except StopAsyncIteration:
            release_cycle(self._result)
            raise

    async def _guard(self, coming: Callable[[], Awaitable[Any]], left_s: Callable[[], float] | None = None) -> Any:
        """The result of `coming`, unless the call is lost or `left_s` runs out first."""
        self._timeout = asyncio.timeout(0.0 if self.lost else None)
        try:
            async with self._timeout:
                if left_s is not None:
                    self._check_time(asyncio.get_running_loop().time(), left_s)
                result = await coming()
        except TimeoutError:
            if not self._timeout.expired():
                raise
            self.lost = True
            self._result.cancel()
            raise ActorUnavailableError("the replica does not answer", self._actor.binary()) from None
        except (AioRpcError, RuntimeError) as error:
            if not _is_foreign(error):
                raise
            raise ActorUnavailableError("another server has the replica's port", self._actor.binary()) from None
        finally:
            self._timeout = None  # it holds the task, whose result holds the call
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self.at = time.monotonic()
        return result

    def _check_time(self, due: float, left_s: Callable[[], float]) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        left = LATE_S if now - due > LATE_S else left_s()
        if left > 0:
            self._timer = loop.call_at(now + left, self._check_time, now + left, left_s)
        else:
            self.lose()

    def _acceptance_s(self) -> float:
        """Time left to accept the call: `ACCEPT_S` since the replica was heard last, `silent_s` in all.

        A replica that reports is alive but late. Without this rule a busy machine would lose its replicas one after the
        other, and each loss would move their programs.
        """
        now = time.monotonic()
        last_report = max(self.at, now - self._health.quiet_s(self.replica_id))
        return min(last_report + ACCEPT_S, self.at + max(ACCEPT_S, self._silent_s)) - now


def _is_foreign(error: AioRpcError | RuntimeError) -> bool:
    """Whether a call met another server at the port of a dead replica.

    Trap: if that ends a stream before it begins, Serve raises a RuntimeError with the status in its text.
    """
    if isinstance(error, AioRpcError):
        return error.code() in FOREIGN
    return str(error).startswith(tuple(f"Unexpected error ({code})" for code in (StatusCode.UNAVAILABLE, *FOREIGN)))


def release_cycle(result: ReplicaResult) -> None:
    """Take apart a call that is over.

    Trap: a gRPC call through interceptors, as Serve's are, holds the inner call, which holds the waiter for its end,
    which holds the outer call.
    """
    call: Any = getattr(result, "_call", None)
    if hasattr(call, "_interceptors_task") and call.done():
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        over.set_exception(asyncio.InvalidStateError("the call is over"))
        over.exception()  # marks it as seen
        call._interceptors_task = over


async def answers_of_each(broadcast: DeploymentBroadcastResponse, timeout_s: float) -> list[Any]:
    """Each replica's answer to a broadcast, or its exception: TimeoutError if it takes longer.

    Empty without replicas. Raises TimeoutError if the time is over before the calls are sent.
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
    """Calls on a handle inside count as a request of their own.

    Trap: calls made while one HTTP request is served share its `internal_request_id`, by which Serve finds what to
    cancel or send.
    """
    context = _get_serve_request_context()
    token = _serve_request_context.set(replace(context, _internal_request_id=uuid4().hex))
    try:
        yield
    finally:
        _serve_request_context.reset(token)


async def proxy_host() -> str:
    """The address that Serve's proxies really listen on."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    return str((await controller.get_http_config.remote()).host)
