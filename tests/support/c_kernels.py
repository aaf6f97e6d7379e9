"""The C kernels of setup.py for tests: whether they can run here, and those that this processor lacks, emulated."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from holdfast.kernels import native

ROOT = Path(__file__).parent.parent.parent
BUILD = runpy.run_path(str(ROOT / "setup.py"))
ABLE = BUILD["HERE"] and bool(torch.cpu.get_capabilities().get("avx2"))
COMPILER = importlib.util.find_spec("ziglang") is not None


class Emulated(native.Library):
    """A kernel's library with functions compiled for AVX2: vectors in halves, missing instructions spelt out.

    A function is compiled when it is first asked for, and kept in `build/`. Skips the test where there is no compiler.
    """

    def __init__(self, name: str, factory: pytest.TempPathFactory) -> None:
        super().__init__(name)
        if not COMPILER:
            pytest.skip("this processor lacks the instructions, or nothing is built, and ziglang is not installed")
        self.missing = ""
        self._variants = BUILD["KERNELS"][name]
        self._room = factory.mktemp("compiled")

    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        variant = next(each for each in self._variants if name.endswith(each))
        self.loaded = ctypes.CDLL(str(self._compiled(variant)))
        return super().function(name, *arguments)

    def _compiled(self, variant: str) -> Path:
        _, lanes, how = self._variants[variant]
        sources = (self.source, BUILD["HEADER"], ROOT / "setup.py")
        digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()[:16]
        library = ROOT / "build" / "emulated" / f"{variant}-{digest}.so"
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}.so")
            BUILD["compile_kernel"](self.source, made, self._room, {variant: ("x86_64_v3", lanes, how)})
            made.replace(library)
        return library


def levels(name: str, module: ModuleType, values: Iterable[str]) -> Any:
    """A fixture `level`: the kernels of a module run at each level, emulated where this machine does not have it."""

    @pytest.fixture(params=values)
    def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        chosen: native.Level = request.param
        if chosen != "torch" and (module.LIBRARY.missing or not native.allowed(chosen)):
            monkeypatch.setattr(module, "LIBRARY", request.getfixturevalue("emulated")(name))
        monkeypatch.setattr(native, "level", functools.cache(lambda: chosen))
        module.kernel.cache_clear()
        yield chosen
        module.kernel.cache_clear()

    return level
