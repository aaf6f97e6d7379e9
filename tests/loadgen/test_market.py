"""`holdfast bench market` against the shipped model behind a real server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_backend import ServiceBackend, engine_served

from holdfast.cluster import cli
from holdfast.loadgen.market import measure
from holdfast.loadgen.options import Market
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = EngineConfig(cells=16384, threads=1, context_length=4096, max_sequences=8, session_rows=2)
    with engine_served(ServiceBackend(config)) as address:
        yield address


def test_both_ways_of_a_server_with_sessions(url: str, tmp_path: Path, capsys) -> None:
    """Of three feeds only two find room for their sessions; every question that was sent is counted."""
    file = tmp_path / "market.json"
    options = "--rates 4 --lines 20 --feeds 3 --seconds 2 --every 1 --max-tokens 4"
    assert cli.main(f"bench market --server a={url} {options} --json {file}".split()) == 0
    session, whole = json.loads(file.read_text())
    assert (session["way"], whole["way"]) == ("session", "whole")
    assert session["failed"] == {"429 overloaded": 1}
    assert whole["failed"] == {}
    assert len(session["questions"]) == len(session["standing"]) == 2 * 2
    assert len(whole["questions"]) == len(whole["standing"]) == 3 * 2
    assert len(session["appends"]) == 2 * 8
    assert whole["appends"] == []
    assert min(whole["tokens"]) > 200
    assert sum(session["cached"]) > 0.9 * sum(session["tokens"])
    printed = capsys.readouterr().out
    assert "session" in printed
    assert "1 x 429 overloaded" in printed


def test_an_answer_that_has_seen_every_line_is_up_to_date(url: str) -> None:
    options = Market((("a", url),), rates=(0.5,), lines=(5,), seconds=2.0, every_s=1.0, max_tokens=2)
    session, whole = asyncio.run(measure(options))
    assert session.outdated[0] == 0.0, "no line had arrived since the opening, a second before"
    assert whole.outdated[0] == 0.0
    assert len(session.appends) == 1


@pytest.mark.parametrize(("options", "field"), [({}, "server"), ({"rates": (0.0,)}, "rates"), ({"feeds": 0}, "feeds")])
def test_options_that_measure_nothing_are_refused(options: dict[str, object], field: str) -> None:
    servers = () if not options else (("a", "http://127.0.0.1:1"),)
    with pytest.raises(ConfigError) as error:
        Market(servers=servers, **options)  # type: ignore[arg-type]
    assert error.value.field == field
