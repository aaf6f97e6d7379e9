"""`holdfast simulate` and the `simulate-` commands: arguments; the work is `loadgen.simulator`'s."""

import argparse
from dataclasses import replace
from pathlib import Path

from holdfast.loadgen.cli import Commands, counts, numbers


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add them all."""
    _add_policies(commands)
    _add_placement(commands)
    _add_tenants(commands)
    _add_orchestrator(commands)
    _add_overload(commands)


def _add_policies(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Scheduling policies side by side on simulated replicas: the real engines over a cost model."
    command = commands.add_parser("simulate", help=text, description=text)
    add = command.add_argument
    add("--workload", default="swe", help="swe, bfcl, mixed, mixed-shell or coding (default: swe)")
    add("--programs", type=int, default=100, help="of one run (default: 100)")
    add("--rates", type=numbers, default=(0.1,), metavar="R,R,..", help="programs a second (default: 0.1)")
    add("--turns-times", type=counts, default=(1,), metavar="N,N,..", help="turns multiplied, texts divided by it")
    add("--scale", type=float, default=1.0, help="of all lengths; coding asks for 0.1 or so (default: 1)")
    add("--tool-times", type=float, default=1.0, help="seconds of tools, multiplied (default: 1)")
    add("--profile", default="8b-a100", help="MODEL-GPU: 8b, 14b or 70b (on 4) and a100, h200 or b200; measured ones: "
        "8b-h100, 253m-cpu, 38m-cpu")  # fmt: skip
    add("--replicas", type=int, default=1, help="behind the router's placement (default: 1)")
    add("--cells", type=int, help="KV cells of a replica (default: what the profile has room for)")
    add("--policy", action="append", help="request, plas, infercept-request, infercept-program, infercept, program, "
        "fixed, bernstein, restore-cost, continuum, expected_waste or default; repeatable; others are compared to the "
        "first (default: all but infercept-program, restore-cost and default)")  # fmt: skip
    add("--host-tier", choices=("off", "on", "both"), default="off", help="cells in host memory (default: off)")
    add("--seed", type=int, default=0, help="of the first run (default: 0)")
    add("--seeds", type=int, default=3, help="how many, one after another (default: 3)")
    add("--one-by-one", action="store_true", help="every decode step by itself: slower, to check against")
    add("--json", type=Path, metavar="FILE", help="write every run and every figure")
    add("--pictures", type=Path, metavar="DIR", help="draw the figures; needs matplotlib")
    command.set_defaults(run=_simulate)


def _add_placement(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Ways to place programs on replicas side by side, simulated: the real engines over a cost model."
    command = commands.add_parser("simulate-placement", help=text, description=text)
    add = command.add_argument
    add("--workload", action="append", help="agents, preambles, fan-out or hot-tenant; may come several times "
        "(default: all)")  # fmt: skip
    add("--placement", action="append", help="ours, round-robin, two-choices, consistent-hash, bounded-hash or prefix; "
        "may come several times (default: all)")  # fmt: skip
    add("--replicas", type=counts, default=(4,), metavar="N,N,..", help="of each run (default: 4)")
    add("--programs", type=int, default=60, help="of one run, for each replica (default: 60)")
    add("--load", type=float, default=1.0, help="times the usual rate of arrivals (default: 1)")
    add("--profile", default="8b-a100", help="as for simulate (default: 8b-a100)")
    add("--cells", type=int, default=1 << 16, help="KV cells of a replica (default: 65536)")
    add("--seed", type=int, default=100, help="of the first run (default: 100)")
    add("--seeds", type=int, default=1, help="how many, one after another (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write every run, one by one")
    add("--with", action="append", type=Path, dest="told", metavar="FILE", help="runs of such a file, in the table too")
    command.set_defaults(run=_placement)


def _add_tenants(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = (
        "Many tenants on several replicas behind several routers, simulated: how equally they are served, and what one "
    )
    text += "with very many programs does to the others. The real engines over a cost model."
    command = commands.add_parser("simulate-tenants", help=text, description=text)
    add = command.add_argument
    add("--tenants", type=int, default=50, help="how many (default: 50)")
    add("--programs", type=int, default=2000, help="of all of them (default: 2000)")
    add("--quiet", type=int, default=20, help="programs of one beside a tenant with half of all (default: 20)")
    add("--replicas", type=int, default=4, help="an even number (default: 4)")
    add("--routers", type=int, default=4, help="how many (default: 4)")
    add(
        "--order",
        action="append",
        help="program, request, plas, fair, or module:Class; repeatable (default: program, fair)",
    )
    add("--profile", default="8b-a100", help="as for simulate (default: 8b-a100)")
    add("--cells", type=int, default=1 << 16, help="KV cells of a replica (default: 65536)")
    add("--seed", type=int, default=0, help="of the first run (default: 0)")
    add("--seeds", type=int, default=1, help="how many, one after another (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write every run")
    command.set_defaults(run=_tenants)


def _tenants(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import sharing

    names = ("tenants", "programs", "quiet", "replicas", "routers", "profile", "cells", "seed", "seeds")
    asked = sharing.Options(**{name: getattr(options, name) for name in names})
    if options.order:
        asked = replace(asked, orders=tuple(options.order))
    return sharing.main(asked, options.json)


def _add_orchestrator(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "What prompts sent ahead, tools that begin as calls close, and tags of cells are worth to "
    text += "agents, one after another, simulated: the real engine over a cost model."
    command = commands.add_parser("simulate-orchestrator", help=text, description=text)
    add = command.add_argument
    add("--workload", default="fan-out", help="fan-out or append-only (default: fan-out)")
    add("--agents", type=int, default=120, help="of one run (default: 120)")
    add("--rate", type=float, default=0.0075, help="agents a second, for the table (default: 0.0075)")
    add("--rates", type=numbers, default=(), metavar="R,R,..", help="for FTR against load (default: no such table)")
    add("--profile", default="14b-a100", help="as for simulate (default: 14b-a100)")
    add("--cells", type=int, help="KV cells (default: what the profile has room for)")
    add("--tools", type=float, default=1.0, help="times the tools' seconds (default: 1)")
    add("--seed", type=int, default=0, help="of the first run (default: 0)")
    add("--seeds", type=int, default=5, help="how many, one after another (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write every run")
    command.set_defaults(run=_orchestrator)


def _add_overload(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "How much has its answer in time when more comes than can be served, where the server is told the time and "
    text += "where it is not, simulated: the real engine over a cost model."
    command = commands.add_parser("simulate-overload", help=text, description=text)
    add = command.add_argument
    add("--loads", type=numbers, default=(0.5, 0.8, 1.0, 1.5, 2.0, 3.0), metavar="X,X,..", help="times the capacity "
        "(default: 0.5,0.8,1,1.5,2,3)")  # fmt: skip
    add("--deadline", type=float, default=40.0, help="seconds, mean; from half to one and a half (default: 40)")
    add("--seconds", type=float, default=300.0, help="of each run (default: 300)")
    add("--prompt", type=int, default=2000, help="tokens, mean (default: 2000)")
    add("--reply", type=int, default=250, help="tokens, mean (default: 250)")
    add("--sequences", type=int, default=64, help="engine.max_sequences (default: 64)")
    add("--batch", type=float, default=0.0, help="part of the requests that is of the class batch (default: 0)")
    add("--profile", default="8b-a100", help="as for simulate (default: 8b-a100)")
    add("--seed", type=int, default=0, help="(default: 0)")
    command.set_defaults(run=_overload)


def _overload(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import overload

    names = ("loads", "seconds", "prompt", "reply", "sequences", "batch", "profile", "seed")
    asked = {name: getattr(options, name) for name in names}
    return overload.main(overload.Options(**asked, deadline_s=options.deadline))


def _orchestrator(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import orchestration

    names = ("workload", "agents", "rate", "rates", "profile", "cells", "tools", "seed", "seeds")
    asked = orchestration.Options(**{name: getattr(options, name) for name in names})
    return orchestration.main(asked, options.json)


def _simulate(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import command

    return command.main(
        command.Options(
            workload=options.workload,
            programs=options.programs,
            rates=options.rates,
            turns_times=options.turns_times,
            scale=options.scale,
            tool_times=options.tool_times,
            profile=options.profile,
            replicas=options.replicas,
            cells=options.cells,
            policies=tuple(options.policy or ()),
            hosts={"off": (False,), "on": (True,), "both": (False, True)}[options.host_tier],
            seed=options.seed,
            seeds=options.seeds,
            one_by_one=options.one_by_one,
        ),
        options.json,
        options.pictures,
    )


def _placement(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import placement

    return placement.main(
        placement.Options(
            workloads=tuple(options.workload or ()),
            placements=tuple(options.placement or ()),
            replicas=options.replicas,
            programs=options.programs,
            load=options.load,
            profile=options.profile,
            cells=options.cells,
            seed=options.seed,
            seeds=options.seeds,
        ),
        options.json,
        options.told or (),
    )
