"""`holdfast bench compare` and `replay`: servers side by side in one run, by workloads or a trace.

Plans the requests, sends them, and writes the files.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.loadgen import rows as row_files
from holdfast.loadgen.chat import ChatClient, encode
from holdfast.loadgen.conversation import Forcing, Manner, first
from holdfast.loadgen.measure import FEW
from holdfast.loadgen.options import MAX_TOKENS, Options, Replay, above_zero
from holdfast.loadgen.program import Program, from_zero
from holdfast.loadgen.progress import LoopLag, bar, uncollected
from holdfast.loadgen.report.page import check_plotting, write_report
from holdfast.loadgen.runner import Part, Runner, Server
from holdfast.loadgen.summary import Summary, summarize
from holdfast.loadgen.table import check_writable, print_report
from holdfast.loadgen.traces import formats, mooncake
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.loadgen.traces.recording import recorded
from holdfast.loadgen.workloads.catalog import LOADED_BY, describe, drawings
from holdfast.loadgen.workloads.drawing import Draw, poisson, warm_up
from holdfast.loadgen.workloads.script import Load, Round, Sizes
from holdfast.replicas.errors import ConfigError, UnavailableError

WARM_UP, REPLAY = "warm-up", "replay"
FORMAT = 2  # of the file; raised when readers have to change
INTERRUPTED = 130


def plan(options: Options) -> list[Part]:
    """Every repetition of every workload at every load, drawn, the warm-up first: the same for the same options."""
    manner = Manner(options.forced, max_tokens=options.max_tokens)
    parts = [Part(WARM_UP, number, warm_up(options.seed, number), manner) for number in range(options.warm_up)]
    for workload in options.workloads:
        for load, sizes in _loads(workload, options):
            for name, drawing in drawings((workload,)):
                for repetition in range(options.repetitions):
                    drawn = drawing(Draw(options.seed, name, repetition, load.name if load else ""), sizes)
                    parts.append(Part(name, repetition, drawn, manner, load, about=describe(drawn)))
    return parts


def measured_of(parts: Sequence[Part]) -> dict[str, list[int]]:
    """Measured requests to each server in each repetition, by the workload's name in the rows."""
    measured: dict[str, list[int]] = {}
    for part in sorted(parts, key=lambda part: part.repetition):
        for name, count in part.measured.items():
            measured.setdefault(name, []).append(count)
    return measured


def about_of(parts: Sequence[Part]) -> dict[str, str]:
    """What was drawn, by the workload's name in the rows: of each repetition that differs from those before."""
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        for name in part.measured:
            found.setdefault(name, {})[part.about] = None
    return {name: "; then ".join(about) for name, about in found.items()}


def _loads(workload: str, options: Options) -> Iterator[tuple[Load | None, Sizes]]:
    """Every load at which a workload is sent, and its sizes then; the usual sizes without a sweep."""
    size = LOADED_BY.get(workload, "")
    values: tuple[float, ...] = options.rates if size == "rate" else options.concurrencies if size else ()
    unit = "a second" if size == "rate" else "at once"
    for value in values:
        changed: dict[str, Any] = {size: value}
        yield Load(value, unit), replace(options.sizes, **changed)
    if not values:
        yield None, options.sizes


@dataclass(slots=True)
class _About:
    """Facts that only the run itself yields."""

    servers: list[dict[str, str]] = field(default_factory=list)
    busy_s: float = 0.0  # processor time of this process while it sent
    wall_s: float = 0.0
    requests: int = 0  # with the warm-up
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


def main(options: Options, more: Sequence[Part] = ()) -> int:
    """Compare, print, write; the exit status, 1 where a server answered nothing.

    Ctrl-C ends the measuring, not the report. A run that an error ends is reported as far as it came, then the error is
    raised again. ``more`` is sent after the workloads.
    """
    for name, path in (("json", options.json_file), ("html", options.html_file), ("record", options.record)):
        if path is not None:
            check_writable(path, name)
    if options.html_file is not None:
        check_plotting()
    planned: list[Part] = [*plan(options), *more]
    _check_tenants(options, planned)
    runner, about = Runner((), dict(options.tenant_keys)), _About()
    runner.record, runner.pause_s = options.record is not None, options.pause_s
    status = 0
    try:
        asyncio.run(_measure(options, planned, runner, about))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception:
        if runner.rows:
            _tell(options, planned, runner, about, complete=False)
        raise
    _tell(options, planned, runner, about, complete=status == 0)
    answering = {row.server for row in runner.rows if row.ok}
    return status or int(any(row.server not in answering for row in runner.rows))


def _tell(options: Options, planned: Sequence[Part], runner: Runner, about: _About, complete: bool) -> None:
    """Write and print the results: the rows before anything that could fail."""
    drawn = about_of(planned)
    content: dict[str, Any] = {
        "format": FORMAT,
        "complete": complete,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "options": options.as_json,
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "servers": about.servers,
        "workloads": drawn,
        "planned": measured_of(planned),
        "generator": about.overhead,
        "summaries": [],
        "programs": [asdict(job) for job in row_files.group(runner.rows)],
        "rows": row_files.to_json(runner.rows),
    }
    _write(options.json_file, content)
    summaries = summarize(runner.rows, options.seed, content["planned"])
    content["summaries"] = [asdict(summary) for summary in summaries]
    _write(options.json_file, content)
    if options.record is not None:
        mooncake.write(recorded(runner.observed), options.record)
    print_report(summaries, drawn, notes(options, summaries, content["generator"], complete))
    if options.html_file and runner.rows:
        write_report(content, options.html_file)


def notes(options: Options, summaries: Sequence[Summary], overhead: dict[str, float], complete: bool) -> list[str]:
    """Remarks that a reader of the figures needs."""
    mode = "forced: the script's answers" if options.forced else "closed loop: each server's own answers"
    how = options.trace or f"max_tokens {options.max_tokens}, temperature 0; histories are {mode}"
    lines = [
        f"seed {options.seed}, {options.repetitions} repetitions, {how}",
        "1st token: median ms to the first piece of text or of a call, 1st p99: their 99th percentile; scripted: "
        "answers with the calls asked for; "
        "same answer: to the same prompt as the first server's; below each figure its 95 % bootstrap interval, or, of "
        f"fewer than {FEW}, the lowest and highest",
        f"the generator itself took {overhead['cpu_ms_a_request']:.1f} ms of processor time a request, "
        f"{overhead['cpu_share']:.1%} of one core; its event loop was late by "
        f"{overhead['loop_lag_p99_ms']:.1f} ms (p99), {overhead['loop_lag_most_ms']:.1f} ms at most",
    ]
    for summary in summaries:
        place = f"{summary.workload} on {summary.server}"
        if summary.failures:
            lines.append(f"FAILED: {place}: {', '.join(f'{n} {kind}' for kind, n in summary.failures.items())}")
        if summary.late:
            lines.append(f"{place}: the schedule was kept to {summary.late.value * 1e3:.1f} ms (p99)")
        if summary.workload == "repeats":
            continue
        if summary.cache_hits:
            lines.append(f"BEWARE: {place}: {summary.cache_hits} answers came from a response cache")
        if (summary.cold_cached_share or 0) > 0.5:
            lines.append(f"BEWARE: {place}: first prompts were cached; restart the server or use another --seed")
    if not complete:
        lines.append("INTERRUPTED: only what was measured until then")
    return lines


async def _measure(options: Options, planned: Sequence[Part], runner: Runner, about: _About) -> None:
    async with AsyncExitStack() as stack:
        servers = []
        for name, url in options.servers:
            client = await stack.enter_async_context(ChatClient(url, options.timeout_s, options.api_key))
            servers.append(Server(name, client, options.model or await client.model()))
            about.servers.append({"name": name, "url": url, "model": servers[-1].model, **await _version(client)})
        runner.servers = servers
        total = len(servers) * sum(part.requests for part in planned)
        with uncollected(), bar("", total) as shown, _counting(about):

            def sent() -> None:
                about.requests += 1
                shown.advance()

            runner.sent = sent
            for part in planned:
                shown.about(f"{part.reported()} {part.repetition + 1}")
                gc.collect()
                async with about.lag.watching():
                    await runner.send(part)


@contextmanager
def _counting(about: _About) -> Iterator[None]:
    busy, wall = time.process_time(), time.perf_counter()
    try:
        yield
    finally:
        about.busy_s, about.wall_s = time.process_time() - busy, time.perf_counter() - wall


async def _version(client: ChatClient) -> dict[str, str]:
    """The server's version, if it has one."""
    try:
        return {"version": str((await client.get("/version"))["version"])}
    except (UnavailableError, LookupError, TypeError):
        return {}


def _check_tenants(options: Options, planned: Sequence[Part]) -> None:
    known = sorted({program.tenant for part in planned for program in part.round.programs if program.tenant})
    for name, _ in options.tenant_keys:
        if name not in known:
            raise ConfigError(f"no tenant {name!r} is sent; known: {', '.join(known) or 'none'}", "tenant-key-file")


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ---- replay ----


def replay(wanted: Replay, options: Options) -> int:
    """Send the programs of a trace; the exit status. Raises ConfigError."""
    return main(replace(options, trace=_told(wanted)), replayed(wanted, options.seed, options.repetitions))


def replayed(wanted: Replay, seed: int, repetitions: int) -> list[Part]:
    """Every repetition of the trace. Raises ConfigError."""
    if wanted.forcing not in set(Forcing):
        raise ConfigError(f"forcing is one of {', '.join(Forcing)}, not {wanted.forcing!r}", "forcing")
    limit = None if wanted.forced_lengths else MAX_TOKENS
    forced, forcing = wanted.forced_lengths, Forcing(wanted.forcing)
    manner = Manner(wanted.recorded_answers, forced, forcing, wanted.max_tokens or limit, wanted.speed)
    programs = from_zero(formats.read(wanted.trace, formats.named(wanted.format)).programs)
    if not programs:
        raise ConfigError("the trace has no program", "trace")
    if wanted.rate is not None:
        above_zero("rate", wanted)
        if any(turn.at_ms is not None for program in programs for turn in program.turns):
            raise ConfigError("the trace says when programs arrived; --speed makes that faster", "rate")
    parts = []
    for repetition in range(repetitions):
        wording = Wording(seed, repetition, scale=wanted.scale)
        for program in programs:
            first(worded(program, wording), manner)
            _check_sendable(program)
        due = tuple((program.arrival_ms or 0.0) / 1e3 / wanted.speed for program in programs)
        if wanted.rate is not None:
            rng = random.Random(f"{seed}/{REPLAY}/{repetition}/arrivals")
            due = poisson(rng, len(programs), wanted.rate)
        lanes = tuple((place,) * len(program.turns) for place, program in enumerate(programs))
        round_ = Round(programs, (lanes,), due=due, session=f"{seed}/{repetition}")
        when = f"arriving over {max(due):.0f} s" if max(due) else "all at once"
        about = f"{len(programs)} programs, {sum(map(len, lanes))} requests, {when}"
        parts.append(Part(REPLAY, repetition, round_, manner, wording=wording, about=about))
    return parts


def _told(wanted: Replay) -> str:
    """How a trace is sent and whose answers are in the histories, for the reader of the report."""
    tokens = wanted.max_tokens or (None if wanted.forced_lengths else MAX_TOKENS)
    limit = "" if tokens is None else f" and max_tokens {tokens}"
    lengths = ", answers of the recorded lengths" if wanted.forced_lengths else ""
    whose = "the trace's" if wanted.recorded_answers else "each server's own"
    when = f"{wanted.speed:g} times its speed" if wanted.rate is None else f"{wanted.rate:g} programs a second"
    return (
        f"temperature 0{limit} where the trace has none{lengths}; "
        f"histories are of {wanted.trace.name} at {when}, {whose} answers"
    )


def _check_sendable(program: Program) -> None:
    """Raises ConfigError for what no request can hold: half a surrogate pair, or an integer beyond 64 bits."""
    for index, turn in enumerate(program.turns):
        try:
            encode({"": [program.id, turn.prompt, turn.output.history, turn.tools, turn.sampling]})
        except TypeError as error:
            raise ConfigError(f"program {program.id!r}, turn {index}: cannot be sent: {error}", "trace") from error
