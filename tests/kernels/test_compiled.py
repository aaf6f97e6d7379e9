"""The Triton kernels compile for Ampere and Hopper without a GPU, and use what they were written for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_kernels.py"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # that a program may have, CUDA programming guide, table of limits


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    programs = json.loads(ran.stdout)
    assert all(program["shared_bytes"] <= SHARED_BYTES[capability] for program in programs.values())
    for name, program in programs.items():
        if name.startswith("attention"):
            assert program["tensor_cores"], name
            assert program["copies_ahead"], name
