"""HTTP pieces that every endpoint shares: answers, errors, and the headers that every answer carries.

Endpoints are plain functions from request to response, so that nothing is parsed or serialised twice.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.replicas.errors import EngineError, HoldfastError
from holdfast.router.entry.quotas import QuotaError, RateLimitStatus, rate_limit_headers
from holdfast.router.protocol.errors import ClientGoneError, anthropic_error, api_error
from holdfast.router.tenants import Caller

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MESSAGES = "/v1/messages/"  # the beginning of the paths of Anthropic's API
STATE = "holdfast"  # where a request's scope keeps its AnswerHeaders
CONTENT = "holdfast.content"  # and the hash of its path and body
ROUTE = "holdfast.route"  # and the template of its path
IDEMPOTENCY = "idempotency-key"  # a client's name for a request and its retries
DELIVERY = "x-holdfast-delivery"  # the proxy's name for a request, which it sends again where a router was lost
CLIENT_GONE = 499  # nobody reads it; proxies log it
VERSION = metadata.version("holdfast")  # once: each call reads files


@dataclass(slots=True)
class AnswerHeaders:
    """Headers of the answer to one request, filled in while it is served."""

    request_id: str
    cache: str = "bypass"
    age_s: float | None = None  # of an answer from the response cache; None: no such header
    replayed: bool = False  # the answer is stored under the request's `Idempotency-Key`
    same_draw: bool = False  # that answer was drawn, and a draw of the request's own may differ from it
    replica: str = "none"
    server_timing: str = ""  # empty: no such header
    skipped: str = ""  # likewise
    tools_as_text: bool = False  # the request's tools are told in the system prompt
    rate_limit: RateLimitStatus | None = None  # the tenant's; likewise
    anthropic: bool = False  # the request came by Anthropic's API: limits and errors are told as there

    def encode(self) -> list[tuple[bytes, bytes]]:
        pairs = [
            (b"x-request-id", self.request_id.encode()),
            (b"request-id", self.request_id.encode()),  # as Anthropic's clients look for it
            (b"x-holdfast-cache", self.cache.encode()),
            (b"x-holdfast-replica", self.replica.encode()),
        ]
        if self.age_s is not None:
            pairs.append((b"age", str(int(self.age_s)).encode()))
        if self.replayed:
            pairs.append((b"idempotent-replayed", b"true"))
        if self.same_draw:
            pairs.append((b"x-holdfast-repeat", b"prompt-seed"))
        if self.server_timing:
            pairs.append((b"server-timing", self.server_timing.encode()))
        if self.skipped:
            pairs.append((b"x-holdfast-skipped", self.skipped.encode()))
        if self.tools_as_text:
            pairs.append((b"x-holdfast-tools", b"system-prompt"))
        if (status := self.rate_limit) is not None:
            pairs += rate_limit_headers(status, anthropic=self.anthropic, now=time.time())
        return pairs


class AnswerHeadersMiddleware:
    """Gives every request an id and puts `AnswerHeaders` on every answer, errors and unknown paths included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = AnswerHeaders(_request_id(scope), anthropic=f"{scope['path']}/".startswith(MESSAGES))
        scope[STATE] = headers

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers.encode()]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def answer_headers(request: Request) -> AnswerHeaders:
    headers: AnswerHeaders = request.scope[STATE]
    return headers


def caller(request: HTTPConnection) -> Caller:
    """The caller, for authentication."""
    client, server = request.scope.get("client"), request.scope.get("server")
    authorization, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    return Caller(
        authorization=f"Bearer {key}" if key and authorization is None else authorization,
        peer=client[0] if client else None,
        server=server[0] if server else None,
        forwarded=",".join(request.headers.getlist("x-forwarded-for")),
        host=request.headers.get("host"),
        origin=request.headers.get("origin"),
    )


def retry_of(request: Request, name: str = DELIVERY) -> str:
    """A digest that is the same for each try of a request: of its path, its body, and its name in the header `name`.

    "" where it has no name. Two requests with the same name and different bodies are different requests. The body must
    have been read.
    """
    digest = request.scope.get(CONTENT)
    if digest is None or not request.headers.get(name):
        return ""
    digest = digest.copy()  # the scope keeps the hash of the body: every call gives the same answer
    digest.update(f"\n{name}: {request.headers[name]}".encode())
    text: str = digest.hexdigest()[:32]
    return text


def content_digest(request: Request) -> "Hash | None":
    """The hash for `retry_of`, which the reader of the body updates; None for a request without a name."""
    if IDEMPOTENCY not in request.headers and DELIVERY not in request.headers:
        return None
    digest: Hash = hashlib.sha256(f"{request.method} {request.url.path}\n".encode())
    request.scope[CONTENT] = digest
    return digest


def json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def error_response(error: HoldfastError, *, anthropic: bool = False) -> Response:
    """The answer for `error`, in Anthropic's shape or in OpenAI's."""
    answer = anthropic_error(error) if anthropic else api_error(error)
    return Response(answer.body, answer.status, answer.headers, "application/json")


def route_of(request: HTTPConnection) -> str:
    """The template of the path that was called: a path itself may contain anything."""
    return str(request.scope.get(ROUTE, ""))


def supervised(handler: Handler, path: str = "") -> Handler:
    """`handler` of the route `path`. Every exception becomes an answer in the shape of its API."""

    async def answer(request: Request) -> Response:
        request.scope[ROUTE] = path
        anthropic = answer_headers(request).anthropic
        try:
            return await handler(request)
        except HoldfastError as error:
            if isinstance(error, QuotaError):
                answer_headers(request).rate_limit = error.status
            return error_response(error, anthropic=anthropic)
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # a bug: the client gets an error in the usual shape, the log the traceback
            request_id = answer_headers(request).request_id
            log.error("request %s failed", request_id, exc_info=error)
            failed = EngineError(f"The server failed to handle the request ({request_id})")
            return error_response(failed, anthropic=anthropic)

    return answer


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if REQUEST_ID.fullmatch(text):
                return str(text)
    return f"req-{secrets.token_hex(12)}"
