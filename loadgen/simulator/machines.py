"""Profiles of machines: from data-sheet ceilings and the share of them that is taken to be reached, and measured ones.

Ceilings, of one GPU: NVIDIA A100 80GB (SXM), H200 (SXM) and HGX B200 data sheets, bf16 without sparsity. Shapes: the
models' own configurations on the Hugging Face hub. The shares and constants are ours: what well-tuned servers are known
to reach, alike for every machine, so that machines differ as their data sheets do.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.loadgen.simulator.profile import Profile
from holdfast.replicas.errors import ConfigError

COMPUTE, BANDWIDTH, LINK = 0.5, 0.8, 0.8  # shares of the ceilings
MEMORY = 0.9  # share of a GPU's memory that weights and KV may take
STEP_S = 2e-3  # launches, sampling and the scheduler's own work
GATHER_S = 15e-6  # of one sum over the GPUs of a replica; there are two in a layer
BYTES = 2  # of a number in bf16


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data sheet. `host` is the memory beside it for a second tier: the Continuum paper's."""

    flops: float
    bandwidth: float  # bytes a second
    memory: float  # bytes
    link: float  # bytes a second to the host, each way
    host: float


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder's shape."""

    parameters: float
    layers: int
    kv_heads: int
    width: int  # of all query heads
    head: int = 128

    @property
    def cell(self) -> int:
        """Bytes of one token's KV in every layer."""
        return 2 * self.layers * self.kv_heads * self.head * BYTES


GPUS = {
    "a100": Gpu(312e12, 2.039e12, 80e9, 32e9, 100e9),
    "h200": Gpu(989e12, 4.8e12, 141e9, 64e9, 200e9),
    "b200": Gpu(2250e12, 8e12, 180e9, 64e9, 200e9),
}
MODELS = {
    "8b": Model(8.03e9, 32, 8, 4096),  # Llama-3.1-8B
    "14b": Model(14.8e9, 40, 8, 5120),  # Qwen3-14B
    "70b": Model(70.6e9, 80, 8, 8192),  # Llama-3.1-70B
}
_MANY = {"70b": 4}  # GPUs that share a model; the others have one
_MEASURED = (
    # 8B in bfloat16: 4,096 tokens take 101 ms, 512 behind 3,000 14.2, 32 sequences that decode 7 to 8.
    Profile(
        "8b-h100",
        1.2e-3,
        weights_s=6e-3,
        token_s=21.5e-6,
        pair_s=1.3e-9,
        cell_s=44e-9,
        reload_s=2.6e-6,
        cells=427_000,
        host_cells=0,
    ),
    # 253 M in bfloat16 on two cores with AVX512-BF16: docs/results.md, forwards.
    Profile(
        "253m-cpu",
        2e-3,
        weights_s=13e-3,
        token_s=1.2e-3,
        pair_s=2.7e-7,
        cell_s=1.3e-6,
        reload_s=1e-6,
        cells=60_000,
        host_cells=0,
    ),
    # 38 M in float32 on the same cores, fitted (`fitting.fit`) to 13,000 steps of coding agents.
    Profile(
        "38m-cpu",
        3.65e-3,
        weights_s=0.0,
        token_s=1.61e-4,
        pair_s=6.15e-8,
        cell_s=1.04e-6,
        reload_s=1e-6,
        cells=60_000,
        host_cells=0,
    ),
)
MEASURED = {each.name: each for each in _MEASURED}


def names() -> list[str]:
    """Every profile's name."""
    return [*(f"{model}-{gpu}" for gpu in GPUS for model in MODELS), *MEASURED]


def profile(name: str) -> Profile:
    """The profile called MODEL-GPU, as in `names`. Raises ConfigError."""
    if name in MEASURED:
        return MEASURED[name]
    if name not in names():
        raise ConfigError(f"there is no profile {name!r}; there are {', '.join(names())}", "profile")
    model_name, _, gpu_name = name.partition("-")
    return of(name, GPUS[gpu_name], MODELS[model_name], _MANY.get(model_name, 1))


def of(name: str, gpu: Gpu, model: Model, gpus: int) -> Profile:
    """The profile of a replica on so many GPUs. Work and cells are shared out evenly."""
    flops, bandwidth = COMPUTE * gpu.flops * gpus, BANDWIDTH * gpu.bandwidth * gpus
    room = MEMORY * gpu.memory * gpus - BYTES * model.parameters
    return Profile(
        name=name,
        step_s=STEP_S + (2 * model.layers * GATHER_S if gpus > 1 else 0.0),
        weights_s=BYTES * model.parameters / bandwidth,
        token_s=2 * model.parameters / flops,
        pair_s=4 * model.layers * model.width / flops,
        cell_s=model.cell / bandwidth,
        reload_s=model.cell / (LINK * gpu.link * gpus),
        cells=int(room / model.cell),
        host_cells=int(gpu.host * gpus / model.cell),
    )
