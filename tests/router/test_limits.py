import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.router.limits import Limiter
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Tenant, TenantLimits


def limited(**limits):
    return Tenant("acme", limits=TenantLimits(**limits))


def test_concurrency_is_bounded_and_given_back():
    limiter, tenant = Limiter(100), limited(max_concurrent=2)
    limiter.enter(tenant, 0.0)
    limiter.enter(tenant, 0.0)
    with pytest.raises(RefusedError) as refused:
        limiter.enter(tenant, 0.0)
    assert refused.value.refusal is Refusal.RATE_LIMITED
    assert limiter.in_flight == 2
    limiter.leave(tenant)
    limiter.enter(tenant, 0.0)
    assert limiter.in_flight == 2


def test_one_tenant_does_not_use_up_anothers_limit():
    limiter = Limiter(100)
    limiter.enter(limited(max_concurrent=1), 0.0)
    limiter.enter(Tenant("other", limits=TenantLimits(max_concurrent=1)), 0.0)
    assert limiter.in_flight == 2


def test_all_tenants_together_are_bounded():
    limiter = Limiter(1)
    limiter.enter(Tenant("a"), 0.0)
    with pytest.raises(OverloadedError):
        limiter.enter(Tenant("b"), 0.0)


def test_a_minutes_requests_refill_evenly_and_the_refusal_says_when():
    limiter, tenant = Limiter(100), limited(requests_per_minute=6)
    for _ in range(6):
        limiter.enter(tenant, 0.0)
    with pytest.raises(RefusedError) as refused:
        limiter.enter(tenant, 4.0)
    assert refused.value.retry_after_s == pytest.approx(6.0)
    limiter.enter(tenant, 10.1)


@given(st.integers(1, 20), st.lists(st.floats(0.0, 30.0), max_size=80))
def test_never_more_than_two_minutes_worth_in_any_minute(rate, gaps):
    """A full bucket and what flows in during a minute: the bound that a token bucket promises."""
    limiter, tenant, now, entered = Limiter(1000), limited(requests_per_minute=rate), 0.0, []
    for gap in gaps:
        now += gap
        try:
            limiter.enter(tenant, now)
        except RefusedError:
            continue
        entered.append(now)
    for start in entered:
        assert sum(start <= at <= start + 60.0 for at in entered) <= 2 * rate + 1
