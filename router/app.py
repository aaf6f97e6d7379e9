"""The HTTP application: which path is served by what. The way of a generation request is in `turns`."""

import time
from collections.abc import Sequence
from importlib import metadata

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.replicas.requests import ModelCard
from holdfast.router import metric_list as listed
from holdfast.router.backend import Backend
from holdfast.router.cluster_status import ClusterStatus
from holdfast.router.config import RouterConfig
from holdfast.router.conversations import Conversations
from holdfast.router.http import (
    AnswerHeadersMiddleware,
    Handler,
    caller,
    error_response,
    json_response,
    read_body,
    supervised,
)
from holdfast.router.metrics import RouterMetrics
from holdfast.router.metrics_endpoints import MetricsEndpoints, Peers
from holdfast.router.program_endpoints import ProgramEndpoints
from holdfast.router.programs import ProgramTable
from holdfast.router.protocol.body import decode, validate
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.protocol.models import model_reply, models_reply
from holdfast.router.protocol.tokens import (
    DetokenizeBody,
    TokenizeBody,
    detokenize_reply,
    detokenize_tokens,
    tokenize_prompt,
    tokenize_reply,
)
from holdfast.router.protocol.turn import find_model
from holdfast.router.response_cache import ResponseCache
from holdfast.router.tenants import TenantDirectory
from holdfast.router.tool_latency import ToolLatencies
from holdfast.router.turn_report import TurnReports
from holdfast.router.turns import CHAT, COMPLETION, Turns


def create_app(
    backend: Backend,
    tenants: TenantDirectory,
    programs: ProgramTable,
    cache: ResponseCache,
    metrics: RouterMetrics,
    config: RouterConfig | None = None,
    latencies: ToolLatencies | None = None,
    reports: TurnReports | None = None,
    peers: Peers | None = None,
    conversations: Conversations | None = None,
) -> FastAPI:
    """The application around `backend`. Whoever made the arguments closes them."""
    config = config or RouterConfig()
    latencies = latencies or ToolLatencies()
    metrics.watch(listed.DEGRADED, lambda: float(cache.degraded))
    reports = reports or TurnReports()
    conversations = conversations or Conversations(programs, None, config.program_entries, config.program_ttl_s)
    turns = Turns(backend, tenants, programs, conversations, cache, metrics, config, latencies, reports)
    agents = ProgramEndpoints(backend, tenants, programs, latencies)
    small = SmallEndpoints(backend, tenants, config)
    status = ClusterStatus(backend, tenants, programs, reports, lambda: cache.degraded, metrics.router)
    told = MetricsEndpoints(backend, tenants, metrics, peers)

    async def chat(request: Request) -> Response:
        return await turns.serve(request, CHAT)

    async def completion(request: Request) -> Response:
        return await turns.serve(request, COMPLETION)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    routes: Sequence[tuple[str, str, Handler]] = (
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", completion),
        ("DELETE", "/v1/programs/{program_id:path}", agents.end),
        ("GET", "/v1/tools/latency", agents.tool_latency),
        ("GET", "/v1/cluster/status", status.show),
        ("POST", "/tokenize", small.tokenize),
        ("POST", "/detokenize", small.detokenize),
        ("GET", "/v1/models", small.models),
        ("GET", "/v1/models/{name:path}", small.model),
        ("GET", "/version", small.version),
        ("GET", "/health", small.health),
        ("GET", "/metrics", told.all),
        ("GET", "/metrics/targets", told.targets),
        ("GET", "/metrics/processes/{process}", told.process),
    )
    for method, path, handler in routes:
        # Starlette's routes: FastAPI's own would parse and serialise what is done here by hand.
        app.router.add_route(path, supervised(handler), methods=[method])
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_middleware(AnswerHeadersMiddleware)
    return app


class SmallEndpoints:
    """Everything that generates nothing."""

    def __init__(self, backend: Backend, tenants: TenantDirectory, config: RouterConfig) -> None:
        self._backend = backend
        self._tenants = tenants
        self._config = config
        self._started = int(time.time())

    async def tokenize(self, request: Request) -> Response:
        body = validate(TokenizeBody, await self._body(request))
        card = await self._card(body.model)
        tokens = await self._backend.tokenize(tokenize_prompt(body, card))
        return json_response(tokenize_reply(tokens, card))

    async def detokenize(self, request: Request) -> Response:
        body = validate(DetokenizeBody, await self._body(request))
        card = await self._card(body.model)
        text = await self._backend.detokenize(detokenize_tokens(body, card))
        return json_response(detokenize_reply(text))

    async def models(self, request: Request) -> Response:
        self._tenants.authenticate(caller(request))
        return json_response(models_reply(await self._backend.models(), self._started))

    async def model(self, request: Request) -> Response:
        self._tenants.authenticate(caller(request))
        card = find_model(request.path_params["name"], await self._backend.models())
        return json_response(model_reply(card, self._started))

    async def version(self, request: Request) -> Response:
        """What runs here, as vLLM tells it."""
        self._tenants.authenticate(caller(request))
        return json_response(orjson.dumps({"version": metadata.version("holdfast")}))

    async def health(self, request: Request) -> Response:
        """Open to everybody: it tells nothing but whether there is a replica."""
        if not await self._backend.healthy():
            raise UnavailableError("No replica is ready")
        return json_response(b'{"status":"ok"}')

    async def _body(self, request: Request) -> dict[str, object]:
        self._tenants.authenticate(caller(request))
        return decode(await read_body(request, self._config.max_body_bytes))

    async def _card(self, name: str | None) -> ModelCard:
        """The model called `name`; where it is left out, the only one."""
        models = await self._backend.models()
        if not models:
            raise UnavailableError("No model is loaded yet")
        if name is None and len(models) > 1:
            raise InvalidRequestError("Missing required parameter: 'model'", "model")
        return models[0] if name is None else find_model(name, models)


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
    response = error_response(refused)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
