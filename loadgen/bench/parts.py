"""The parts of a GPU benchmark. Each part has a time limit, may end its process, and is written down line by line.

A part that fails or takes too long is recorded as failed; the other parts keep their figures. Some errors of a kernel
end the use of the GPU for the whole process, and a kernel that hangs cannot be interrupted from within. So `supervised`
runs the benchmark in a child process, and starts another child behind a part that ended one. Both share only the
report's file.
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
LOST = 75  # exit status: the device does not respond, a new process may continue
_GRACE_S = 15.0  # after its deadline a part is interrupted
_SLACK_S = 10.0  # after that the supervisor kills the process
_BRIEF_S = 5.0  # the duration of a shorter part with one line is not printed
_POLL_S = 0.2
_TIDY_S = 5.0  # to end by itself


class OverTimeError(BaseException):
    """A part exceeded its time. Not an Exception, so that no engine handles it as the failure of a step."""


class Deadline:
    """The time until which a part may begin more work."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative once it is over."""
        return self._end - time.perf_counter()

    @property
    def over(self) -> bool:
        return self.left <= 0


Figures: TypeAlias = dict[str, Any]
Lines: TypeAlias = Iterator[tuple[str, Figures]]
Part: TypeAlias = Callable[[Deadline], Lines]


class Report:
    """The figures so far. No part begins after `seconds`.

    With `resume` it continues the file: the parts in it are done, or ended their process. The time then counts from the
    start of the first process.
    """

    def __init__(self, file: Path | None, seconds: float, resume: bool = False) -> None:
        self.found: dict[str, Any] = {"parts": {}, "failed": {}, "left_out": [], "seconds": {}, "began": time.time()}
        self._file = file
        if resume and file is not None and file.exists():
            self.found |= json.loads(file.read_text()) | {"left_out": []}
        self._before = set(self.found["parts"])
        self._deadline = Deadline(seconds - (time.time() - self.found["began"]))

    def run(self, name: str, part: Part, budget: float = 60.0) -> None:
        """Run a part for about `budget` seconds and record what it raises.

        The process ends with `LOST` if the device does not respond after a failure.
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
            os._exit(LOST)  # tensors cannot be freed any more

    def run_anew(self, name: str, part: Part, budget: float) -> None:
        """`run` a part that other parts depend on, once in every process; later runs are named "again".

        A part that failed in an earlier process does not run again.
        """
        names = itertools.chain((name, f"{name}, again"), (f"{name}, again {times}" for times in itertools.count(2)))
        own = next(each for each in names if each in self.found["failed"] or each not in self._before)
        if own not in self.found["failed"]:
            self.run(own, part, budget)

    def wants(self, names: Iterable[str]) -> bool:
        """Whether one of these parts did not begin in an earlier process."""
        return not self._before.issuperset(names)

    def write(self) -> None:
        """Write the file; all shares of ceilings and all ratios to peers are collected in one place each."""
        self.found["shares"] = self._all("share", "efficiency")
        self.found["ratios"] = self._all("theirs_over_ours")
        if self._file is not None:
            put(self._file, self.found)

    def _all(self, *keys: str) -> dict[str, float]:
        """One of these figures of every line that has it."""
        parts: dict[str, dict[str, Figures]] = self.found["parts"]
        return {
            part if part == line else f"{part}: {line}": figures[key]
            for part, lines in parts.items()
            for line, figures in lines.items()
            for key in keys
            if key in figures
        }


def put(file: Path, found: dict[str, Any]) -> None:
    """Replace the file atomically."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(file)


def device_answers() -> bool:
    """Whether the GPU, if there is one, still works; after some errors it does not, for this process."""
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
    """Raise OverTimeError here after `seconds`; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise OverTimeError(f"interrupted after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# ---- the supervisor; nothing here touches the GPU


def supervised(command: Sequence[str], file: Path | None) -> int:
    """Run `command` with `--json FILE --resume` until all parts are done; the exit status.

    It is 1 if a part ended its process. Temporary files of the process are removed.
    """
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="bench.") as made:
        kept = file or Path(made) / "found.json"
        put(kept, {"began": time.time()})  # the time of imports counts
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
    """Run until the process ends, and kill it if a part far exceeds its time."""
    with tempfile.TemporaryDirectory(prefix="bench.") as made:
        process = subprocess.Popen(["env", f"TMPDIR={made}", *command])
        try:
            while True:
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    running = _found(file).get("running")
                    if running is not None and time.time() > running["until"] + _SLACK_S:
                        print(f"{running['part']}: does not end, the process is killed", flush=True)
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
    """The report; the part that ended the process is recorded as failed."""
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
    """`python -m module` with these options, by this interpreter."""
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
