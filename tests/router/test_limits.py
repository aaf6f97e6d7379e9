import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import OverloadedError
from holdfast.router.limits import BodyMemory, Limiter, Shares
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
        assert limiter.total == sum(has.values()) <= most


amounts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans()), max_size=60)


@given(st.integers(1, 40), amounts)
def test_amounts_are_shared_as_places_are(most, calls):
    shares, taken = Shares(most), {name: [] for name in "abc"}
    shares.share([Tenant(name) for name in "abc"])
    part = int(most / 6)
    for name, amount, gives_back in calls:
        has = {each: sum(taken[each]) for each in taken}
        if gives_back and taken[name]:
            shares.give_back(name, taken[name].pop())
        else:
            room = most - sum(has.values())
            beyond = room - sum(max(0, part - has[other]) for other in has if other != name)
            assert shares.take(name, amount) == (amount <= room and amount <= max(beyond, part - has[name]))
            if shares.of(name) > has[name]:
                taken[name].append(amount)
        assert shares.total == sum(map(sum, taken.values())) <= most


def test_a_body_counts_as_it_comes_and_not_any_more_afterwards():
    memory = BodyMemory(100)
    memory.share([Tenant("a"), Tenant("b")])
    with memory.body("a") as one, memory.body("b") as other:
        one.come(70)
        with pytest.raises(OverloadedError, match="request bodies"):
            one.come(10)  # the rest is kept for the other
        with pytest.raises(OverloadedError, match="request bodies"):
            other.expect(31)
        other.expect(30)
        assert memory.total == one.size == 70
        other.come(25)
    assert memory.total == memory.of("a") == 0


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
