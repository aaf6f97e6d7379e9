"""Moments at which things begin, kept whatever else is going on. No HTTP, no statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

LEAD_S = 0.02
"""How long before its moment a request is made ready, so that making it is not taken for the server's time."""


async def sleep_until(due: float | None, lead: float = 0.0) -> None:
    """Return ``lead`` seconds before ``due``, a moment of `time.perf_counter`; at once if that is past, or None."""
    if due is not None and (left := due - lead - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def start_each(
    starts: Sequence[float | None], begin: Sequence[Callable[[], Coroutine[None, None, None]]], lead: float = LEAD_S
) -> None:
    """Run each of ``begin`` from ``lead`` seconds before its start on, until all are through.

    A task is made when its moment nears: thousands made in advance would hold up the first ones. Raises the first
    error of any, after the others have been cancelled.
    """
    order = sorted(range(len(starts)), key=lambda place: starts[place] or 0.0)
    try:
        async with asyncio.TaskGroup() as tasks:
            for place in order:
                await sleep_until(starts[place], lead)
                tasks.create_task(begin[place]())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
