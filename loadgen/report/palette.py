"""Colours of the report. Each is read on a white and on a dark page, so a plot needs to be drawn only once."""

from __future__ import annotations

from holdfast.loadgen.timeline import Phase

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181c"

SERVERS = ("#2f7fd1", "#d0651c", "#23946a", "#9a62d0", "#c74a78", "#84802a", "#0f8f9c")
PHASES = {
    Phase.OUTSIDE: "#878e98",
    Phase.QUEUE: "#d0651c",
    Phase.PREFILL: "#2f7fd1",
    Phase.WAIT: "#94762c",
    Phase.DECODE: "#23946a",
    Phase.TOOL: "#9a62d0",
    Phase.FAILED: "#d64545",
}
