"""`holdfast simulate` and the `simulate-` commands: their options. The work is `commands`', imported when needed."""

import argparse
from pathlib import Path
from typing import Any

from holdfast.loadgen.cli import Commands
from holdfast.loadgen.flags import add_flags, counts, numbers

Options = dict[str, dict[str, Any]]  # of `add_argument`, by flag

ABOUT = {
    "simulate": "Compare scheduling policies on simulated replicas: the real engines over a cost model.",
    "simulate-placement": "Compare ways to place programs on replicas, simulated.",
    "simulate-tenants": "Simulate many tenants on several replicas behind several routers: how equally they are "
    "served, and what one with very many programs does to the others.",
    "simulate-orchestrator": "Simulate agents with an orchestrator: what prompts sent ahead, tools that begin as calls "
    "close, and tags of cells are worth, one after another.",
    "simulate-states": "Simulate where a cache keeps recurrent states, for programs whose states do not fit.",
}
COMMON: Options = {
    "--profile": {"default": "8b-a100", "help": "MODEL-GPU: 8b, 14b or 70b (on 4) and a100, h200 or b200; or 8b-h100, "
                  "27b-hybrid-h100, 253m-cpu, 38m-cpu"},
    "--cells": {"type": int, "default": None, "help": "KV cells of a replica; else what the profile has "
                "room for"},
    "--seed": {"type": int, "default": 0, "help": "seed of the first run"},
    "--seeds": {"type": int, "default": 1, "help": "runs, each with the next seed"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write every run"},
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "simulate": {"--seeds": 3},
    "simulate-placement": {"--cells": 1 << 16, "--seed": 100},
    "simulate-tenants": {"--cells": 1 << 16},
    "simulate-orchestrator": {"--profile": "14b-a100", "--seeds": 5},
    "simulate-states": {"--profile": "27b-hybrid-h100", "--seeds": 3},
}
"""Defaults of a command that differ from those of `COMMON`."""
OWN: dict[str, Options] = {
    "simulate": {
        "--workload": {"default": "swe", "help": "swe, bfcl, mixed, mixed-shell or coding"},
        "--programs": {"type": int, "default": 100, "help": "programs of one run"},
        "--rates": {"type": numbers, "default": (0.1,), "metavar": "R,R,..", "help": "programs a second"},
        "--turns-times": {"type": counts, "default": (1,), "metavar": "N,N,..", "help": "multiply the turns and divide "
                          "the texts"},
        "--scale": {"type": float, "default": 1.0, "help": "multiply all lengths; coding needs about 0.1"},
        "--tool-times": {"type": float, "default": 1.0, "help": "multiply the tools' seconds"},
        "--replicas": {"type": int, "default": 1, "help": "replicas behind the router's placement"},
        "--policy": {"action": "append", "help": "request, plas, infercept-request, infercept-program, infercept, "
                     "program, fixed, bernstein, restore-cost, continuum, expected_waste or default; repeatable, the "
                     "others are compared to the first (default: all but infercept-program, restore-cost and default)"},
        "--host-tier": {"choices": ("off", "on", "both"), "default": "off", "help": "cells in host memory"},
        "--pictures": {"type": Path, "metavar": "DIR", "help": "draw the figures; needs matplotlib"},
    },
    "simulate-placement": {
        "--workload": {"action": "append", "help": "agents, preambles, fan-out or hot-tenant; repeatable "
                       "(default: all)"},
        "--placement": {"action": "append", "help": "ours, ours-4-routers, round-robin, two-choices, consistent-hash, "
                        "bounded-hash or prefix; repeatable (default: all)"},
        "--replicas": {"type": counts, "default": (4,), "metavar": "N,N,..", "help": "replicas of each run"},
        "--programs": {"type": int, "default": 60, "help": "programs of one run, for each replica"},
        "--load": {"type": float, "default": 1.0, "help": "multiply the usual rate of arrivals"},
    },
    "simulate-tenants": {
        "--tenants": {"type": int, "default": 50, "help": "number of tenants"},
        "--programs": {"type": int, "default": 2000, "help": "programs of all tenants"},
        "--quiet": {"type": int, "default": 20, "help": "programs of one beside a tenant with half of all"},
        "--replicas": {"type": int, "default": 4, "help": "replicas, an even number"},
        "--routers": {"type": int, "default": 4, "help": "number of routers"},
        "--order": {"action": "append", "help": "program, request, plas, fair, or module:Class; repeatable "
                    "(default: program, fair)"},
    },
    "simulate-orchestrator": {
        "--workload": {"default": "fan-out", "help": "fan-out or append-only"},
        "--agents": {"type": int, "default": 120, "help": "agents of one run"},
        "--rate": {"type": float, "default": 0.0075, "help": "agents a second"},
        "--rates": {"type": numbers, "default": (), "metavar": "R,R,..", "help": "further rates, for FTR against load "
                    "(default: none)"},
        "--tools": {"type": float, "default": 1.0, "help": "multiply the tools' seconds"},
    },
    "simulate-states": {
        "--workload": {"default": "swe", "help": "as for simulate"},
        "--programs": {"type": int, "default": 64, "help": "programs of one run"},
        "--rate": {"type": float, "default": 2.0, "help": "programs a second"},
        "--slots": {"type": int, "default": 48, "help": "state slots"},
    },
}  # fmt: skip


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add every scenario's command."""
    for name, help_text in ABOUT.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.set_defaults(run=_run, scenario=name)
        flags = {**OWN[name], **COMMON}
        for flag, default in DEFAULTS.get(name, {}).items():
            flags[flag] = flags[flag] | {"default": default}
        add_flags(command, flags)


def _run(options: argparse.Namespace) -> int:
    from holdfast.loadgen.simulator import commands

    return commands.main(options)
