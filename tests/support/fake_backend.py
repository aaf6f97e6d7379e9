"""A backend that replies as told, and a whole router around it, for tests of the HTTP layer."""

import asyncio
import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from redis_server import shared_records
from starlette.requests import Request
from starlette.routing import Route
from waiting import PATIENCE_S

from holdfast.replicas.errors import EngineError, UnavailableError, UnknownSessionError
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    ChatPrompt,
    Completed,
    Errored,
    GenerateRequest,
    ModelCard,
    Piece,
    RawPrompt,
    ReplyReason,
    SessionCall,
    SessionState,
    TextDelta,
    Timing,
    ToolCallDelta,
    Usage,
)
from holdfast.replicas.stats import ReplicaStatus
from holdfast.router.app import create_app
from holdfast.router.backend import ANYWHERE, Batch, Routed, RoutingHint
from holdfast.router.background import stop
from holdfast.router.config import RouterConfig
from holdfast.router.entry.admission import Drain
from holdfast.router.entry.audit import Audit
from holdfast.router.entry.call import Call
from holdfast.router.entry.http import STATE, AnswerHeaders
from holdfast.router.entry.metrics import RouterMetrics
from holdfast.router.entry.quotas import Quotas
from holdfast.router.entry.tenant_store import TenantStore
from holdfast.router.entry.turn_log import TurnLog
from holdfast.router.entry.usage import CallEnd, UsageBooks
from holdfast.router.records.programs import ProgramTable
from holdfast.router.records.response_cache import ResponseCache
from holdfast.router.records.store import Records
from holdfast.router.records.tool_latency import ToolLatencies
from holdfast.router.tenants import Principal, Tenant, TenantDirectory, hash_key

CARD = ModelCard("pocket", context_length=4096, vocabulary=1000, replica_id="r1")
USAGE = Usage(prompt=10, cached=4, completion=3)
DONE = Completed("stop", USAGE, Timing(arrived=0.0, scheduled=0.125, first_token=0.25, finished=0.5))
HELLO: tuple[tuple[Piece, ...], ...] = ((TextDelta("Hel"),), (TextDelta("lo"), TextDelta("!")), (DONE,))
CALL: tuple[tuple[Piece, ...], ...] = (
    (ToolCallDelta(0, "call_1", "get_weather"),),
    (ToolCallDelta(0, arguments='{"city":'), ToolCallDelta(0, arguments='"Oslo"}', closed=True)),
    (Completed("tool_calls", USAGE, DONE.timing),),
)


def called(*calls: ToolCallDelta, reason: ReplyReason = "tool_calls") -> tuple[tuple[Piece, ...], ...]:
    """A script of these calls."""
    return (calls, (Completed(reason, USAGE, DONE.timing),))


class FakeBackend:
    """Replies with `script`, a list of batches; an exception in it is raised in its place.

    With `stall` set it never gets beyond that many batches. `aborted` is set once a reply was ended early.
    """

    def __init__(self, script: Sequence[Sequence[Piece] | Exception] = HELLO) -> None:
        self.script = script
        self.stall: int | None = None
        self.cards: tuple[ModelCard, ...] = (CARD,)
        self.ready = True
        self.requests: list[GenerateRequest] = []
        self.places: list[RoutingHint] = []
        self.texts: list[str] = []
        self.statuses: list[ReplicaStatus] = []
        self.started = threading.Event()
        self.aborted = threading.Event()
        self.open_streams = 0
        self.asked: list[str] = []  # what was drawn for them
        self.used: Usage | None = None
        self.counted = threading.Event()
        self.ended_programs: list[tuple[str, str]] = []
        self.released: list[tuple[str, str]] = []
        self.session_calls: list[tuple[SessionCall, str, str]] = []
        self.session_error: Exception | None = None

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        built = AnswerBuilder()
        async with contextlib.aclosing(self.stream(request, place)) as batches:
            async for batch in batches:
                built.add(batch.pieces)
        reply: Answer | Errored | None = built.answer()
        if reply is None:
            assert isinstance(built.terminal, Errored)
            reply = built.terminal
        return Routed("r1", reply)

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        self.requests.append(request)
        self.places.append(place)
        self.open_streams += 1
        finished = False
        try:
            for index, step in enumerate(self.script):
                if index == self.stall:
                    self.started.set()
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                finished = isinstance(step[-1], Completed | Errored)
                yield Batch("r1", tuple(step))
        finally:
            self.open_streams -= 1
            if not finished:
                self.aborted.set()

    async def session(self, call: SessionCall, program: str, replica_id: str) -> SessionState:
        self.session_calls.append((call, program, replica_id))
        raise self.session_error or UnknownSessionError("not open", "session_id")

    async def sessions(self, scope: str) -> Sequence[SessionState]:
        return []

    async def end_program(self, scope: str, program_id: str) -> None:
        self.ended_programs.append((scope, program_id))

    async def release(self, scope: str, handle: str) -> None:
        self.released.append((scope, handle))

    async def drawn(self, request_id: str) -> Usage | None:
        self.asked.append(request_id)
        asyncio.get_running_loop().call_later(0, self.counted.set)  # once who asks has gone on
        return self.used

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str) -> Sequence[int]:
        size = len(prompt.messages) if isinstance(prompt, ChatPrompt) else len(prompt.content)
        return list(range(size))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        if 13 in tokens:
            raise EngineError("unlucky")
        return " ".join(str(token) for token in tokens)

    async def models(self) -> Sequence[ModelCard]:
        return self.cards

    async def metrics(self, only: str | None = None) -> Mapping[str, str]:
        texts = {f"r-{i}": text for i, text in enumerate(self.texts)}
        return {each: text if only in (None, each) else "" for each, text in texts.items()}

    async def status(self) -> Sequence[ReplicaStatus]:
        return self.statuses

    async def activity(self, scope: str | None) -> Sequence[bytes]:
        return []

    async def healthy(self) -> bool:
        return self.ready


async def _turns_of_the_loop() -> None:
    """So many that work in the background ends, and generators that nobody reads are closed."""
    for _ in range(20):
        await asyncio.sleep(0)


@cache
def event_loop() -> asyncio.Runner:
    """The loop of all tests that call a `World`: to make one, and connections to Redis, takes longer than a request."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


@dataclass
class World:
    """A router around a fake backend, reached without a network."""

    backend: FakeBackend = field(default_factory=FakeBackend)
    tenants: TenantDirectory = field(default_factory=TenantDirectory)
    config: RouterConfig = field(default_factory=RouterConfig)
    records: Records | None = None  # in a namespace of its own, unless they are given
    now: float = 1_000_000.0  # of the program table
    turns: TurnLog = field(default_factory=TurnLog)
    tenant_store: TenantStore | None = None
    books: UsageBooks | None = None
    audit: Audit | None = None
    drain: Drain | None = None

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        if self.records is None:
            self.records = shared_records(key_file=self.config.cache_key_file)
        self.programs = ProgramTable(self.records, self.config, lambda: self.now)
        self.cache = ResponseCache(self.records, self.config, "weights-1")
        metrics = self.metrics = RouterMetrics(self.registry)
        self.latencies = ToolLatencies(self.records)
        self.books = self.books or UsageBooks(self.config, Quotas(NoRedis()))
        self.app: FastAPI = create_app(
            self.backend,
            self.tenants,
            self.programs,
            self.cache,
            metrics,
            self.records,
            self.config,
            self.latencies,
            self.turns,
            tenant_store=self.tenant_store,
            books=self.books,
            audit=self.audit,
            drain=self.drain,
        )

    def client(self, peer: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
        """A client for coroutines, without a network."""
        transport = httpx.ASGITransport(self.app, client=(peer, 50000))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **options)

    def call(self, method: str, path: str, peer: str = "127.0.0.1", **arguments: object) -> httpx.Response:
        """One request through the ASGI application, the answer read to its end."""
        return self.calls([(method, path, arguments)], peer)[0]

    def chat(self, peer: str = "127.0.0.1", **body: object) -> httpx.Response:
        """A chat completion with a small default body."""
        return self.call("POST", "/v1/chat/completions", peer, json=chat_body(**body))

    def calls(
        self, calls: Sequence[tuple[str, str, dict[str, object]]], peer: str = "127.0.0.1"
    ) -> list[httpx.Response]:
        """Requests one after the other, on one event loop."""

        async def run() -> list[httpx.Response]:
            async with self.client(peer) as client:
                answers = [await client.request(method, path, **arguments) for method, path, arguments in calls]
                await self.cache.drain()
                await self.latencies.close()
                await _turns_of_the_loop()
                await stop(*(asyncio.all_tasks() - {asyncio.current_task()}))  # as at the end of an event loop
                await _turns_of_the_loop()
                return answers

        return event_loop().run(run())

    def operations(self) -> set[tuple[str, str]]:
        """The methods and paths of all that is served."""
        routes = [route for route in self.app.router.routes if isinstance(route, Route)]
        served = {(method, route.path.replace(":path", "")) for route in routes for method in route.methods or ()}
        return {(method, path) for method, path in served if method != "HEAD"}

    def outcomes(self) -> dict[str, float]:
        """How many requests ended in each outcome."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name == "holdfast_requests_total" and sample.value:
                    outcome = sample.labels["outcome"]
                    found[outcome] = found.get(outcome, 0.0) + sample.value
        return found

    def in_flight(self) -> float | None:
        return self.registry.get_sample_value("holdfast_requests_in_flight")

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        """The address of this router behind a real HTTP server on loopback."""
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        server = _Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert server.up.wait(PATIENCE_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join(PATIENCE_S)


class NoRedis:
    """In the place of the `Records` of quotas and books, for tests that do not look at these."""

    degraded = True

    async def try_script(self, *_: object) -> None:
        return None

    async def script(self, *_: object) -> None:
        raise UnavailableError("Redis does not answer; retry")


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[object] | None = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        self.up.set()


class Ends(UsageBooks):
    """Books that only note the ends of calls, without an event loop."""

    def __init__(self) -> None:
        super().__init__(RouterConfig(), Quotas(NoRedis()))
        self.ends: list[CallEnd] = []

    def book(self, end: CallEnd) -> None:  # type: ignore[override]
        self.ends.append(end)


def begun(
    metrics: RouterMetrics | None = None,
    endpoint: str = "chat",
    tenant: Tenant | None = None,
    turns: TurnLog | None = None,
    books: UsageBooks | None = None,
) -> Call:
    """A call that has come, outside of any server."""
    request = Request({"type": "http", "path": "/v1/chat/completions", "headers": [], STATE: AnswerHeaders("id")})
    metrics = metrics or RouterMetrics(CollectorRegistry())
    call = Call(request, endpoint, metrics, turns or TurnLog(), books or Ends())
    call.principal = Principal(tenant or Tenant("acme"))
    call.facts.tenant = call.tenant.name
    return call


def config_of(**values: object) -> RouterConfig:
    """A configuration with these options, and with these in the place of fixed values."""
    options = {each.name for each in fields(RouterConfig)} & values.keys()
    kind = type("Fixed", (RouterConfig,), {"__slots__": (), **{k: v for k, v in values.items() if k not in options}})
    config: RouterConfig = kind(**{name: values[name] for name in options})
    return config


def chat_body(**changes: object) -> dict[str, object]:
    """A small valid chat body; a value of None takes the field out."""
    body = {"model": "pocket", "messages": [{"role": "user", "content": "hello"}], **changes}
    return {name: value for name, value in body.items() if value is not None}


def keyed(*names: str, **options: Any) -> TenantDirectory:
    """Tenants of these names. The key of each is its name."""
    return TenantDirectory([Tenant(name, (hash_key(name),)) for name in names], **options)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def http_scope(path: str, method: str = "POST", headers: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    """The scope of a request from this machine, for tests that write the messages of ASGI themselves."""
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    return scope | {"client": ("127.0.0.1", 50000), "server": ("127.0.0.1", 80), "state": {}}


class FakeTurns(FakeBackend):
    """Replies with one script after another, and with the last one again."""

    def __init__(self, *scripts: Sequence[Sequence[Piece] | Exception]) -> None:
        super().__init__(scripts[0])
        self._scripts = list(scripts)

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        self.script = self._scripts.pop(0) if self._scripts else self.script
        async with contextlib.aclosing(super().stream(request, place)) as batches:
            async for batch in batches:
                yield batch


@dataclass(frozen=True)
class Format:
    """One of the endpoints that generate: how a stream of it is asked for, and how one ends, well or not."""

    path: str
    body: Mapping[str, object]
    whole: str
    failed: str

    def streamed(self) -> dict[str, object]:
        return {"model": "pocket", "stream": True, **self.body}

    def ends(self, text: str) -> list[str]:
        """The ends that are in a stream; it must have nothing behind the last of them."""
        blocks = text.split("\n\n")
        assert blocks.pop() == ""
        ends = [end for block in blocks for end in (self.whole, self.failed) if block.startswith(end)]
        after = blocks[-1] if blocks[-1] != "data: [DONE]" or self.whole == blocks[-1] else blocks[-2]
        assert after.startswith((self.whole, self.failed))
        return ends

    def __str__(self) -> str:
        return self.path


_SAID = [{"role": "user", "content": "hello"}]
FORMATS = (
    Format("/v1/chat/completions", {"messages": _SAID}, "data: [DONE]", 'data: {"error"'),
    Format("/v1/responses", {"input": "hello"}, "event: response.completed\n", "event: response.failed\n"),
    Format("/v1/messages", {"messages": _SAID, "max_tokens": 9}, "event: message_stop\n", "event: error\n"),
)
