"""The HTTP application: which endpoint serves which path. `endpoints/turns.py` serves generation requests."""

import time
from functools import partial

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from holdfast.replicas.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.router import metric_list as listed
from holdfast.router.backend import Backend
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints import (
    AdminEndpoints,
    ChatFormat,
    ClusterStatus,
    CompactionFormat,
    CompletionFormat,
    Format,
    Live,
    MessagesFormat,
    MetricsEndpoints,
    PageFiles,
    Peers,
    PrefillEndpoints,
    ProgramEndpoints,
    ResponseEndpoints,
    ResponsesFormat,
    SessionEndpoints,
    SessionHomes,
    StoredPrefills,
    Turns,
    UsageEndpoints,
    document,
    loaded_models,
    page,
    served,
    watch_cache,
)
from holdfast.router.entry import (
    VERSION,
    AnswerHeadersMiddleware,
    Audit,
    Drain,
    Entry,
    Handler,
    KeptAnswers,
    RouterMetrics,
    TenantStore,
    TurnLog,
    UsageBooks,
    answer_headers,
    error_response,
    json_response,
    supervised,
)
from holdfast.router.protocol.completions import detokenize_reply, read_detokenize, read_tokenize, tokenize_reply
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.protocol.models import model_reply, models_reply
from holdfast.router.protocol.turn import find_model
from holdfast.router.records import (
    ProgramTable,
    Records,
    ResponseCache,
    SessionHistories,
    StoredResponses,
    ToolLatencies,
)
from holdfast.router.tenants import TenantDirectory

ANTHROPIC = "anthropic-version"  # a header of Anthropic's clients, and of no others


def create_app(
    backend: Backend,
    tenants: TenantDirectory,
    programs: ProgramTable,
    cache: ResponseCache,
    metrics: RouterMetrics,
    records: Records,
    config: RouterConfig | None = None,
    latencies: ToolLatencies | None = None,
    turns: TurnLog | None = None,
    peers: Peers | None = None,
    drain: Drain | None = None,
    tenant_store: TenantStore | None = None,
    books: UsageBooks | None = None,
    audit: Audit | None = None,
) -> FastAPI:
    """The application around `backend`. The caller closes the arguments."""
    config = config or RouterConfig()
    latencies = latencies or ToolLatencies(records)
    metrics.watch(listed.DEGRADED, lambda: float(cache.degraded))
    watch_cache(metrics, cache)
    if tenant_store is not None:
        tenant_store.watch_purges(cache.purged)
    audit = audit or Audit()
    entry = Entry(tenants, metrics, config, drain, books, audit, turns)
    homes = SessionHomes(backend, programs, SessionHistories(records, config), metrics)
    answers = KeptAnswers(records, config)
    serving = Turns(backend, entry, programs, cache, config, latencies, homes, answers)
    responses = StoredResponses(records, config)
    stored = ResponseEndpoints(entry, backend, responses)
    messages = MessagesFormat(entry, backend)
    handles = StoredPrefills(records, config)
    ahead = PrefillEndpoints(backend, entry, programs, handles, config)
    agents = ProgramEndpoints(backend, entry, programs, latencies, records)
    sessions = SessionEndpoints(backend, entry, programs, serving, homes)
    small = SmallEndpoints(backend, entry)
    status = ClusterStatus(backend, tenants, programs, entry, lambda: cache.degraded)
    usage = UsageEndpoints(entry)
    admin = AdminEndpoints(tenants, tenant_store, audit, entry, config)
    exposition = MetricsEndpoints(backend, tenants, metrics, peers)

    def generates(format_: Format) -> Handler:
        return partial(serving.serve, format_=format_)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    routes: tuple[tuple[str, str, Handler], ...] = (
        ("POST", "/v1/chat/completions", generates(ChatFormat(entry, handles))),
        ("POST", "/v1/completions", generates(CompletionFormat(entry))),
        ("POST", "/v1/messages", generates(messages)),
        ("POST", "/v1/messages/count_tokens", messages.count),
        ("POST", "/v1/responses", generates(ResponsesFormat(entry, backend, responses))),
        ("POST", "/v1/responses/compact", generates(CompactionFormat(entry, responses))),
        ("POST", "/v1/responses/input_tokens", stored.count),
        ("GET", "/v1/responses/{response_id}", stored.show),
        ("DELETE", "/v1/responses/{response_id}", stored.delete),
        ("POST", "/v1/responses/{response_id}/cancel", stored.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", stored.input_items),
        ("POST", "/v1/prefills", ahead.create),
        ("GET", "/v1/prefills/{prefill_id}", ahead.show),
        ("DELETE", "/v1/prefills/{prefill_id}", ahead.delete),
        ("POST", "/v1/prefills/{prefill_id}/extend", ahead.extend),
        ("POST", "/v1/sessions", sessions.open),
        ("GET", "/v1/sessions", sessions.listed),
        ("GET", "/v1/sessions/{session_id}", sessions.show),
        ("DELETE", "/v1/sessions/{session_id}", sessions.close),
        ("POST", "/v1/sessions/{session_id}/append", sessions.append),
        ("POST", "/v1/sessions/{session_id}/query", sessions.query),
        ("POST", "/v1/sessions/{session_id}/fork", sessions.fork),
        ("POST", "/v1/sessions/{session_id}/questions", sessions.stand),
        ("GET", "/v1/sessions/{session_id}/questions", sessions.questions),
        ("GET", "/v1/sessions/{session_id}/questions/{question_id}", sessions.answer),
        ("DELETE", "/v1/sessions/{session_id}/questions/{question_id}", sessions.withdraw),
        ("POST", "/v1/programs/{program_id:path}/heartbeat", agents.heartbeat),
        ("DELETE", "/v1/programs/{program_id:path}", agents.end),
        ("GET", "/v1/tools/latency", agents.tool_latency),
        ("GET", "/v1/usage", usage.sums),
        ("GET", "/v1/usage/records", usage.records),
        ("GET", "/v1/admin/tenants", admin.tenants),
        ("POST", "/v1/admin/tenants", admin.add),
        ("PATCH", "/v1/admin/tenants/{name}", admin.change),
        ("DELETE", "/v1/admin/tenants/{name}", admin.remove),
        ("DELETE", "/v1/admin/tenants/{name}/cache", admin.purge),
        ("POST", "/v1/admin/tenants/{name}/keys", admin.add_key),
        ("DELETE", "/v1/admin/tenants/{name}/keys/{key_id}", admin.remove_key),
        ("GET", "/v1/admin/usage", admin.sums),
        ("GET", "/v1/admin/usage/records", admin.records),
        ("GET", "/v1/admin/audit", admin.audit),
        ("GET", "/v1/cluster/status", status.show),
        ("POST", "/tokenize", small.tokenize),
        ("POST", "/detokenize", small.detokenize),
        ("GET", "/v1/models", small.models),
        ("GET", "/v1/models/{name:path}", small.model),
        ("GET", "/version", small.version),
        ("GET", "/health", small.health),
        ("GET", "/openapi.json", small.openapi),
        ("GET", "/docs", small.docs),
        ("GET", "/metrics", exposition.all),
        ("GET", "/metrics/targets", exposition.targets),
        ("GET", "/metrics/processes/{process}", exposition.process),
    )
    if config.page:
        page_files = PageFiles()
        live = Live(backend, entry)
        routes += (
            ("GET", "/", page_files.index),
            ("GET", "/page/{name}", page_files.file),
            ("GET", "/v1/live", live.show),
        )
    for method, path, handler in routes:
        # Starlette's routes: FastAPI's own would parse and serialise what is done here by hand.
        app.router.add_route(path, supervised(handler, path), methods=[method])
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_middleware(AnswerHeadersMiddleware)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "PATCH", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    return app


class SmallEndpoints:
    """The endpoints that generate nothing and belong to nobody else."""

    def __init__(self, backend: Backend, entry: Entry) -> None:
        self._backend = backend
        self._entry = entry
        self._started = int(time.time())

    async def tokenize(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            prompt, card = await self._entry.read(request, read_tokenize, await loaded_models(self._backend))
            return json_response(tokenize_reply(await self._backend.tokenize(prompt, tenant.name), card))

    async def detokenize(self, request: Request) -> Response:
        async with self._entry.entered(request):
            tokens = await self._entry.read(request, read_detokenize, await loaded_models(self._backend))
            return json_response(detokenize_reply(await self._backend.detokenize(tokens)))

    async def models(self, request: Request) -> Response:
        anthropic = ANTHROPIC in request.headers
        async with self._entry.entered(request):
            return json_response(models_reply(await self._backend.models(), self._started, anthropic=anthropic))

    async def model(self, request: Request) -> Response:
        anthropic = ANTHROPIC in request.headers
        async with self._entry.entered(request):
            card = find_model(request.path_params["name"], await self._backend.models())
            return json_response(model_reply(card, self._started, anthropic=anthropic))

    async def version(self, request: Request) -> Response:
        """The version of this server, in vLLM's shape."""
        async with self._entry.entered(request):
            return json_response(orjson.dumps({"version": VERSION}))

    async def health(self, request: Request) -> Response:
        """Whether there is a replica and this router takes requests. Open to everybody."""
        self._entry.drain.check()
        if not await self._backend.healthy():
            raise UnavailableError("No replica is ready")
        return json_response(b'{"status":"ok"}')

    async def openapi(self, request: Request) -> Response:
        """Open to everybody; only callers with a key learn which models are served."""
        return json_response(await self._document(request))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(page(await self._document(request)))

    async def _document(self, request: Request) -> bytes:
        try:
            self._entry.authenticate(request)
        except RefusedError:
            return document()
        return document(served(await self._backend.models()))


async def _unrouted(request: Request, error: Exception) -> Response:
    """The answer to a path or method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    refused: HoldfastError
    if status == 405:
        refused = RefusedError(Refusal.NO_METHOD, f"Method {request.method} is not allowed for {request.url.path}")
    elif status == 404:
        refused = RefusedError(Refusal.NO_PATH, f"Unknown path: {request.method} {request.url.path}")
    else:
        refused = InvalidRequestError(str(error))
    response = error_response(refused, anthropic=answer_headers(request).anthropic)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
