import importlib
import pickle
import pkgutil
from typing import Any

import pytest
from ray import cloudpickle

import holdfast.router
from holdfast.replicas.errors import (
    DeadlineError,
    ErrorInfo,
    ErrorKind,
    HoldfastError,
    InvalidRequestError,
    OverloadedError,
)
from holdfast.replicas.requests import Usage
from holdfast.router.entry.quotas import QuotaError, RateLimitStatus
from holdfast.router.protocol.errors import TABLE, ClientGoneError, Refusal, RefusedError, ReplyError, api_error
from holdfast.router.tenants import TenantLimits


def test_every_kind_has_a_row():
    assert set(TABLE) == {*ErrorKind, *Refusal}


def test_retry_after_is_in_whole_seconds_and_never_too_early():
    assert api_error(RefusedError(Refusal.RATE_LIMITED, "", retry_after_s=1.2)).headers == {"retry-after": "2"}
    assert api_error(OverloadedError("full")).headers == {"retry-after": "1"}
    assert api_error(InvalidRequestError("no")).headers == {}


STATUS = RateLimitStatus(TenantLimits(max_concurrent=2), {"max_concurrent": 2.0}, 3.0)
ARGUMENTS: dict[type[Exception], tuple[Any, ...]] = {
    RefusedError: (Refusal.RATE_LIMITED, "slow down", "model", 3.0),
    QuotaError: ("acme", "max_concurrent", STATUS),
    ReplyError: (ErrorInfo(ErrorKind.TIMEOUT, "slow", "x", 2.0), Usage(3, 2, 1)),
    DeadlineError: ("too late", "timeout", 2.0),
    ClientGoneError: (),
}


def exceptions() -> list[type[Exception]]:
    """Those that the modules of `replicas/errors.py` and `router/` define."""
    names = ["holdfast.replicas.errors"]
    names += [each.name for each in pkgutil.walk_packages(holdfast.router.__path__, "holdfast.router.")]
    found = {
        one
        for name in names
        for one in vars(importlib.import_module(name)).values()
        if isinstance(one, type) and issubclass(one, Exception) and one.__module__ == name
    }
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
