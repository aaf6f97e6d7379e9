"""InferCept's order of requests: a program keeps its place by arrival, whether its cells are pinned or not."""

from holdfast.replicas.programs import Sequence
from holdfast.replicas.scheduling.queue import Key, ProgramOrder


class ArrivalOfProgram(ProgramOrder):
    """By the program's first arrival alone. It goes with the retention policy `infercept`."""

    def waiting(self, sequence: Sequence) -> Key:
        return self.key(sequence)
