"""What is drawn for many replicas: the same for a seed, and what its name says."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from holdfast.loadgen.simulator.crowds import CROWDS, LONGEST, Crowd
from holdfast.loadgen.simulator.programs import MAX_TOKENS, Program
from holdfast.replicas.errors import ConfigError


def drawn(kind: str, programs: int = 400, seed: int = 0) -> list[Program]:
    return list(Crowd(kind, programs, 10.0).draw(seed))


def children(programs: list[Program]) -> list[Program]:
    return [child for program in programs for turn in program.turns for child in turn.children]


@pytest.mark.parametrize("kind", CROWDS)
def test_a_seed_says_all_and_programs_fit(kind: str) -> None:
    programs = drawn(kind, 100)
    assert programs == drawn(kind, 100)
    assert programs != drawn(kind, 100, seed=1)
    assert all(one.arrived <= other.arrived for one, other in pairwise(programs))
    everybody = programs + children(programs)
    assert len({program.name for program in everybody}) == len(everybody)
    assert all(program.length - program.turns[-1].reply + MAX_TOKENS <= LONGEST for program in everybody)


def test_no_program_is_too_long_however_rare_it_is() -> None:
    """One in four thousand was: its parent had said nearly as much as a context holds."""
    everybody = drawn("fan-out", 5000, seed=100)
    everybody += children(everybody)
    assert all(program.length - program.turns[-1].reply + MAX_TOKENS <= LONGEST for program in everybody)


def test_preambles_are_shared_by_their_rank() -> None:
    programs = drawn("preambles", 2000)
    shares = Counter(program.preamble for program in programs)
    assert shares[1] == pytest.approx(2 * shares[2], rel=0.25)
    assert len(shares) == 40
    first, second = [program for program in programs if program.preamble == 1][:2]
    other = next(program for program in programs if program.preamble == 2)
    shared = first.shared
    assert (first.tokens()[:shared] == second.tokens()[:shared]).all()
    assert first.tokens()[shared] != second.tokens()[shared]
    assert first.tokens()[0] != other.tokens()[0]
    assert first.begins == second.begins != other.begins


def test_sub_agents_begin_with_what_their_parent_said() -> None:
    programs = drawn("fan-out")
    parents = [program for program in programs if children([program])]
    counts = [len(children([parent])) for parent in parents]
    assert np.median(counts) == 2
    assert 10 <= max(counts) <= 21
    for parent in parents[:20]:
        for child in children([parent]):
            at = child.fork
            assert child.shared == sum(turn.prompt + turn.reply for turn in parent.turns[: at + 1])
            assert (child.tokens()[: child.shared] == parent.tokens()[: child.shared]).all()
            assert child.tokens()[child.shared] != parent.tokens()[child.shared]
            assert child.begins == parent.standing(at)


def test_the_hot_tenant_sends_most_and_in_bursts() -> None:
    programs = drawn("hot-tenant", 3000)
    hot = [program for program in programs if program.tenant == "hot"]
    assert len(hot) == pytest.approx(0.6 * len(programs), rel=0.1)
    assert all(program.arrived % 30 <= 15 for program in hot)
    quiet = [program for program in programs if program.tenant != "hot"]
    assert sum(program.arrived % 30 > 15 for program in quiet) == pytest.approx(len(quiet) / 2, rel=0.15)
    assert len({program.tenant for program in quiet}) == 9


@pytest.mark.parametrize("wrong", [{"kind": "poetry"}, {"programs": 0}, {"rate": 0.0}])
def test_wrong_sizes(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Crowd(**{"kind": "agents", "programs": 1, "rate": 1.0} | wrong)
