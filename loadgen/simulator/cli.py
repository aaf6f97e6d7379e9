"""`holdfast simulate`: its arguments, and what becomes of its runs; the work is `loadgen.simulator`'s."""

import argparse
from pathlib import Path

from holdfast.loadgen.cli import Commands, counts, numbers


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add `simulate`."""
    text = "Scheduling policies side by side on simulated replicas: the real engines over a cost model."
    command = commands.add_parser("simulate", help=text, description=text)
    add = command.add_argument
    add("--workload", default="swe", help="swe or bfcl (default: swe)")
    add("--programs", type=int, default=100, help="of one run (default: 100)")
    add("--rates", type=numbers, default=(0.1,), metavar="R,R,..", help="programs a second (default: 0.1)")
    add("--turns-times", type=counts, default=(1,), metavar="N,N,..", help="turns multiplied, texts divided by it")
    add("--scale", type=float, default=1.0, help="of what tools tell (default: 1)")
    add("--profile", default="8b-a100", help="MODEL-GPU: 8b, 14b or 70b (on 4) and a100, h200 or b200")
    add("--replicas", type=int, default=1, help="behind the router's placement (default: 1)")
    add("--cells", type=int, help="KV cells of a replica (default: what the profile has room for)")
    add("--policy", action="append", help="request, plas, infercept, program, fixed, bernstein, restore-cost, "
        "continuum or default; may come several times, the first is what the others are compared to (default: request, "
        "plas, infercept, program, fixed and continuum)")  # fmt: skip
    add("--host-tier", choices=("off", "on", "both"), default="off", help="cells in host memory (default: off)")
    add("--seed", type=int, default=0, help="of the first run (default: 0)")
    add("--seeds", type=int, default=3, help="how many, one after another (default: 3)")
    add("--one-by-one", action="store_true", help="every decode step by itself: slower, to check against")
    add("--json", type=Path, metavar="FILE", help="write every run and every figure")
    add("--pictures", type=Path, metavar="DIR", help="draw the figures; needs matplotlib")
    command.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import command

    return command.main(
        command.Options(
            workload=options.workload,
            programs=options.programs,
            rates=options.rates,
            turns_times=options.turns_times,
            scale=options.scale,
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
