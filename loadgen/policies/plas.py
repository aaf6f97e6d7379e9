"""Autellix's order of requests: the program that was served least comes first."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from holdfast.replicas.programs import ProgramKey, Sequence, Status
from holdfast.replicas.scheduling.queue import Chunks, Key, RequestOrder, Sequences
from holdfast.replicas.types import Priority

_NOBODY: Mapping[Priority, int] = {}


class Plas(RequestOrder):
    """Autellix's PLAS: levels by attained service, first come, first served within a level.

    Service is the seconds of the steps that the program's requests took part in, on this replica. A request begins in
    the level of its program's service and sinks as it is served itself. Level i ends at `quantum_s * factor**i`. A
    request that has waited `patience` times its program's service goes back to the first level, once: after that it
    only sinks, so the order of the running requests settles. The paper leaves the constants open. The service of
    `programs` programs is remembered, the least recently served one is forgotten first.
    """

    settled = False

    def __init__(
        self,
        levels: int = 8,
        quantum_s: float = 1.0,
        factor: float = 2.0,
        patience: float = 4.0,
        programs: int = 65_536,
    ) -> None:
        self._ends = [quantum_s * factor**i for i in range(levels - 1)]
        self._patience = patience
        self._programs = programs
        self._of_programs: OrderedDict[ProgramKey, float] = OrderedDict()
        self.attained: dict[Sequence, float] = {}  # service that counts against each request that waits or runs
        self._due: list[tuple[float, int, Sequence]] = []  # a heap: when requests have waited too long

    def key(self, sequence: Sequence) -> Key:
        attained = self.attained.get(sequence, 0.0)
        return (sum(attained >= end for end in self._ends), sequence.arrived, sequence.number)

    def arrive(self, sequence: Sequence, *, alone: bool = False) -> None:
        program = ProgramKey.of(sequence.submit)
        attained = self.attained[sequence] = self._of_programs.get(program, 0.0) if program is not None else 0.0
        if attained >= self._ends[0]:
            heapq.heappush(self._due, (sequence.arrived + self._patience * attained, sequence.number, sequence))

    def left(self, sequence: Sequence) -> None:
        self.attained.pop(sequence, None)

    def serve(
        self, sequences: Sequences, chunks: Chunks, seconds: float, waiting: Mapping[Priority, int] = _NOBODY
    ) -> None:
        for sequence in sequences:
            if sequence in self.attained:
                self.attained[sequence] += seconds
            program = ProgramKey.of(sequence.submit)
            if program is None:
                continue
            self._of_programs[program] = self._of_programs.get(program, 0.0) + seconds
            self._of_programs.move_to_end(program)
            if len(self._of_programs) > self._programs:
                self._of_programs.popitem(last=False)

    def promote(self, now: float) -> Iterator[Sequence]:
        while self._due and self._due[0][0] <= now:
            sequence = heapq.heappop(self._due)[2]
            if sequence in self.attained and sequence.status is Status.WAITING and not sequence.preempted:
                self.attained[sequence] = 0.0
                yield sequence
