"""In which order waiting requests are admitted: small interchangeable policies.

A key is computed when a request starts to wait; the smallest key is served first.
"""

from typing import Protocol, TypeAlias

from holdfast.replicas.sequences.sequence import Sequence

Key: TypeAlias = tuple[float, ...]


class Order(Protocol):
    def key(self, sequence: Sequence) -> Key: ...


class ProgramOrder:
    """Preempted first, then by the program's first arrival, then by the request's (Continuum)."""

    def key(self, sequence: Sequence) -> Key:
        began = sequence.submit.program_arrival
        return (0.0 if sequence.preempted else 1.0, began, sequence.arrived)


class RequestOrder:
    """First come, first served by request: the baseline of request-driven servers."""

    def key(self, sequence: Sequence) -> Key:
        return (0.0 if sequence.preempted else 1.0, sequence.arrived)
