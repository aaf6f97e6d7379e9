"""Colours of the report. Each is read on a white and on a dark page, so a plot needs to be drawn only once."""

from __future__ import annotations

from holdfast.loadgen.timeline import Phase

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181c"
LEAST_CONTRAST = 3.0  # of a graphical object (WCAG 2.2, success criterion 1.4.11)

SERVERS = ("#2f7fd1", "#d0651c", "#23946a", "#9a62d0", "#c74a78", "#84802a")
PHASES = {
    Phase.OUTSIDE: "#878e98",
    Phase.QUEUE: "#d0651c",
    Phase.PREFILL: "#2f7fd1",
    Phase.WAIT: "#94762c",
    Phase.DECODE: "#23946a",
    Phase.TOOL: "#9a62d0",
    Phase.FAILED: "#d64545",
}


def contrast(one: str, other: str) -> float:
    """How much two colours ``#rrggbb`` differ in brightness, 1 to 21 (WCAG 2.2, contrast ratio)."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
