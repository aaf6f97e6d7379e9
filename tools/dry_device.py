"""A stand-in for a GPU: Triton compiles every launch for it and stops before the launch would run.

The launchers are the real ones, so tiles and strides are real too. Tensors lie in host memory. Use it in a process of
its own, without TRITON_INTERPRET: Triton decides at its first import whether it compiles or interprets.
"""

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_BYTES = {
    80: 163 * 1024,
    90: 227 * 1024,
}  # limit of a program, by capability (CUDA programming guide, table of limits)


@dataclass
class Program:
    """A compiled kernel and the resources that it takes of a multiprocessor."""

    name: str
    shared: int
    warps: int
    registers: int
    stack: int  # bytes of local memory: spilled registers, among others
    seconds: float
    ptx: str = field(repr=False)
    grid: tuple = ()
    label: str = ""


@dataclass
class DryDevice:
    """Makes itself Triton's active driver. `programs`: everything compiled so far, in order of first use."""

    capability: int
    programs: list[Program] = field(default_factory=list)
    label: str = ""

    def __post_init__(self) -> None:
        properties = {"max_shared_mem": SHARED_BYTES[self.capability], "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties, load_binary=self._load, unload_module=lambda module: None
        )
        self._start = time.perf_counter()
        driver.set_active(self)
        triton.knobs.runtime.kernel_load_start_hook = self._on_load_start

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        self._start = time.perf_counter()
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def launcher_cls(self, source, metadata):
        programs = self.programs

        def launch(x, y, z, *_):
            # A launch beyond these limits of a grid fails on a device.
            assert 0 < x < 2**31, (x, y, z)
            assert 0 < y < 2**16, (x, y, z)
            assert 0 < z < 2**16, (x, y, z)
            if programs and not programs[-1].grid:
                programs[-1].grid = (x, y, z)

        return launch

    def _on_load_start(self, module, function, name, files, key) -> None:
        self._ptx = next(Path(file).read_text() for file in files.values() if str(file).endswith(".ptx"))

    def _load(self, name, binary, shared, device):
        seconds = time.perf_counter() - self._start
        registers, stack = resources(binary)
        warps = int(re.search(r"\.reqntid (\d+)|\.maxntid (\d+)", self._ptx).group(0).split()[1]) // 32
        self.programs.append(Program(name, shared, warps, registers, stack, seconds, self._ptx, label=self.label))
        return 1, 1, registers, stack // 4, 1024


def resources(binary: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", usage).group(1)), int(re.search(r"STACK:(\d+)", usage).group(1))
