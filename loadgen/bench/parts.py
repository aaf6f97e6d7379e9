"""The command of a GPU benchmark: its parts have time limits, may end their process, and are written line by line.

A part that fails is recorded; the others keep their figures. Some errors of a kernel end the use of the GPU for the
whole process, and a kernel that hangs cannot be interrupted from within. So on a GPU the parts run in a child process,
and `supervised` starts another child behind a part that ended one or took too long. Both share only the report's file.
"""

import argparse
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeAlias, TypeVar

Made = TypeVar("Made")
RESUME = "--resume"
LOST = 75  # exit status: the device does not respond, a new process may continue
_SECONDS = 440.0  # after which no other part begins
_SETUP_S = 150.0  # for what a part needs
_GRACE_S = 25.0  # beyond the time of a part, before its process is killed
_POLL_S = 0.2
_TIDY_S = 5.0  # to end by itself

Figures: TypeAlias = dict[str, Any]
Lines: TypeAlias = Iterator[tuple[str, Figures]]


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


Part: TypeAlias = Callable[[Deadline], Lines]


class Once(Generic[Made]):
    """A value that several parts need: made when it is first needed, in each process anew. A failure is kept."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._values: list[Made] = []
        self._failure: Exception | None = None

    def __call__(self) -> Made:
        """Raises RuntimeError where making it failed before."""
        if self._failure is not None:
            raise RuntimeError("this part needs something that could not be made") from self._failure
        if not self._values:
            try:
                self._values.append(self._make())
            except Exception as failure:
                self._failure = failure
                raise
        return self._values[0]

    def drop(self) -> None:
        """Forget the value, so that its memory is free."""
        self._values.clear()


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

    def run(self, name: str, part: Part, budget: float = 60.0, setup: Callable[[], object] | None = None) -> None:
        """Run a part for about `budget` seconds, after `setup`, and record what either raises.

        The process ends with `LOST` if the device does not respond after a failure.
        """
        if name in self._before:
            return
        seconds = min(budget, self._deadline.left)
        if seconds <= 0:
            self.found["left_out"].append(name)
            print(f"{name}: left out, there is no time", flush=True)
            return
        start = time.perf_counter()
        figures: Figures = {}
        self.found["parts"][name] = figures
        until = time.time() + seconds + _GRACE_S + (_SETUP_S if setup else 0.0)
        self.found["running"] = {"part": name, "until": until}
        self.write()
        try:
            if setup is not None:
                setup()
            for line, found in part(Deadline(seconds)):
                figures[line] = found
                texts = (f"{key} {value if isinstance(value, str) else f'{value:.4g}'}" for key, value in found.items())
                print(f"{line:60} {'  '.join(texts)}", flush=True)
                self.write()
        except Exception as failure:
            self.found["failed"][name] = traceback.format_exc()
            print(f"{name}: FAILED, {type(failure).__name__}: {str(failure)[:300]}", flush=True)
        self.found["seconds"][name] = time.perf_counter() - start
        del self.found["running"]
        self.write()
        if name in self.found["failed"] and not device_answers():
            print("the device does not answer any more", flush=True)
            os._exit(LOST)  # tensors cannot be freed any more

    def write(self) -> None:
        """Write the file; shares of ceilings are collected in one place."""
        self.found["shares"] = {
            part if part == line else f"{part}: {line}": figures[key]
            for part, lines in self.found["parts"].items()
            for line, figures in lines.items()
            for key in ("share", "efficiency")
            if key in figures
        }
        if self._file is not None:
            put(self._file, self.found)


def put(file: Path, results: dict[str, Any]) -> None:
    """Replace the file atomically."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(file)


def device_answers() -> bool:
    """Whether the GPU, if there is one, still works; after some errors it does not, for this process."""
    import torch  # the supervisor, and processes that only write a report, do without

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        return int(torch.ones(1, device="cuda").sum()) == 1
    except RuntimeError:
        return False


def free_device() -> None:
    """Hand memory that nobody holds back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- the command; the supervising process does not touch the GPU


def command(
    name: str,
    description: str | None,
    flags: Mapping[str, Mapping[str, Any]],
    measure: Callable[[Report, argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> int:
    """The command `bench NAME`; exit status 1 if a part failed.

    `measure` runs the parts. On a GPU it does so in a child process.
    """
    import torch

    signal.signal(signal.SIGTERM, _exit)
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=description)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="begin no other part after so long")
    parser.add_argument(RESUME, action="store_true", help=argparse.SUPPRESS)
    for flag, settings in flags.items():
        parser.add_argument(flag, **settings)
    options = parser.parse_args(argv)
    options.gpu = torch.cuda.is_available()
    if options.gpu and not options.resume:
        return supervised([sys.executable, "-m", f"holdfast.loadgen.bench.{name}", *argv], options.json)
    report = Report(options.json, options.seconds, options.resume)
    report.found |= {"machine": _machine(options.gpu), "versions": _versions()}
    print(report.found["machine"], report.found["versions"], flush=True)
    measure(report, options)
    report.write()
    failed = list(report.found["failed"])
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


def _machine(gpu: bool) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    if not gpu:
        return {"cores": cores, "note": "no GPU: small sizes in an interpreter, the figures say nothing"}
    import torch

    device = torch.cuda.get_device_properties(0)
    memory = {"memory_bytes": device.total_memory, "multiprocessors": device.multi_processor_count}
    return {"cores": cores, "device": torch.cuda.get_device_name(), **memory}


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names if find_spec(name)}}


def supervised(command: Sequence[str], file: Path | None) -> int:
    """Run `command` with `--json FILE --resume` until all parts are done; the exit status.

    It is 1 if a part ended its process. Temporary files of the process are removed.
    """
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        results_file = file or Path(folder) / "found.json"
        put(results_file, {"began": time.time()})  # the time of imports counts
        failed, done = False, 0
        while True:
            status = _watched([*command, "--json", str(results_file), RESUME], results_file)
            if status in (0, 1):
                return int(failed or status)
            results = json.loads(results_file.read_text())
            running = results.pop("running", None)
            if running is not None:
                results["failed"].setdefault(running["part"], f"the process ended with status {status}")
                put(results_file, results)
            failed, before, done = True, done, len(results.get("parts", ()))
            if done <= before:
                return status


def _watched(command: Sequence[str], file: Path) -> int:
    """Run until the process ends, and kill it if a part far exceeds its time."""
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        process = subprocess.Popen(["env", f"TMPDIR={folder}", *command])
        try:
            while True:
                try:
                    return process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    running = json.loads(file.read_text()).get("running")
                    if running is not None and time.time() > running["until"]:
                        print(f"{running['part']}: does not end, the process is killed", flush=True)
                        process.kill()
        finally:
            process.terminate()
            try:
                process.wait(_TIDY_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
