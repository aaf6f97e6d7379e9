"""`holdfast doctor`: what would go wrong on this machine with a configuration, and how to mend it.

What is looked at is gathered once (`machine_facts`); each check is a function of the facts and the settings, and gives
findings (`doctor_checks`). Nothing is changed and no port or GPU is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text


class State(StrEnum):
    OK = "ok"
    WARN = "warn"  # it runs, but worse than it could
    FAIL = "fail"  # it would not start


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. `mend` says what to do, "" where all is well."""

    check: str
    state: State
    found: str
    mend: str = ""


Check = Callable[[], Iterable[Finding]]

STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


def ok(check: str, found: str) -> Finding:
    return Finding(check, State.OK, found)


def warn(check: str, found: str, mend: str) -> Finding:
    return Finding(check, State.WARN, found, mend)


def fail(check: str, found: str, mend: str) -> Finding:
    return Finding(check, State.FAIL, found, mend)


def findings(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """What all checks find; one that breaks off is a finding, too, and does not keep the others from looking."""
    found: list[Finding] = []
    for name, check in checks:
        try:
            found.extend(check())
        except Exception as error:  # the supervisor of the checks: a machine may be odd in any way
            found.append(warn(name, f"could not be checked: {error}", "look at it by hand"))
    return found


def worst(found: Iterable[Finding]) -> State:
    order = list(State)
    return max((each.state for each in found), key=order.index, default=State.OK)


def show(found: Sequence[Finding], as_json: bool) -> None:
    """Print the findings, the worst last."""
    if as_json:
        print(json.dumps({"state": worst(found), "findings": [asdict(each) for each in found]}, indent=2))
        return
    console = Console(soft_wrap=True)
    for each in sorted(found, key=lambda each: list(State).index(each.state)):
        console.print(Text.assemble((f"{each.state.value:>4}", STYLES[each.state]), f"  {each.check}: {each.found}"))
        if each.mend:
            console.print(Text(f"      {each.mend}", "bold"))
