"""Builds what is not Python: `kernels/*_c.c`, for x86-64 on Linux; those of `PLAIN` for any processor that has Linux.

Zig's C compiler, a wheel that is needed for nothing else, makes one library of each: the same file once for each kind
of processor and each dtype. Where that fails the package is built without, says so, and torch computes.
"""

import hashlib
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# No product is contracted with a sum but where the file says so: rounding is the same wherever a value is computed.
_EXACT = "-ffp-contract=off"
# Which processor each function is for, the float32 values of its vectors, and how it computes; see the file.
VARIANTS = {
    "attend_pairs_avx512": ("x86_64_v4+avx512bf16", 16, f"{_EXACT} -DPAIRS=1 -DWIDE=0"),
    "attend_bfloat16_avx512": ("x86_64_v4", 16, f"{_EXACT} -DPAIRS=0 -DWIDE=0"),
    "attend_float32_avx512": ("x86_64_v4", 16, f"{_EXACT} -DPAIRS=0 -DWIDE=1"),
    "attend_bfloat16_avx2": ("x86_64_v3", 8, f"{_EXACT} -DPAIRS=0 -DWIDE=0"),
    "attend_float32_avx2": ("x86_64_v3", 8, f"{_EXACT} -DPAIRS=0 -DWIDE=1"),
}
_PRODUCT = _EXACT + " -DVECTORS={} -DROWS={} -DKIND={} -DWIDE={}"
_TILES = " -DTILES=1"
PRODUCT_VARIANTS = {
    "bytes_amx_float32": ("x86_64_v4+avx512bf16+amx_tile+amx_int8", 16, _PRODUCT.format(4, 32, "BYTES", 1) + _TILES),
    "bytes_amx_bfloat16": ("x86_64_v4+avx512bf16+amx_tile+amx_int8", 16, _PRODUCT.format(4, 32, "BYTES", 0) + _TILES),
    "bytes_vnni_float32": ("x86_64_v4+avx512vnni", 16, _PRODUCT.format(4, 6, "BYTES", 1)),
    "bytes_vnni_bfloat16": ("x86_64_v4+avx512vnni", 16, _PRODUCT.format(4, 6, "BYTES", 0)),
    "words_avx2_float32": ("x86_64_v3", 8, _PRODUCT.format(2, 6, "WORDS", 1)),
    "words_avx2_bfloat16": ("x86_64_v3", 8, _PRODUCT.format(2, 6, "WORDS", 0)),
    "pairs_amx": ("x86_64_v4+avx512bf16+amx_tile+amx_bf16", 16, _PRODUCT.format(4, 32, "PAIRS", 0) + _TILES),
    "pairs_avx512_bf16": ("x86_64_v4+avx512bf16", 16, _PRODUCT.format(4, 6, "PAIRS", 0)),
    "pairs_avx512": ("x86_64_v4", 16, _PRODUCT.format(4, 4, "PAIRS", 0)),
    "pairs_avx2": ("x86_64_v3", 8, _PRODUCT.format(2, 4, "PAIRS", 0)),
    "reals_avx512": ("x86_64_v4", 16, _PRODUCT.format(4, 6, "REALS", 1)),
    "reals_avx2": ("x86_64_v3", 8, _PRODUCT.format(2, 6, "REALS", 1)),
}
# A function of each name; see the file.
LAYER_VARIANTS = {
    f"{way}_{dtype}": (processor, lanes, f"-DWIDE={wide} -DNORM=norm_{way}_{dtype} -DROTATE=rotate_{way}_{dtype}")
    for way, processor, lanes in (("avx512", "x86_64_v4", 16), ("avx2", "x86_64_v3", 8))
    for dtype, wide in (("float32", 1), ("bfloat16", 0))
}
LINEAR_STATE_VARIANTS = {
    f"{way}_{dtype}": (processor, lanes, f"{_EXACT} -DWIDE={wide}")
    for way, processor, lanes in (("avx512", "x86_64_v4", 16), ("avx2", "x86_64_v3", 8))
    for dtype, wide in (("float32", 1), ("bfloat16", 0))
}
PLAIN = ("attention_plan", "ngrams")  # for any processor; their functions have names of their own
HEADER = Path(__file__).resolve().parent / "kernels" / "lanes.h"  # what several of the files include
GLIBC = "2.17"  # or later: as torch's own wheels
CACHE = Path(__file__).resolve().parent / "build" / "zig-cache"  # the compiler's
FLAGS = "-O3 -fPIC -ffp-contract=fast -fno-math-errno -fno-sanitize=all -mprefer-vector-width=512"


def compile_kernel(source: Path, library: Path, room: Path, variants: dict[str, tuple[str, int, str]]) -> None:
    """Make `library` of `source`, its objects under `room`. What was compiled so before comes from `CACHE`.

    Raises subprocess.CalledProcessError, with what the compiler says, or OSError.
    """
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(CACHE), "ZIG_LOCAL_CACHE_DIR": str(CACHE)}
    triple = f"{platform.machine()}-linux-gnu.{GLIBC}"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", triple, *FLAGS.split()]
    parts = {source.name: source.read_bytes(), HEADER.name: HEADER.read_bytes()}
    digest = int.from_bytes(hashlib.sha256(b"".join(parts.values())).digest()[:8], "big")
    # The compiler knows a file by its path, but one in its cache by the path there: it is the same in every checkout.
    cached = CACHE / "sources" / f"{digest:016x}" / source.name
    cached.parent.mkdir(parents=True, exist_ok=True)
    for name, text in parts.items():
        if cached.with_name(name).exists():
            continue
        written = cached.with_name(f"{name}.{os.getpid()}")
        written.write_bytes(text)
        written.replace(cached.with_name(name))
    commands = [("source", [f"-DSOURCE={digest}u"])]
    for name, (processor, lanes, how) in variants.items():
        commands.append((name, [f"-mcpu={processor}", f"-DLANES={lanes}", *how.split(), f"-DNAME={name}"]))
    room.mkdir(parents=True, exist_ok=True)
    objects = [str(room / f"{name}.o") for name, _ in commands]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        calls = [
            pool.submit(_run, [*compiler, *flags, "-c", str(cached), "-o", target], environment)
            for (_, flags), target in zip(commands, objects, strict=True)
        ]
    for call in calls:
        call.result()
    library.parent.mkdir(parents=True, exist_ok=True)
    _run([*compiler, "-shared", "-s", "-o", str(library), *objects], environment)


def _run(command: list[str], environment: dict[str, str]) -> None:
    subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class BuildKernel(build_ext):
    """`build_ext` for a library that Python does not import: ctypes loads it."""

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition(".lib")[2]
        try:
            target = Path(self.get_ext_fullpath(ext.name))
            compile_kernel(Path(ext.sources[0]), target, Path(self.build_temp) / name, KERNELS[name])
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "output", None) or "").strip()
            plain = {"ngrams": "nothing is drafted", "attention_plan": "attention on a GPU is planned in Python"}
            instead = plain.get(name, f"{name} runs in torch, several times slower")
            self.warn(f"no {name} kernel for CPUs: {instead} ({error})\n{said}")

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


KERNELS = {
    "attention": VARIANTS,
    "product": PRODUCT_VARIANTS,
    "layer": LAYER_VARIANTS,
    "linear_state": LINEAR_STATE_VARIANTS,
    **{name: {name: ("baseline", 1, _EXACT)} for name in PLAIN},
}
HERE = sys.platform == "linux" and platform.machine() == "x86_64"
EXTENSIONS = [
    Extension(f"holdfast.kernels.lib{name}", [f"kernels/{name}_c.c"], depends=[str(HEADER)], optional=True)
    for name in KERNELS
    if HERE or (sys.platform == "linux" and name in PLAIN)
]

if __name__ == "__main__":
    setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildKernel})
