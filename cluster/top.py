"""`holdfast status` and `holdfast top`: a server's status printed once, or kept on the screen until q or Ctrl-C.

Where nobody looks, in a pipe or a file, both print plain lines as wide as they need to be, and end.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.cluster import watch
from holdfast.cluster.status_view import view
from holdfast.cluster.watch import Watched
from holdfast.replicas.errors import UnavailableError

Say = Callable[[str], None]
Wait = Callable[[float], str]  # waits so many seconds at most for a key; "" where none was pressed

LEAVE = frozenset({"q", "Q", "\x1b", "\x03", "\x04"})
MOST = 200  # programs that a screen could have room for
PLAIN = 400  # columns of plain text: as many as the longest name needs
SOME = 20  # programs of a status that is printed


def status(server: Watched, as_json: bool, say: Say) -> None:
    """Print the status once. Raises UnavailableError."""
    with watch.client() as client:
        told = watch.ask(client, server, MOST if as_json else SOME)
    if as_json:
        say(json.dumps(told, indent=2))
    else:
        _console().print(view(told))


def top(server: Watched, interval_s: float) -> None:
    """Keep the status on the screen; in a pipe print it once, with the rates of one interval.

    Raises UnavailableError where the first look fails; later ones are shown.
    """
    console = _console()
    with watch.client() as client:
        first = watch.ask(client, server, MOST)
        if not console.is_terminal:
            time.sleep(interval_s)
            console.print(view(watch.ask(client, server, MOST), first))
            return
        with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
            for shown in looks(lambda: watch.ask(client, server, MOST), first, interval_s, console, wait):
                live.update(shown, refresh=True)


def _console() -> Console:
    """The terminal; what is none gets no control codes, and lines that nobody has to cut."""
    if sys.stdout.isatty():
        return Console()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a bar has characters that not all can write
    return Console(force_terminal=False, color_system=None, width=PLAIN)


def looks(
    ask: Callable[[], dict[str, Any]], first: dict[str, Any], interval_s: float, console: Console, wait: Wait
) -> Iterator[RenderableType]:
    """A picture for each look, until a key says to leave. A look that fails leaves the last picture, with a word."""
    hint = f"every {interval_s:g} s, q leaves"
    now = first
    last: dict[str, dict[str, Any]] = {}  # by router: each counts for itself, and any of them may answer
    while True:
        router = str(now.get("router", ""))
        yield view(now, last.get(router), console.height, hint)
        last[router] = now
        if wait(interval_s) in LEAVE:
            return
        try:
            now = ask()
        except UnavailableError as error:
            yield Text(f"{error.message}\nasking again; q leaves", "bold red")
            if wait(interval_s) in LEAVE:
                return


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Wait]:
    """Keys one by one, not shown; without a terminal nothing is ever pressed."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode("latin-1") or "q" if ready else ""  # nothing to read: the terminal is gone

    try:
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
