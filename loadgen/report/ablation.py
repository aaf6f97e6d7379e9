"""The table of `holdfast bench ablation`: what each mechanism is worth, as that benchmark wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.loadgen.report.grid import Grid
from holdfast.replicas.errors import ConfigError

RATIO = "p50 off/on"
HEADS = ("scenario", "turns", "ms p50 on", "ms p50 off", "ms p99 on", "ms p99 off", RATIO, "p99", "wall", "equal")
_TIMES = ("on_median_ms", "off_median_ms", "on_p99_ms", "off_p99_ms")
_RATIOS = ("ratio", "p99_ratio", "wall_ratio")
_FIELDS = frozenset(("off", "scenario", "turns", "low", "high", "equal", *_TIMES, *_RATIOS))


def read_ablation(path: Path) -> list[dict[str, Any]]:
    """What `holdfast bench ablation --json` wrote. Raises ConfigError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "ablation") from error
    if not isinstance(entries, list) or not all(isinstance(one, dict) and set(one) >= _FIELDS for one in entries):
        raise ConfigError(f"{path} is no ablation", "ablation")
    return entries


def ablation_grid(entries: Sequence[Mapping[str, Any]]) -> Grid | None:
    """A row for each mechanism and scenario; None without any."""
    rows = [(str(entry["off"]), [[text] for text in _cells(entry)]) for entry in entries]
    for (_, cells), entry in zip(rows, entries, strict=True):
        cells[HEADS.index(RATIO)].append(f"{entry['low']:.2f}–{entry['high']:.2f}")
    return Grid("off", HEADS, rows) if rows else None


def _cells(entry: Mapping[str, Any]) -> list[str]:
    return [
        str(entry["scenario"]),
        str(entry["turns"]),
        *(f"{entry[name]:.1f}" for name in _TIMES),
        *(f"{entry[name]:.2f}x" for name in _RATIOS),
        f"{entry['equal']:.0%}",
    ]
