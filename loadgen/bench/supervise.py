"""Runs a benchmark in a process of its own, and another one behind the part that a process did not survive.

Some errors of a kernel end the use of a GPU for the whole process, and a kernel that does not end cannot be interrupted
from within. Here nothing touches the GPU: what is known of the other process is in the file of its `report`.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.loadgen.bench.report import put

RESUME = "--resume"
_SLACK_S = 10.0  # beyond the moment in which a part should have been broken off from within
_POLL_S = 0.2
_TIDY_S = 5.0  # to end by itself


def supervised(command: Sequence[str], file: Path | None) -> int:
    """Run `command` with `--json FILE --resume` until it has gone through all parts; its exit status.

    1 where a part failed with its process. What the process leaves in the folder for temporary files is removed.
    """
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="bench.") as made:
        kept = file or Path(made) / "found.json"
        put(kept, {"began": time.time()})  # importing what a process needs takes of the time, too
        failed, done = False, 0
        while True:
            status = _watched([*command, "--json", str(kept), RESUME], kept)
            if status in (0, 1):
                return int(failed or status)
            found = _ended(kept, status)
            failed, before, done = True, done, len(found.get("parts", ()))
            if done <= before:
                return status


def _watched(command: Sequence[str], file: Path) -> int:
    """Run until the process ends, or a part of it goes on far beyond its time."""
    with tempfile.TemporaryDirectory(prefix="bench.") as made:
        process = subprocess.Popen(["env", f"TMPDIR={made}", *command])
        try:
            while True:
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    running = _found(file).get("running")
                    if running is not None and time.time() > running["until"] + _SLACK_S:
                        print(f"{running['part']}: does not end, its process is killed", flush=True)
                        process.kill()
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_TIDY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ended(file: Path, status: int) -> dict[str, Any]:
    """What was found; the part with which the process ended is noted as failed."""
    found = _found(file)
    running = found.pop("running", None)
    if running is not None:
        found["failed"].setdefault(running["part"], f"the process ended with status {status}")
        put(file, found)
    return found


def _found(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def module_command(module: str, options: Sequence[str]) -> list[str]:
    """`python -m module` with these options, by the interpreter that runs now."""
    return [sys.executable, "-m", module, *options]


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
