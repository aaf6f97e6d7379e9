"""When programs arrived, on one clock, though not every request says it and those that do may use another clock."""

from holdfast.replicas.events import Submit


class Arrivals:
    """Routers give a program's arrival in seconds since the epoch, callers in this process maybe by the engine's clock.

    No program begins after its request: one that seems to shows how far that clock is ahead of the engine's at least.
    Requests that say nothing are put as far ahead: among the others they stand by when they came, and neither kind
    goes first for ever. Where all times are of the engine's clock none is changed.
    """

    def __init__(self) -> None:
        self._ahead = 0.0  # seconds

    def of(self, submit: Submit, arrived: float, began: float) -> float:
        """What a request says, or else `began`, which like `arrived`, when it came itself, is by the engine's clock."""
        if not submit.program_arrival:
            return began + self._ahead
        self._ahead = max(self._ahead, submit.program_arrival - arrived)
        return submit.program_arrival
