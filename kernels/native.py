"""Libraries that setup.py builds from C, each beside its source, and the threads that they share with torch.

What a library's functions compute and for which processors: the file of the same name in Python.
"""

import ctypes
import functools
import hashlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch


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


@functools.cache
def tiles_allowed() -> bool:
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
