"""The pure rules of a step: chunk sizes, admission, and who follows whom."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.events import Sampling, Submit
from holdfast.replicas.scheduling.admission import Budget, find_leader
from holdfast.replicas.scheduling.scheduler import chunk_size
from holdfast.replicas.sequences import Sequence, Status

CONFIG = EngineConfig(cells=1000, step_tokens=4096, latency_chunk=1024, admission_ceiling=0.5, completion_reserve=100)


def sequence(prompt: list[int], max_tokens: int = 10, scope: str = "", computed: int = 0) -> Sequence:
    made = Sequence.of(Submit("x", np.asarray(prompt, np.int32), Sampling(max_tokens), scope), 0, 0.0, frozenset(), 0)
    made.move(Status.RUNNING)
    made.n_computed = computed
    return made


@given(st.integers(1, 10**5), st.integers(1, 5000), st.booleans())
def test_a_chunk_is_positive_and_within_its_bounds(remaining, active, hurried):
    size = chunk_size(remaining, active, hurried, CONFIG)
    assert 1 <= size <= remaining
    assert size <= max(1, (1024 if hurried else 4096))
    assert size * active <= max(4096, active)


def test_a_lone_prefill_fills_the_step_and_a_hurried_neighbour_narrows_it():
    assert chunk_size(9000, 1, False, CONFIG) == 4096
    assert chunk_size(9000, 4, False, CONFIG) == 1024
    assert chunk_size(9000, 1, True, CONFIG) == 1024


def test_admission_counts_the_prompt_beyond_the_cache_and_a_bounded_completion():
    budget = Budget.of(CONFIG)
    assert budget.need(sequence([1] * 50, 20), n_cached=30) == 40
    assert budget.need(sequence([1] * 50, 5000), n_cached=0) == 150
    assert budget.admits(committed=400, need=100, alone=False)
    assert not budget.admits(committed=400, need=101, alone=False)
    assert budget.admits(committed=400, need=900, alone=True)


def test_the_leader_is_the_prefill_that_shares_most():
    mine = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    some, most = sequence([1, 2, 3, 4, 9]), sequence([1, 2, 3, 4, 5, 6, 9])
    other_scope = sequence([1, 2, 3, 4, 5, 6, 7, 8], scope="other")
    following = find_leader(mine, [some, most, other_scope], n_cached=0, least=2)
    assert (following.leader, following.shared, following.gain) == (most, 6, 6)
    assert not following.over
    most.n_computed = 6
    assert following.over


def test_nobody_leads_for_too_little_or_for_what_is_cached():
    mine = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    leader = sequence([1, 2, 3, 4, 5, 6, 9])
    assert find_leader(mine, [leader], n_cached=5, least=2) is None
    assert find_leader(mine, [sequence([1, 2, 3, 4, 5, 6, 9], computed=6)], n_cached=0, least=2) is None


def test_the_last_token_is_never_shared():
    twin = sequence([1, 2, 3, 4])
    assert find_leader(sequence([1, 2, 3, 4]), [twin], n_cached=0, least=1).shared == 3
