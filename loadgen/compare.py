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
from holdfast.loadgen.flags import above_zero
from holdfast.loadgen.measure import FEW
from holdfast.loadgen.options import MAX_TOKENS, Options, Replay
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
                    round_ = drawing(Draw(options.seed, name, repetition, load.name if load else ""), sizes)
                    parts.append(Part(name, repetition, round_, manner, load, description=describe(round_)))
    return parts


def measured_of(parts: Sequence[Part]) -> dict[str, list[int]]:
    """Measured requests to each server in each repetition, by the workload's name in the rows."""
    counts: dict[str, list[int]] = {}
    for part in sorted(parts, key=lambda part: part.repetition):
        for name, count in part.measured.items():
            counts.setdefault(name, []).append(count)
    return counts


def descriptions_of(parts: Sequence[Part]) -> dict[str, str]:
    """Descriptions of the drawn rounds by the workload's name in the rows. Equal repetitions share one."""
    descriptions: dict[str, dict[str, None]] = {}
    for part in parts:
        for name in part.measured:
            descriptions.setdefault(name, {})[part.description] = None
    return {name: "; then ".join(texts) for name, texts in descriptions.items()}


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
class _RunFacts:
    """Facts that are known only after the run."""

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

    Ctrl-C ends the measuring, not the report. After an error the rows so far are reported, then the error is raised
    again. ``more`` is sent after the workloads.
    """
    for name, path in (("json", options.json_file), ("html", options.html_file), ("record", options.record)):
        if path is not None:
            check_writable(path, name)
    if options.html_file is not None:
        check_plotting()
    parts: list[Part] = [*plan(options), *more]
    _check_tenants(options, parts)
    runner, facts = Runner((), dict(options.tenant_keys)), _RunFacts()
    runner.record, runner.pause_s = options.record is not None, options.pause_s
    status = 0
    try:
        asyncio.run(_measure(options, parts, runner, facts))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception:
        if runner.rows:
            _report(options, parts, runner, facts, complete=False)
        raise
    _report(options, parts, runner, facts, complete=status == 0)
    answering = {row.server for row in runner.rows if row.ok}
    return status or int(any(row.server not in answering for row in runner.rows))


def _report(options: Options, parts: Sequence[Part], runner: Runner, facts: _RunFacts, complete: bool) -> None:
    """Write and print the results: the rows before anything that could fail."""
    descriptions = descriptions_of(parts)
    content: dict[str, Any] = {
        "format": FORMAT,
        "complete": complete,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "options": options.as_json,
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "servers": facts.servers,
        "workloads": descriptions,
        "planned": measured_of(parts),
        "generator": facts.overhead,
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
    print_report(summaries, descriptions, notes(options, summaries, content["generator"], complete))
    if options.html_file and runner.rows:
        write_report(content, options.html_file)


def notes(options: Options, summaries: Sequence[Summary], overhead: dict[str, float], complete: bool) -> list[str]:
    """The notes below the tables."""
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
        lines.append("INTERRUPTED: the figures cover the requests until then")
    return lines


async def _measure(options: Options, parts: Sequence[Part], runner: Runner, facts: _RunFacts) -> None:
    async with AsyncExitStack() as stack:
        servers = []
        for name, url in options.servers:
            client = await stack.enter_async_context(ChatClient(url, options.timeout_s, options.api_key))
            servers.append(Server(name, client, options.model or await client.model()))
            facts.servers.append({"name": name, "url": url, "model": servers[-1].model, **await _version(client)})
        runner.servers = servers
        total = len(servers) * sum(part.requests for part in parts)
        with uncollected(), bar("", total) as progress, _counting(facts):

            def on_sent() -> None:
                facts.requests += 1
                progress.advance()

            runner.on_sent = on_sent
            for part in parts:
                progress.describe(f"{part.reported()} {part.repetition + 1}")
                gc.collect()
                async with facts.lag.watching():
                    await runner.send(part)


@contextmanager
def _counting(facts: _RunFacts) -> Iterator[None]:
    busy, wall = time.process_time(), time.perf_counter()
    try:
        yield
    finally:
        facts.busy_s, facts.wall_s = time.process_time() - busy, time.perf_counter() - wall


async def _version(client: ChatClient) -> dict[str, str]:
    """The server's version, if it has one."""
    try:
        return {"version": str((await client.get("/version"))["version"])}
    except (UnavailableError, LookupError, TypeError):
        return {}


def _check_tenants(options: Options, parts: Sequence[Part]) -> None:
    tenants = sorted({program.tenant for part in parts for program in part.round.programs if program.tenant})
    for name, _ in options.tenant_keys:
        if name not in tenants:
            raise ConfigError(f"no tenant {name!r} is sent; known: {', '.join(tenants) or 'none'}", "tenant-key-file")


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ---- replay ----


def replay(request: Replay, options: Options) -> int:
    """Send the programs of a trace; the exit status. Raises ConfigError."""
    return main(replace(options, trace=_settings_text(request)), replayed(request, options.seed, options.repetitions))


def replayed(request: Replay, seed: int, repetitions: int) -> list[Part]:
    """Every repetition of the trace. Raises ConfigError."""
    if request.forcing not in set(Forcing):
        raise ConfigError(f"forcing is one of {', '.join(Forcing)}, not {request.forcing!r}", "forcing")
    limit = None if request.forced_lengths else MAX_TOKENS
    forced, forcing = request.forced_lengths, Forcing(request.forcing)
    manner = Manner(request.recorded_answers, forced, forcing, request.max_tokens or limit, request.speed)
    programs = from_zero(formats.read(request.trace, formats.named(request.format)).programs)
    if not programs:
        raise ConfigError("the trace has no program", "trace")
    if request.rate is not None:
        above_zero("rate", request)
        if any(turn.at_ms is not None for program in programs for turn in program.turns):
            raise ConfigError("the trace says when programs arrived; --speed makes that faster", "rate")
    parts = []
    for repetition in range(repetitions):
        wording = Wording(seed, repetition, scale=request.scale)
        for program in programs:
            first(worded(program, wording), manner)
            _check_sendable(program)
        starts = tuple((program.arrival_ms or 0.0) / 1e3 / request.speed for program in programs)
        if request.rate is not None:
            rng = random.Random(f"{seed}/{REPLAY}/{repetition}/arrivals")
            starts = poisson(rng, len(programs), request.rate)
        lanes = tuple((place,) * len(program.turns) for place, program in enumerate(programs))
        round_ = Round(programs, (lanes,), due=starts, session=f"{seed}/{repetition}")
        when = f"arriving over {max(starts):.0f} s" if max(starts) else "all at once"
        description = f"{len(programs)} programs, {sum(map(len, lanes))} requests, {when}"
        parts.append(Part(REPLAY, repetition, round_, manner, wording=wording, description=description))
    return parts


def _settings_text(request: Replay) -> str:
    """One line for the report: how the trace is sent, and whether histories have recorded answers."""
    tokens = request.max_tokens or (None if request.forced_lengths else MAX_TOKENS)
    limit = "" if tokens is None else f" and max_tokens {tokens}"
    lengths = ", answers of the recorded lengths" if request.forced_lengths else ""
    whose = "the trace's" if request.recorded_answers else "each server's own"
    when = f"{request.speed:g} times its speed" if request.rate is None else f"{request.rate:g} programs a second"
    return (
        f"temperature 0{limit} where the trace has none{lengths}; "
        f"histories are of {request.trace.name} at {when}, {whose} answers"
    )


def _check_sendable(program: Program) -> None:
    """Raises ConfigError for values that JSON cannot hold: half a surrogate pair, or an integer beyond 64 bits."""
    for index, turn in enumerate(program.turns):
        try:
            encode({"": [program.id, turn.prompt, turn.output.history, turn.tools, turn.sampling]})
        except TypeError as error:
            raise ConfigError(f"program {program.id!r}, turn {index}: cannot be sent: {error}", "trace") from error
