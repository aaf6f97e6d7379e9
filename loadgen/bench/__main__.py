"""`python -m holdfast.loadgen.bench NAME [options]`: the table of benchmarks of an engine or a CPU kernel.

`holdfast bench ablation` is one of them too. Those of a GPU are `bench.gpu` and `bench.kernels`.
"""

import sys
from collections.abc import Sequence
from typing import Any

from holdfast.loadgen.bench import ablation, calls, cpu, efficiency, forwards, micro
from holdfast.loadgen.bench.harness import FIGURES, Benchmark
from holdfast.loadgen.bench.workload import SCENARIOS
from holdfast.replicas.config import POCKET
from holdfast.replicas.errors import HoldfastError

Flags = dict[str, dict[str, Any]]


def _names(text: str) -> list[str]:
    return text.split(",")


MODEL: Flags = {"--model": {"required": True, "help": "'pocket' or a model folder"}}
THREADS: Flags = {"--threads": {"type": int, "default": 0, "help": "of torch on a CPU; 0: all cores"}}
REPEAT: Flags = {"--repeat": {"type": int, "default": 5}}
ONLY: Flags = {"--only": {"default": "", "help": "only cases whose name contains this"}}
DTYPE: Flags = {"--dtype": {"choices": ("float32", "bfloat16"), "default": "bfloat16"}}
PRECISION: dict[str, Any] = {"choices": forwards.PRECISIONS, "metavar": "DTYPE"}
AT_ONCE: dict[str, Any] = {"type": int, "nargs": "+"}

BENCHMARKS = {
    "ablation": Benchmark(
        "Turn latency with everything on, and with each mechanism off.",
        ablation.ablation,
        ablation.COLUMNS,
        THREADS
        | {
            "--model": {"default": POCKET, "help": "'pocket', a folder, or a hub name in the local cache"},
            "--off": {"default": "", "help": "mechanisms to turn off, comma-separated (default: each in turn)"},
            "--scenarios": {"default": "", "help": f"of {', '.join(each.name for each in SCENARIOS)} (default: all)"},
            "--scale": {"type": float, "default": 1.0, "help": "multiply the number of rounds (default: 1)"},
            "--seed": {"type": int, "default": 0, "help": "of the conversations"},
            "--dtype": {"choices": ("auto", "float32", "bfloat16"), "default": "auto"},
        },
    ),
    "attention_cpu": Benchmark(
        "Attention on a CPU beside torch's, and against the machine's limits.",
        cpu.attention,
        cpu.ATTENTION_COLUMNS,
        DTYPE
        | THREADS
        | REPEAT
        | ONLY
        | {"--ways": {"default": "", "help": "kernels, comma-separated; KERNEL/int8: over a store in int8"}},
    ),
    "experts_cpu": Benchmark(
        "Experts of one layer on a CPU, against its limits, in milliseconds.",
        cpu.experts,
        cpu.EXPERT_COLUMNS,
        REPEAT | ONLY | {"--dtype": {"choices": tuple(cpu.DTYPES), "default": "bfloat16"}},
    ),
    "linear_state_cpu": Benchmark(
        "Linear layers on a CPU, beside torch.", cpu.linear_states, cpu.STATE_COLUMNS, REPEAT | ONLY
    ),
    "dispatch": Benchmark(
        "What a layer costs beside its sums on a CPU.",
        cpu.dispatch,
        cpu.DISPATCH_COLUMNS,
        {"--repeat": {"type": int, "default": 150}},
    ),
    "sharing": Benchmark(
        "How well threads share a shape's work; computed.",
        cpu.sharing,
        cpu.SHARING_COLUMNS,
        {"--shape": {"required": True, "help": "a name that `inflate` knows, or a config.json"}},
    ),
    "forwards": Benchmark(
        "Steps of a model against the machine's floors.",
        forwards.forwards,
        forwards.forward_columns,
        MODEL
        | THREADS
        | REPEAT
        | ONLY
        | {
            "--dtype": PRECISION | {"default": "auto", "help": "a dtype; DTYPE/int8, DTYPE/fp8: with KV in that"},
            "--beside": PRECISION | {"help": "another one, by turns"},
            "--peer": {
                "action": "append",
                "default": [],
                "metavar": "NAME=URL",
                "help": "a llama.cpp server of the same model, by turns with the steps; repeatable",
            },
        },
    ),
    "efficiency": Benchmark(
        "Turns against what this CPU allows.",
        efficiency.efficiency,
        efficiency.COLUMNS,
        MODEL
        | DTYPE
        | THREADS
        | {
            "--turns": AT_ONCE | {"default": [6, 25]},
            "--programs": AT_ONCE | {"default": [1, 8], "help": "at once"},
            "--each": {"action": "store_true", "help": "a row for each turn as well"},
        },
    ),
    "micro": Benchmark("Costs of the pieces around the model.", micro.micro, FIGURES),
    "sessions": Benchmark("A question's cost by a session's length.", micro.sessions, FIGURES),
    "calls": Benchmark(
        "What guaranteed tool calls hold and cost.",
        calls.calls,
        FIGURES,
        {
            "--parts": {"type": _names, "default": list(calls.PARTS), "help": ",".join(calls.PARTS)},
            "--turns": {"type": int, "default": 2000, "help": "of the law, over all models and formats"},
            "--rounds": {"type": int, "default": 40, "help": "turns that are timed in each form"},
            "--formats": {"type": _names, "default": [str(each) for each in calls.FORMATS], "help": "of law and time"},
            "--model": {"default": "pocket", "help": "of time: pocket, or a folder of `holdfast inflate`"},
        },
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; exit status 1 if a bar is missed, 2 for wrong options."""
    name, *options = (sys.argv[1:] if argv is None else argv) or [""]
    if name not in BENCHMARKS:
        print(f"bench: {name!r} is no benchmark; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    try:
        return BENCHMARKS[name].main(name, options)
    except HoldfastError as error:
        print(f"bench {name}: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
