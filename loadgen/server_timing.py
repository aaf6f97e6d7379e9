"""What a server tells of a request's stages: read from a `Server-Timing` header or from a stream's last chunk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = ("queue", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """Seconds of each stage; None: the server does not say, or not as we read it."""

    queue: float | None = None  # from when it was sent to the engine until it was first scheduled
    prefill: float | None = None  # from there to the first token
    decode: float | None = None  # from there to the last


def from_header(value: str) -> ServerTiming:
    """From `queue;dur=1.5, prefill;dur=20` (W3C Server Timing; milliseconds). Other metrics are passed over."""
    told: dict[str, str] = {}
    for entry in value.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, number = parameter.partition("=")
            if key.strip().lower() == "dur":
                told.setdefault(name, number.strip().strip('"'))
    return ServerTiming(*(_seconds(told.get(name)) for name in _NAMES))


def from_object(told: object) -> ServerTiming:
    """From a chunk's `timing`: `{"queue_ms": 1.5, "prefill_ms": 20, "decode_ms": 300}`."""
    known: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    return ServerTiming(*(_seconds(known.get(f"{name}_ms")) for name in _NAMES))


def _seconds(milliseconds: object) -> float | None:
    if not isinstance(milliseconds, str | int | float) or isinstance(milliseconds, bool):
        return None
    try:
        seconds = float(milliseconds) / 1e3
    except (ValueError, OverflowError):
        return None
    return round(seconds, 6) if math.isfinite(seconds) and seconds >= 0 else None
