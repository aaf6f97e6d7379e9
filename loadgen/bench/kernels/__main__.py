"""``python -m holdfast.loadgen.bench.kernels [--json FILE]``: the GPU kernels, verified and timed.

Errors are relative to float64, of whole tensors. Each case and each timing is a part of its own: if one fails, the
others keep their figures. The file is written line by line. Without a GPU small cases run in Triton's interpreter, and
nothing is timed.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from holdfast.loadgen.bench.kernels.correctness import Case, cases
from holdfast.loadgen.bench.parts import Deadline, Lines, Report, command

FLAGS = {
    "--no-timing": {"action": "store_true", "help": "verify only"},
    "--no-verifying": {"action": "store_true", "help": "time only"},
    "--only": {"default": "", "help": "only parts whose name contains one of these words, separated by commas"},
}


def measure(report: Report, options: Namespace) -> None:
    """Verify every kernel, then time it."""
    words = options.only.split(",")
    for case in () if options.no_verifying else cases("cuda" if options.gpu else "cpu", large=options.gpu):
        if any(word in case.name for word in words):
            report.run(case.name, partial(_verified, case))
    if not options.gpu:
        print("no GPU: the kernels ran in Triton's interpreter and nothing was timed")
    elif not options.no_timing:
        from holdfast.loadgen.bench.kernels.speed import time_kernels

        time_kernels(report, words)


def _verified(case: Case, deadline: Deadline) -> Lines:
    yield case.name, case.verify()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a kernel is wrong or failed."""
    return command("kernels", __doc__, FLAGS, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
