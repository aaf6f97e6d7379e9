"""Libraries that setup.py builds from C, each beside its source, the instructions that they may use, and the threads
that they share with torch.

What a library's functions compute and for which processors: the file of the same name in Python.
"""

import ctypes
import functools
import hashlib
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch

Level: TypeAlias = Literal["amx", "avx512_bf16", "avx512", "avx2", "torch"]
"""Sets of instructions, each with all that follow; "torch": none of ours."""

LEVELS: tuple[Level, ...] = get_args(Level)
OPT_IN: frozenset[Level] = frozenset({"amx"})
"""Levels that are used only where they are named: our kernels for them have never run on such a processor."""
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_cd", "avx2", "fma3")
_NEEDS: dict[Level, tuple[str, ...]] = {  # of a processor, as torch names it
    "amx": (*_AVX512, "avx512_bf16", "amx_tile"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma3"),
    "torch": (),
}
_ABOVE: dict[Level, tuple[str, ...]] = {  # how the names of what a level leaves out begin
    "amx": (),
    "avx512_bf16": ("amx",),
    "avx512": ("amx", "avx512_bf16"),
    "avx2": ("amx", "avx512"),
    "torch": ("",),
}
_level: list[Level] = []  # the highest that may be used, once somebody has said so


def load(source: Path, library: str, symbol: str) -> ctypes.CDLL:
    """The library that was built beside `source`, which says in `symbol` what it was built from.

    Raises OSError where it was not built, or from another source than lies there.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(f"the kernel is written for x86-64 on Linux, not for {platform.machine()} on {sys.platform}")
    path = source.with_name(library)
    if not path.exists():
        raise OSError(f"{path.name} is not built; `pip install -e .` or `make` builds it")
    built = ctypes.CDLL(str(path))
    if source.exists() and source_digest(source.read_bytes()) != ctypes.c_uint64.in_dll(built, symbol).value:
        raise OSError(f"{path.name} was built from another {source.name}; `pip install -e .` or `make` builds it again")
    return built


def missing(load: Callable[[], ctypes.CDLL]) -> str:
    """Why a kernel cannot be had here, or "": its library does not `load`, or torch's threads are of another kind."""
    try:
        load()
        team()
    except OSError as error:
        return str(error)
    return ""


def source_digest(source: bytes) -> int:
    """What a library says of the source that it was built from."""
    return int.from_bytes(hashlib.sha256(source).digest()[:8], "big")


def limit(wanted: Level | Literal["auto"]) -> Level:
    """Let this process's kernels use no instructions above this level; "auto": all that the processor has but those in
    `OPT_IN`.

    Returns the highest level that is left. What was prepared before, as weights in a way's order, keeps its way. Raises
    ValueError for a level that the processor does not have.
    """
    there = [level for level in LEVELS if _has(level)]
    if wanted != "auto" and LEVELS.index(wanted) < LEVELS.index(there[0]):
        raise ValueError(f"this processor has no {wanted}, only {', '.join(LEVELS[LEVELS.index(there[0]) :])}")
    _level[:] = [next(level for level in there if level not in OPT_IN) if wanted == "auto" else wanted]
    return _level[0]


def level() -> Level:
    """The highest level that kernels may use."""
    return _level[0] if _level else limit("auto")


@functools.cache
def features(level: Level) -> Mapping[str, bool]:
    """What the processor has up to this level, as torch names it."""
    has = torch.cpu.get_capabilities()
    return {name: bool(has[name]) and not name.startswith(_ABOVE[level]) for name in has}


def _has(level: Level) -> bool:
    """Whether the processor has this level, and this process may use it."""
    has = torch.cpu.get_capabilities()
    return all(has.get(need) for need in _NEEDS[level]) and (level != "amx" or _tiles_allowed())


@functools.cache
def _tiles_allowed() -> bool:
    """Whether this process may use AMX's tiles, which Linux (5.16) grants to who asks: arch_prctl, of x86-64."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


@functools.cache
def team() -> int:
    """Address of the GOMP_parallel that torch itself calls. Raises OSError where torch has another kind of threads.

    Looked up as the dynamic linker did for torch: in what is loaded for everybody, then in what torch's library needs.
    """
    own = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    for library in (None, str(own)):
        function = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    raise OSError("torch was not built with GNU OpenMP")
