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
from typing import Any, Protocol

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
from holdfast.loadgen.lag import LoopLag
from holdfast.loadgen.runner import Runner, Server, reported
from holdfast.loadgen.summary import Summary, summarize
from holdfast.loadgen.table import print_report
from holdfast.loadgen.traces import formats
from holdfast.loadgen.traces.formats import Format
from holdfast.loadgen.traces.recording import recorded
from holdfast.loadgen.workloads.catalog import WORKLOADS, describe, drawings
from holdfast.loadgen.workloads.drawing import Draw, warm_up
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
    record: Path | None = None  # the trace of the run goes there
    tenant_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of `tenants`: name and API key
    trace: str = ""  # what is replayed in place of workloads, and how

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("a comparison needs at least one --server NAME=URL", "server")
        if len(dict(self.servers)) < len(self.servers):
            raise ConfigError("two servers have the same name", "server")
        for name in self.workloads:
            if name not in WORKLOADS:
                near = get_close_matches(name, WORKLOADS, 1) or WORKLOADS
                raise ConfigError(f"unknown workload {name!r}; nearest: {', '.join(near)}", "workload")
        if self.record is not None and len(self.servers) > 1:
            raise ConfigError("a trace is of one server: --record goes with one --server", "record")
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

    @property
    def told(self) -> dict[str, str]:
        """What was drawn, in a line, under every name that the rows have for it; nothing where none is measured."""
        names = dict.fromkeys(reported(self.workload, script.tenant) for script in self.drawn.scripts)
        return dict.fromkeys(names, describe(self.drawn)) if self.drawn.waves else {}

    async def send(self, runner: Runner) -> None:
        """Send it to every server of ``runner``."""
        await runner.run(self.workload, self.repetition, self.drawn)


class Part(Protocol):
    """One repetition of something that is sent to every server."""

    @property
    def workload(self) -> str: ...
    @property
    def repetition(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def told(self) -> dict[str, str]: ...
    async def send(self, runner: Runner) -> None: ...


@dataclass(slots=True)
class _About:
    """What only the run itself could tell."""

    servers: list[dict[str, str]] = field(default_factory=list)
    busy_s: float = 0.0  # processor time of this process while it sent
    wall_s: float = 0.0
    requests: int = 0  # the warm-up's, too
    lag: LoopLag = field(default_factory=LoopLag)

    @property
    def overhead(self) -> dict[str, float]:
        """The generator's own processor time, as a share of one core and a request; how late its event loop was."""
        return {
            "loop_lag_p99_ms": self.lag.p99 * 1e3,
            "loop_lag_most_ms": self.lag.most * 1e3,
            "cpu_share": self.busy_s / max(self.wall_s, 1e-9),
            "cpu_ms_a_request": self.busy_s * 1e3 / max(self.requests, 1),
        }


def parse_server(text: str) -> tuple[str, str]:
    """Name and address from ``NAME=URL``; the address with or without ``/v1``. Raises ConfigError."""
    name, found, url = text.partition("=")
    if not found or not name or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is not NAME=URL, as in holdfast=http://127.0.0.1:8000", "server")
    return name, url.rstrip("/").removesuffix("/v1")


def parse_tenant_key(text: str) -> tuple[str, str]:
    """Name and key from ``NAME=FILE``. Raises ConfigError."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"{text!r} is not NAME=FILE, as in noisy=keys/noisy", "tenant-key-file")
    return name, read_key(Path(path))


def read_key(path: Path) -> str:
    """The API key in a file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "api-key-file") from error


def main(options: Options, more: Sequence[Part] = ()) -> int:
    """Compare, print, write; the exit status. Ctrl-C ends the measuring, not the report.

    ``more`` is sent after the workloads. A trace is written of the workloads only.
    """
    for path, field_name in ((options.json_file, "json"), (options.record, "record")):
        if path is not None:
            _check_writable(path, field_name)
    planned: list[Part] = [*plan(options), *more]
    runner, about, status = Runner((), options.max_tokens, options.forced, dict(options.tenant_keys)), _About(), 0
    runner.record = options.record is not None
    try:
        asyncio.run(_measure(options, planned, runner, about))
    except KeyboardInterrupt:
        status = INTERRUPTED
    summaries = summarize(runner.rows, options.seed)
    drawn = {name: told for part in planned for name, told in part.told.items()}
    if options.record is not None:
        formats.write(recorded(runner.observed), options.record, Format.MOONCAKE)
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
    mode = options.trace or mode
    told = [
        f"seed {options.seed}, {options.repetitions} repetitions, max_tokens {options.max_tokens}, temperature 0; "
        f"histories are {mode}",
        "1st token: median ms to the first piece of text or of a call; scripted: answers with the calls asked for; "
        "same answer: to the same prompt as the first server's; below each figure its 95 % bootstrap interval",
        f"the generator itself took {overhead['cpu_ms_a_request']:.1f} ms of processor time a request, "
        f"{overhead['cpu_share']:.1%} of one core; its event loop was late by "
        f"{overhead['loop_lag_p99_ms']:.1f} ms (p99), {overhead['loop_lag_most_ms']:.1f} ms at most",
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


async def _measure(options: Options, planned: Sequence[Part], runner: Runner, about: _About) -> None:
    async with AsyncExitStack() as stack:
        servers = []
        for name, url in options.servers:
            client = await stack.enter_async_context(ChatClient(url, options.timeout_s, options.api_key))
            servers.append(Server(name, client, options.model or await _model(client, name)))
            about.servers.append({"name": name, "url": url, "model": servers[-1].model, **await _version(client)})
        runner.servers = servers
        await stack.enter_async_context(about.lag.watching())
        with _progress() as progress, _counting(about):
            task = progress.add_task("", total=len(servers) * sum(part.requests for part in planned))

            def sent() -> None:
                about.requests += 1
                progress.advance(task)

            runner.sent = sent
            for part in planned:
                progress.update(task, description=f"{part.workload} {part.repetition + 1}/{options.repetitions}")
                await part.send(runner)


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


def _check_writable(path: Path, field_name: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field_name) from error


def _content(
    options: Options,
    about: _About,
    drawn: dict[str, str],
    runner: Runner,
    summaries: Sequence[Summary],
    complete: bool,
) -> dict[str, Any]:
    asked = asdict(options) | {
        "api_key": bool(options.api_key),
        "json_file": str(options.json_file),
        "record": None if options.record is None else str(options.record),
        "tenant_keys": [name for name, _ in options.tenant_keys],
    }
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
