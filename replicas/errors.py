"""Typed errors of the engine, few on purpose; `router/protocol` maps their kinds to HTTP in one table.

Nothing here knows HTTP. An error names the field that caused it where there is one, so a client can be told
what to change.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorKind(StrEnum):
    """What went wrong, as a client has to react to it."""

    INVALID = "invalid_request"  # malformed or impossible: change the request
    NO_SESSION = "session_not_found"  # never opened, closed, or unused for too long
    NO_QUESTION = "question_not_found"
    SESSION_EXISTS = "session_exists"
    SESSION_LOST = "session_lost"  # its replica is gone, and its history was not kept: open it again
    SESSION_CHANGED = "session_changed"  # it went on meanwhile without this operation
    OPERATION_DONE = "operation_done"  # it is part of a session already, and cannot be answered again
    TOO_LONG = "context_length_exceeded"
    OVERLOADED = "overloaded"  # no room now: come back later
    DEADLINE = "deadline_unmet"  # its answer cannot be there in the time that it gave, so nothing was begun
    UNAVAILABLE = "unavailable"  # shutting down, or the replica died
    TIMEOUT = "timeout"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data: what crosses threads, processes and the wire."""

    kind: ErrorKind
    message: str
    field: str | None = None
    retry_after_s: float | None = None  # when it may be tried again, where that is known


class HoldfastError(Exception):
    """Base of every error Holdfast raises on purpose."""

    kind = ErrorKind.INTERNAL

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(self.kind, self.message, self.field)

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        # Ray pickles exceptions across processes; the default would drop the field.
        return type(self), (self.message, self.field)


class InvalidRequestError(HoldfastError):
    """The request can never be served as it stands."""

    kind = ErrorKind.INVALID


class UnknownSessionError(InvalidRequestError):
    """The session is not open: unknown, closed, or another tenant's."""

    kind = ErrorKind.NO_SESSION


class UnknownQuestionError(InvalidRequestError):
    """The session has no such standing question."""

    kind = ErrorKind.NO_QUESTION


class SessionExistsError(InvalidRequestError):
    """A session of this id is open already."""

    kind = ErrorKind.SESSION_EXISTS


class SessionLostError(HoldfastError):
    """The replica that had the session is gone."""

    kind = ErrorKind.SESSION_LOST


class SessionChangedError(InvalidRequestError):
    """What was begun of an operation does not go on from the session's history as it is now."""

    kind = ErrorKind.SESSION_CHANGED


class OperationDoneError(InvalidRequestError):
    """An operation of this name is part of the session, and its answer is nowhere."""

    kind = ErrorKind.OPERATION_DONE


class ContextLengthError(InvalidRequestError):
    """Prompt and completion together do not fit the model's context, or the whole KV cache."""

    kind = ErrorKind.TOO_LONG


def too_long(context: int, why: str, field: str) -> ContextLengthError:
    """The error of what does not fit a context of so many tokens, in the words by which clients know it.

    Agents shorten their conversation where they read them: OpenAI's own phrase is what they look for.
    """
    return ContextLengthError(f"This model's maximum context length is {context} tokens; {why}", field)


class OverloadedError(HoldfastError):
    """A bounded queue or pool is full, or a wait for it timed out."""

    kind = ErrorKind.OVERLOADED


class DeadlineError(OverloadedError):
    """An answer cannot be there in the time that was given for it."""

    kind = ErrorKind.DEADLINE

    def __init__(self, message: str, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, field)
        self.retry_after_s = retry_after_s

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(self.kind, self.message, self.field, self.retry_after_s)

    def __reduce__(self) -> tuple[type, tuple[str, str | None, float | None]]:  # type: ignore[override]
        return type(self), (self.message, self.field, self.retry_after_s)


class UnavailableError(HoldfastError):
    """The engine is stopping or has died."""

    kind = ErrorKind.UNAVAILABLE


class EngineError(HoldfastError):
    """A step failed; the requests in it fail, the engine goes on."""

    kind = ErrorKind.INTERNAL


class ConfigError(HoldfastError):
    """A setting is unknown, has the wrong type, or cannot be met on this machine."""

    kind = ErrorKind.INVALID


_TYPES: dict[ErrorKind, type[HoldfastError]] = {
    ErrorKind.INVALID: InvalidRequestError,
    ErrorKind.NO_SESSION: UnknownSessionError,
    ErrorKind.NO_QUESTION: UnknownQuestionError,
    ErrorKind.SESSION_EXISTS: SessionExistsError,
    ErrorKind.SESSION_LOST: SessionLostError,
    ErrorKind.SESSION_CHANGED: SessionChangedError,
    ErrorKind.OPERATION_DONE: OperationDoneError,
    ErrorKind.TOO_LONG: ContextLengthError,
    ErrorKind.OVERLOADED: OverloadedError,
    ErrorKind.DEADLINE: DeadlineError,
    ErrorKind.UNAVAILABLE: UnavailableError,
}


def error_of(info: ErrorInfo) -> HoldfastError:
    """The exception that `info` was made from, for a caller who would rather have it raised."""
    return _TYPES.get(info.kind, EngineError)(info.message, info.field)
