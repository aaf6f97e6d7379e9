"""Costs by hand."""

from dataclasses import replace

import numpy as np
import pytest

from holdfast.loadgen.simulator import machines
from holdfast.loadgen.simulator.machines import Profile
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import PageMoves
from holdfast.replicas.plan import Chunk, Draw, Sampling, StepPlan

ROUND = Profile(
    "round", step_s=1.0, weights_s=10.0, token_s=0.5, pair_s=0.25, cell_s=0.1, reload_s=2.0, cells=64, host_cells=64
)


def chunk(start: int, tokens: int, drafts: int | None = None) -> Chunk:
    draw = None if drafts is None else Draw(Sampling(), 0, drafts)
    return Chunk(0, start, np.zeros(tokens, np.int32), draw)


def test_a_decode_reads_the_weights_and_its_cells() -> None:
    assert ROUND.step(StepPlan((chunk(9, 1, 0), chunk(19, 1, 0))), 4) == pytest.approx(1 + 10 + 0.1 * (10 + 20))
    assert ROUND.decode_s(2, 30) == pytest.approx(14.0)


def test_decode_steps_one_by_one_and_at_once_take_the_same() -> None:
    one_by_one = sum(ROUND.decode_s(3, 30 + 3 * step) for step in range(7))
    assert ROUND.decode_s(3, 30, 7) == pytest.approx(one_by_one)


def test_a_prompt_takes_a_polynomial_of_its_length() -> None:
    n = 40  # enough to be computed for longer than weights and cells are read
    for prompt in (chunk(0, n), chunk(0, n, 0)):
        assert ROUND.step(StepPlan((prompt,)), 4) == pytest.approx(0.125 * n**2 + 0.5 * n + 1.0)
    # A short one takes what reading takes.
    assert ROUND.step(StepPlan((chunk(98, 2),)), 4) == pytest.approx(1 + 10 + 2 * 99 * 0.25)
    slow = Profile("slow", 1.0, 10.0, 0.5, 0.25, 100.0, 2.0, 64, 64)
    assert slow.step(StepPlan((chunk(98, 2),)), 4) == pytest.approx(1 + 10 + 100 * 100)


def test_a_step_takes_at_least_as_long_as_its_copies() -> None:
    pages = np.arange(3, dtype=np.int32)
    plan = StepPlan((chunk(9, 1, 0),), saves=PageMoves(pages, pages), loads=PageMoves(pages[:1], pages[:1]))
    assert ROUND.step(plan, 4) == pytest.approx(4 * 4 * 2.0)
    assert ROUND.step(StepPlan((), loads=PageMoves(pages[:1], pages[:1])), 4) == pytest.approx(4 * 2.0)


@pytest.mark.parametrize("seconds", [0.0, 12.0, 14.0, 40.0, 1e6])
def test_fewest_steps_that_take_so_long(seconds: float) -> None:
    steps = ROUND.decode_steps(2, 30, seconds, 50)
    assert 1 <= steps <= 50
    assert steps == 50 or ROUND.decode_s(2, 30, steps) >= seconds
    assert steps == 1 or ROUND.decode_s(2, 30, steps - 1) < seconds


def test_a_profile_is_its_data_sheet() -> None:
    found = machines.profile("8b-a100")
    assert found.weights_s == pytest.approx(2 * 8.03e9 / (0.8 * 2.039e12))
    assert found.token_s == pytest.approx(2 * 8.03e9 / (0.5 * 312e12))
    assert found.cell_s * 0.8 * 2.039e12 == pytest.approx(128 * 1024)
    assert found.cells == int((0.9 * 80e9 - 2 * 8.03e9) / (128 * 1024))
    assert machines.MODELS["70b"].cell == 320 * 1024
    four = machines.profile("70b-b200")
    assert four.weights_s == pytest.approx(2 * 70.6e9 / (4 * 0.8 * 8e12))
    assert all(machines.profile(name).cells > 0 for name in machines.names())
    assert all(machines.profile(name).name == name for name in machines.names())
    costs = ("step_s", "weights_s", "token_s", "pair_s", "cell_s", "reload_s")
    assert found.slowed(2.0) == replace(found, **{name: 2 * getattr(found, name) for name in costs})
    with pytest.raises(ConfigError):
        machines.profile("8b-abacus")
