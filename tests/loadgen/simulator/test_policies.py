"""The papers' orders and retention policies: without an engine, against numbers worked out by hand."""

import math
from itertools import count

import numpy as np
import pytest

from holdfast.loadgen.simulator.policies import RETENTION, SUTRADHARA_TTL, Bernstein, Fixed, Plas, upper_bound
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import Submit
from holdfast.replicas.retention.latency import LatencySnapshot, ToolLatency
from holdfast.replicas.retention.policy import Conditions, Pause, RestoreCost, RetentionPolicy, retention_policy

_numbers = count()


def request(arrived: float, program: str = "", scope: str = "") -> Sequence:
    tokens = np.asarray([1], np.int32)
    submit = Submit("r", sampling=Sampling(1), scope=scope, program_id=program, tokens=tokens)
    return Sequence.of(submit, next(_numbers), arrived, frozenset(), 0)


def arriving(order: Plas, *programs: str, at: float = 1.0) -> list[Sequence]:
    made = [request(at, program=program) for program in programs]
    for each in made:
        order.arrive(each)
    return made


def test_a_request_begins_at_the_level_of_its_program_and_sinks_as_it_is_served() -> None:
    order = Plas(levels=3, quantum_s=1.0, factor=2.0)
    order.serve((request(0.0, program="p"),), (), 1.5)
    later, other = arriving(order, "p", "q")
    assert (order.key(later)[0], order.key(other)[0]) == (1, 0)
    levels = []
    for _ in range(6):
        levels.append(order.key(other)[0])
        order.serve((other,), (), 0.5)
    assert levels == [0, 0, 1, 1, 2, 2]
    order.serve((other,), (), 1e9)
    assert order.key(other)[0] == 2, "no further than the last level"
    order.left(other)
    order.left(later)
    order.serve((other,), (), 1.0)  # the step in which it ended
    assert order.attained == {}


def test_the_longer_a_program_was_served_the_longer_it_is_patient() -> None:
    order = Plas(quantum_s=1.0, patience=3.0)
    order.serve((request(0.0, program="p"),), (), 2.0)
    later, _ = arriving(order, "p", "q", at=10.0)
    assert list(order.promote(15.9)) == []
    assert order.key(later)[0] > 0
    assert list(order.promote(16.0)) == [later]
    assert order.key(later)[0] == 0


def test_programs_served_longest_ago_are_forgotten_and_tenants_have_programs_of_their_own() -> None:
    order = Plas(quantum_s=1.0, programs=2)
    for program in "abca":
        order.serve((request(0.0, program=program),), (), 5.0)
    assert [order.attained[each] for each in arriving(order, *"abc")] == [5.0, 0.0, 5.0]
    stranger = request(0.0, program="a", scope="other")
    order.arrive(stranger)
    assert order.attained[stranger] == 0.0


# ---- retention ----

PAUSE = Pause("acme", "grep", cells=1000, turn=1)
COST = RestoreCost(a=1e-6, b=1e-3, c=0.5)  # 1,000 cells: 1 + 1 + 0.5 s
NOTHING = LatencySnapshot()


def known(mean: float) -> LatencySnapshot:
    """A snapshot that knows `grep` of tenant acme alone."""
    tool = ToolLatency(1000, mean, 0.0, (mean,))
    return LatencySnapshot(tool, {("acme", "grep"): tool})


def ttl(
    policy: RetentionPolicy,
    latency: LatencySnapshot = NOTHING,
    pause: Pause = PAUSE,
    conditions: Conditions | None = None,
) -> float:
    return policy.ttl(pause, latency, conditions or Conditions())


def test_fixed_keeps_for_quick_tools_and_for_those_that_nobody_knows() -> None:
    assert [ttl(Fixed(), known(mean)) for mean in (0.3, 2.0, 2.01)] == [2.0, 2.0, 0.0]
    assert ttl(Fixed(), known(9.0), Pause("acme", "sed", 10)) == 2.0
    assert ttl(Fixed(), known(9.0), Pause("other", "grep", 10)) == 2.0, "a tenant's tools are its own"
    assert ttl(Fixed(5.0)) == 5.0
    assert ttl(retention_policy(SUTRADHARA_TTL), known(5.9)) == 6.0


def test_the_bound_of_maurer_and_pontil() -> None:
    tool = ToolLatency(count=50, mean=1.0, variance=0.25, recent=(0.5, 3.0))
    log = math.log(2 / 0.1)  # 2.9957
    assert upper_bound(tool, 0.1) == pytest.approx(1.0 + math.sqrt(0.5 * log / 50) + 7 * 3.0 * log / (3 * 49))
    assert upper_bound(tool, 0.1) == pytest.approx(1.0 + 0.17308 + 0.42796, abs=1e-4)
    assert upper_bound(ToolLatency(1, 4.0, 0.0, (4.0,)), 0.1) == 4.0


def test_bernstein_falls_back_to_all_tools_and_then_to_a_default() -> None:
    tool, overall = ToolLatency(10, 1.0, 0.0, (1.0,)), ToolLatency(10, 3.0, 0.0, (3.0,))
    bound = 1.0 + 7 * 1.0 * math.log(2 / 0.05) / (3 * 9)
    at_the_end = Pause("acme", "grep", 1000, turn=5)
    few = ToolLatency(9, 1.0, 0.0, (1.0,))
    for mine, everybodys, expected in ((tool, overall, bound), (few, overall, 3 * bound), (few, few, 7.5)):
        snapshot = LatencySnapshot(everybodys, {("acme", "grep"): mine})
        found = ttl(Bernstein(unknown_s=7.5), snapshot, at_the_end, Conditions(mean_turns=5.0))
        assert found == pytest.approx(expected)


def test_bernstein_keeps_a_program_longer_that_has_turns_before_it() -> None:
    pauses = [Pause("acme", "", 10, turn) for turn in (1, 3, 5, 9)]
    found = [ttl(Bernstein(), NOTHING, pause, Conditions(mean_turns=5.0)) for pause in pauses]
    assert found == pytest.approx([3.6, 2.8, 2.0, 2.0])


def test_restore_cost_keeps_as_long_as_restoring_takes() -> None:
    policy = retention_policy(RETENTION["restore-cost"])
    assert ttl(policy, conditions=Conditions(restore=COST)) == pytest.approx(2.5)
    reload = RestoreCost(a=1e-6, b=1e-3, c=0.5, reload=1e-4)
    assert ttl(policy, conditions=Conditions(restore=reload)) == pytest.approx(0.1)


@pytest.mark.parametrize("name", [*RETENTION.values(), SUTRADHARA_TTL])
def test_each_name_is_a_policy(name: str) -> None:
    assert ttl(retention_policy(name), known(0.5), conditions=Conditions(restore=COST)) > 0.0
