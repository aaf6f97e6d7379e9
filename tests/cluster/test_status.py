"""`holdfast status` and `holdfast top`: on a terminal of our own, against a router with a replica that only says so."""

import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import CALL, FakeBackend, World, chat_body
from rich.console import Console
from terminal import COLUMNS, ROWS, Terminal

from holdfast.cluster import cli
from holdfast.cluster import status as status_view
from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.retention.latency import Called
from holdfast.replicas.stats import EngineStats, Occupancy, ReplicaStatus, replica_status
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key


class Busy(FakeBackend):
    """Two replicas that have drawn 500 tokens more each time they are asked; every turn calls a tool."""

    looks = 0

    def __init__(self) -> None:
        done = replace(CALL[-1][-1], called=Called(("get_weather",)))
        super().__init__((*CALL[:-1], (done,)))

    async def status(self) -> Sequence[ReplicaStatus]:
        self.looks += 1
        stats = EngineStats(
            completion=500 * self.looks, prompt_computed=1000, prompt_cached=3000, drafted=100, accepted=64
        )
        now = Occupancy(3, 1, 4, 65536, 32768, 22000, 10768, pins=3, cells_pinned=8000)
        return [replica_status(name, "pocket", "cpu", stats, now) for name in ("left", "right")]


@pytest.fixture
def world() -> World:
    return World(Busy())


@pytest.fixture
def url(world: World) -> Iterator[str]:
    with world.served() as address:
        for number in range(3):
            text = [{"role": "user", "content": str(number)}]
            body = chat_body(program_id=f"trip-{number}", messages=text)
            httpx.post(f"{address}/v1/chat/completions", json=body, trust_env=False).raise_for_status()
        yield address


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def run(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def test_top_shows_replicas_tenants_and_programs_and_q_leaves(url: str, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("top", "--url", url, "--interval", "0.1")
    lines = shown.until(lambda lines: any("tok/s" in line for line in lines))
    assert lines[0].startswith("Holdfast 0.1.0  pocket on cpu x 2  up ")
    assert "0 running  3 at tools" in lines[0]
    left = next(line.split() for line in lines if line.startswith("left"))
    assert left[1:3] == ["3", "1"]
    assert left[3] == "█" * 8 + "·" * 8
    assert left[4:9] == ["50", "%", "3", "75", "%"]
    assert left[-1] == "tok/s"
    tenant = next(line.split() for line in lines if line.startswith("default"))
    assert tenant[:5] == ["default", "0", "3", "0", "0"]
    programs = [line.split() for line in lines if line.startswith("trip-")]
    assert [row[0] for row in programs] == ["trip-2", "trip-1", "trip-0"]
    assert all(row[1:3] == ["default", "tools"] and row[-2:] == ["r1", "get_weather"] for row in programs)
    assert len(lines) == ROWS
    shown.press("q")
    assert shown.leave() == 0


def test_top_leaves_by_control_c(url: str, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("top", "--url", url, "--interval", "60")
    shown.until(lambda lines: any(line.startswith("trip-") for line in lines))
    shown.press("\x03")
    assert shown.leave(again="\x03") == 130


def test_top_outlives_a_server_that_goes(terminal: Callable[..., Terminal], world: World) -> None:
    with world.served() as address:
        shown = terminal("top", "--url", address, "--interval", "0.1")
        shown.until(lambda lines: lines[0].startswith("Holdfast"))
    shown.until(lambda lines: "no server answers" in lines[0])
    shown.press("q")
    assert shown.leave() == 0


def test_status_for_people_and_for_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url]) == 0
    assert "trip-2" in capsys.readouterr().out
    assert cli.main(["status", "--url", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["replica_id"] for each in told["replicas"]] == ["left", "right"]


@pytest.mark.parametrize(("command", "encoding"), [("status", "utf-8"), ("top", "ascii")])
def test_in_a_pipe_it_is_plain_lines_cut_nowhere(command: str, encoding: str, url: str) -> None:
    name = "a-program-with-a-very-long-name-that-no-narrow-terminal-has-room-for-beside-all-the-others"
    httpx.post(f"{url}/v1/chat/completions", json=chat_body(program_id=name), trust_env=False).raise_for_status()
    words = [sys.executable, "-m", "holdfast.cluster.cli", command, "--url", url]
    words += ["--interval", "0.1"] if command == "top" else []
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(words, capture_output=True, timeout=60, check=True, env=environment)
    told = done.stdout.decode(encoding)
    assert "\x1b" not in told
    assert "\r" not in told
    assert told.count("Holdfast ") == 1
    assert any(line.startswith(f"{name} ") for line in told.splitlines())
    assert ("tok/s" in told) == (command == "top")


@pytest.mark.parametrize("command", ["status", "top"])
def test_without_a_server_it_says_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--url", "http://127.0.0.1:9"]) == cli.MISUSE
    assert capsys.readouterr().err.startswith("holdfast: no server answers at http://127.0.0.1:9")


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = Tenant("ops", (hash_key("right"),), operator=True)
    world = World(Busy(), tenants=TenantDirectory((operator,), exposed=True))
    (tmp_path / "key").write_text("right\n")
    with world.served() as address:
        assert cli.main(["status", "--url", address]) == cli.MISUSE
        assert "HOLDFAST_API_KEY" in capsys.readouterr().err
        assert cli.main(["status", "--url", address, "--api-key-file", str(tmp_path / "key")]) == 0
        monkeypatch.setenv("HOLDFAST_API_KEY", "right")
        assert cli.main(["status", "--url", address]) == 0
    assert cli.main(["status", "--api-key-file", str(tmp_path / "none")]) == cli.MISUSE


def test_names_that_look_like_markup_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    world = World(Busy())
    names = ["[/bold]", "[red]x[/red]", "[link=http://evil.example]y", "a\\[b]"]
    with world.served() as address:
        for number, name in enumerate(names):
            body = chat_body(program_id=name, messages=[{"role": "user", "content": str(number)}])
            httpx.post(f"{address}/v1/chat/completions", json=body, trust_env=False).raise_for_status()
        assert cli.main(["status", "--url", address]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in names)


def picture(status: dict[str, object], height: int) -> list[str]:
    console = Console(width=COLUMNS, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(status_view.view(status, height=height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("height", [12, 20, 40])
def test_it_fits_the_screen(url: str, height: int) -> None:
    told = httpx.get(f"{url}/v1/cluster/status", trust_env=False).json()
    told["programs"] = [{**told["programs"][0], "program": f"p{number}"} for number in range(100)]
    lines = picture(told, height)
    assert len(lines) <= max(height, 14)
    if height > 14:
        assert lines[-1].startswith("and ")


def test_a_look_that_fails_is_told_and_the_next_one_counts(url: str) -> None:
    told = httpx.get(f"{url}/v1/cluster/status", trust_env=False).json()
    answers: list[object] = [UnavailableError("gone"), told]

    def ask() -> dict[str, object]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)  # type: ignore[call-overload]

    keys = iter(["", "x", "", "q"])
    shown = list(status_view.looks(ask, told, 1.0, Console(width=COLUMNS, height=ROWS), lambda seconds: next(keys)))
    assert len(shown) == 4
    assert "gone" in str(shown[1])


def test_rates_are_between_looks_at_one_router(url: str) -> None:
    """Each counts for itself, and a proxy asks now the one, now the other."""
    told = httpx.get(f"{url}/v1/cluster/status", trust_env=False).json()

    def look(router: str, time: float, tokens: int) -> dict[str, Any]:
        tenants = [{**told["tenants"][0], "prompt_tokens": tokens}]
        return {**told, "router": router, "time": time, "replicas": [], "programs": [], "tenants": tenants}

    coming = [look("b", 11.0, 5_800_000), look("a", 12.0, 140), look("b", 13.0, 5_800_500)]
    console = Console(width=COLUMNS, height=ROWS, record=True, file=io.StringIO())
    keys = iter(["", "", "", "q"])
    for shown in status_view.looks(
        lambda: coming.pop(0), look("a", 10.0, 100), 1.0, console, lambda seconds: next(keys)
    ):
        console.print(shown)
    rows = [line.split() for line in console.export_text().splitlines() if line.startswith("default")]
    assert [row[5:7] for row in rows] == [["100", "tok"], ["5.8M", "tok"], ["20", "tok/s"], ["250", "tok/s"]]


def test_numbers_are_short() -> None:
    seconds, numbers = (0.04, 9.94, 59, 61, 3700, 90000), (0, 999, 9999, 12345, 1.5e6, 2e9)
    assert " ".join(map(status_view.duration, seconds)) == "0.0s 9.9s 59s 1m01s 1h01m 1d01h"
    assert " ".join(map(status_view.count, numbers)) == "0 999 9999 12.3k 1.5M 2.0G"


def test_the_picture_in_the_docs_has_what_the_screen_has(url: str, terminal: Callable[..., Terminal]) -> None:
    """It is taken of a server that ran (`make pictures`), so it names the model that comes with us, on a CPU."""
    picture = (Path(__file__).parents[2] / "docs/pictures/top.svg").read_text()
    words = html.unescape(" ".join(re.findall(r">([^<]+)</text>", picture))).replace("\xa0", " ").split()
    shown = terminal("top", "--url", url, "--interval", "0.1")
    lines = shown.until(lambda lines: any("tok/s" in line for line in lines))
    for head in ("replica", "tenant", "program"):
        row = next(line.split() for line in lines if line.split()[:1] == [head])
        at = words.index(head)
        assert words[at : at + len(row)] == row
    assert "pocket on cpu" in " ".join(words)
