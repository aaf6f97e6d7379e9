"""Log lines of the cluster's processes: two formats, and the request that each line belongs to.

Modules use `logging.getLogger(__name__)`; a process calls `configure` once. Lines contain ids, counts and times, never
a client's text or key.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
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


_about: ContextVar[About | None] = ContextVar("about", default=None)


def serving(about: About) -> None:
    """From here on this task's log lines belong to that request."""
    _about.set(about)


def fields(**named: Any) -> dict[str, Any]:
    """`extra` of a log call: further fields of the line. None and "" are left out."""
    return {"fields": {name: value for name, value in named.items() if value not in (None, "")}}


class TextFormatter(logging.Formatter):
    """`2026-11-21T17:20:03.123Z WARNING router holdfast.router.turns: message request_id=… outcome=…`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields_text = "".join(f" {name}={_word(value)}" for name, value in _fields_of(record).items())
        text = f"{_time(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}{fields_text}"
        exception = _exception(self, record)
        return f"{text}\n{exception}" if exception else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, the request, further fields, `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if exception := _exception(self, record):
            line["exception"] = exception
        return json.dumps(line, default=str)


def configure(config: LoggingConfig, process: str) -> None:
    """Send this process's lines to the target of `config`. A second call replaces the first. Raises OSError."""
    # Trap: in a replica `sys.stderr` is Serve's logger, which delays lines, and drops them if it is configured quiet.
    handler = logging.FileHandler(config.file) if config.file else logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter(process) if config.format == "json" else TextFormatter(process))
    root = logging.getLogger(ROOT)
    for before in root.handlers[:]:
        root.removeHandler(before)
        before.close()
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    root.propagate = False  # Ray's handlers would repeat each line


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    about = {name: value for name, value in asdict(_about.get() or About()).items() if value}
    further: Mapping[str, Any] = getattr(record, "fields", {})
    return {**about, **further}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


def _word(value: Any) -> str:
    """A value as one word; quoted if it contains spaces, quotes, `=` or line breaks."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain or not isinstance(value, str) else json.dumps(text)
