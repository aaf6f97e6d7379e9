"""A pseudo-terminal with a command on it, and what is on its screen."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pyte

ROWS, COLUMNS = 24, 80
PATIENT_S = 120.0
AGAIN_S = 5.0


class Terminal:
    """A command on a pseudo-terminal of 24 lines by 80, and what is on its screen."""

    def __init__(self, *arguments: str) -> None:
        self._end, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(inside)
        self._inside = inside
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cluster.cli", *arguments],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""},
        )
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """What is on the screen once `seen` says so."""
        deadline = time.monotonic() + PATIENT_S
        while not seen(self.lines):
            assert time.monotonic() < deadline, "\n".join(self.lines)
            if select.select([self._end], [], [], 0.2)[0]:
                self._stream.feed(os.read(self._end, 65536))
        return self.lines

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def leave(self, again: str = "") -> int:
        """The exit status; the terminal has to be as it was. `again` is pressed every few seconds until it leaves.

        Trap: Python reports an interrupt that comes while it runs a finalizer, and forgets it.
        """
        deadline, press_at = time.monotonic() + PATIENT_S, time.monotonic() + AGAIN_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if again and time.monotonic() > press_at:
                self.press(again)
                press_at += AGAIN_S
            if select.select([self._end], [], [], 0.05)[0]:
                self._stream.feed(os.read(self._end, 65536))
        assert termios.tcgetattr(self._inside) == self.before
        return self.process.wait(PATIENT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)
        os.close(self._inside)
