"""A progress bar with rate and time left, on standard error: for whatever may take longer than two seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar on the screen."""

    advance: Callable[[], None]  # one more is done
    about: Callable[[str], None]  # what is being done now


class _Rate(ProgressColumn):
    """So many a second, of late."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f}/s")


@contextmanager
def bar(about: str, total: int) -> Iterator[Bar]:
    """A bar until ``total`` are done, or the block is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate())
    # Drawing it costs processor time beside the servers: twice a second will do.
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, refresh_per_second=2
    ) as progress:
        task = progress.add_task(about, total=total)
        yield Bar(lambda: progress.advance(task), lambda text: progress.update(task, description=text))
