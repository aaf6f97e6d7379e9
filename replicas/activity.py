"""What one engine does at this moment, request by request and pin by pin, for those who watch: ids, counts and times.

Rows are tuples, because there may be a thousand of them a second; `TURN` and `PIN` name their places. Read while the
engine runs on, so each row is right by itself and none waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from holdfast.replicas.engine import Engine
from holdfast.replicas.programs import Kind, Sequence, Status

TURN = ("request", "phase", "prompt", "cached", "computed", "drawn")
PIN = ("program", "cells", "since_s", "worth_s", "until_s")

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"  # phases

TurnRow: TypeAlias = tuple[str, str, int, int, int, int]
PinRow: TypeAlias = tuple[str, int, float, float, float]


@dataclass(frozen=True, slots=True)
class Activity:
    """`turns` are the requests that have not ended: how many tokens their prompts have, how many of these were found
    in the cache and how many are computed by now, the found ones among them; and how many tokens were drawn.

    `pins` are what is kept for programs between their turns: cells, seconds since the turn ended, how much longer they
    are worth keeping and when they are let go at the latest, both in seconds from now.
    """

    turns: list[TurnRow]
    pins: list[PinRow]


def activity(engine: Engine, scope: str | None, now: float) -> Activity:
    """What `engine` does for the tenant `scope`, or for all of them where that is None. Any thread may ask."""
    turns = [
        _turn(each)
        for each in list(engine.live.values())
        if (scope is None or each.submit.scope == scope) and not each.background
    ]
    pins = [
        (
            pin.program.key.name,
            pin.pin.length,
            round(now - pin.since, 3),
            round(min(pin.lapse, pin.deadline) - now, 3),
            round(pin.deadline - now, 3),
        )
        for pin in engine.scheduler.retention.pins
        if (scope is None or pin.scope == scope) and pin.program.key.kind is not Kind.HANDLE
    ]
    return Activity(turns, pins)


def _turn(sequence: Sequence) -> TurnRow:
    drawn = sequence.length - sequence.n_prompt
    phase = QUEUE if sequence.status is Status.WAITING else DECODE if drawn else PREFILL
    computed = min(sequence.n_computed, sequence.n_prompt)
    return sequence.request_id, phase, sequence.n_prompt, sequence.n_cached, computed, drawn
