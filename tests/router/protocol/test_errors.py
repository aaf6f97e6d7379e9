import pickle
from typing import Any

import pytest
from ray import cloudpickle

from holdfast.replicas import errors
from holdfast.replicas.errors import DeadlineError, ErrorKind, HoldfastError, InvalidRequestError, OverloadedError
from holdfast.router.protocol.errors import TABLE, Refusal, RefusedError, api_error


def test_every_kind_has_a_row():
    assert set(TABLE) == {*ErrorKind, *Refusal}


def test_retry_after_is_in_whole_seconds_and_never_too_early():
    assert api_error(RefusedError(Refusal.RATE_LIMITED, "", retry_after_s=1.2)).headers == {"retry-after": "2"}
    assert api_error(OverloadedError("full")).headers == {"retry-after": "1"}
    assert api_error(InvalidRequestError("no")).headers == {}


ARGUMENTS: dict[type[Exception], tuple[Any, ...]] = {DeadlineError: ("too late", "timeout", 2.0)}


def exceptions() -> list[type[Exception]]:
    """Those that replicas raise, which cross to routers."""
    found = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)}
    return sorted(found, key=lambda each: each.__name__)


@pytest.mark.parametrize("kind", exceptions())
def test_every_error_is_the_same_after_it_has_crossed_processes(kind):
    error = kind(*ARGUMENTS.get(kind, ("what happened", "field")))
    for dump in (pickle.dumps, cloudpickle.dumps):
        crossed = pickle.loads(dump(error))
        assert type(crossed) is kind
        assert (str(crossed), vars(crossed)) == (str(error), vars(error))
        if isinstance(error, HoldfastError):
            assert (crossed.info, api_error(crossed)) == (error.info, api_error(error))
