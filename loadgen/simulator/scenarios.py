"""The scenarios of `holdfast simulate` and the `simulate-` commands: each one is an entry of `SCENARIOS`.

A scenario says which runs its options ask for, how one run is played, and which figures are printed. `cli` has the
options; `commands` turns the runs into rows, and the rows into tables and a file.

The engines, the scheduler, the router's placement and the tenants' shares are the real ones, over a cost model.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from holdfast.loadgen.flags import at_least
from holdfast.loadgen.measure import Estimate, estimate, mean
from holdfast.loadgen.program import Program
from holdfast.loadgen.simulator import states
from holdfast.loadgen.simulator.clients import AgentDone, Orchestrated, Way
from holdfast.loadgen.simulator.machines import Profile, profile
from holdfast.loadgen.simulator.policies import ORDERS, SUTRADHARA_TTL, TTL_S, USUAL, engine_config
from holdfast.loadgen.simulator.replica import Replica
from holdfast.loadgen.simulator.routing import ROUTINGS, Ours, routing
from holdfast.loadgen.simulator.simulation import Served, Simulation
from holdfast.loadgen.simulator.workloads import (
    AGENTS,
    CROWD_CONTEXT,
    CROWDS,
    Crowd,
    Workload,
    agents,
    of_tenants,
)
from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import ServedElsewhere
from holdfast.router.dispatch import Ledger

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: `play` returns the figures of each case that it covers. `load` is its place on a picture's axis."""

    case: str
    way: str
    seed: int
    play: Callable[[], Mapping[str, Figures]]
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one case in one run."""

    case: str
    way: str
    seed: int
    load: float
    figures: Figures


def summary(values: Sequence[float]) -> Estimate:
    """The mean over seeds with its interval."""
    result = estimate(values, mean, 0)
    if result is None:
        raise ConfigError("there is no run", "seeds")
    return result


@dataclass(frozen=True, slots=True)
class Column:
    """One printed figure: the mean over seeds.

    `kind`: "%" a share; "over" and "under": this way's figure over the first way's, and the other way round; "gained":
    1 minus the first.
    """

    head: str
    figure: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One command, whose options are in `cli`.

    `tables`: titles and columns; the first way of a case is what the others are compared to. `notes`: lines after the
    tables.
    """

    runs: Callable[[Namespace], list[Run]]
    tables: Mapping[str, Sequence[Column]]
    notes: Callable[[Sequence[Row]], Iterator[str]] = lambda rows: iter(())


def _spread(seconds: Sequence[float], *percents: int) -> Figures:
    return {f"p{percent}_s": float(np.percentile(seconds, percent)) for percent in percents}


def _seeds(options: Namespace) -> range:
    return range(options.seed, options.seed + options.seeds)


# ---- policies ----


def _policies(options: Namespace) -> list[Run]:
    at_least(1, "seeds replicas", options)
    machine = profile(options.profile, options.cells)
    hosts = {"off": (False,), "on": (True,), "both": (False, True)}[options.host_tier]
    runs = []
    for host, times, rate in product(hosts, options.turns_times, options.rates):
        workload = Workload(options.workload, options.programs, rate, times, options.scale, options.tool_times).within(
            machine.cells
        )
        name = f"{workload.kind}{f' x{times}' if times > 1 else ''} {rate:g}/s on {options.replicas} x {machine.name}"
        name += ", host tier" if host else ""
        load = times if len(options.turns_times) > 1 else rate
        for seed, policy in product(_seeds(options), options.policy or USUAL):
            config = engine_config(policy, machine, host)
            play = partial(play_policy, name, workload, machine, config, options.replicas, seed)
            runs.append(Run(name, policy, seed, play, load))
    return runs


def play_policy(
    case: str, workload: Workload, machine: Profile, config: EngineConfig, replicas: int, seed: int
) -> Mapping[str, Figures]:
    """One run of a workload: completion times of programs, and what the engines counted."""
    outcome = Simulation(machine, config, replicas).run(workload.draw(seed))
    programs = outcome.programs
    seconds = [program.seconds for program in programs]
    figures = {"mean_s": fmean(seconds), **_spread(seconds, 50, 90, 99)}
    figures |= {"programs": len(programs), "programs_per_s": outcome.programs_per_s}
    figures["bubble_s"] = fmean(program.bubble_s for program in programs)
    figures["tool_s"] = fmean(program.tool_s for program in programs)
    figures["cached"] = sum(program.cached for program in programs) / sum(program.prompt for program in programs)
    return {case: figures | outcome.counts}


# ---- placement ----

ROWS = 32  # of a replica: so many turns at once
CELLS = 1 << 16
RATES = {"agents": 0.22, "preambles": 0.45, "fan-out": 0.17, "hot-tenant": 0.4}  # programs a second and replica
WARM = 1 / 3  # of the arrivals, before anything counts


def crowd_engine(machine: Profile) -> EngineConfig:
    """One replica of many: the default order and retention, few rows."""
    usual = engine_config("default", machine, host=False)
    return replace(usual, context_length=CROWD_CONTEXT, max_sequences=ROWS, session_rows=ROWS // 2)


def _placements(options: Namespace) -> list[Run]:
    at_least(1, "seeds", options)
    machine = profile(options.profile, options.cells)
    runs = []
    for replicas, workload in product(options.replicas, options.workload or CROWDS):
        if replicas < 1:
            raise ConfigError("replicas must be at least 1", "replicas")
        crowd = Crowd(workload, options.programs * replicas, RATES.get(workload, 1.0) * options.load * replicas)
        for seed, name in product(_seeds(options), options.placement or ROUTINGS):
            routing(name)
            case = f"{workload}, {replicas}"
            runs.append(Run(case, name, seed, partial(play_placement, case, crowd, machine, replicas, name, seed)))
    return runs


def play_placement(
    case: str, crowd: Crowd, machine: Profile, replicas: int, placement: str, seed: int
) -> Mapping[str, Figures]:
    """One run. What counts is the time from the first third of the arrivals to the last of them.

    Before that caches are empty, after it replicas have nothing to do. Turns that take very long are cut short.
    """
    programs = list(crowd.draw(seed))
    window = programs[int(WARM * len(programs))].arrived, programs[-1].arrived
    turns: list[Served] = []
    start = time.process_time()
    simulation = Simulation(
        machine, crowd_engine(machine), replicas, window=window, routing=routing(placement), served=turns.append
    )
    simulation.run(programs)
    elapsed = time.process_time() - start
    measured = [turn for turn in turns if window[0] <= turn.asked <= window[1]]
    figures = turn_figures(measured, window[1] - window[0], replicas)
    figures |= {"turns": len(measured), "cut": sum(not turn.prompt for turn in measured), "took_s": elapsed}
    busy = np.array([site.busy_s for site in simulation.sites])
    figures |= {"busy": float(busy.mean()) / (window[1] - window[0])}
    return {case: figures | {"most_busy": float(busy.max() / busy.mean()), "busy_cv": float(busy.std() / busy.mean())}}


def turn_figures(turns: Sequence[Served], seconds: float, replicas: int) -> Figures:
    """Figures of the turns that were sent within `seconds`. `others_p99_s`: of all tenants but the hot one.

    `in_hand`: turns in progress at a replica in the mean, and of the replica with the most.
    """
    turn_s, first_s = [turn.seconds for turn in turns], [turn.first_s for turn in turns]
    hand = np.zeros(replicas)
    np.add.at(hand, [turn.replica for turn in turns], np.array(turn_s) / seconds)
    figures = {"hit": sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)}
    figures |= _spread(turn_s, 50, 99) | {f"first_{name}": value for name, value in _spread(first_s, 50, 99).items()}
    figures |= {"in_hand": float(hand.mean()), "most_in_hand": float(hand.max())}
    others = [turn.seconds for turn in turns if turn.tenant != "hot"]
    if 0 < len(others) < len(turns):
        figures["others_p99_s"] = float(np.percentile(others, 99))
    return figures


# ---- tenants ----

WITHIN_S = 10.0  # all programs come in this time
STEP_MS = 100.0  # `engine.step_ms` of the tables in docs/scheduling.md
NOISY, QUIET = "tenant-0", "tenant-1"


class Sharing(Ours):
    """The router's placement; each report of a replica also adds to the sums of every tenant's seconds."""

    def __init__(self, replicas: int, routers: int, *, share: bool) -> None:
        super().__init__(replicas, routers=routers)
        self._share = share
        self._sums: dict[str, float] = {}
        self._ledgers = [Ledger() for _ in range(replicas)]

    def report(self, number: int, replica: Replica) -> None:
        super().report(number, replica)
        if not self._share:
            return
        ledger = self._ledgers[number]
        delta = ledger.delta(replica.engine.contended)
        for name, seconds in delta.seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds
        if elsewhere := ledger.elsewhere(delta, [self._sums[name] for name in delta.seconds]):
            replica.notice(ServedElsewhere(elsewhere))


@dataclass(frozen=True, slots=True)
class Shared:
    """One run: its turns, the seconds of service of each tenant at moments on the way, and when programs ended."""

    turns: Sequence[Served]
    service: Sequence[tuple[float, Mapping[str, float]]]
    ended: Mapping[str, Sequence[float]]  # by tenant

    def shares(self) -> dict[str, float]:
        """Seconds of service of each tenant while all are busy: until the first has ended half of its programs."""
        end = min(moments[len(moments) // 2] for moments in self.ended.values())
        inside = [total for moment, total in self.service if WITHIN_S <= moment <= end]
        return {tenant: inside[-1][tenant] - inside[0].get(tenant, 0.0) for tenant in inside[-1]}


def share(programs: Sequence[Program], machine: Profile, replicas: int, order: str, routers: int, but: str) -> Shared:
    """One run to the end of all programs, those of the tenant `but` excepted."""
    turns: list[Served] = []
    service: list[tuple[float, Mapping[str, float]]] = []

    def served(turn: Served) -> None:
        turns.append(turn)
        now = turn.asked + turn.seconds
        if service and now < service[-1][0] + 1.0:
            return
        total: dict[str, float] = {}
        for site in simulation.sites:
            for tenant, seconds in site.replica.engine.stats.served_s.items():
                total[tenant] = total.get(tenant, 0.0) + seconds
        service.append((now, total))

    config = replace(crowd_engine(machine), order=ORDERS.get(order, order), step_ms=STEP_MS)
    placement = partial(Sharing, routers=routers, share=order == "fair")
    simulation = Simulation(machine, config, replicas, routing=placement, served=served)
    pending = {program.number for program in programs if program.tenant != but}

    def enough(number: int) -> bool:
        pending.discard(number)
        return not pending

    outcome = simulation.run(programs, enough=enough)
    tenants = {program.number: program.tenant for program in programs}
    ended: dict[str, list[float]] = {program.tenant: [] for program in programs}
    for finished in outcome.programs:
        ended[tenants[finished.number]].append(finished.ended)
    return Shared(turns, service, {tenant: sorted(moments) for tenant, moments in ended.items()})


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all have the same, 1/n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def _tenants(options: Namespace) -> list[Run]:
    at_least(1, "seeds quiet routers", options)
    if options.tenants < 2 or options.programs < 2 * options.tenants:
        raise ConfigError("there must be two tenants, and two programs of each", "tenants")
    if options.replicas < 2 or options.replicas % 2:
        raise ConfigError("replicas must be an even number", "replicas")
    orders = options.order or ("program", "fair")
    return [
        Run("tenants", order, seed, partial(play_tenants, options, order, seed))
        for seed, order in product(_seeds(options), orders)
    ]


def play_tenants(options: Namespace, order: str, seed: int) -> Mapping[str, Figures]:
    """The runs of one order and seed.

    `equal`: all tenants have as many programs, more than the replicas can serve at once. `noise`: one tenant has as
    many programs as all others together; the others' turns count, over their turns where all have as many. `pair`: two
    tenants, one with very many programs; the other's turns count, over its turns alone on half of the machines.
    """
    machine, count = profile(options.profile, options.cells), options.tenants

    def run(programs: dict[str, int], but: str = NOISY, replicas: int = 0, slower: float = 1.0) -> Shared:
        programs_drawn = of_tenants(seed, programs, WITHIN_S)
        return share(programs_drawn, machine.slowed(slower), replicas or options.replicas, order, options.routers, but)

    def figures(ran: Shared, but: str = NOISY, only: str = "", base: Figures | None = None) -> Figures:
        seconds = [turn.seconds for turn in ran.turns if turn.tenant != but and only in ("", turn.tenant)]
        result = _spread(seconds, 50, 99) | {"turns": len(seconds)}
        return result if base is None else result | {"raised": result["p50_s"] / base["p50_s"]}

    per_tenant = options.programs // count
    equal = run({f"tenant-{i}": per_tenant for i in range(count)}, "")
    shares = list(equal.shares().values())
    rows = {"equal": figures(equal, "")}
    rows["equal"] |= {"jain": jain(shares), "most_over_least": max(shares) / min(shares)}

    others = {f"tenant-{i}": options.programs // 2 // (count - 1) for i in range(1, count)}
    calm = rows["noise: as many as each other"] = figures(run({NOISY: others[QUIET], **others}))
    noise = run({NOISY: options.programs // 2, **others})
    rows["noise: half of all, over as many as each other"] = figures(noise, base=calm)
    alone = figures(run({NOISY: 0, QUIET: others[QUIET]}, slower=count))
    rows[f"noise: one alone, 1/{count} as fast"] = alone
    rows[f"noise: half of all, one of the others over alone, 1/{count} as fast"] = figures(noise, "", QUIET, alone)

    quiet = {NOISY: 0, QUIET: options.quiet}
    slow = rows["pair: alone, half as fast"] = figures(run(quiet, slower=2))
    few = rows["pair: alone, half of the replicas"] = figures(run(quiet, replicas=options.replicas // 2))
    pair = run({**quiet, NOISY: options.programs // 2})
    rows["pair: beside, over alone, half as fast"] = figures(pair, base=slow)
    rows["pair: beside, over alone, half of the replicas"] = figures(pair, base=few)
    return rows


# ---- orchestrator ----

WHOLE = 1 << 20  # tokens of a step, of which no prompt fills a quarter
DEPTHS = 4  # the last one stands for all deeper ones
NEITHER, SPLIT, BOTH = Way(), Way(split=True), Way(split=True, dispatch=True)
_TAGS: dict[str, Any] = {"without": ("grouped_prefill",)}
_OURS = EngineConfig()
_DEFAULTS = {"without": (), "step_tokens": _OURS.step_tokens, "step_ms": 50.0, "retention": _OURS.retention}
PARTS: dict[str, tuple[Way, dict[str, Any]]] = {
    "baseline": (NEITHER, {}),
    "+ splitting": (SPLIT, {}),
    "+ dispatch": (BOTH, {}),
    "+ tags": (BOTH, _TAGS),
    "+ all other defaults": (BOTH, _DEFAULTS),
    "+ all other defaults, sent ahead as prompts": (Way(split=True, dispatch=True, first=True), _DEFAULTS),
    "baseline, whole prompts": (NEITHER, {"step_tokens": WHOLE}),
    f"baseline, TTL {TTL_S:g} s": (NEITHER, {"retention": RetentionConfig(SUTRADHARA_TTL)}),
}
"""Sutradhara's table, one part added after another: what the orchestrator does, and the engine's settings."""
SWEPT = ("baseline", "+ tags")


def _orchestrator(options: Namespace) -> list[Run]:
    at_least(1, "seeds agents", options)
    if options.workload not in AGENTS:
        raise ConfigError(f"there is no workload {options.workload!r}; there are {', '.join(AGENTS)}", "workload")
    if not all(rate > 0 for rate in (options.rate, *options.rates)):
        raise ConfigError("rates must be more than 0", "rates")
    at_least(0, "tools", options)
    machine = profile(options.profile, options.cells)
    cases = [(options.rate, part) for part in PARTS]
    cases += [(rate, part) for rate in options.rates if rate != options.rate for part in SWEPT]
    runs = []
    for (rate, part), seed in product(cases, _seeds(options)):
        case = f"{options.workload} {rate:g}/s"
        play = partial(play_agents, case, options.workload, options.agents, rate, options.tools, machine, part, seed)
        runs.append(Run(case, part, seed, play, rate))
    return runs


def play_agents(
    case: str, workload: str, count: int, rate: float, tools: float, machine: Profile, part: str, seed: int
) -> Mapping[str, Figures]:
    """One run. `found`: cached when a turn began; `reused`: computed neither for the turn nor ahead of it."""
    way, settings = PARTS[part]
    config = engine_config("program", machine, host=False)
    config = replace(config, step_tokens=256, without=("grouped_prefill", "kv_tags"))
    simulated = Orchestrated(machine, replace(config, **settings), way)
    agents_done = simulated.run(agents(workload, count, rate, seed, tools))
    stats = simulated.engine.stats
    turns = [turn for agent in agents_done for turn in agent.turns]
    prompt, cached = sum(turn.prompt for turn in turns), sum(turn.across + turn.within + turn.ahead for turn in turns)
    first_s = [agent.first_s for agent in agents_done]
    tool, decode = fmean(agent.tool_s for agent in agents_done), fmean(agent.decode_s for agent in agents_done)
    figures = {f"first_{name}": value for name, value in _spread(first_s, 50, 90).items()}
    figures |= _spread([agent.seconds for agent in agents_done], 50, 90)
    shares = np.percentile([agent.tool_s / agent.first_s for agent in agents_done], (50, 90, 99))
    figures |= {f"tools_p{percent}": float(share) for percent, share in zip((50, 90, 99), shares, strict=True)}
    figures |= {"prompt_s": fmean(first_s) - tool - decode, "decode_s": decode, "tool_s": tool}
    figures["drawing_s"] = decode + fmean(agent.seconds - agent.first_s for agent in agents_done)
    ended = stats.ahead_ended
    figures["cut"] = (ended["overtaken"] + ended["no_cells"]) / max(sum(ended.values()), 1)
    figures |= {"found": cached / prompt, "reused": 1 - (stats.prompt_computed + stats.ahead_computed) / prompt}
    for depth in range(DEPTHS):
        figures |= _depth(agents_done, depth)
    return {case: figures}


def _depth(agents_done: Sequence[AgentDone], depth: int) -> Figures:
    turns = [turn for agent in agents_done for at, turn in enumerate(agent.turns) if min(at, DEPTHS - 1) == depth]
    prompt = max(sum(turn.prompt for turn in turns), 1)
    kinds = ("across", "within", "ahead")
    return {f"{kind}_{depth}": sum(getattr(turn, kind) for turn in turns) / prompt for kind in kinds}


def _equal_latency(rows: Sequence[Row]) -> Iterator[str]:
    """For each of the baseline's loads: the load that all parts together carry at the same median FTR."""
    loads = sorted({row.load for row in rows if row.way == SWEPT[1]})
    if len(loads) < 2:
        return
    base, ours = (
        [fmean(r.figures["first_p50_s"] for r in rows if (r.way, r.load) == (way, load)) for load in loads]
        for way in SWEPT
    )
    for load, target in zip(loads[:-1], base, strict=False):
        reached = [n for n in range(len(loads)) if ours[n] <= target]
        if not reached:
            continue
        last, at = max(reached), f"at the baseline's FTR of {target:.1f} s at {load:g}/s"
        if last + 1 == len(loads):
            yield f"{at}: over {loads[-1] / load:.1f} times the load"
            continue
        part = (target - ours[last]) / (ours[last + 1] - ours[last])
        yield f"{at}: {(loads[last] + part * (loads[last + 1] - loads[last])) / load:.2f} times the load"


# ---- states ----


def _states(options: Namespace) -> list[Run]:
    at_least(1, "seeds slots", options)
    machine = profile(options.profile, options.cells)
    workload = Workload(options.workload, options.programs, options.rate)
    case = f"{options.workload} {options.rate:g}/s, {options.slots} slots"
    return [
        Run(case, way, seed, partial(_play_states, case, machine, workload, way, options.slots, seed))
        for seed, way in product(_seeds(options), states.WAYS)
    ]


def _play_states(
    case: str, machine: Profile, workload: Workload, way: str, slots: int, seed: int
) -> Mapping[str, Figures]:
    return {case: states.play(machine, list(workload.draw(seed)), way, slots)}


def _columns(*columns: tuple[str, ...]) -> tuple[Column, ...]:
    return tuple(Column(*values) for values in columns)


SCENARIOS: dict[str, Scenario] = {
    "simulate": Scenario(_policies, {"": _columns(
        ("job s mean", "mean_s"), ("p50", "p50_s"), ("p90", "p90_s"), ("p99", "p99_s"),
        ("programs/s", "programs_per_s"), ("bubble s", "bubble_s"), ("cached", "cached", "%"),
        ("faster", "mean_s", "under"), ("throughput", "programs_per_s", "over"),
    )}),
    "simulate-placement": Scenario(_placements, {"": _columns(
        ("hit rate", "hit", "%"),
        ("p50 s", "p50_s"), ("over", "p50_s", "over"), ("p99 s", "p99_s"), ("over", "p99_s", "over"),
        ("1st token p50 s", "first_p50_s"), ("over", "first_p50_s", "over"),
        ("1st p99 s", "first_p99_s"), ("over", "first_p99_s", "over"),
        ("most in hand", "most_in_hand"), ("over", "most_in_hand", "over"),
        ("busiest over mean", "most_busy"), ("cv", "busy_cv"),
    )}),
    "simulate-tenants": Scenario(_tenants, {"": _columns(
        ("turn p50 s", "p50_s"), ("p99 s", "p99_s"), ("p50 over", "raised"),
        ("Jain's index", "jain"), ("most over least", "most_over_least"),
    )}),
    "simulate-orchestrator": Scenario(_orchestrator, {
        "": _columns(
            ("FTR p50", "first_p50_s"), ("p90", "first_p90_s"), ("E2E p50", "p50_s"), ("p90", "p90_s"),
            ("FTR gained", "first_p50_s", "gained"), ("E2E gained", "p50_s", "gained"),
            ("found", "found", "%"), ("reused", "reused", "%"),
            ("prompt s", "prompt_s"), ("decode s", "decode_s"), ("tool s", "tool_s"),
            ("drawing s", "drawing_s"), ("ahead cut", "cut", "%"),
            *((f"tools of FTR {name}", f"tools_{name}", "%") for name in ("p50", "p90", "p99")),
        ),
        "found at each depth: of others, of earlier turns, computed ahead": _columns(*(
            (f"{depth}{'+' * (depth == DEPTHS - 1)} {kind}", f"{kind}_{depth}", "%")
            for depth in range(DEPTHS)
            for kind in ("across", "within", "ahead")
        )),
    }, _equal_latency),
    "simulate-states": Scenario(_states, {"": _columns(
        ("seconds of a program", "mean_s"), ("over ours", "mean_s", "over"), ("p90 over ours", "p90_s", "over"),
        ("hits", "hits", "%"), ("checkpoints evicted", "evicted"),
    )}),
}  # fmt: skip
