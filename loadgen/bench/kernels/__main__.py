"""``python -m holdfast.loadgen.bench.kernels [--json FILE]``: the GPU kernels' times as shares of measured ceilings.

Each timing is a part of its own: if one fails, the others keep their figures. The file is written line by line. Not
here: whether the kernels are right, which `tests/kernels` says on a GPU as in Triton's interpreter.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from holdfast.loadgen.bench.parts import Report, command

FLAGS = {"--only": {"default": "", "help": "only parts whose name contains one of these words, separated by commas"}}


def measure(report: Report, options: Namespace) -> None:
    """Time every kernel."""
    if not options.gpu:
        print("no GPU: nothing is timed")
        return
    from holdfast.loadgen.bench.kernels.speed import time_kernels

    time_kernels(report, options.only.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a part failed."""
    return command("kernels", __doc__, FLAGS, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
