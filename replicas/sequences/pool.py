"""The sequence pool: a fixed number of page-table rows, handed out and returned (stateful inference, section 3.1).

The pool never waits: a request waits in the scheduler's queue, in order and with a timeout, until a row is free.
"""

from enum import Enum


class Region(Enum):
    """TRANSIENT rows serve single requests; SESSION rows those of programs and sessions, which come back for more."""

    TRANSIENT = "transient"
    SESSION = "session"


class SequencePool:
    """Rows `0..rows-1`, the last `session_rows` of which form the session region."""

    def __init__(self, rows: int, session_rows: int = 0) -> None:
        if not 0 <= session_rows < rows:
            raise ValueError(f"session_rows must be in [0, {rows}), not {session_rows}")
        self.rows = rows
        self.first_session_row = rows - session_rows
        # Stacks: the row returned last is the one whose memory is warm.
        self._free = {
            Region.TRANSIENT: list(range(self.first_session_row - 1, -1, -1)),
            Region.SESSION: list(range(rows - 1, self.first_session_row - 1, -1)),
        }
        self._taken: set[int] = set()

    def free(self, region: Region = Region.TRANSIENT) -> int:
        return len(self._free[region])

    @property
    def taken(self) -> int:
        return len(self._taken)

    def acquire(self, region: Region = Region.TRANSIENT) -> int | None:
        """A free row of the region, or None when there is none."""
        if not self._free[region]:
            return None
        row = self._free[region].pop()
        self._taken.add(row)
        return row

    def release(self, row: int) -> None:
        """Return a row. Raises ValueError if it is not taken: a double release would give it to two sequences."""
        if row not in self._taken:
            raise ValueError(f"row {row} is not taken")
        self._taken.remove(row)
        self._free[Region.TRANSIENT if row < self.first_session_row else Region.SESSION].append(row)
