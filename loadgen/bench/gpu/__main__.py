"""``python -m holdfast.loadgen.bench.gpu [--json FILE] [--seconds N]``: the engine's figures on a GPU, in one call.

It compares Pocket's replies with transformers', then times single steps of a Llama 3.1 8B with random weights, then
whole workflows on Pocket inflated to that shape, by our engine and by transformers. It needs torch, triton,
transformers and numpy. A part that fails, or has no time left, is recorded; the others keep their figures.
Without a GPU and with TRITON_INTERPRET=1 the same code runs over tiny models. Its figures then say nothing.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.kernels.ceilings import Ceilings, Clock, measure_ceilings
from holdfast.loadgen.bench.gpu import experts, invariance, parity, steps, workflows
from holdfast.loadgen.bench.gpu.stage import Stage, free_device, full_turns, small_turns
from holdfast.loadgen.bench.gpu.steps import World, full_steps, small_steps
from holdfast.loadgen.bench.parts import RESUME, Deadline, Lines, Part, Report, module_command, supervised, versions

_SECONDS = 440.0  # after which no other part begins


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a part failed, or a reply in float32 is wrong."""
    parser = argparse.ArgumentParser(prog="bench gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="begin no other part after so long")
    parser.add_argument("--only", choices=("parity", "steps", "turns"), help="replies, steps, or workflows")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument(RESUME, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    if gpu and not options.resume:
        given = [f"--seconds={options.seconds}", *(["--no-peers"] if options.no_peers else [])]
        given += [f"--only={options.only}"] if options.only else []
        return supervised(module_command("holdfast.loadgen.bench.gpu", given), options.json)
    report = Report(options.json, options.seconds, options.resume)
    report.found |= {"machine": _machine(gpu), "versions": versions()}
    print(report.found["machine"], report.found["versions"], flush=True)
    if options.only in (None, "parity"):
        parity.run(report, parity.full_parity() if gpu else parity.small_parity())
    if options.only == "steps":
        _steps(report, _ceilings(report, gpu), gpu)
    elif options.only != "parity":
        stage = Stage(full_turns() if gpu else small_turns(), _ceilings(report, gpu))
        workflows.remember(stage, report.found["parts"])
        try:
            if options.only is None:
                _steps(report, stage.ceilings, gpu)  # while the model is being written
            workflows.run_ours(stage, report)
            if not options.no_peers:
                workflows.run_peers(stage, report)
        finally:
            stage.close()
    report.write()
    return 1 if report.found["failed"] else 0


def _ceilings(report: Report, gpu: bool) -> Ceilings:
    """Measured once, also where several processes come to share the parts."""
    if "ceilings" in report.found:
        return Ceilings(**report.found["ceilings"])
    ceilings = measure_ceilings(Clock()) if gpu else Ceilings(1e12, 1e13)
    report.found["ceilings"] = asdict(ceilings)
    report.write()
    return ceilings


def _machine(gpu: bool) -> dict[str, Any]:
    if not gpu:
        return {"cores": len(os.sched_getaffinity(0)), "note": "interpreter: the figures say nothing"}
    device = torch.cuda.get_device_properties(0)
    memory = {"memory_bytes": device.total_memory, "multiprocessors": device.multi_processor_count}
    return {"cores": len(os.sched_getaffinity(0)), **memory}


def _steps(report: Report, ceilings: Ceilings, gpu: bool) -> None:
    """Single steps: without graphs, then with them. Each process has to choose products and capture graphs itself."""
    worlds: list[World] = []

    def part(call: Callable[[World], Lines]) -> Part:
        def run(deadline: Deadline) -> Lines:
            if not worlds:
                worlds.append(World(full_steps() if gpu else small_steps(), ceilings))
            return call(worlds[0])

        return run

    launched = {"decode, launched": (steps.decode_shares, 90.0), "verify, launched": (steps.verify_cost, 30.0)}
    in_graphs = {
        "decode": steps.decode_shares,
        "verify": steps.verify_cost,
        "prefill": steps.prefill_share,
        "alias": steps.alias,
        "host tier": steps.host_tier,
        "host": steps.host_time,
        "long prompt": steps.long_prompt,
        "invariance": invariance.found,
        "invariance, kept": invariance.kept,
    }
    if report.wants((*launched, *in_graphs)):
        report.run_anew("products", part(steps.products), 60.0)
    for name, (call, budget) in launched.items():
        report.run(name, part(call), budget)
    if report.wants(in_graphs):
        report.run_anew("graphs", part(steps.graphs), 60.0)
    for name, call in in_graphs.items():
        report.run(name, part(call), 20.0)
    worlds.clear()
    free_device()
    sizes = full_steps() if gpu else small_steps()
    seconds = Clock().seconds if gpu else steps.host_seconds
    report.run("experts", lambda deadline: experts.shares(gpu, ceilings, seconds), 40.0)
    free_device()
    report.run("transformers' model", lambda deadline: steps.transformers_model(sizes, ceilings), 40.0)
    free_device()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the model's folder is removed
    sys.exit(main())
