"""How far the replicas of `holdfast serve` are with their weights: they write it into files, its console shows it.

On a terminal one line is rewritten; elsewhere there is a line now and then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from holdfast.replicas.model.progress import LOG_S, Progress

_CLEAR = "\r\x1b[K"


def write(folder: Path, name: str, progress: Progress) -> None:
    """Put a replica's progress where `read` finds it, whole. A full disk does not keep a replica from loading."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        new = folder / f"{name}.new"
        new.write_text(json.dumps(asdict(progress)))
        os.replace(new, folder / f"{name}.json")


def read(folder: Path) -> Progress | None:
    """What all replicas have read together. None: none has begun."""
    found = list(_each(folder))
    if not found:
        return None
    return Progress(sum(one.read for one in found), sum(one.total for one in found), max(one.seconds for one in found))


def _each(folder: Path) -> Iterator[Progress]:
    for file in folder.glob("*.json"):
        with suppress(OSError):  # its replica has gone
            yield Progress(**json.loads(file.read_text()))


class Line:
    """Shows the progress in `folder` between the lines of `say`."""

    def __init__(
        self, folder: Path, say: Callable[[str], None], terminal: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._say, self._terminal, self._now = folder, say, terminal, now
        self._shown: Progress | None = None
        self._said = now()

    def say(self, text: str) -> None:
        """Print a line for good."""
        self.clear()
        self._say(text)

    def update(self) -> None:
        """Show what is new."""
        progress = read(self._folder)
        if progress is None or progress == self._shown:
            return
        if self._terminal:
            self._shown = progress
            _write(f"{_CLEAR}weights: {progress}")
        elif self._now() - self._said >= LOG_S:
            self._shown, self._said = progress, self._now()
            self._say(f"weights: {progress}")

    def clear(self) -> None:
        """Leave no half line on the screen."""
        if self._terminal and self._shown is not None:
            _write(_CLEAR)
            self._shown = None


def _write(text: str) -> None:
    with suppress(OSError):  # a terminal that has gone must not keep a server from starting
        sys.stdout.write(text)
        sys.stdout.flush()
