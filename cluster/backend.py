"""The router's `Backend` over a Ray Serve handle: calls, streams, and what happens when a replica dies.

Choosing the replica is `router.affinity`'s. A request whose replica died or stops is sent again, to another one: a
whole reply from the start, a stream from the tokens that its client has the pieces of. What comes next depends on the
prompt and the position alone, so a stream goes on as it would have.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from holdfast.cluster.early import EarlyPieces
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
from holdfast.router.affinity import COUNTS, HINT, from_each, own_request
from holdfast.router.backend import ANYWHERE, Batch, Place, Routed
from holdfast.router.fleet import FLEET
from holdfast.router.round_trips import RoundTrips

log = logging.getLogger(__name__)

# What a call raises when its replica is gone. Trap: Serve does not retry a call that was running when it died.
LOST = (RayActorError, ReplicaUnavailableError, RequestCancelledError)
# How one says that it may not have got a call. Trap: over gRPC one that has died does so, too, until Serve knows.
UNANSWERED = (TimeoutError, ActorUnavailableError)
ATTEMPTS = 3

# What crosses is our own plain data; cloudpickle, Serve's default, takes several times as long for it.
_PICKLE = {"request_serialization": "pickle", "response_serialization": "pickle"}
RETRY_S = 0.1  # between two looks whether a first replica is there
STATUS_S = 2.0  # a replica that takes longer is left out
CONTROL_S = 5.0  # as long has a replica for its metrics, and to end a program
HEALTHY_S = 2.0  # a replica that takes longer to say its name is not well


class ServeBackend:
    """The replicas behind `handle`. One per ingress process; all methods run on its event loop.

    `early`: where those of this machine tell the first pieces of streams, if they are to.
    """

    def __init__(self, handle: DeploymentHandle[Any], early: EarlyPieces | None = None) -> None:
        self._handle = handle
        self._early = early
        self._generate = handle.options(method_name="generate", **_PICKLE)
        self._stream = handle.options(method_name="stream", stream=True, **_PICKLE)
        self._cards: tuple[ModelCard, ...] = ()
        self._counting: dict[str, RoundTrips[str, Usage]] = {}  # by replica

    async def start(self, timeout_s: float) -> None:
        """Learn what is served, from the first replica that answers; raises TimeoutError when none does."""
        async with asyncio.timeout(timeout_s):
            while True:
                with suppress(UnavailableError):  # a model may take longer to load than a request waits for a replica
                    self._cards = (await self._call("card"),)
                    return
                await asyncio.sleep(RETRY_S)

    async def generate(self, request: GenerateRequest, place: Place = ANYWHERE) -> Routed:
        try:
            return await self._generated(request, place)
        finally:
            FLEET.ended(request.request_id)

    async def _generated(self, request: GenerateRequest, place: Place) -> Routed:
        handle, began = self._generate.options(session_id=request.program_id), time.monotonic()
        for attempt in range(1, _attempts(request) + 1):
            with own_request():
                call = handle.remote(_now(request, began), **{HINT: place})
            try:
                routed: Routed = await call
                if not _stopped(routed.reply):
                    _heard(routed.replica_id, _now(request, began), routed.reply)
                    return routed
                log.warning("attempt %d of request %s came to a replica that stops", attempt, request.request_id)
            except LOST as error:
                log.warning("attempt %d of request %s lost its replica: %s", attempt, request.request_id, error)
            except asyncio.CancelledError:
                # The id of the request is its own, so Serve's cancellation of the HTTP request does not find it.
                call.cancel()
                raise
        return Routed("", lost())

    async def stream(self, request: GenerateRequest, place: Place = ANYWHERE) -> AsyncGenerator[Batch, None]:
        handle = self._stream.options(session_id=request.program_id)
        replica_id, drawing, began = "", PartialReply(request.drawn), time.monotonic()
        for attempt in range(1, _attempts(request) + 1):
            early = None if self._early is None else self._early.expect()
            asked = _now(request, began)
            with own_request():
                call = handle.remote(replace(asked, early=early.to) if early else asked, **{HINT: place})
            ended = False
            try:
                async with aclosing(early.before(call)) if early else nullcontext(call) as batches:
                    async for batch in batches:
                        if _stopped(batch.pieces[-1]):
                            message = "attempt %d of request %s came to a replica that stops"
                            log.warning(message, attempt, request.request_id)
                            break
                        replica_id, ended = batch.replica_id, isinstance(batch.pieces[-1], Completed | Errored)
                        _heard(replica_id, _now(request, began), batch.pieces[-1])
                        drawing.merge(batch.drawn)
                        yield batch
            except LOST as error:
                log.warning("attempt %d of request %s lost its replica: %s", attempt, request.request_id, error)
            finally:
                FLEET.ended(request.request_id)
                if not ended:
                    call.cancel()
            if ended:
                return
            if replica_id:  # the client has a part of the answer
                request = replace(request, drawn=drawing.whole)
        yield Batch(replica_id, (lost(),))

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        handle = self._handle.options(method_name="session", session_id=program, **_PICKLE)
        with own_request():
            asked = handle.remote(call, **{HINT: Place(replica_id, bound=True)})
        try:
            answer: SessionState | Errored = await asked
        except LOST as error:
            raise UnavailableError("the session's replica did not answer; try again") from error
        except asyncio.CancelledError:
            asked.cancel()
            raise
        if isinstance(answer, Errored):
            raise error_of(answer.error)
        return answer

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        with own_request(), suppress(TimeoutError):
            told = await from_each(self._handle.broadcast("sessions", scope), STATUS_S)
            return [state for each in told if isinstance(each, list) for state in each]
        return []

    async def end_program(self, scope: str, program_id: str) -> None:
        # To all: whichever had it last may not be the one that the program table names.
        try:
            with own_request():
                ended = await from_each(self._handle.broadcast("end_program", scope, program_id), CONTROL_S)
        except TimeoutError as error:
            ended = [error]
        if any(isinstance(each, UNANSWERED) for each in ended):  # one that has died keeps nothing
            raise UnavailableError("a replica did not answer; the program may not have ended there")

    async def release(self, scope: str, handle: str) -> None:
        # To all: it may have been computed elsewhere since. One that does not answer keeps it until its time is over.
        with own_request(), suppress(TimeoutError):
            await from_each(self._handle.broadcast("release", scope, handle), CONTROL_S)

    async def drawn(self, request_id: str) -> Usage | None:
        replica_id = FLEET.replica_of(request_id)
        if replica_id is None:  # it was sent to none
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
        handle = self._handle.options(method_name=COUNTS, **_PICKLE)
        with suppress(TimeoutError, HoldfastError, *LOST):
            async with asyncio.timeout(CONTROL_S):
                with own_request():
                    asked = handle.remote(request_ids, **{HINT: Place(replica_id, bound=True)})
                try:
                    return await asked  # type: ignore[no-any-return]
                except asyncio.CancelledError:
                    asked.cancel()
                    raise
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
        with own_request(), suppress(TimeoutError):
            told = await from_each(self._handle.broadcast("status"), STATUS_S)
            return [each for each in told if isinstance(each, dict)]
        return []

    async def activity(self, scope: str | None) -> Sequence[bytes]:
        with own_request(), suppress(TimeoutError):
            told = await from_each(self._handle.broadcast("activity", scope), STATUS_S)
            return [each for each in told if isinstance(each, bytes)]
        return []

    async def healthy(self) -> bool:
        # Asked for real: what the handle knows of its replicas may be from before they died.
        with suppress(TimeoutError, HoldfastError):
            async with asyncio.timeout(HEALTHY_S):
                await self._call("card")
                return True
        return False

    async def _call(self, method: str, *args: Any) -> Any:
        """One plain call to the least busy replica, again while replicas die under it."""
        handle = self._handle.options(method_name=method)
        for _ in range(ATTEMPTS):
            with own_request(), suppress(*LOST):
                return await handle.remote(*args)
        raise UnavailableError("no replica answered")


async def expositions(handle: DeploymentHandle[Any], only: str | None) -> Mapping[str, str]:
    """What `metrics` of each replica of a deployment says, by its id; those that do not answer are left out."""
    with own_request(), suppress(TimeoutError):
        told = await from_each(handle.broadcast("metrics", only), CONTROL_S)
        return dict(each for each in told if isinstance(each, tuple))
    return {}


def _stopped(last: object) -> bool:
    """Whether a reply has ended because its replica stops, or its engine's thread has died."""
    return isinstance(last, Errored) and last.error.kind is ErrorKind.UNAVAILABLE


def _heard(replica_id: str, request: GenerateRequest, last: object) -> None:
    """A reply has come so far, to what is left of a request."""
    if isinstance(last, Errored):
        FLEET.refused(replica_id, request, last.error)


def _now(request: GenerateRequest, began: float) -> GenerateRequest:
    """`request` with what is left of its time since it `began`."""
    if request.within_s == inf:
        return request
    return replace(request, within_s=request.within_s - (time.monotonic() - began))


def _attempts(request: GenerateRequest) -> int:
    """How often it may be sent. A session's operation goes to its replica alone, and whether that is lost to it, or the
    session, is for `router.session_homes` to say.
    """
    return ATTEMPTS if request.session is None or request.session.opens else 1


def lost() -> Errored:
    """What a request ends with when its replica died and it cannot be sent again."""
    return Errored(ErrorInfo(ErrorKind.UNAVAILABLE, "the replica that served this request was lost"))
