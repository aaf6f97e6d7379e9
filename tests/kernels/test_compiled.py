"""What the launchers ask for compiles for Ampere and Hopper without a GPU, fits there, and uses their tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDEST = "attention, chunk, heads of 256"
SCRIPT = Path(__file__).parents[2] / "tools" / "compile_kernels.py"


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability):
    """A program with more shared memory than there is, or a grid beyond its limits, fails on the device not there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    programs = json.loads(ran.stdout)
    kernels = {program["kernel"] for program in programs}
    assert len(kernels) == 25
    for program in programs:
        # Registers that did not do: a few of the widest tiles, most of all where heads have 256 values.
        assert program["stack_bytes"] <= (768 if program["launch"].startswith(WIDEST) else 80), program
        if program["kernel"] in ("_attend_items", "_prepare", "_scan", "_multiply") or program["kernel"].startswith(
            "_stream"
        ):
            assert program["tensor_cores"], program
            assert program["copies_ahead"] or program["kernel"] == "_prepare", program  # which has no loop
