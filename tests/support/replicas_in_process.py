"""Several engines behind several routers in one process, on an event loop of its own: replicas are lost as told."""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import httpx
from fake_backend import FakeBackend, NoRedis
from prometheus_client import CollectorRegistry

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorInfo, ErrorKind, SessionLostError, UnavailableError, UnknownSessionError
from holdfast.replicas.requests import (
    AnswerBuilder,
    CloseSession,
    Completed,
    Errored,
    GenerateRequest,
    PartialReply,
    SessionCall,
    SessionState,
)
from holdfast.replicas.service import Service
from holdfast.router.app import create_app
from holdfast.router.backend import ANYWHERE, Batch, Routed, RoutingHint
from holdfast.router.config import RouterConfig
from holdfast.router.entry.metrics import RouterMetrics
from holdfast.router.entry.quotas import Quotas
from holdfast.router.entry.usage import UsageBooks
from holdfast.router.records.programs import ProgramTable
from holdfast.router.records.response_cache import ResponseCache
from holdfast.router.records.store import Records
from holdfast.router.tenants import TenantDirectory

T = TypeVar("T")
LOST = Errored(ErrorInfo(ErrorKind.UNAVAILABLE, "the replica that served this request was lost"))


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result(60.0)

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Trap(Enum):
    """When the replica that serves the next operation is lost: it did not get it, in the middle, or having done it. Or
    it has done it and lives, and what it said is lost.
    """

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"
    CUT = "cut"


class Replicas(FakeBackend):
    """Engines by the ids of their replicas. One that is lost comes back empty, under another id."""

    def __init__(self, n: int, config: EngineConfig) -> None:
        super().__init__()
        self._n = n
        self._config = config
        self._numbers = itertools.count(1)
        self.live: dict[str, Service] = {}
        self.silent: set[str] = set()
        self.trap: Trap | None = None
        self.restore_fails = 0  # so many replicas are lost while they take a session in
        self.meanwhile: Callable[[], Awaitable[object]] | None = None  # done once, before a trap closes
        self._placed = 0
        self.restored: list[GenerateRequest] = []

    async def load(self) -> None:
        """On the loop that uses them."""
        for _ in range(self._n):
            service = Service.load(self._config)
            self.live[self._name()] = service
        self.cards = (replace(service.card, replica_id="r1"),)

    async def close(self) -> None:
        for service in self.live.values():
            await service.close()

    async def lose(self, replica_id: str) -> None:
        """It dies, with all its sessions, and another comes in its place."""
        await self.forget(replica_id)
        self.live[self._name()] = self.live.pop(replica_id)
        self.silent.discard(replica_id)

    async def forget(self, replica_id: str) -> None:
        """It loses its sessions, and goes on."""
        sessions = self.live[replica_id].sessions
        for scope in ("default", "a", "b"):
            for state in sessions.of(scope):
                with suppress(UnknownSessionError):  # a router has closed it meanwhile
                    await sessions.call(CloseSession(scope, state.session_id))

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        built, replica_id = AnswerBuilder(), ""
        async with aclosing(self.stream(request, place)) as batches:
            async for batch in batches:
                replica_id = batch.replica_id
                built.add(batch.pieces)
        return Routed(replica_id, built.answer() or built.error())

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        self.requests.append(request)
        replica_id = self._at(place)
        session, drawing = request.session, PartialReply(request.drawn)
        trap = None
        if session is not None and session.opens and session.appends:
            self.restored.append(request)
            if self.restore_fails:
                self.restore_fails -= 1
                yield Batch(replica_id, (LOST,))
                return
        elif place.bound:
            trap, self.trap = self.trap, None
        if trap is Trap.BEFORE:
            await self.lose(replica_id)
            yield Batch(replica_id, (LOST,))
            return
        async with aclosing(self.live[replica_id].stream(request, drawing)) as stream:
            async for pieces in stream:
                over = isinstance(pieces[-1], Completed | Errored)
                if over and trap is not None:
                    break
                yield Batch(replica_id, pieces, drawn=drawing.take())
                if trap is Trap.DURING:
                    break
            else:
                return
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        if trap is not Trap.CUT:
            await self.lose(replica_id)
        yield Batch(replica_id, (LOST,))

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        at = self._at(RoutingHint(replica_id, bound=True))
        return replace(await self.live[at].sessions.call(call), replica_id=at)

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        return [
            replace(state, replica_id=each)
            for each, service in self.live.items()
            if each not in self.silent
            for state in service.sessions.of(scope)
        ]

    def _at(self, place: RoutingHint) -> str:
        if not place.bound:
            self._placed += 1
            there = sorted(self.live.keys() - self.silent)
            return there[self._placed % len(there)]
        assert place.home is not None
        if place.home in self.silent:
            raise UnavailableError("the session's replica does not answer")
        if place.home not in self.live:
            raise SessionLostError("the session's replica is gone", "session_id")
        return place.home

    def _name(self) -> str:
        return f"r{next(self._numbers):06}"


class Router:
    """One of several at one Redis."""

    def __init__(
        self,
        loop: Loop,
        backend: FakeBackend,
        records: Records,
        config: RouterConfig | None = None,
        tenants: TenantDirectory | None = None,
    ) -> None:
        self._loop = loop
        self.registry, config = CollectorRegistry(), config or RouterConfig()
        self.programs = ProgramTable(records, config)
        cache = ResponseCache(records, config, "weights")
        metrics = RouterMetrics(self.registry)
        self.app = create_app(
            backend,
            tenants or TenantDirectory(),
            self.programs,
            cache,
            metrics,
            records,
            config,
            books=UsageBooks(config, Quotas(NoRedis())),
        )

    async def acall(self, method: str, path: str, key: str = "", **arguments: Any) -> httpx.Response:
        headers = dict(arguments.pop("headers", {}))
        if key:
            headers["idempotency-key"] = key
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers, **arguments)

    def call(self, method: str, path: str, key: str = "", **arguments: Any) -> httpx.Response:
        return self._loop.run(self.acall(method, path, key, **arguments))

    def moves(self) -> dict[str, float]:
        """How many sessions this router has moved, by why."""
        return {
            sample.labels["reason"]: sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "holdfast_session_moves_total" and sample.value
        }
