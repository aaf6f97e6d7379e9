"""Log lines of the cluster's processes: their two forms, and which request each line is about.

Modules log through `logging.getLogger(__name__)` as everywhere; a process calls `configure` once. Lines tell ids,
counts and times, never what a client wrote or the key it came with.
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
    """What the processes of a cluster write about themselves. `info` has a line for each request."""

    format: Format = "text"  # text, or json: one object a line
    level: Level = "warning"  # debug, info (one line for each request), warning or error
    file: str = ""  # all processes of a machine append to it; empty: each process's stderr, which Ray keeps


@dataclass(frozen=True, slots=True)
class About:
    """What is being served while a line is written; "" is not told."""

    request_id: str = ""
    program_id: str = ""
    tenant: str = ""
    trace_id: str = ""


_about: ContextVar[About | None] = ContextVar("about", default=None)


def serving(about: About) -> None:
    """From here on the lines of this task are about that request."""
    _about.set(about)


def fields(**named: Any) -> dict[str, Any]:
    """`extra` of a log call: what a line tells besides its message; what is None or "" is left out."""
    return {"fields": {name: value for name, value in named.items() if value not in (None, "")}}


class TextFormatter(logging.Formatter):
    """`2026-11-21T17:20:03.123Z WARNING router holdfast.router.turns: message request_id=… outcome=…`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        told = "".join(f" {name}={_word(value)}" for name, value in _told(record).items())
        text = f"{_time(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}{told}"
        trouble = _trouble(self, record)
        return f"{text}\n{trouble}" if trouble else text


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, process, logger, message, whom it is about, further fields, `exception`."""

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
            **_told(record),
        }
        if trouble := _trouble(self, record):
            line["exception"] = trouble
        return json.dumps(line, default=str)


def configure(config: LoggingConfig, process: str) -> None:
    """Send all of this process's lines where `config` says; a second call replaces the first. Raises OSError."""
    # Trap: in a replica `sys.stderr` is Serve's logger, which keeps lines back, and drops them where it is to be quiet.
    handler = logging.FileHandler(config.file) if config.file else logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter(process) if config.format == "json" else TextFormatter(process))
    root = logging.getLogger(ROOT)
    for before in root.handlers[:]:
        root.removeHandler(before)
        before.close()
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    root.propagate = False  # Ray's handlers would write each line a second time


def _told(record: logging.LogRecord) -> dict[str, Any]:
    about = {name: value for name, value in asdict(_about.get() or About()).items() if value}
    further: Mapping[str, Any] = getattr(record, "fields", {})
    return {**about, **further}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trouble(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else ""


def _word(value: Any) -> str:
    """A value as one word; quoted where it would be taken for several, or for the end of the line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain or not isinstance(value, str) else json.dumps(text)
