"""The C kernels of setup.py for tests: what is able to run them, and those that this processor lacks, emulated."""

import ctypes
import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
BUILD = runpy.run_path(str(ROOT / "setup.py"))
ABLE = BUILD["HERE"] and bool(torch.cpu.get_capabilities().get("avx2"))
COMPILER = importlib.util.find_spec("ziglang") is not None


def emulated(source: str, variants: dict[str, tuple[str, int, str]], factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """These functions of a kernel, compiled for AVX2. Skips the test where there is no compiler."""
    if not COMPILER:
        pytest.skip("this processor lacks the way, or it is not built, and ziglang is not installed to emulate it")
    room = factory.mktemp("compiled")
    for_avx2 = {name: ("x86_64_v3", lanes, how) for name, (_, lanes, how) in variants.items()}
    BUILD["compile_kernel"](ROOT / "kernels" / source, room / "all.so", room, for_avx2)
    return ctypes.CDLL(str(room / "all.so"))
