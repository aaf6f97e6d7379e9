"""Typed errors of the engine. `router/protocol` maps their kinds to HTTP in one table.

An error names the field that caused it, if there is one.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorKind(StrEnum):
    """Kinds of errors by the reaction they ask of a client."""

    INVALID = "invalid_request"  # malformed or impossible: change the request
    NO_SESSION = "session_not_found"  # never opened, closed, unused for too long, or of another tenant
    NO_QUESTION = "question_not_found"
    SESSION_EXISTS = "session_exists"
    SESSION_LOST = "session_lost"  # its replica is gone, and its history was not stored: open it again
    SESSION_CHANGED = "session_changed"  # its history changed before this operation
    OPERATION_DONE = "operation_done"  # it is part of the session already; its answer is not stored
    TOO_LONG = "context_length_exceeded"
    OVERLOADED = "overloaded"  # no room now: retry later
    DEADLINE = "deadline_unmet"  # its answer cannot be ready in time, so it was not started
    UNAVAILABLE = "unavailable"  # shutting down, or the replica died
    TIMEOUT = "timeout"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data, for other threads and processes and for clients."""

    kind: ErrorKind
    message: str
    field: str | None = None
    retry_after_s: float | None = None  # when to retry, if known


class HoldfastError(Exception):
    """Base of every error that Holdfast raises on purpose."""

    kind = ErrorKind.INTERNAL

    def __init__(self, message: str, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, field, retry_after_s)  # Ray pickles exceptions by these arguments
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(self.kind, self.message, self.field, self.retry_after_s)


class InvalidRequestError(HoldfastError):
    """The request can never be served unchanged."""

    kind = ErrorKind.INVALID


class UnknownSessionError(InvalidRequestError):
    kind = ErrorKind.NO_SESSION


class UnknownQuestionError(InvalidRequestError):
    kind = ErrorKind.NO_QUESTION


class SessionExistsError(InvalidRequestError):
    kind = ErrorKind.SESSION_EXISTS


class SessionLostError(HoldfastError):
    kind = ErrorKind.SESSION_LOST


class SessionChangedError(InvalidRequestError):
    kind = ErrorKind.SESSION_CHANGED


class OperationDoneError(InvalidRequestError):
    kind = ErrorKind.OPERATION_DONE


class ContextLengthError(InvalidRequestError):
    """Prompt and completion together exceed the model's context or the whole KV cache."""

    kind = ErrorKind.TOO_LONG


def too_long(context: int, why: str, field: str) -> ContextLengthError:
    """The error of a prompt that exceeds the context. Agents that see OpenAI's phrase shorten their conversation."""
    return ContextLengthError(f"This model's maximum context length is {context} tokens; {why}", field)


class OverloadedError(HoldfastError):
    """A bounded queue or pool is full, or waiting for it timed out."""

    kind = ErrorKind.OVERLOADED


class DeadlineError(OverloadedError):
    kind = ErrorKind.DEADLINE


class UnavailableError(HoldfastError):
    kind = ErrorKind.UNAVAILABLE


class EngineError(HoldfastError):
    """A step failed. The requests in it fail, and the engine goes on."""

    kind = ErrorKind.INTERNAL


class ConfigError(HoldfastError):
    """A setting is unknown, has the wrong type, or is impossible on this machine."""

    kind = ErrorKind.INVALID


_TYPES: dict[ErrorKind, type[HoldfastError]] = {
    each.kind: each
    for each in (
        *(InvalidRequestError, UnknownSessionError, UnknownQuestionError, SessionExistsError, SessionLostError),
        *(SessionChangedError, OperationDoneError, ContextLengthError, OverloadedError, DeadlineError),
        UnavailableError,
    )
}


def error_of(info: ErrorInfo) -> HoldfastError:
    """The exception that `info` describes."""
    return _TYPES.get(info.kind, EngineError)(info.message, info.field, info.retry_after_s)
