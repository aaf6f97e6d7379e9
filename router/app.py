"""The HTTP application: the table of all endpoints. `endpoints/turns.py` serves generation requests."""

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from holdfast.replicas.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.replicas.requests import ModelCard
from holdfast.router.backend import Backend
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints import (
    LINES,
    TEXT,
    AdminEndpoints,
    ApiDocument,
    ChatFormat,
    ClusterStatus,
    CompactionFormat,
    CompletionFormat,
    Endpoint,
    Format,
    HeartbeatBody,
    Live,
    LiveQuery,
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
    StatusQuery,
    StoredPrefills,
    Turns,
    UsageEndpoints,
    loaded_models,
    page,
    served,
)
from holdfast.router.entry import (
    VERSION,
    AnswerHeadersMiddleware,
    Audit,
    Drain,
    Entry,
    Handler,
    KeptAnswers,
    Quotas,
    RouterMetrics,
    TenantStore,
    TurnLog,
    UsageBooks,
    answer_headers,
    error_response,
    json_response,
    supervised,
)
from holdfast.router.protocol import shapes
from holdfast.router.protocol.admin import (
    ChangeBody,
    DaysQuery,
    KeyBody,
    RowsQuery,
    TenantBody,
    TenantDaysQuery,
    TenantRowsQuery,
)
from holdfast.router.protocol.anthropic import CountBody, MessagesBody
from holdfast.router.protocol.chat import ChatBody
from holdfast.router.protocol.completions import (
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    detokenize_reply,
    read_detokenize,
    read_tokenize,
    tokenize_reply,
)
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.protocol.prefills import ExtendBody, PrefillBody
from holdfast.router.protocol.responses import ItemsQuery, ResponsesBody, StoredQuery
from holdfast.router.protocol.sessions import AppendBody, ForkBody, OpenBody, QueryBody, QuestionBody, SessionsQuery
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
    metrics.watch("store_degraded", lambda: float(records.degraded))
    tenant_store = tenant_store or TenantStore(records, tenants)
    tenant_store.watch_purges(cache.purged)
    books = books or UsageBooks(config, Quotas(records))
    audit = audit or Audit(records)
    entry = Entry(tenants, metrics, config, books, audit, drain, turns)
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
    api = ApiDocument()
    small = SmallEndpoints(backend, entry, api)
    status = ClusterStatus(backend, tenants, programs, entry, lambda: records.degraded)
    usage = UsageEndpoints(entry)
    admin = AdminEndpoints(tenants, tenant_store, audit, entry, config)
    exposition = MetricsEndpoints(backend, tenants, metrics, peers)

    def turn(path: str, serve: Format | Handler, answer: Any, body: Any, events: Any = None) -> Endpoint:
        handler = serve if callable(serve) else partial(serving.serve, format_=serve)
        return Endpoint("POST", path, handler, answer, body, events=events, generates=True, about=serve.__doc__ or "")

    get, post, delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))
    response, prefill, session = "/v1/responses/{response_id}", "/v1/prefills/{prefill_id}", "/v1/sessions/{session_id}"
    question, program, tenant = f"{session}/questions", "/v1/programs/{program_id:path}", "/v1/admin/tenants/{name}"
    chat, completion = ChatFormat(entry, handles), CompletionFormat(entry)
    compaction, items = CompactionFormat(entry, responses), ResponsesFormat(entry, backend, responses)
    cut, lost, taken = (409, 410, 504), (410,), (409,)
    api.endpoints = (
        turn("/v1/chat/completions", chat, shapes.ChatCompletion, ChatBody, shapes.ChatEvent),
        turn("/v1/completions", completion, shapes.Completion, CompletionBody, shapes.CompletionEvent),
        turn("/v1/messages", messages, shapes.MessageReply, MessagesBody, shapes.MessageEvent),
        post("/v1/messages/count_tokens", messages.count, shapes.InputTokens, CountBody),
        turn("/v1/responses", items, shapes.ResponseReply, ResponsesBody, shapes.ResponseEvent),
        turn("/v1/responses/compact", compaction, shapes.CompactionReply, ResponsesBody),
        post("/v1/responses/input_tokens", stored.count, shapes.CountedInput, ResponsesBody),
        get(response, stored.show, shapes.ResponseReply, query=StoredQuery),
        delete(response, stored.delete, shapes.Deleted),
        post(f"{response}/cancel", stored.cancel, shapes.ResponseReply),
        get(f"{response}/input_items", stored.input_items, shapes.ItemPage, query=ItemsQuery),
        post("/v1/prefills", ahead.create, shapes.PrefillReply, PrefillBody, errors=cut),
        get(prefill, ahead.show, shapes.PrefillReply),
        delete(prefill, ahead.delete, shapes.Deleted),
        post(f"{prefill}/extend", ahead.extend, shapes.PrefillReply, ExtendBody, errors=cut),
        turn("/v1/sessions", sessions.open, shapes.SessionOpened, OpenBody),
        get("/v1/sessions", sessions.listed, shapes.SessionList, query=SessionsQuery),
        get(session, sessions.show, shapes.SessionReply, errors=lost),
        delete(session, sessions.close, shapes.Deleted, errors=lost),
        turn(f"{session}/append", sessions.append, shapes.SessionAppended, AppendBody),
        turn(f"{session}/query", sessions.query, shapes.Completion, QueryBody, shapes.CompletionEvent),
        post(f"{session}/fork", sessions.fork, shapes.SessionReply, ForkBody, errors=cut, optional_body=True),
        post(question, sessions.stand, shapes.QuestionReply, QuestionBody, errors=cut),
        get(question, sessions.questions, shapes.QuestionList, errors=lost),
        get(f"{question}/{{question_id}}", sessions.answer, shapes.QuestionReply, errors=lost),
        delete(f"{question}/{{question_id}}", sessions.withdraw, shapes.Deleted, errors=lost),
        post(f"{program}/heartbeat", agents.heartbeat, shapes.HeartbeatReply, HeartbeatBody),
        delete(program, agents.end, shapes.Deleted),
        get("/v1/tools/latency", agents.tool_latency, shapes.LatencyList),
        get("/v1/usage", usage.sums, shapes.UsageSums, query=DaysQuery),
        get("/v1/usage/records", usage.records, str, query=RowsQuery, media=LINES),
        get("/v1/admin/tenants", admin.tenants, shapes.TenantList),
        post("/v1/admin/tenants", admin.add, shapes.KeyMade, TenantBody, errors=taken),
        Endpoint("PATCH", tenant, admin.change, shapes.TenantRow, ChangeBody, errors=taken),
        delete(tenant, admin.remove, shapes.Deleted, errors=taken),
        delete(f"{tenant}/cache", admin.purge, shapes.Deleted),
        post(f"{tenant}/keys", admin.add_key, shapes.KeyMade, KeyBody, errors=taken, optional_body=True),
        delete(f"{tenant}/keys/{{key_id}}", admin.remove_key, shapes.Deleted, errors=taken),
        get("/v1/admin/usage", admin.sums, shapes.UsageOfAll, query=TenantDaysQuery),
        get("/v1/admin/usage/records", admin.records, str, query=TenantRowsQuery, media=LINES),
        get("/v1/admin/audit", admin.audit, str, query=RowsQuery, media=LINES),
        get("/v1/cluster/status", status.show, shapes.StatusReply, query=StatusQuery),
        post("/tokenize", small.tokenize, shapes.TokenizeReply, TokenizeBody),
        post("/detokenize", small.detokenize, shapes.DetokenizeReply, DetokenizeBody),
        get("/v1/models", small.models, shapes.AnyModelList),
        get("/v1/models/{name:path}", small.model, shapes.AnyModel),
        get("/version", small.version, shapes.VersionReply),
        get("/health", small.health, shapes.HealthReply),
        get("/openapi.json", small.openapi),
        get("/docs", small.docs),
        get("/metrics", exposition.all, str, media=TEXT),
        get("/metrics/targets", exposition.targets, shapes.TargetList),
        get("/metrics/processes/{process}", exposition.process, str, media=TEXT),
    )
    if config.page:
        page_files, live = PageFiles(), Live(backend, entry)
        api.endpoints += (
            get("/", page_files.index),
            get("/page/{name}", page_files.file),
            get("/v1/live", live.show, shapes.LiveReply, query=LiveQuery),
        )
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for each in api.endpoints:
        # Starlette's routes: FastAPI's own would parse and serialise what is done here by hand.
        app.router.add_route(each.path, supervised(each.handler, each.path), methods=[each.method])
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

    def __init__(self, backend: Backend, entry: Entry, api: ApiDocument) -> None:
        self._backend = backend
        self._entry = entry
        self._api = api
        self._started = int(time.time())

    async def tokenize(self, request: Request) -> Response:
        """A prompt as token ids."""
        async with self._entry.entered(request) as tenant:
            prompt, card = await self._entry.read(request, read_tokenize, await loaded_models(self._backend))
            return json_response(tokenize_reply(await self._backend.tokenize(prompt, tenant.name), card))

    async def detokenize(self, request: Request) -> Response:
        """Token ids as text."""
        async with self._entry.entered(request):
            tokens = await self._entry.read(request, read_detokenize, await loaded_models(self._backend))
            return json_response(detokenize_reply(await self._backend.detokenize(tokens)))

    async def models(self, request: Request) -> Response:
        """The served models."""
        anthropic = ANTHROPIC in request.headers
        async with self._entry.entered(request):
            data = [_model(card, self._started, anthropic) for card in await self._backend.models()]
            if not anthropic:
                return json_response(orjson.dumps({"object": "list", "data": data}))
            first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
            return json_response(orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last}))

    async def model(self, request: Request) -> Response:
        """One model."""
        anthropic = ANTHROPIC in request.headers
        async with self._entry.entered(request):
            card = find_model(request.path_params["name"], await self._backend.models())
            return json_response(orjson.dumps(_model(card, self._started, anthropic)))

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
            return self._api.json()
        return self._api.json(served(await self._backend.models()))


def _model(card: ModelCard, created: int, anthropic: bool) -> dict[str, Any]:
    """A model in OpenAI's shape or in Anthropic's."""
    context = card.context_length
    if not anthropic:
        model = {"id": card.name, "object": "model", "created": created}
        return {**model, "owned_by": "holdfast", "max_model_len": context}
    day = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    model = {"type": "model", "id": card.name, "display_name": card.name, "created_at": day}
    return {**model, "max_input_tokens": context, "max_tokens": context}


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
