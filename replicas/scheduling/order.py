"""In which order requests are served: small interchangeable policies.

The smallest key is served first; no two sequences have the same. It is the order of the running, where the last is
preempted when cells run out, and, behind those that were preempted, of the waiting. So the first of the running is
never preempted, and there is always one that gets on.
"""

from typing import Protocol, TypeAlias

from holdfast.replicas.sequences.sequence import Sequence

Key: TypeAlias = tuple[float, ...]


class Order(Protocol):
    def key(self, sequence: Sequence) -> Key: ...


class ProgramOrder:
    """By the program's first arrival, then by the request's (Continuum)."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.submit.program_arrival, sequence.arrived, sequence.number)


class RequestOrder:
    """First come, first served by request: the baseline of request-driven servers."""

    def key(self, sequence: Sequence) -> Key:
        return (sequence.arrived, sequence.number)
