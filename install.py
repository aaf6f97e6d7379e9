"""Runs pip and says what it does and how far it is, for `make`, which has nothing installed yet: only Python's own.

    .venv/bin/python install.py -e .        # the arguments are those of `pip install`

On a terminal one line that changes, else a line at each step and every quarter of a minute. pip itself is heard only
where it fails: then the end of what it said.
"""

import os
import re
import selectors
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

PIP = (*("-m", "pip", "install", "--no-input", "--disable-pip-version-check"), *("--progress-bar", "off"))
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "bytes": 1.0}
LOOK_S = 0.5  # between two pictures on a terminal
LINE_S = 15.0  # and between two lines elsewhere
SHOWN = 40  # lines of pip's, where it fails

COLLECTING = re.compile(r"^Collecting ([A-Za-z0-9._-]+)")
DOWNLOADING = re.compile(r"^\s*Downloading (\S+?)(?:-[0-9][^ ]*)?(?: \(([\d.]+) (bytes|kB|MB|GB)\))?$")
INSTALLING = re.compile(r"^Installing collected packages: (.*)$")
BUILDING = re.compile(r"^\s*(?:Building|Preparing) (?:editable|wheel|metadata)")


class Progress:
    """How far pip is, from what it says. `here`: how many packages are in its folder now."""

    def __init__(self, here: int) -> None:
        self._before = here
        self._found = 0
        self._bytes = 0.0
        self._total = 0
        self.step = "looking for what is needed"

    def take(self, line: str) -> bool:
        """One line of pip's; whether another step begins with it."""
        step = self.step
        if COLLECTING.match(line):
            self._found += 1
        elif found := DOWNLOADING.match(line):
            name, size, unit = found.groups()
            name = name.rpartition("/")[2]
            self._bytes += float(size or 0) * UNITS[unit or "bytes"]
            self.step = f"downloading {name}" + (f" ({size} {unit})" if size else "")
        elif found := INSTALLING.match(line):
            self._total = len(found.group(1).split(", "))
            self.step = f"unpacking {self._total} packages"
        elif BUILDING.match(line):
            self.step = "building the C kernels" if self._found else "looking for what is needed"
        return self.step != step

    def told(self, here: int, seconds: float) -> str:
        """Where it is, in one line."""
        if self._total:
            done = min(max(0, here - self._before), self._total)
            far = f"{done} of {self._total} packages"
        else:
            far = f"{self._found} packages found" + (f", {size(self._bytes)}" if self._bytes else "")
        return f"[{int(seconds) // 60}:{int(seconds) % 60:02d}] {far} · {self.step}"


class Shown:
    """Where it is written: one line that changes, or lines."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._live, self._last = out, out.isatty(), float("-inf")

    def tell(self, text: str, now: float, begins: bool) -> None:
        if self._live:
            width = os.get_terminal_size(self._out.fileno()).columns or 80
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=self._out, flush=True)
        elif (begins and "downloading" not in text) or now - self._last >= LINE_S:
            self._last = now
            print(text, file=self._out, flush=True)

    def end(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._live else text, file=self._out, flush=True)


def size(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def packages() -> int:
    """How many there are in the folder that pip fills."""
    return len(list(Path(sysconfig.get_path("purelib")).glob("*.dist-info")))


def run(command: Sequence[str], out: TextIO) -> int:
    """Run pip; its exit status."""
    began = time.monotonic()
    progress, shown, last = Progress(packages()), Shown(out), deque[str](maxlen=SHOWN)
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert pip.stdout is not None
    os.set_blocking(pip.stdout.fileno(), False)
    rest, open_ = "", True
    with selectors.DefaultSelector() as selector:
        selector.register(pip.stdout, selectors.EVENT_READ)
        while open_:
            begins = False
            if selector.select(LOOK_S):
                piece = os.read(pip.stdout.fileno(), 65536).decode(errors="replace")
                open_ = bool(piece)
                *lines, rest = (rest + piece).split("\n")
                for line in lines:
                    last.append(line)
                    begins = progress.take(line) or begins
            seconds = time.monotonic() - began
            shown.tell(progress.told(packages(), seconds), seconds, begins)
    status, seconds = pip.wait(), time.monotonic() - began
    if status:
        shown.end(f"pip failed after {seconds:.0f} s; the end of what it said:")
        print("\n".join([*last, rest]), file=out)
    else:
        shown.end(f"installed in {seconds:.0f} s")
    return status


if __name__ == "__main__":
    constraints = str(Path(__file__).parent / "constraints.txt")
    raise SystemExit(run([sys.executable, *PIP, "-c", constraints, *sys.argv[1:]], sys.stdout))
