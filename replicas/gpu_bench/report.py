"""What the benchmark found, written down after every part; and the time that each part may take.

A part that fails, or takes too long, is written down as such and leaves the others their figures. What is measured is
the parts' matter.
"""

import json
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

_GRACE_S = 15.0  # beyond its deadline a part is broken off


class OverTimeError(BaseException):
    """A part went on beyond its time. No Exception, so that no engine takes it for the failure of a step."""


class Deadline:
    """Until when a part may begin something else."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds; none are left from 0 on."""
        return self._end - time.perf_counter()

    @property
    def over(self) -> bool:
        return self.left <= 0


Figures: TypeAlias = dict[str, Any]
Lines: TypeAlias = Iterator[tuple[str, Figures]]
Part: TypeAlias = Callable[[Deadline], Lines]


class Report:
    """What was found so far. `seconds`: after which no other part begins."""

    def __init__(self, file: Path | None, seconds: float) -> None:
        self.found: dict[str, Any] = {"parts": {}, "failed": {}, "left_out": [], "seconds": {}}
        self._file = file
        self._deadline = Deadline(seconds)

    def run(self, name: str, part: Part, budget: float = 60.0) -> None:
        """Run a part for about `budget` seconds; what it raises is written down. The supervisor of the parts."""
        seconds = min(budget, self._deadline.left)
        if seconds <= 0:
            self.found["left_out"].append(name)
            print(f"{name}: left out, there is no time", flush=True)
            return
        began = time.perf_counter()
        figures: Figures = {}
        self.found["parts"][name] = figures
        try:
            with _alarm(seconds + _GRACE_S):
                for line, found in part(Deadline(seconds)):
                    figures[line] = found
                    print(f"{line:44}{_shown(found)}", flush=True)
        except (Exception, OverTimeError) as failure:
            self.found["failed"][name] = traceback.format_exc()
            print(f"{name}: FAILED, {type(failure).__name__}: {failure}", flush=True)
        self.found["seconds"][name] = time.perf_counter() - began
        print(f"({name}: {self.found['seconds'][name]:.1f} s, {self._deadline.left:.0f} s left)", flush=True)
        self.write()

    def write(self) -> None:
        """Write the file, with the shares of ceilings and the ratios to others in one place each."""
        self.found["shares"] = self._all("share", "efficiency")
        self.found["ratios"] = self._all("theirs_over_ours")
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")

    def _all(self, *keys: str) -> dict[str, float]:
        """These figures of every line of every part that has one of them."""
        parts: dict[str, dict[str, Figures]] = self.found["parts"]
        return {
            f"{part}: {line}": figures[key]
            for part, lines in parts.items()
            for line, figures in lines.items()
            for key in keys
            if key in figures
        }


def _shown(found: Figures) -> str:
    return "  ".join(f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, int | float))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OverTimeError here after so long. Only the main thread can be told; in another one nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise OverTimeError(f"broken off after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
