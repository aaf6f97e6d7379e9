"""Drafts of a constrained sequence: what its grammar forbids is cut off, and what it forces needs no drafter."""

import numpy as np

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.sequences.sequence import Sequence
from holdfast.replicas.speculation.drafter import NO_DRAFT
from holdfast.replicas.tokens import TokenIds


def fitting(sequence: Sequence, drafts: TokenIds, most_forced: int) -> TokenIds:
    """Of `drafts` those that the sequence's grammar lets through; or the tokens it forces, `most_forced` at most.

    Forced tokens are always drawn, so they cost a row of the forward each and never a step.
    """
    matcher = sequence.submit.matcher
    if matcher is None:
        return drafts
    limit = min(most_forced, len(sequence.buffer) - sequence.length - 1)
    forced = matcher.forced()[:limit] if limit > 0 else []
    if forced and drafts[: len(forced)].tolist() != forced:
        return np.array(forced, np.int32)
    return drafts[: matcher.accepts(drafts.tolist())] if len(drafts) else NO_DRAFT


def check(sequence: Sequence) -> None:
    """Raises InvalidRequestError once the sequence's grammar has grown beyond its limits: it says no more."""
    matcher = sequence.submit.matcher
    if matcher is not None and matcher.failed:
        raise InvalidRequestError("the grammar of the reply grew beyond its limits; simplify its schemas")
