"""What this process has used of the machine. No history: whoever asks again takes differences."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STARTED = time.time()
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """`cpu_s`: of all threads. `memory`: resident bytes, 0 where the system does not tell. `started`: since 1970."""

    cpu_s: float
    memory: int
    started: float


def process_usage() -> ProcessUsage:
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        resident = 0
    return ProcessUsage(time.process_time(), resident, _STARTED)
