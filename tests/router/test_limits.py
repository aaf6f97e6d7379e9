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


steps = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=120)


@given(st.integers(1, 24), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3), steps)
def test_whoever_has_less_than_its_part_of_half_is_let_in_whatever_others_send(most, weights, calls):
    tenants = {name: Tenant(name, weight=weight) for name, weight in zip("abc", weights, strict=True)}
    limiter, has = Limiter(most), dict.fromkeys("abc", 0)
    limiter.share(list(tenants.values()))
    part = {name: int(most * tenant.weight / sum(weights) / 2) for name, tenant in tenants.items()}
    for name, leaves in calls:
        if leaves and has[name]:
            limiter.leave(tenants[name])
            has[name] -= 1
            continue
        kept = sum(max(0, part[other] - has[other]) for other in has if other != name)
        try:
            limiter.enter(tenants[name], 0.0)
        except OverloadedError:
            assert has[name] >= part[name]
            assert sum(has.values()) + kept >= most, "what is kept for nobody is anybody's"
        else:
            has[name] += 1
        assert limiter.in_flight == sum(has.values()) <= most


def test_alone_a_tenant_has_all_places():
    limiter, tenant = Limiter(4), Tenant("a")
    limiter.share([tenant])
    for _ in range(4):
        limiter.enter(tenant, 0.0)
    with pytest.raises(OverloadedError):
        limiter.enter(tenant, 0.0)


def test_tenants_that_come_while_others_are_served_get_their_part_as_places_come_free():
    limiter, old, new = Limiter(4), Tenant("old"), Tenant("new")
    limiter.share([old])
    for _ in range(4):
        limiter.enter(old, 0.0)
    limiter.share([old, new])
    limiter.leave(old)
    with pytest.raises(OverloadedError):
        limiter.enter(old, 0.0)
    limiter.enter(new, 0.0)
