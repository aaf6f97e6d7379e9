"""Grouped prefill: a prefix that several waiting prompts share is computed by one of them (stateful inference, 3.2).

The leader is a running sequence in the middle of its prompt. A follower waits until the leader's cells reach the end
of what they share, and then aliases them through the tree like any cached prefix.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from holdfast.replicas.kv.radix import common_prefix
from holdfast.replicas.sequences.ahead import decoded
from holdfast.replicas.sequences.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Following:
    """`follower` gains `gain` tokens by waiting until `leader` has computed `shared`."""

    follower: Sequence
    leader: Sequence
    shared: int
    gain: int

    @property
    def over(self) -> bool:
        """Nothing is left to wait for: the shared tokens are computed, or the leader has gone."""
        return self.leader.status is not Status.RUNNING or self.leader.n_computed >= self.shared


def find_leader(sequence: Sequence, running: Iterable[Sequence], n_cached: int, least: int) -> Following | None:
    """The running prefill that shares most with `sequence` beyond its `n_cached` tokens; None under `least` tokens."""
    tokens = sequence.tokens[:-1]
    window = tokens[n_cached : n_cached + least]  # agrees, or the gain is less than `least`
    best: Following | None = None
    for leader in running:
        if decoded(leader) or leader.submit.scope != sequence.submit.scope:
            continue
        if not np.array_equal(leader.tokens[n_cached : n_cached + len(window)], window):
            continue
        shared = common_prefix(tokens, leader.tokens)
        gain = shared - n_cached
        if shared > leader.n_computed and gain >= max(least, best.gain + 1 if best else 0):
            best = Following(sequence, leader, shared, gain)
    return best
