"""`holdfast status` and `holdfast top`: a running server's status, printed once or kept on the screen.

In a pipe or a file both print plain lines as wide as they need to be, and end. Names that clients and configurations
give stand in a `Text`: rich would read a plain string for markup.
"""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.replicas.errors import ConfigError, UnavailableError

Status: TypeAlias = Mapping[str, Any]
Wait: TypeAlias = Callable[[float], str]  # waits so many seconds at most for a key; "" if none was pressed

PATH = "/v1/cluster/status"
URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
LEAVE = frozenset({"q", "Q", "\x1b", "\x03", "\x04"})
MOST = 200  # programs that a screen could have room for
PRINTED = 20  # programs of a status that is printed
PLAIN = 400  # columns of plain text
BAR = 16  # characters
CELLS = (("held", "cells_held", "red"), ("pinned", "cells_pinned", "yellow"), ("cached", "cells_cached", "cyan"))
STATES = {"running": "green", "tools": "yellow", "idle": "dim"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address, and an operator's key; "" where none is needed."""

    url: str = URL
    key: str = ""


def key_from(file: Path | None, environment: str) -> str:
    """The key in `file`, else that of the environment. Raises ConfigError."""
    if file is None:
        return environment
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "api-key-file") from error


def client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False)


def fetch(client: httpx.Client, server: Server, programs: int) -> dict[str, Any]:
    """The status, with at most so many programs. Raises UnavailableError with advice."""
    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    try:
        answer = client.get(server.url.rstrip("/") + PATH, params={"programs": programs}, headers=headers)
    except httpx.HTTPError as error:
        raise UnavailableError(f"no server answers at {server.url} ({error}); `--url` names another one") from error
    if answer.status_code in (401, 403):
        raise UnavailableError(f"{error_message(answer)}. Give the key by --api-key-file or in HOLDFAST_API_KEY")
    if answer.status_code != 200:
        raise UnavailableError(f"{server.url} answered {answer.status_code}: {error_message(answer)}")
    try:
        status: dict[str, Any] = answer.json()
        status["replicas"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"the server at {server.url} is not Holdfast") from error
    return status


def error_message(answer: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, or the beginning of any other answer."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase


# ---- the commands ----


def print_status(server: Server, as_json: bool) -> None:
    """Print the status once. Raises UnavailableError."""
    with client() as http:
        status = fetch(http, server, MOST if as_json else PRINTED)
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        _console().print(view(status))


def top(server: Server, interval_s: float) -> None:
    """Keep the status on the screen; in a pipe print it once, with the rates of one interval.

    Raises UnavailableError if the first look fails; later failures are shown.
    """
    console = _console()
    with client() as http:
        first = fetch(http, server, MOST)
        if not console.is_terminal:
            time.sleep(interval_s)
            console.print(view(fetch(http, server, MOST), first))
            return
        with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
            for shown in looks(lambda: fetch(http, server, MOST), first, interval_s, console, wait):
                live.update(shown, refresh=True)


def looks(
    look: Callable[[], dict[str, Any]], first: dict[str, Any], interval_s: float, console: Console, wait: Wait
) -> Iterator[RenderableType]:
    """A screen for each fetched status, until a key ends it. A failed fetch is shown as its error."""
    hint = f"every {interval_s:g} s, q leaves"
    now = first
    last: dict[str, dict[str, Any]] = {}  # by router: each has counters of its own, and any of them may answer
    while True:
        router = str(now.get("router", ""))
        yield view(now, last.get(router), console.height, hint)
        last[router] = now
        if wait(interval_s) in LEAVE:
            return
        try:
            now = look()
        except UnavailableError as error:
            yield Text(f"{error.message}\nasking again; q leaves", "bold red")
            if wait(interval_s) in LEAVE:
                return


def _console() -> Console:
    """The terminal; a pipe gets no control codes and uncut lines."""
    if sys.stdout.isatty():
        return Console()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # not every encoding has the bar's characters
    return Console(force_terminal=False, color_system=None, width=PLAIN)


@contextmanager
def _keys() -> Iterator[Wait]:
    """Keys one by one, not shown; without a terminal nothing is ever pressed."""

    def no_keys(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    def read_key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode("latin-1") or "q" if ready else ""  # nothing to read: the terminal is gone

    if not sys.stdin.isatty():
        yield no_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# ---- the picture ----


def view(status: Status, before: Status | None = None, height: int | None = None, note: str = "") -> RenderableType:
    """The whole picture. With an earlier look `before` at the same router, counters become rates.

    `height` bounds the number of lines.
    """
    seconds = status["time"] - before["time"] if before else 0.0
    replicas = _replicas(status["replicas"], before["replicas"] if before else (), seconds)
    tenants = _tenants(status["tenants"], before["tenants"] if before else (), seconds)
    used = 9 + replicas.row_count + tenants.row_count
    room = None if height is None else max(0, height - used - 2)
    return Group(_head(status), "", replicas, _legend(note), "", tenants, "", _programs(status["programs"], room))


def _head(status: Status) -> Text:
    running = sum(each["running"] for each in status["tenants"])
    models = Counter(f"{each['model']} on {each['device']}" for each in status["replicas"])
    served = ", ".join(f"{model} x {n}" for model, n in models.items())
    text = Text.assemble(
        ("Holdfast ", "bold"),
        (str(status["version"]), "bold"),
        f"  {served}  up {duration(status['up_s'])}  {running} running  {status['at_tools']} at tools",
    )
    if status["store"] != "ok":
        text.append("  Redis is away", "bold red")
    if not status["replicas"]:
        text.append("  no replica answers", "bold red")
    text.no_wrap = True
    return text


def _replicas(rows: Iterable[Status], before: Iterable[Status], seconds: float) -> Table:
    table = _table(
        "replica", "run", "wait", "cells", "free", "pins", "cached", "drafts", "out", right=(1, 2, 4, 5, 6, 7, 8)
    )
    earlier = {each["replica_id"]: each["completion"] for each in before}
    for each in rows:
        table.add_row(
            Text(each["replica_id"]),
            str(each["running"]),
            str(each["waiting"]),
            bar(each),
            share(each["cells_free"], each["cells_total"]),
            f"{each['pins']}",
            share(each["prompt_cached"], each["prompt_cached"] + each["prompt_computed"]),
            share(each["accepted"], each["drafted"]),
            rate(each["completion"], earlier.get(each["replica_id"]), seconds),
        )
    return table


def _tenants(rows: Iterable[Status], before: Iterable[Status], seconds: float) -> Table:
    table = _table("tenant", "run", "ended", "failed", "rejected", "in", "cached", "out", right=range(1, 8))
    earlier = {each["name"]: each for each in before}
    for each in rows:
        past = earlier.get(each["name"], {})
        tokens = each.get("prompt_tokens", 0)
        table.add_row(
            Text(each["name"]),
            *(str(each.get(name, 0)) for name in ("running", "ended", "failed", "rejected")),
            rate(tokens, past.get("prompt_tokens"), seconds),
            share(each.get("cached_tokens", 0), tokens),
            rate(each.get("completion_tokens", 0), past.get("completion_tokens"), seconds),
        )
    return table


def _programs(rows: list[Status], room: int | None) -> Table:
    table = _table("program", "tenant", "state", "for", "turns", "age", "replica", "tools", right=range(3, 6))
    shown = rows if room is None or len(rows) <= room else rows[: max(0, room - 1)]
    for each in shown:
        table.add_row(
            Text(each["program"]),
            Text(each["tenant"]),
            Text(each["state"], STATES.get(each["state"], "")),
            "" if each["since_s"] is None else duration(each["since_s"]),
            str(each["turns"]),
            duration(each["age_s"]),
            Text(each["replica"]),
            Text(each["tools"]),
        )
    if len(shown) < len(rows):
        table.add_row(Text(f"and {len(rows) - len(shown)} more", "dim"))
    return table


def bar(replica: Status) -> Text:
    """The cells of a replica: held by running sequences, pinned for programs, cached, free."""
    total = replica["cells_total"] or 1
    cells = {**replica, "cells_cached": max(0, replica["cells_tree"] - replica["cells_pinned"])}
    text, drawn, reached = Text(), 0, 0
    for _, field, style in CELLS:
        reached += cells[field]
        upto = min(BAR, round(reached / total * BAR))
        text.append("█" * (upto - drawn), style)
        drawn = max(drawn, upto)
    return text.append("·" * (BAR - drawn), "dim")


def _legend(note: str) -> Text:
    text = Text("  cells: ", "dim")
    for name, _, style in CELLS:
        text.append("█", style).append(f" {name}  ", "dim")
    return text.append(f"· free    {note}".rstrip(), "dim")


def share(part: float, whole: float) -> str:
    """Per cent; "" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else ""


def rate(now: float, before: float | None, seconds: float) -> str:
    """Tokens a second since the look before; without one the total."""
    if before is None or seconds <= 0:
        return f"{count(now)} tok"
    return f"{count(max(0.0, now - before) / seconds)} tok/s"


def count(number: float) -> str:
    """A number in at most five characters."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """`4.2s`, `3m05s`, `2h03m`, `5d04h`."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def _table(*names: str, right: Iterable[int]) -> Table:
    """`right` columns have numbers and keep their width; names give way where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for index, name in enumerate(names):
        number = index in right
        table.add_column(name, no_wrap=True, justify="right" if number else "left", min_width=4 if number else None)
    return table
