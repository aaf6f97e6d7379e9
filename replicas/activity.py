"""The present requests and pins of one engine, for monitoring: ids, counts and times.

Rows are tuples, because there may be a thousand of them a second; `TURN` and `PIN` name their columns. The engine runs
meanwhile, so each row is consistent in itself, but rows may be of different moments.
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
    """`turns`: the live requests, with tokens of the prompt, cached, computed (including cached) and drawn.

    `pins`: cells kept for programs between turns, with seconds since the turn ended, seconds that they are still worth
    keeping, and seconds until they are dropped at the latest.
    """

    turns: list[TurnRow]
    pins: list[PinRow]


def activity(engine: Engine, scope: str | None, now: float) -> Activity:
    """The activity for one tenant, or for all if `scope` is None. Any thread may call it."""
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
