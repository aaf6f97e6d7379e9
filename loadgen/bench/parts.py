"""The parts of a benchmark: each has a time of its own, may end its process, and is written down line by line.

A part that fails, or takes too long, is written down as such and leaves the others their figures. Some errors of a
kernel end the use of a GPU for the whole process, and a kernel that does not end cannot be interrupted from within: so
`supervised` runs the benchmark in a process of its own, and begins another one behind the part that a process did not
survive. All that the two know of each other is in the report's file. What is measured is the parts' matter.
"""

import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

RESUME = "--resume"
LOST = 75  # exit status: the device answers no more, a new process may go on
_GRACE_S = 15.0  # beyond its deadline a part is broken off
_SLACK_S = 10.0  # beyond that moment the process is killed from without
_BRIEF_S = 5.0  # a part of one line that took no longer needs no line of its own
_POLL_S = 0.2
_TIDY_S = 5.0  # to end by itself


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
    """What was found so far. `seconds`: after which no other part begins.

    With `resume` it goes on with what the file says: parts that are in it were done, or ended their process; and time
    counts from when the first process was begun.
    """

    def __init__(self, file: Path | None, seconds: float, resume: bool = False) -> None:
        self.found: dict[str, Any] = {"parts": {}, "failed": {}, "left_out": [], "seconds": {}, "began": time.time()}
        self._file = file
        if resume and file is not None and file.exists():
            self.found |= json.loads(file.read_text()) | {"left_out": []}
        self._before = set(self.found["parts"])
        self._deadline = Deadline(seconds - (time.time() - self.found["began"]))

    def run(self, name: str, part: Part, budget: float = 60.0) -> None:
        """Run a part for about `budget` seconds; what it raises is written down. The supervisor of the parts.

        The process ends with `LOST` where the device is of no use any more.
        """
        if name in self._before:
            return
        seconds = min(budget, self._deadline.left)
        if seconds <= 0:
            self.found["left_out"].append(name)
            print(f"{name}: left out, there is no time", flush=True)
            return
        began = time.perf_counter()
        figures: Figures = {}
        self.found["parts"][name] = figures
        self.found["running"] = {"part": name, "until": time.time() + seconds + _GRACE_S}
        self.write()
        try:
            with _alarm(seconds + _GRACE_S):
                for line, found in part(Deadline(seconds)):
                    figures[line] = found
                    print(f"{line:60} {_shown(found)}", flush=True)
                    self.write()
        except (Exception, OverTimeError) as failure:
            self.found["failed"][name] = traceback.format_exc()
            print(f"{name}: FAILED, {type(failure).__name__}: {str(failure)[:300]}", flush=True)
        self.found["seconds"][name] = took = time.perf_counter() - began
        del self.found["running"]
        if took > _BRIEF_S or list(figures) != [name]:
            print(f"({name}: {took:.1f} s, {self._deadline.left:.0f} s left)", flush=True)
        self.write()
        if name in self.found["failed"] and not device_answers():
            print("the device does not answer any more", flush=True)
            os._exit(LOST)  # what holds tensors cannot be taken down in order any more

    def run_anew(self, name: str, part: Part, budget: float) -> None:
        """`run` a part that makes what others need, in every process: "again" where one before this did.

        Where it failed there it is not begun again.
        """
        names = itertools.chain((name, f"{name}, again"), (f"{name}, again {times}" for times in itertools.count(2)))
        own = next(each for each in names if each in self.found["failed"] or each not in self._before)
        if own not in self.found["failed"]:
            self.run(own, part, budget)

    def wants(self, names: Iterable[str]) -> bool:
        """Whether one of these parts was not begun by a process before this one."""
        return not self._before.issuperset(names)

    def write(self) -> None:
        """Write the file, with the shares of ceilings and the ratios to others in one place each."""
        self.found["shares"] = self._all("share", "efficiency")
        self.found["ratios"] = self._all("theirs_over_ours")
        if self._file is not None:
            put(self._file, self.found)

    def _all(self, *keys: str) -> dict[str, float]:
        """These figures of every line of every part that has one of them."""
        parts: dict[str, dict[str, Figures]] = self.found["parts"]
        return {
            part if part == line else f"{part}: {line}": figures[key]
            for part, lines in parts.items()
            for line, figures in lines.items()
            for key in keys
            if key in figures
        }


def put(file: Path, found: dict[str, Any]) -> None:
    """Write what was found; who reads the file meanwhile sees the old or the new one."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(file)


def device_answers() -> bool:
    """Whether the GPU, if there is one, still does what it is told: after some errors a process has to end."""
    import torch  # the supervising process does without

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        return int(torch.ones(1, device="cuda").sum()) == 1
    except RuntimeError:
        return False


def _shown(found: Figures) -> str:
    shown = (f"{key} {value if isinstance(value, str) else format(value, '.4g')}" for key, value in found.items())
    return "  ".join(shown)


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


# ---- from without: nothing here touches the GPU


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


def versions() -> dict[str, str]:
    """The device, and the versions of the libraries that matter."""
    import torch  # the supervising process does without

    names = ("torch", "triton", "transformers", "numpy")
    found = {name: version(name) for name in names if find_spec(name)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "python": platform.python_version(), **found}
