"""The one table from error kinds to HTTP, and the OpenAI error shape.

Kinds that the engine knows come from `holdfast.replicas.errors`; `Refusal` adds those that only an HTTP front can
have. Nothing here reads a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Any

import orjson

from holdfast.replicas.errors import ErrorInfo, ErrorKind, HoldfastError
from holdfast.replicas.requests import NOTHING_USED, Usage


class Refusal(StrEnum):
    """Why the router itself refuses a request. The value is the `code` a client sees."""

    UNAUTHENTICATED = "invalid_api_key"
    FORBIDDEN = "forbidden"
    NO_MODEL = "model_not_found"
    NO_PATH = "not_found"
    NO_PROGRAM = "program_not_found"
    NO_RESPONSE = "response_not_found"
    NO_PREVIOUS = "previous_response_not_found"
    NO_PREFILL = "prefill_not_found"
    NO_METHOD = "method_not_allowed"
    SLOW_BODY = "request_timeout"
    TOO_LARGE = "request_too_large"
    RATE_LIMITED = "rate_limit_exceeded"
    OVER_BUDGET = "insufficient_quota"
    NO_TENANT = "tenant_not_found"
    TENANT_EXISTS = "tenant_exists"
    CHANGED = "changed_meanwhile"
    KEY_REUSED = "idempotency_key_reused"


class RefusedError(HoldfastError):
    """A request that the router does not let in. `retry_after_s` says when it may be tried again."""

    kind = ErrorKind.INVALID

    def __init__(
        self, refusal: Refusal, message: str, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, field)
        self.refusal = refusal
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.refusal, self.message, self.field, self.retry_after_s)


class ReplyError(HoldfastError):
    """A replica's reply was the error `info`; `usage` is what was done for it until then."""

    def __init__(self, info: ErrorInfo, usage: Usage = NOTHING_USED) -> None:
        super().__init__(info.message, info.field)
        self.kind = info.kind
        self.usage = usage
        self._info = info

    @property
    def info(self) -> ErrorInfo:
        return self._info

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.info, self.usage)


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of error looks over HTTP. `retry_after_s` is the default of the `Retry-After` header."""

    status: int
    type: str
    code: str | None
    retry_after_s: float | None = None


TABLE: Mapping[ErrorKind | Refusal, Row] = {
    ErrorKind.INVALID: Row(400, "invalid_request_error", None),
    ErrorKind.TOO_LONG: Row(400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.NO_SESSION: Row(404, "invalid_request_error", "session_not_found"),
    ErrorKind.NO_QUESTION: Row(404, "invalid_request_error", "question_not_found"),
    ErrorKind.SESSION_EXISTS: Row(409, "invalid_request_error", "session_exists"),
    Refusal.TENANT_EXISTS: Row(409, "invalid_request_error", "tenant_exists"),
    Refusal.CHANGED: Row(409, "invalid_request_error", "changed_meanwhile"),
    ErrorKind.SESSION_CHANGED: Row(409, "invalid_request_error", "session_changed"),
    ErrorKind.OPERATION_DONE: Row(409, "invalid_request_error", "operation_done"),
    ErrorKind.SESSION_LOST: Row(410, "server_error", "session_lost"),
    Refusal.UNAUTHENTICATED: Row(401, "authentication_error", "invalid_api_key"),
    Refusal.FORBIDDEN: Row(403, "permission_error", "forbidden"),
    Refusal.NO_MODEL: Row(404, "invalid_request_error", "model_not_found"),
    Refusal.NO_PROGRAM: Row(404, "invalid_request_error", "program_not_found"),
    Refusal.NO_RESPONSE: Row(404, "invalid_request_error", "response_not_found"),
    # As at OpenAI, whose clients know by it that they have to send the whole conversation.
    Refusal.NO_PREVIOUS: Row(400, "invalid_request_error", "previous_response_not_found"),
    Refusal.NO_PREFILL: Row(404, "invalid_request_error", "prefill_not_found"),
    Refusal.NO_TENANT: Row(404, "invalid_request_error", "tenant_not_found"),
    Refusal.NO_PATH: Row(404, "invalid_request_error", "not_found"),
    Refusal.NO_METHOD: Row(405, "invalid_request_error", "method_not_allowed"),
    Refusal.SLOW_BODY: Row(408, "invalid_request_error", "request_timeout"),
    Refusal.TOO_LARGE: Row(413, "invalid_request_error", "request_too_large"),
    Refusal.KEY_REUSED: Row(422, "invalid_request_error", "idempotency_key_reused"),
    Refusal.RATE_LIMITED: Row(429, "rate_limit_error", "rate_limit_exceeded", 1.0),
    Refusal.OVER_BUDGET: Row(429, "insufficient_quota", "insufficient_quota", 60.0),
    ErrorKind.OVERLOADED: Row(429, "rate_limit_error", "overloaded", 1.0),
    ErrorKind.DEADLINE: Row(429, "rate_limit_error", "deadline_unmet", 1.0),
    ErrorKind.INTERNAL: Row(500, "server_error", "internal_error"),
    ErrorKind.UNAVAILABLE: Row(503, "server_error", "unavailable", 2.0),
    ErrorKind.TIMEOUT: Row(504, "server_error", "timeout"),
}


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as it goes over the wire: `body` is the OpenAI error object in JSON."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, ceil(self.retry_after_s)))}


def reason(error: HoldfastError) -> str:
    """The kind of `error` in a word, for counting: one of as many as `TABLE` has rows."""
    return error.refusal.value if isinstance(error, RefusedError) else error.kind.value


def api_error(error: HoldfastError | ErrorInfo) -> ApiError:
    """What a client is told about `error`."""
    key: ErrorKind | Refusal = error.kind
    if isinstance(error, RefusedError):
        key, retry_after_s = error.refusal, error.retry_after_s
    else:
        retry_after_s = (error if isinstance(error, ErrorInfo) else error.info).retry_after_s
    row = TABLE[key]
    body = {"message": error.message, "type": row.type, "param": error.field, "code": row.code}
    return ApiError(row.status, orjson.dumps({"error": body}), retry_after_s or row.retry_after_s)
