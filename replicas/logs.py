"""Log lines of the cluster's processes: two formats, and the request that each line belongs to.

Modules use `logging.getLogger(__name__)`; a process calls `configure` once. Lines contain ids, counts and times, never
a client's text or key.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

Format: TypeAlias = Literal["text", "json"]
Level: TypeAlias = Literal["debug", "info", "warning", "error"]

ROOT = "holdfast"  # the logger above all of ours


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """Logging of a cluster's processes. Level `info` has a line for each request."""

    format: Format = "text"  # text, or json: one object a line
    level: Level = "warning"  # debug, info (one line for each request), warning or error
    file: str = ""  # all processes of a machine append to it; empty: each process's stderr, which Ray keeps


@dataclass(frozen=True, slots=True)
class About:
    """The request being served while a line is written. Empty fields are left out."""

    request_id: str = ""
    program_id: str = ""
    tenant: str = ""
    trace_id: str = ""


_request: ContextVar[About | None] = ContextVar("request", default=None)


def serving(request: About) -> None:
    """From here on this task's log lines belong to that request."""
    _request.set(request)


def fields(**named: Any) -> dict[str, Any]:
    """`extra` of a log call: further fields of the line. None and "" are left out."""
    return {"fields": {name: value for name, value in named.items() if value not in (None, "")}}


class LineFormatter(logging.Formatter):
    """One line: time, level, process, logger, message, then the request and further fields, as text or JSON.

    `2026-11-21T17:20:03.123Z WARNING router holdfast.router.endpoints.turns: message request_id=… outcome=…`
    """

    def __init__(self, process: str, format: Format) -> None:
        super().__init__()
        self._process = process
        self._json = format == "json"

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {name: value for name, value in asdict(_request.get() or About()).items() if value}
        further: dict[str, Any] = fields | getattr(record, "fields", {})
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        message = record.getMessage()
        if not self._json:
            fields_text = "".join(f" {name}={_word(value)}" for name, value in further.items())
            line = f"{moment} {record.levelname} {self._process} {record.name}: {message}{fields_text}"
            return f"{line}\n{exception}" if exception else line
        own = {"time": moment, "level": record.levelname.lower(), "process": self._process, "logger": record.name}
        end = {"exception": exception} if exception else {}
        return json.dumps({**own, "message": message, **further, **end}, default=str)


def configure(config: LoggingConfig, process: str) -> None:
    """Send this process's lines to the target of `config`. A second call replaces the first. Raises OSError."""
    # Trap: in a replica `sys.stderr` is Serve's logger, which delays lines, and drops them if it is configured quiet.
    handler = logging.FileHandler(config.file) if config.file else logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(LineFormatter(process, config.format))
    root = logging.getLogger(ROOT)
    for before in root.handlers[:]:
        root.removeHandler(before)
        before.close()
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    root.propagate = False  # Ray's handlers would repeat each line


def _word(value: Any) -> str:
    """A value as one word; quoted if it contains spaces, quotes, `=` or line breaks."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain or not isinstance(value, str) else json.dumps(text)
