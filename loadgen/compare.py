"""`holdfast bench compare`: servers side by side in one run. Puts runner, summary, table and file together."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from holdfast.loadgen import rows as row_files
from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.runner import Runner, Server
from holdfast.loadgen.summary import Summary, summarize
from holdfast.loadgen.table import print_report
from holdfast.loadgen.workloads.drawing import WORKLOADS, Draw, describe, drawings, warm_up
from holdfast.loadgen.workloads.script import Round, Sizes
from holdfast.replicas.errors import ConfigError, UnavailableError

FORMAT = 1  # of the file; raised when a reader would have to change
WARM_UP = "warm-up"
INTERRUPTED = 130
NOVEL = ("agents", "bugfix", "webapp", "burst", "concurrency")
"""Where nothing is asked twice: what a comparison runs unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a comparison is asked for. Raises ConfigError."""

    servers: tuple[tuple[str, str], ...]  # name and address
    workloads: tuple[str, ...] = NOVEL
    repetitions: int = 3
    seed: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    forced: bool = False
    model: str = ""  # empty: the first that each server names
    max_tokens: int = 128
    timeout_s: float = 300.0
    warm_up: int = 1  # programs of six turns
    api_key: str = field(default="", repr=False)
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("a comparison needs at least one --server NAME=URL", "server")
        if len(dict(self.servers)) < len(self.servers):
            raise ConfigError("two servers have the same name", "server")
        for name in self.workloads:
            if name not in WORKLOADS:
                near = get_close_matches(name, WORKLOADS, 1) or WORKLOADS
                raise ConfigError(f"unknown workload {name!r}; nearest: {', '.join(near)}", "workload")
        if self.repetitions < 1:
            raise ConfigError("there must be at least one repetition", "repetitions")


@dataclass(frozen=True, slots=True)
class Planned:
    """One repetition of one workload, drawn."""

    workload: str
    repetition: int
    drawn: Round

    @property
    def requests(self) -> int:
        """What one server is sent."""
        return sum(len(lane) for wave in (*self.drawn.fill, *self.drawn.waves) for lane in wave)


@dataclass(slots=True)
class _About:
    """What only the run itself could tell."""

    servers: list[dict[str, str]] = field(default_factory=list)
    busy_s: float = 0.0  # processor time of this process while it sent
    wall_s: float = 0.0
    requests: int = 0  # the warm-up's, too

    @property
    def overhead(self) -> dict[str, float]:
        """The generator's own processor time: as a share of one core, and a request."""
        return {
            "cpu_share": self.busy_s / max(self.wall_s, 1e-9),
            "cpu_ms_a_request": self.busy_s * 1e3 / max(self.requests, 1),
        }


def parse_server(text: str) -> tuple[str, str]:
    """Name and address from ``NAME=URL``; the address with or without ``/v1``. Raises ConfigError."""
    name, found, url = text.partition("=")
    if not found or not name or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is not NAME=URL, as in holdfast=http://127.0.0.1:8000", "server")
    return name, url.rstrip("/").removesuffix("/v1")


def read_key(path: Path) -> str:
    """The API key in a file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "api-key-file") from error


def main(options: Options) -> int:
    """Compare, print, write; the exit status. Ctrl-C ends the measuring, not the report."""
    if options.json_file:
        _check_writable(options.json_file)
    planned = plan(options)
    runner, about, status = Runner((), options.max_tokens, options.forced), _About(), 0
    try:
        asyncio.run(_measure(options, planned, runner, about))
    except KeyboardInterrupt:
        status = INTERRUPTED
    summaries = summarize(runner.rows, options.seed)
    drawn = {plan.workload: describe(plan.drawn) for plan in planned if plan.drawn.waves}
    if options.json_file:
        content = _content(options, about, drawn, runner, summaries, complete=status == 0)
        options.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print_report(summaries, drawn, notes(options, summaries, about.overhead, complete=status == 0))
    return status


def plan(options: Options) -> list[Planned]:
    """Every repetition, drawn, the warm-up first: the same for the same options."""
    warm = [Planned(WARM_UP, number, warm_up(options.seed, number)) for number in range(options.warm_up)]
    return warm + [
        Planned(name, repetition, drawing(Draw(options.seed, name, repetition), options.sizes))
        for name, drawing in drawings(options.workloads)
        for repetition in range(options.repetitions)
    ]


def notes(options: Options, summaries: Sequence[Summary], overhead: dict[str, float], complete: bool) -> list[str]:
    """What a reader must know about the figures."""
    mode = "forced: the script's answers" if options.forced else "closed loop: each server's own answers"
    told = [
        f"seed {options.seed}, {options.repetitions} repetitions, max_tokens {options.max_tokens}, temperature 0; "
        f"histories are {mode}",
        "1st token: median ms to the first piece of text or of a call; scripted: answers with the calls asked for; "
        "same answer: to the same prompt as the first server's; below each figure its 95 % bootstrap interval",
        f"the generator itself took {overhead['cpu_ms_a_request']:.1f} ms of processor time a request, "
        f"{overhead['cpu_share']:.1%} of one core",
    ]
    for summary in summaries:
        place = f"{summary.workload} on {summary.server}"
        if summary.failures:
            told.append(f"FAILED: {place}: {', '.join(f'{n} {kind}' for kind, n in summary.failures.items())}")
        if summary.late:
            told.append(f"{place}: the schedule was kept to {summary.late.value * 1e3:.1f} ms (p99)")
        if summary.workload == "repeats":
            continue
        if summary.cache_hits:
            told.append(f"BEWARE: {place}: {summary.cache_hits} answers came from a response cache")
        if (summary.cold_cached_share or 0) > 0.5:
            told.append(f"BEWARE: {place}: first prompts were cached; restart the server or use another --seed")
    if not complete:
        told.append("INTERRUPTED: only what was measured until then")
    return told


async def _measure(options: Options, planned: Sequence[Planned], runner: Runner, about: _About) -> None:
    async with AsyncExitStack() as stack:
        servers = []
        for name, url in options.servers:
            client = await stack.enter_async_context(ChatClient(url, options.timeout_s, options.api_key))
            servers.append(Server(name, client, options.model or await _model(client, name)))
            about.servers.append({"name": name, "url": url, "model": servers[-1].model, **await _version(client)})
        runner.servers = servers
        with _progress() as progress, _counting(about):
            task = progress.add_task("", total=len(servers) * sum(plan.requests for plan in planned))

            def sent() -> None:
                about.requests += 1
                progress.advance(task)

            runner.sent = sent
            for plan in planned:
                progress.update(task, description=f"{plan.workload} {plan.repetition + 1}/{options.repetitions}")
                await runner.run(plan.workload, plan.repetition, plan.drawn)


@contextmanager
def _counting(about: _About) -> Iterator[None]:
    busy, wall = time.process_time(), time.perf_counter()
    try:
        yield
    finally:
        about.busy_s, about.wall_s = time.process_time() - busy, time.perf_counter() - wall


class _Rate(ProgressColumn):
    """Requests per second, of late."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f}/s")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate())
    # Drawing the bar costs processor time beside the servers: twice a second will do.
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, refresh_per_second=2)


async def _model(client: ChatClient, name: str) -> str:
    try:
        return str((await client.get("/v1/models"))["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise UnavailableError(f"{name} names no model at /v1/models; give --model") from error


async def _version(client: ChatClient) -> dict[str, str]:
    """The server's version where it tells one."""
    try:
        return {"version": str((await client.get("/version"))["version"])}
    except (UnavailableError, LookupError, TypeError):
        return {}


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", "json") from error


def _content(
    options: Options,
    about: _About,
    drawn: dict[str, str],
    runner: Runner,
    summaries: Sequence[Summary],
    complete: bool,
) -> dict[str, Any]:
    asked = asdict(options) | {"api_key": bool(options.api_key), "json_file": str(options.json_file)}
    return {
        "format": FORMAT,
        "complete": complete,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "options": asked,
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "servers": about.servers,
        "workloads": drawn,
        "generator": about.overhead,
        "summaries": [asdict(summary) for summary in summaries],
        "rows": row_files.to_json(runner.rows),
    }
