"""How much may run at once, in cells (stateful inference, section 3.2). Pure arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Budget:
    """The cells that admitted requests may have at their ends, and how a request's need is estimated.

    `reserve` bounds the completion a request is charged for: most stop long before their `max_tokens`, and one
    that does not is covered by preemption.
    """

    ceiling: int
    reserve: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Budget":
        return cls(
            ceiling=int(config.cells * config.admission_ceiling),
            reserve=config.completion_reserve,
        )

    def need(self, sequence: Sequence, n_cached: int) -> int:
        """Cells the sequence will fill beyond its cached prefix: prompt - cached + completion."""
        completion = len(sequence.buffer) - sequence.length
        return sequence.length - n_cached + min(completion, self.reserve)

    def committed(self, running: Iterable[Sequence]) -> int:
        """The cells that all these may come to need beyond what they have computed."""
        reserve = self.reserve
        return sum([s.length - s.n_computed + min(len(s.buffer) - s.length, reserve) for s in running])

    def admits(self, committed: int, need: int, *, alone: bool) -> bool:
        """Whether `need` more cells fit beside those that are `committed`: occupied, or yet to be computed.

        A request that runs alone always fits.
        """
        return alone or committed + need <= self.ceiling
