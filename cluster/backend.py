"""The router's `Backend` over a Ray Serve handle: calls, streams, and what happens when a replica dies.

`router.affinity` chooses the replica. A request whose replica died or stops is sent to another replica. A whole reply
starts again; a stream continues after the tokens that its client has. Each token depends on the prompt and its position
alone, so the stream is the same.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from holdfast.replicas.errors import ErrorInfo, ErrorKind, HoldfastError, UnavailableError, error_of
from holdfast.replicas.requests import (
    ChatPrompt,
    Completed,
    Errored,
    GenerateRequest,
    ModelCard,
    PartialReply,
    RawPrompt,
    SessionCall,
    SessionState,
    Usage,
)
from holdfast.replicas.stats import ReplicaStatus
from holdfast.router.backend import ANYWHERE, Batch, Routed, RoutingHint
from holdfast.router.dispatch import ReplicaHealth
from holdfast.router.dispatch.affinity import HINT, USED
from holdfast.router.dispatch.serve_private import REFUSED_S, answers_of_each, own_request
from holdfast.router.records import RoundTrips

log = logging.getLogger(__name__)

# Errors of a call whose replica is gone. Trap: Serve does not retry a call that was running when its replica died.
LOST = (RayActorError, ReplicaUnavailableError, RequestCancelledError)
# Errors of a broadcast call that the replica may not have got. Trap: a dead replica raises them until Serve notices.
UNANSWERED = (TimeoutError, ActorUnavailableError)
ATTEMPTS = 3

# Plain data needs no cloudpickle, Serve's default, which takes several times as long.
_PICKLE = {"request_serialization": "pickle", "response_serialization": "pickle"}
RETRY_S = 0.1  # between two tries to reach a first replica
STATUS_S = 2.0  # a replica that takes longer for its status is left out
CONTROL_S = 5.0  # the same for metrics, and for the end of a program
HEALTHY_S = 2.0  # a replica that takes longer to answer is not healthy


class ServeBackend:
    """The replicas behind `handle`. One per ingress process; all methods run on its event loop."""

    def __init__(self, handle: DeploymentHandle[Any], health: ReplicaHealth) -> None:
        self._handle = handle
        self._health = health
        self._generate = handle.options(method_name="generate", **_PICKLE)
        self._stream = handle.options(method_name="stream", stream=True, **_PICKLE)
        self._cards: tuple[ModelCard, ...] = ()
        self._counting: dict[str, RoundTrips[str, Usage]] = {}  # by replica

    async def start(self, timeout_s: float) -> None:
        """Get the served models from the first replica that answers. Raises TimeoutError if none does."""
        async with asyncio.timeout(timeout_s):
            while True:
                with suppress(UnavailableError):  # a model may take longer to load than a request waits for a replica
                    self._cards = (await self._call("card"),)
                    return
                await asyncio.sleep(RETRY_S)

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        try:
            return await self._attempt(request, place)
        finally:
            self._health.on_end(request.request_id)

    async def _attempt(self, request: GenerateRequest, place: RoutingHint) -> Routed:
        handle, began = self._generate.options(session_id=request.program_id), time.monotonic()
        for attempt in range(1, _attempts(request) + 1):
            with own_request():
                call = handle.remote(_now(request, began), **{HINT: place})
            try:
                result: Routed = await call
                if not self._refused(result.replica_id, result.reply, request, attempt):
                    return result
            except LOST as error:
                log.warning("attempt %d of request %s lost its replica: %s", attempt, request.request_id, error)
            except asyncio.CancelledError:
                # The call has a request id of its own, so Serve does not cancel it with the HTTP request.
                call.cancel()
                raise
        return Routed("", lost())

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        handle = self._stream.options(session_id=request.program_id)
        replica_id, drawing, began = "", PartialReply(request.drawn), time.monotonic()
        for attempt in range(1, _attempts(request) + 1):
            with own_request():
                call = handle.remote(_now(request, began), **{HINT: place})
            ended = False
            try:
                async for batch in call:
                    if self._refused(batch.replica_id, batch.pieces[-1], request, attempt):
                        break
                    replica_id, ended = batch.replica_id, isinstance(batch.pieces[-1], Completed | Errored)
                    drawing.merge(batch.drawn)
                    yield batch
            except LOST as error:
                log.warning("attempt %d of request %s lost its replica: %s", attempt, request.request_id, error)
            finally:
                self._health.on_end(request.request_id)
                if not ended:
                    call.cancel()
            if ended:
                return
            if replica_id:  # the client has a part of the answer
                request = replace(request, drawn=drawing.whole)
        yield Batch(replica_id, (lost(),))

    def _refused(self, replica_id: str, last: object, request: GenerateRequest, attempt: int) -> bool:
        """Whether a reply ends because its replica stops, its engine's thread has died, or the call was misdirected."""
        if not isinstance(last, Errored) or last.error.kind is not ErrorKind.UNAVAILABLE:
            return False
        log.warning("attempt %d of request %s: replica %s refuses it", attempt, request.request_id, replica_id)
        sent_to = self._health.replica_of(request.request_id)
        if sent_to is not None and sent_to != replica_id:  # that one is dead, and another has its port
            self._health.eject(sent_to, REFUSED_S)
        return True

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        try:
            answer: SessionState | Errored = await _call_one(self._handle, replica_id, "session", call, program=program)
        except LOST as error:
            raise UnavailableError("the session's replica did not answer; try again") from error
        if isinstance(answer, Errored):
            raise error_of(answer.error)
        return answer

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        return [state for each in await _answers(self._handle, list, "sessions", scope) for state in each]

    async def end_program(self, scope: str, program_id: str) -> None:
        # To all: the program's record may name another replica than the one that had it last.
        try:
            with own_request():
                ended = await answers_of_each(self._handle.broadcast("end_program", scope, program_id), CONTROL_S)
        except TimeoutError as error:
            ended = [error]
        if any(isinstance(each, UNANSWERED) for each in ended):  # a dead replica keeps nothing
            raise UnavailableError("a replica did not answer; the program may not have ended there")

    async def release(self, scope: str, handle: str) -> None:
        # To all: it may have been computed elsewhere since. A replica that does not answer keeps it until it expires.
        with own_request(), suppress(TimeoutError):
            await answers_of_each(self._handle.broadcast("release", scope, handle), CONTROL_S)

    async def drawn(self, request_id: str) -> Usage | None:
        replica_id = self._health.replica_of(request_id)
        if replica_id is None:  # no replica got it
            return Usage()
        trips = self._counting.get(replica_id)
        if trips is None:
            trips = self._counting[replica_id] = RoundTrips(partial(self._drawn_at, replica_id))
        try:
            return await trips.ask(request_id)
        finally:
            if trips.idle:
                self._counting.pop(replica_id, None)

    async def _drawn_at(self, replica_id: str, request_ids: Sequence[str]) -> Sequence[Usage] | None:
        with suppress(TimeoutError, HoldfastError, *LOST):
            async with asyncio.timeout(CONTROL_S):
                usages: Sequence[Usage] | None = await _call_one(self._handle, replica_id, USED, request_ids)
                if usages is not None:
                    return usages
        log.warning("replica %s has not said what it did for %d requests", replica_id, len(request_ids))
        return None

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str) -> Sequence[int]:
        return await self._call("tokenize", prompt, scope)  # type: ignore[no-any-return]

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._call("detokenize", tokens)  # type: ignore[no-any-return]

    async def models(self) -> Sequence[ModelCard]:
        return self._cards

    async def metrics(self, only: str | None = None) -> Mapping[str, str]:
        return await expositions(self._handle, only)

    async def status(self) -> Sequence[ReplicaStatus]:
        return await _answers(self._handle, dict, "status")

    async def activity(self, scope: str | None) -> Sequence[bytes]:
        return await _answers(self._handle, bytes, "activity", scope)

    async def healthy(self) -> bool:
        # A real call: the handle's list of replicas may be older than their death.
        with suppress(TimeoutError, HoldfastError):
            async with asyncio.timeout(HEALTHY_S):
                await self._call("card")
                return True
        return False

    async def _call(self, method: str, *args: Any) -> Any:
        """One plain call to the least busy replica. It is repeated if the replica dies during the call."""
        handle = self._handle.options(method_name=method)
        for _ in range(ATTEMPTS):
            with own_request(), suppress(*LOST):
                return await handle.remote(*args)
        raise UnavailableError("no replica answered")


async def _answers(handle: DeploymentHandle[Any], kind: type, method: str, *args: Any) -> list[Any]:
    """The answers of type `kind` from the replicas that answer within `STATUS_S`."""
    with own_request(), suppress(TimeoutError):
        answers = await answers_of_each(handle.broadcast(method, *args), STATUS_S)
        return [each for each in answers if isinstance(each, kind)]
    return []


async def _call_one(
    handle: DeploymentHandle[Any], replica_id: str, method: str, argument: Any, program: str = ""
) -> Any:
    """Call a method of one replica. Raises one of `LOST` if that replica does not answer."""
    bound = handle.options(method_name=method, session_id=program, **_PICKLE)
    with own_request():
        running = bound.remote(argument, replica_id, **{HINT: RoutingHint(replica_id, bound=True)})
    try:
        return await running
    except asyncio.CancelledError:
        running.cancel()
        raise


async def expositions(handle: DeploymentHandle[Any], only: str | None) -> Mapping[str, str]:
    """The metrics of each replica of a deployment that answers, by its id."""
    with own_request(), suppress(TimeoutError):
        answers = await answers_of_each(handle.broadcast("metrics", only), CONTROL_S)
        return dict(each for each in answers if isinstance(each, tuple))
    return {}


def _now(request: GenerateRequest, began: float) -> GenerateRequest:
    """`request` with what is left of its time since it `began`."""
    if request.within_s == inf:
        return request
    return replace(request, within_s=request.within_s - (time.monotonic() - began))


def _attempts(request: GenerateRequest) -> int:
    """The allowed number of attempts. A session's operation gets one: `router.session_homes` moves sessions."""
    return ATTEMPTS if request.session is None or request.session.opens else 1


def lost() -> Errored:
    """The error of a request whose replica died and that cannot be sent again."""
    return Errored(ErrorInfo(ErrorKind.UNAVAILABLE, "the replica that served this request was lost"))
