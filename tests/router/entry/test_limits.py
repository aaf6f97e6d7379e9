"""Places and bytes that tenants share."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.entry.admission import Shares
from holdfast.router.tenants import Tenant

calls = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans()), max_size=80)


@given(st.integers(1, 40), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3), calls)
def test_half_is_reserved_by_weight_and_the_rest_goes_to_whoever_comes_first(most, weights, calls):
    shares, taken = Shares(most), {name: [] for name in "abc"}
    shares.share([Tenant(name, weight=weight) for name, weight in zip("abc", weights, strict=True)])
    part = {name: int(most * weight / sum(weights) / 2) for name, weight in zip("abc", weights, strict=True)}
    for name, amount, gives_back in calls:
        has = {each: sum(taken[each]) for each in taken}
        if gives_back and taken[name]:
            shares.give_back(name, taken[name].pop())
        else:
            room = most - sum(has.values())
            beyond = room - sum(max(0, part[other] - has[other]) for other in has if other != name)
            assert shares.take(name, amount) == (amount <= room and amount <= max(beyond, part[name] - has[name]))
            if shares.of(name) > has[name]:
                taken[name].append(amount)
        assert shares.total == sum(map(sum, taken.values())) <= most


def test_alone_a_tenant_has_all_places_and_a_new_tenant_gets_its_part_as_places_come_free():
    shares = Shares(4)
    shares.share([Tenant("old")])
    assert [shares.take("old", 1) for _ in range(5)] == [True] * 4 + [False]
    shares.share([Tenant("old"), Tenant("new")])
    shares.give_back("old", 1)
    assert not shares.take("old", 1)
    assert shares.take("new", 1)
