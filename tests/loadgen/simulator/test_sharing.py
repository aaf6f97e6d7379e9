"""Simulated tenants on several replicas: who is served how much, and what a noisy one does to the others."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.simulator import sharing
from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.sharing import Options, Runs, jain, slowed
from holdfast.replicas.errors import ConfigError

SMALL = Options(tenants=3, programs=60, quiet=3, replicas=2, routers=2)


def runs(order):
    return Runs(SMALL, replace(profile(SMALL.profile), cells=SMALL.cells), order, seed=0)


def test_equal_tenants_are_served_alike_where_they_share():
    fair, program = (runs(order).equal() for order in ("fair", "program"))
    assert fair.jain > 0.95 > program.jain
    assert fair.most_over_least < program.most_over_least


def test_a_quiet_tenants_turns_are_told_over_what_they_take_alone():
    """On replicas that are half as fast, and on half of the replicas."""
    slow, few, over_slow, over_few = runs("fair").pair()
    assert (over_slow.base, over_few.base) == (slow.run, few.run)
    assert over_slow.raised == pytest.approx(over_slow.p50_s / slow.p50_s)
    assert over_few.raised == pytest.approx(over_few.p50_s / few.p50_s)
    assert over_slow.turns == over_few.turns == slow.turns == few.turns


def test_a_run_that_ends_with_the_others_programs_tells_the_same_of_them():
    programs = sharing.of_tenants(0, {sharing.NOISY: 30, sharing.QUIET: 3}, sharing.WITHIN_S)
    machine = replace(profile(SMALL.profile), cells=SMALL.cells)
    whole, short = (sharing.run(programs, machine, 2, "fair", 2, besides) for besides in ("", sharing.NOISY))
    of_others = [[turn for turn in ran.turns if turn.tenant == sharing.QUIET] for ran in (whole, short)]
    assert of_others[0] == of_others[1]
    assert len(short.turns) < len(whole.turns)
    assert len(short.ended[sharing.NOISY]) < 30


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20), st.floats(0.1, 10.0))
def test_jains_index_is_one_for_equal_shares_and_does_not_depend_on_the_unit(values, times):
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([value * times for value in values]) == pytest.approx(jain(values))
    assert jain([values[0]] * len(values)) == pytest.approx(1.0)
    assert jain([values[0], *[0.0] * (len(values) - 1)]) == pytest.approx(1 / len(values))


def test_a_slower_machine_takes_as_many_times_as_long():
    machine = profile(SMALL.profile)
    assert slowed(machine, 2.0).step_s == 2 * machine.step_s
    assert slowed(machine, 2.0).cells == machine.cells


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"tenants": 1}, "tenants"), ({"replicas": 3}, "replicas"), ({"seeds": 0}, "seeds"), ({"quiet": 0}, "quiet")],
)
def test_options_that_cannot_be_are_named(wrong, field):
    with pytest.raises(ConfigError) as refused:
        replace(SMALL, **wrong)
    assert refused.value.field == field


def test_the_table_has_the_mean_over_seeds_and_the_file_every_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Runs, "noise", lambda self: iter(()))
    monkeypatch.setattr(Runs, "pair", lambda self: iter(()))
    monkeypatch.setattr(
        Runs, "equal", lambda self: sharing.Row("equal", self.order, self.seed, 1, 1.0 + self.seed, 2.0)
    )
    path = tmp_path / "rows.json"
    assert sharing.main(replace(SMALL, seeds=3, orders=("fair",)), path) == 0
    assert "| equal | `fair` | 2 | 2 |" in capsys.readouterr().out
    assert [row["seed"] for row in json.loads(path.read_text())["rows"]] == [0, 1, 2]
