"""``python -m holdfast.loadgen.bench.kernels [--json FILE]``: the GPU kernels, verified and timed.

Errors are relative to float64, of whole tensors. Each case and each timing is a part of its own: if one fails, the
others keep their figures. The file is written line by line. Without a GPU small cases run in Triton's interpreter, and
nothing is timed.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.loadgen.bench.kernels.correctness import Case, cases
from holdfast.loadgen.bench.parts import RESUME, Deadline, Lines, Report, module_command, supervised, versions

_SECONDS = 440.0  # after which no other part begins
_CASE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a kernel is wrong or failed."""
    parser = argparse.ArgumentParser(prog="bench kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="begin no other part after so long")
    parser.add_argument("--no-timing", action="store_true", help="verify only")
    parser.add_argument("--no-verifying", action="store_true", help="time only")
    parser.add_argument(RESUME, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    if gpu and not options.resume:
        given = [f"--seconds={options.seconds}"]
        given += [f"--{name}" for name in ("no-timing", "no-verifying") if vars(options)[name.replace("-", "_")]]
        return supervised(module_command("holdfast.loadgen.bench.kernels", given), options.json)
    report = Report(options.json, options.seconds, options.resume)
    report.found |= versions()
    print(*versions().values(), flush=True)
    if not options.no_verifying:
        for case in cases("cuda" if gpu else "cpu", large=gpu):
            report.run(case.name, partial(_verified, case), _CASE_S)
    if not gpu:
        print("no GPU: the kernels ran in Triton's interpreter and nothing was timed")
    elif not options.no_timing:
        from holdfast.loadgen.bench.kernels.speed import time_kernels

        time_kernels(report)
    report.found["wrong"] = wrong = _wrong(report.found["parts"])
    report.write()
    print(f"wrong: {wrong or 'none'}; failed: {list(report.found['failed']) or 'none'}")
    return 1 if wrong or report.found["failed"] else 0


def _verified(case: Case, deadline: Deadline) -> Lines:
    yield case.name, case.verify().figures


def _wrong(parts: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Cases that gave something else than they should."""
    return [name for name, lines in parts.items() for line in lines.values() if line.get("verdict") == "WRONG"]


if __name__ == "__main__":
    sys.exit(main())
