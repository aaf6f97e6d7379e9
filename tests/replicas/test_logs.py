"""Log lines: text and JSON, the request they belong to, one line per record."""

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas import logs
from holdfast.replicas.logs import About, LineFormatter, LoggingConfig

log = logging.getLogger("holdfast.somewhere")


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Path]:
    """A file for `configure`. Logging is restored afterwards. No request of an earlier test is on its lines."""
    token = logs._request.set(None)
    root = logging.getLogger(logs.ROOT)
    before = root.handlers[:], root.level, root.propagate
    root.handlers.clear()
    yield tmp_path / "log"
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level, root.propagate = before
    logs._request.reset(token)


def record(message: str = "hi", **told: object) -> logging.LogRecord:
    made = logging.LogRecord("holdfast.x", logging.INFO, __file__, 1, message, (), None)
    made.__dict__.update(logs.fields(**told))
    return made


def test_json_lines_name_the_request_of_their_task(lines: Path) -> None:
    logs.configure(LoggingConfig("json", "info", str(lines)), "router")

    async def serve(number: int) -> None:
        logs.serving(About(f"r{number}", f"acme/p{number}", "acme", "t" if number else ""))
        await asyncio.sleep(0)
        log.info("turn ended", extra=logs.fields(outcome="completed", tokens=number, absent=None))

    async def both() -> None:
        await asyncio.gather(serve(0), serve(1))
        log.warning("about nobody")

    asyncio.run(both())
    first, second, third = [json.loads(line) for line in lines.read_text().splitlines()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "process": "router",
        "logger": "holdfast.somewhere",
        "message": "turn ended",
        "request_id": "r0",
        "program_id": "acme/p0",
        "tenant": "acme",
        "outcome": "completed",
        "tokens": 0,
    }
    assert (second["request_id"], second["trace_id"]) == ("r1", "t")
    assert "request_id" not in third


def test_text_lines(lines: Path) -> None:
    logs.configure(LoggingConfig("text", "info", str(lines)), "replica a")
    log.info("turn ended", extra=logs.fields(outcome="completed", why="two words", seconds=0.5))
    assert re.fullmatch(
        r"\S+Z INFO replica a holdfast\.somewhere: turn ended outcome=completed why=\"two words\" seconds=0\.5\n",
        lines.read_text(),
    )


def test_the_level_filters_and_a_second_configuration_replaces_the_first(lines: Path) -> None:
    logs.configure(LoggingConfig("json", "debug", str(lines) + ".old"), "router")
    logs.configure(LoggingConfig("text", "warning", str(lines)), "router")
    log.info("no")
    log.warning("yes")
    assert lines.read_text().endswith("yes\n")
    assert lines.read_text().count("\n") == 1
    assert Path(str(lines) + ".old").read_text() == ""


def test_without_a_file_lines_go_to_the_original_stderr(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to a replacement that the process's host has installed."""
    own, put = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", own)
    monkeypatch.setattr(sys, "stderr", put)
    logs.configure(LoggingConfig("text", "warning"), "router")
    log.error("broken")
    assert own.getvalue().endswith("broken\n")
    assert put.getvalue() == ""


def test_an_exception_is_part_of_its_line(lines: Path) -> None:
    logs.configure(LoggingConfig("json", "info", str(lines)), "router")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("a stream failed")
    (line,) = lines.read_text().splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: boom")


@settings(max_examples=40)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text() | st.integers() | st.none()))
def test_a_record_is_always_one_line(told: dict[str, object]) -> None:
    kept = {name: value for name, value in told.items() if value not in (None, "")}
    line = LineFormatter("p", "json").format(record(**told))
    assert len(line.splitlines()) == 1
    assert {name: json.loads(line)[name] for name in kept} == kept
    text = LineFormatter("p", "text").format(record(**told))
    assert len(text.splitlines()) == 1
