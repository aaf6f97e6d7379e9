import pickle

import orjson
import pytest

from holdfast.replicas.errors import ErrorInfo, ErrorKind, InvalidRequestError, OverloadedError
from holdfast.router.protocol.errors import TABLE, Refusal, RefusedError, ReplyError, api_error


def test_every_kind_has_a_row():
    assert set(TABLE) == {*ErrorKind, *Refusal}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("no", "temperature"), 400, None),
        (ErrorInfo(ErrorKind.TOO_LONG, "long"), 400, "context_length_exceeded"),
        (RefusedError(Refusal.UNAUTHENTICATED, "who"), 401, "invalid_api_key"),
        (RefusedError(Refusal.NO_MODEL, "what", "model"), 404, "model_not_found"),
        (RefusedError(Refusal.TOO_LARGE, "big"), 413, "request_too_large"),
        (ErrorInfo(ErrorKind.INTERNAL, "bug"), 500, "internal_error"),
        (ReplyError(ErrorInfo(ErrorKind.TIMEOUT, "slow")), 504, "timeout"),
    ],
)
def test_an_error_in_openais_shape(error, status, code):
    answer = api_error(error)
    body = orjson.loads(answer.body)["error"]
    assert answer.status == status
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code
    assert body["message"] == error.message
    assert body["param"] == error.field


def test_retry_after_is_in_whole_seconds_and_never_too_early():
    assert api_error(RefusedError(Refusal.RATE_LIMITED, "", retry_after_s=1.2)).headers == {"retry-after": "2"}
    assert api_error(OverloadedError("full")).headers == {"retry-after": "1"}
    assert api_error(InvalidRequestError("no")).headers == {}


def test_a_refusal_survives_pickling():
    error = pickle.loads(pickle.dumps(RefusedError(Refusal.RATE_LIMITED, "slow down", "model", 3.0)))
    assert (error.refusal, error.message, error.field, error.retry_after_s) == (
        Refusal.RATE_LIMITED,
        "slow down",
        "model",
        3.0,
    )


def test_a_reply_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ReplyError(ErrorInfo(ErrorKind.TIMEOUT, "slow", "x"))))
    assert error.info == ErrorInfo(ErrorKind.TIMEOUT, "slow", "x")
