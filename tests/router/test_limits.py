import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.router.limits import Limiter
from holdfast.router.tenants import Tenant


def test_all_tenants_together_are_bounded():
    limiter = Limiter(1)
    limiter.enter(Tenant("a"))
    with pytest.raises(OverloadedError):
        limiter.enter(Tenant("b"))


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
            limiter.enter(tenants[name])
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
        limiter.enter(tenant)
    with pytest.raises(OverloadedError):
        limiter.enter(tenant)


def test_tenants_that_come_while_others_are_served_get_their_part_as_places_come_free():
    limiter, old, new = Limiter(4), Tenant("old"), Tenant("new")
    limiter.share([old])
    for _ in range(4):
        limiter.enter(old)
    limiter.share([old, new])
    limiter.leave(old)
    with pytest.raises(OverloadedError):
        limiter.enter(old)
    limiter.enter(new)
