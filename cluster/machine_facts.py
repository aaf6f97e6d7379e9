"""What `holdfast doctor` knows of this machine, gathered once: memory, GPUs, versions, folders. Reading only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from holdfast.cluster import environment
from holdfast.replicas.memory import memory

GIB = 2**30
NVIDIA = ("--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits")
_TORCH = "import torch; print(f'{torch.version.cuda or str()},{torch.cuda.device_count()}')"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver tells. Memory in bytes."""

    name: str
    memory: int
    free: int
    driver: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Memory in bytes. `gpus` None: no driver. `torch_cuda` "": torch is built without; `torch_gpus`: those it sees."""

    python: tuple[int, int]
    packages: Mapping[str, str]  # installed versions by canonical name
    required: tuple[str, ...]  # requirements, as in the package's metadata
    cores: int
    memory: int
    memory_free: int
    shm: int  # size of /dev/shm; 0: there is none
    shm_free: int
    disk_free: int  # of the folder for temporary files
    temporary: Path
    files: int  # open files a process may have
    gpus: tuple[Gpu, ...] | None
    gpu_device: bool  # the kernel shows an NVIDIA device
    torch_cuda: str  # "" also where there is no GPU: then torch is not asked
    torch_gpus: int


def gather(temporary: Path, cores: int) -> Facts:
    """The facts of this machine. Starts `nvidia-smi`, and where there is a GPU a Python with torch: some seconds."""
    gpus = _gpus()
    gpu_device = Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()
    cuda, seen = _torch() if gpus or gpu_device else ("", 0)
    total, free = memory()
    shm, shm_free = _room(Path("/dev/shm"))
    return Facts(
        python=sys.version_info[:2],
        packages={canonicalize_name(each.name): each.version for each in metadata.distributions()},
        required=tuple(each for each in metadata.requires("holdfast") or () if "extra ==" not in each),
        cores=cores,
        memory=total,
        memory_free=free,
        shm=shm,
        shm_free=shm_free,
        disk_free=_room(temporary)[1],
        temporary=temporary,
        files=environment.files(),
        gpus=gpus,
        gpu_device=gpu_device,
        torch_cuda=cuda,
        torch_gpus=seen,
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The lines of `nvidia-smi --query-gpu` as `NVIDIA` asks for them; memory there is in MiB."""
    found = []
    for line in text.strip().splitlines():
        name, total, free, driver = (part.strip() for part in line.split(","))
        found.append(Gpu(name, int(total) << 20, int(free) << 20, driver))
    return tuple(found)


def _gpus() -> tuple[Gpu, ...] | None:
    """None where the driver's tool is not there or does not answer."""
    try:
        done = subprocess.run(["nvidia-smi", *NVIDIA], capture_output=True, text=True, timeout=20, check=True)
        return parse_gpus(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _torch() -> tuple[str, int]:
    """The CUDA version of torch, and the GPUs it sees; asked in a process of its own, for CUDA stays taken."""
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120, check=True)
        cuda, seen = done.stdout.strip().split(",")
        return cuda, int(seen)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "", 0


def _room(folder: Path) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def writable(folder: Path) -> bool:
    """Whether this user may make files there."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
