"""How far the reading of a checkpoint is, told while it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

log = logging.getLogger(__name__)

TELL_S = 0.25  # between two reports to whoever asked for them
LOG_S = 5.0  # between two lines of the log
GB = 10**9


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes `read` of `total`, in so many seconds."""

    read: int
    total: int
    seconds: float

    def __str__(self) -> str:
        rate = self.read / max(self.seconds, 1e-3)
        left = f", {(self.total - self.read) / rate:.0f} s left" if 0 < self.read < self.total else ""
        return f"{self.read / GB:.1f} of {self.total / GB:.1f} GB, {rate / GB:.2f} GB/s{left}"


Tell: TypeAlias = Callable[[Progress], None]


class Meter:
    """Counts the bytes read of `total`. Reports and logs them from time to time; always reports the end."""

    def __init__(self, total: int, report: Tell | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._total, self._report, self._now = total, report, now
        self._read = 0
        self._began = self._logged = self._reported_at = now()

    def add(self, size: int) -> None:
        """Count `size` more bytes as read."""
        self._read += size
        moment = self._now()
        progress = Progress(self._read, self._total, moment - self._began)
        done = self._read >= self._total
        if self._report is not None and (done or moment - self._reported_at >= TELL_S):
            self._reported_at = moment
            self._report(progress)
        if moment - self._logged >= LOG_S:
            self._logged = moment
            log.info("weights: %s", progress)
