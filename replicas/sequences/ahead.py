"""Where a sequence will be once the step in flight is over, while the next one is planned; without one, where it is."""

from holdfast.replicas.sequences.sequence import Sequence


def reach(sequence: Sequence) -> int:
    """Its length then."""
    return sequence.length + (sequence.awaited is not None)


def closing(sequence: Sequence) -> bool:
    """It ends with the step in flight, whatever that draws."""
    end = reach(sequence)
    return sequence.ahead > 0 and end == len(sequence.buffer) and sequence.pending == end - sequence.length


def decoded(sequence: Sequence) -> bool:
    """Whether it decodes already without that step: its prompt is in the cache for all to see."""
    return sequence.length - sequence.n_computed == 1 and sequence.length > sequence.n_prompt
