"""A status as tables for a terminal: replicas with their cells, tenants, programs. Pure: status in, renderable out.

Rates need two looks at one router; a single one shows totals. What clients and configurations name stands in a `Text`:
rich would read a plain string for markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Status: TypeAlias = Mapping[str, Any]

BAR = 16  # characters
CELLS = (("held", "cells_held", "red"), ("pinned", "cells_pinned", "yellow"), ("cached", "cells_cached", "cyan"))
STATES = {"running": "green", "tools": "yellow", "idle": "dim"}


def view(status: Status, before: Status | None = None, height: int | None = None, note: str = "") -> RenderableType:
    """The whole picture. With an earlier look at the same router, `before`, counters become rates; `height` bounds the
    lines in all.
    """
    replicas, tenants = _replicas(status, before), _tenants(status, before)
    parts: list[RenderableType] = [_head(status), "", replicas, _legend(note), "", tenants, ""]
    used = 5 + replicas.row_count + tenants.row_count + 4
    room = None if height is None else max(0, height - used - 2)
    return Group(*parts, _programs(status, room))


def _head(status: Status) -> Text:
    running = sum(each["running"] for each in status["tenants"])
    text = Text.assemble(
        ("Holdfast ", "bold"),
        (str(status["version"]), "bold"),
        f"  {_served(status)}  up {duration(status['up_s'])}  {running} running  ",
        f"{status['at_tools']} at tools",
    )
    if status["store"] != "ok":
        text.append("  Redis is away", "bold red")
    if not status["replicas"]:
        text.append("  no replica answers", "bold red")
    text.no_wrap = True
    return text


def _replicas(status: Status, before: Status | None) -> Table:
    table = _table(
        "replica", "run", "wait", "cells", "free", "pins", "cached", "drafts", "out", right=(1, 2, 4, 5, 6, 7, 8)
    )
    earlier = {each["replica_id"]: each for each in before["replicas"]} if before else {}
    for each in status["replicas"]:
        past = earlier.get(each["replica_id"])
        seconds = status["time"] - before["time"] if before and past else 0.0
        table.add_row(
            Text(each["replica_id"]),
            str(each["running"]),
            str(each["waiting"]),
            bar(each),
            share(each["cells_free"], each["cells_total"]),
            f"{each['pins']}",
            share(each["prompt_cached"], each["prompt_cached"] + each["prompt_computed"]),
            share(each["accepted"], each["drafted"]),
            rate(each["completion"], past and past["completion"], seconds),
        )
    return table


def _tenants(status: Status, before: Status | None) -> Table:
    table = _table("tenant", "run", "ended", "failed", "rejected", "in", "cached", "out", right=range(1, 8))
    earlier = {each["name"]: each for each in before["tenants"]} if before else {}
    for each in status["tenants"]:
        past = earlier.get(each["name"], {})
        seconds = status["time"] - before["time"] if before else 0.0
        tokens = each.get("prompt_tokens", 0)
        table.add_row(
            Text(each["name"]),
            str(each["running"]),
            str(each.get("ended", 0)),
            str(each.get("failed", 0)),
            str(each.get("rejected", 0)),
            rate(tokens, past.get("prompt_tokens"), seconds),
            share(each.get("cached_tokens", 0), tokens),
            rate(each.get("completion_tokens", 0), past.get("completion_tokens"), seconds),
        )
    return table


def _programs(status: Status, room: int | None) -> Table:
    table = _table("program", "tenant", "state", "for", "turns", "age", "replica", "tools", right=range(3, 6))
    rows = status["programs"]
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


def bar(replica: Mapping[str, Any]) -> Text:
    """What the cells of a replica are used for: held by running sequences, pinned for programs, cached, free."""
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
    """Per cent, or nothing where there is nothing to have a share of."""
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
    """Columns of numbers, the `right` ones, keep their width; names give way where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for index, name in enumerate(names):
        number = index in right
        table.add_column(name, no_wrap=True, justify="right" if number else "left", min_width=4 if number else None)
    return table


def _served(status: Status) -> str:
    """`pocket on cpu x 2`."""
    kinds = Counter(f"{each['model']} on {each['device']}" for each in status["replicas"])
    return ", ".join(f"{kind} x {n}" for kind, n in kinds.items())
