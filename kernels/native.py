"""What the C kernels have in common: the libraries that setup.py builds, the instructions that they may use, and the
threads that they share with torch.

What a library's functions compute: `attention_c`, `attention_plan`, `linear`, `layer`, `linear_state`, and
`replicas.speculation.ngrams`.
"""

import ctypes
import functools
import hashlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

Level: TypeAlias = Literal["amx", "avx512_bf16", "avx512", "avx2", "torch"]
"""Sets of instructions, each with all that follow; "torch": no kernel of ours."""

LEVELS: tuple[Level, ...] = get_args(Level)
OPT_IN: frozenset[Level] = frozenset({"amx"})
"""Levels that must be named to be used: our kernels for them have never run on such a processor."""
_AVX2 = ("avx2", "fma3", "bmi", "bmi2", "f16c")
_AVX512 = (*_AVX2, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd")
_NEEDS: dict[Level, tuple[str, ...]] = {  # of a processor, as torch names it
    "amx": (*_AVX512, "avx512_bf16", "amx_tile"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "torch": (),
}
_HEADER = Path(__file__).with_name("lanes.h")  # what several of the sources include
_limit: list[Level] = []  # the level in use, once it is chosen


def limit(wanted: Level | Literal["auto"]) -> Level:
    """Let this process's kernels use no instructions above a level; "auto": the processor's highest outside `OPT_IN`.

    Returns the level in use. Weights that were packed before keep their layout and function. Raises ValueError for a
    level that the processor does not have.
    """
    there = [level for level in LEVELS if _has(level)]
    if wanted != "auto" and wanted not in there:
        raise ValueError(f"this processor has no {wanted}, only {', '.join(there)}")
    _limit[:] = [next(level for level in there if level not in OPT_IN) if wanted == "auto" else wanted]
    level.cache_clear()
    return _limit[0]


@functools.cache
def level() -> Level:
    """The highest level that kernels may use."""
    return _limit[0] if _limit else limit("auto")


def levels_below(highest: Level) -> tuple[Level, ...]:
    """The levels from `highest` down."""
    return LEVELS[LEVELS.index(highest) :]


def allowed(needed: Level, features: tuple[str, ...] = ()) -> bool:
    """Whether kernels may use this level, and the processor has these features besides (as torch names them)."""
    has = torch.cpu.get_capabilities()
    return needed in levels_below(level()) and all(has.get(feature) for feature in features)


def _has(level: Level) -> bool:
    """Whether the processor has this level, and this process may use it."""
    has = torch.cpu.get_capabilities()
    return all(has.get(need) for need in _NEEDS[level]) and (level != "amx" or _tiles_allowed())


@functools.cache
def _tiles_allowed() -> bool:
    """Ask Linux (5.16) for AMX's tiles, which it grants per process: arch_prctl, on x86-64."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


class Library:
    """`lib<name>.so`, which setup.py builds from `<name>_c.c` and `lanes.h` beside it.

    `plain`: it uses neither vectors nor threads, so that it is built for every processor that has Linux.
    """

    def __init__(self, name: str, folder: Path = Path(__file__).parent, *, plain: bool = False) -> None:
        self.source, self.path = folder / f"{name}_c.c", folder / f"lib{name}.so"
        self._symbol = f"{name}_source"
        self._plain = plain

    @functools.cached_property
    def loaded(self) -> ctypes.CDLL:
        """Raises OSError where it was not built, was built from another source, or torch's threads are not OpenMP's."""
        if sys.platform != "linux" or not (self._plain or platform.machine() == "x86_64"):
            raise OSError(f"the kernel is written for x86-64 on Linux, not for {platform.machine()} on {sys.platform}")
        source, path = self.source, self.path
        if not path.exists():
            raise OSError(f"{path.name} is not built; `pip install -e .` or `make` builds it")
        built = ctypes.CDLL(str(path))
        if source.exists():
            text = source.read_bytes() + _HEADER.read_bytes()
            digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
            if digest != ctypes.c_uint64.in_dll(built, self._symbol).value:
                again = "`pip install -e .` or `make` builds it again"
                raise OSError(f"{path.name} was built from another {source.name}; {again}")
        if not self._plain:
            team()
        return built

    @functools.cached_property
    def missing(self) -> str:
        """Why the library cannot be used here, or ""."""
        try:
            _ = self.loaded
        except OSError as error:
            return str(error)
        return ""

    def function(self, name: str, *arguments: Any) -> Callable[..., None]:
        """A function of the library by its name and its arguments' ctypes."""
        function = self.loaded[name]
        function.argtypes, function.restype = arguments, None
        return function


@functools.cache
def team() -> int:
    """Address of the GOMP_parallel that torch itself calls. Raises OSError where torch has another kind of threads.

    Looked up as the dynamic linker did for torch: in the libraries loaded for the whole process, then in those that
    torch's library needs.
    """
    own = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    for library in (None, str(own)):
        function = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    raise OSError("torch was not built with GNU OpenMP")
