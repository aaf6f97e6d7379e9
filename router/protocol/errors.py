"""The one table from kinds of errors to HTTP, in OpenAI's and Anthropic's shapes, and the field names in messages.

The engine's kinds come from `holdfast.replicas.errors`; `Refusal` adds those that only an HTTP server has.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from typing import Any

import orjson

from holdfast.replicas.errors import ErrorInfo, ErrorKind, HoldfastError
from holdfast.replicas.requests import NOTHING_USED, Usage


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer; there is nobody to tell."""


class Refusal(StrEnum):
    """The reason why the router itself refuses a request. The value is the `code` that a client sees."""

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
    """The router refuses a request. `retry_after_s`: seconds until a retry makes sense."""

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
    """A replica replied with the error `info` after the work `usage`."""

    def __init__(self, info: ErrorInfo, usage: Usage = NOTHING_USED) -> None:
        super().__init__(info.message, info.field, info.retry_after_s)
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
    """The HTTP form of one kind of error. `retry_after_s` is the default of the `Retry-After` header."""

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
    # OpenAI's status and code. Clients then send the whole conversation.
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


ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status. Other statuses below 500 have the type of 400; other ones have `api_error`."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """An HTTP error. `body` is the error object in JSON."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, ceil(self.retry_after_s)))}


def reason(error: HoldfastError) -> str:
    """The kind of `error` as a label of metrics, one of the rows of `TABLE`."""
    return error.refusal.value if isinstance(error, RefusedError) else error.kind.value


def api_error(error: HoldfastError | ErrorInfo) -> ApiError:
    """`error` in OpenAI's shape."""
    row, retry_after_s = _row(error)
    body = {"message": error.message, "type": row.type, "param": error.field, "code": row.code}
    return ApiError(row.status, orjson.dumps({"error": body}), retry_after_s)


def anthropic_error(error: HoldfastError | ErrorInfo) -> ApiError:
    """`error` in Anthropic's shape."""
    row, retry_after_s = _row(error)
    kind = ANTHROPIC_TYPES.get(row.status) or ("api_error" if row.status >= 500 else ANTHROPIC_TYPES[400])
    # Anthropic's clients look for these words and then shorten the conversation.
    message = f"prompt is too long: {error.message}" if error.kind is ErrorKind.TOO_LONG else error.message
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return ApiError(row.status, orjson.dumps(body), retry_after_s)


def _row(error: HoldfastError | ErrorInfo) -> tuple[Row, float | None]:
    """The row of `TABLE` for `error`, and the seconds for `Retry-After`."""
    row = TABLE[error.refusal if isinstance(error, RefusedError) else error.kind]
    return row, error.retry_after_s or row.retry_after_s


# ---- field names ----


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A request's own names for the fields of the chat completion that it becomes.

    Chat is the inner form: the checks of a prompt, here and in a replica, name fields of a chat completion.
    `prefixes` maps paths of a chat completion to the request's own. `tools` and `messages` list the fields of the
    request from which the tools and messages were made; None means the same names. `schema` is the member of a tool
    that describes its arguments: one name for all tools, or one for each.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[str] | None = None
    messages: Sequence[str] | None = None
    schema: str | Sequence[str] = "parameters"

    def of(self, name: str) -> str:
        """The request's own name of field `name` of the chat completion."""
        kind, _, rest = name.partition(".")
        index, _, rest = rest.partition(".")
        fields = {"tools": self.tools, "messages": self.messages}.get(kind)
        if fields is not None and index.isdigit() and int(index) < len(fields):
            if kind == "messages":  # the inside of an item differs from the inside of its message
                return fields[int(index)]
            rest = rest.removeprefix("function.")
            if rest == "parameters" or rest.startswith("parameters."):
                schema = self.schema if isinstance(self.schema, str) else self.schema[int(index)]
                rest = schema + rest.removeprefix("parameters")
            return f"{fields[int(index)]}.{rest}".rstrip(".")
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if name == prefix or name.startswith(f"{prefix}."):
                return self.prefixes[prefix] + name[len(prefix) :]
        return name

    def info(self, error: ErrorInfo) -> ErrorInfo:
        """`error` with the request's own names, in its message too."""
        if error.field is None or (own := self.of(error.field)) == error.field:
            return error
        # A name of one word counts only in quotes: without them it may be a word of the sentence.
        name = rf"(?<![\w.]){re.escape(error.field)}(?!\w)" if "." in error.field else f"'{re.escape(error.field)}'"
        message = re.sub(name, lambda match: match[0].replace(error.field or "", own), error.message)
        return replace(error, field=own, message=message)

    def error(self, error: HoldfastError) -> HoldfastError:
        """`error`, of the same type, with the request's own names."""
        info = self.info(error.info)
        if info.field == error.field:
            return error
        if isinstance(error, ReplyError):
            return ReplyError(info, error.usage)
        error.message, error.field = info.message, info.field
        error.args = (info.message, info.field, error.retry_after_s)
        return error


CHAT_FIELDS = FieldNames()
