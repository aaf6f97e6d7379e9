"""The router and one service in this process, behind a real HTTP server: all of Holdfast but Ray."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from fake_backend import FakeBackend, World

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.reports import status_of, told_activity
from holdfast.replicas.requests import (
    ChatPrompt,
    GenerateRequest,
    HandleReleased,
    RawPrompt,
    SessionCall,
    SessionState,
    Usage,
)
from holdfast.replicas.service import Service
from holdfast.replicas.stats import ReplicaStatus
from holdfast.router.backend import ANYWHERE, Batch, RoutingHint

SMALL = EngineConfig(cells=4096, threads=1, speculation=DraftConfig(enabled=False))


class ServiceBackend(FakeBackend):
    """One replica, "r1", loaded on the event loop that asks it first."""

    def __init__(self, config: EngineConfig = SMALL) -> None:
        super().__init__()
        self.config = config
        self.loaded: Service | None = None

    @property
    def service(self) -> Service:
        if self.loaded is None:
            self.loaded = Service.load(self.config)
            self.cards = (replace(self.loaded.card, replica_id="r1"),)
        return self.loaded

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        self.requests.append(request)
        self.places.append(place)
        async with aclosing(self.service.stream(request)) as stream:
            async for pieces in stream:
                yield Batch("r1", pieces)

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str) -> Sequence[int]:
        return await self.service.tokenize(prompt, scope)

    async def status(self) -> Sequence[ReplicaStatus]:
        return [status_of(self.service, "r1")]

    async def activity(self, scope: str | None) -> Sequence[bytes]:
        return [told_activity(self.service, "r1", scope)]

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        self.session_calls.append((call, program, replica_id))
        return replace(await self.service.sessions.call(call), replica_id="r1")

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        return [replace(state, replica_id="r1") for state in self.service.sessions.of(scope)]

    async def drawn(self, request_id: str) -> Usage | None:
        return await self.service.used(request_id) or Usage()

    async def release(self, scope: str, handle: str) -> None:
        self.service.notice(HandleReleased(scope, handle))

    def stop(self) -> None:
        """From any thread, once nothing is asked any more."""
        if self.loaded is not None:
            self.loaded.bridge.thread.stop()
            self.loaded.bridge.thread.join()


@contextmanager
def engine_served(backend: ServiceBackend | None = None) -> Iterator[str]:
    """The address of a router with this engine."""
    backend = backend or ServiceBackend()
    try:
        with World(backend).served() as address:
            yield address
    finally:
        backend.stop()
