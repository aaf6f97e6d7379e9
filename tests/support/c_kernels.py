"""The C kernels of setup.py for tests: whether they can run here, and those that this processor lacks, emulated."""

import ctypes
import functools
import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch

from holdfast.kernels import native

ROOT = Path(__file__).parent.parent.parent
BUILD = runpy.run_path(str(ROOT / "setup.py"))
ABLE = BUILD["HERE"] and bool(torch.cpu.get_capabilities().get("avx2"))
COMPILER = importlib.util.find_spec("ziglang") is not None


class Emulated(native.Library):
    """A kernel's library, all of its functions compiled for AVX2: vectors in halves, missing instructions spelt out.

    Skips the test where there is no compiler.
    """

    def __init__(self, name: str, factory: pytest.TempPathFactory) -> None:
        super().__init__(name)
        if not COMPILER:
            pytest.skip("this processor lacks the instructions, or nothing is built, and ziglang is not installed")
        room = factory.mktemp("compiled")
        variants = {each: ("x86_64_v3", lanes, how) for each, (_, lanes, how) in BUILD["KERNELS"][name].items()}
        BUILD["compile_kernel"](self.source, room / "all.so", room, variants)
        self.loaded, self.missing = ctypes.CDLL(str(room / "all.so")), ""


def use_level(
    level: native.Level, module: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a module's kernels run at a level, by the fixture `emulated` where this machine does not have it."""
    if level != "torch" and (module.LIBRARY.missing or not native.allowed(level)):
        monkeypatch.setattr(module, "LIBRARY", request.getfixturevalue("emulated"))
    monkeypatch.setattr(native, "level", functools.cache(lambda: level))
    module.kernel.cache_clear()
    request.addfinalizer(module.kernel.cache_clear)
