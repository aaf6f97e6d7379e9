"""``python -m holdfast.loadgen.bench.gpu [--json FILE] [--seconds N]``: the engine's figures on a GPU, in one call.

It times single steps of a Llama 3.1 8B with random weights, then whole workflows on Pocket inflated to that shape. It
needs torch, triton, transformers and numpy. A part that fails, or has no time left, is recorded; the others keep their
figures. Without a GPU and with TRITON_INTERPRET=1 the same code runs over tiny models. Its figures then say nothing.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdfast.kernels.ceilings import Ceilings, Clock, measure_ceilings
from holdfast.loadgen.bench.gpu import invariance, models, steps, workflows
from holdfast.loadgen.bench.gpu.stage import Stage, full_turns, small_turns
from holdfast.loadgen.bench.parts import Once, Report, command, free_device

FLAGS: dict[str, dict[str, Any]] = {
    "--only": {"choices": ("steps", "models", "turns"), "help": "steps, models, or workflows"},
}


def measure(report: Report, options: Namespace) -> None:
    """Steps, then workflows; models only where they are asked for."""
    gpu, only = options.gpu, options.only
    if "ceilings" not in report.found:  # measured once, also where several processes share the parts
        report.found["ceilings"] = asdict(measure_ceilings(Clock()) if gpu else Ceilings(1e12, 1e13))
    ceilings = Ceilings(**report.found["ceilings"])
    if only == "models":
        models.run(report, models.full_models() if gpu else models.small_models(), ceilings)
        return
    if only != "turns":
        run_steps(report, ceilings, gpu)
    if only != "steps":
        stage = Stage(full_turns() if gpu else small_turns(), ceilings)
        try:
            workflows.run(stage, report)
        finally:
            stage.close()


def run_steps(report: Report, ceilings: Ceilings, gpu: bool) -> None:
    """Single steps: without graphs, then with them. Each process chooses products and captures graphs itself."""
    sizes = steps.full_steps() if gpu else steps.small_steps()
    world = Once(lambda: steps.World(sizes, ceilings))
    chosen = Once(lambda: list(steps.products(world())))
    captured = Once(lambda: list(steps.graphs(world())))
    report.run("products", lambda deadline: iter(chosen()), setup=world)
    for name, call in {"decode": steps.decode_shares, "verify": steps.verify_cost}.items():
        report.run(f"{name}, launched", lambda deadline, call=call: call(world()), 90.0, chosen)  # type: ignore[misc]

    def with_graphs() -> None:
        chosen()
        captured()

    report.run("graphs", lambda deadline: iter(captured()), setup=chosen)
    for name, call in {
        "decode": steps.decode_shares,
        "verify": steps.verify_cost,
        "prefill": steps.prefill_share,
        "host tier": steps.host_tier,
        "host": steps.host_time,
        "invariance": invariance.found,
        "invariance, kept": invariance.kept,
    }.items():
        report.run(name, lambda deadline, call=call: call(world()), 20.0, with_graphs)  # type: ignore[misc]
    world.drop()
    free_device()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a part failed."""
    return command("gpu", __doc__, FLAGS, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
