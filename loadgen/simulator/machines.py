"""The cost of a step on a machine, and the profiles of known machines. Pure, no state.

    step        constant + sequences + max(weights read once, tokens computed) + attention of every chunk
    attention   of a prompt's chunk: its pairs computed or its cells read, whichever takes longer
                of a decode: its cells read
    copies      cells that move between the tiers: a step takes at least as long as they do

A prompt of n tokens takes a n^2 + b n + c, as Continuum fits it. A decode takes its bytes over the bandwidth.

Ceilings, of one GPU: NVIDIA A100 80GB (SXM), H200 (SXM) and HGX B200 data sheets, bf16 without sparsity. Shapes: the
models' own configurations on the Hugging Face hub. The shares of the ceilings that are reached are our assumption, the
same for every machine. `fitting` measures a profile instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.plan import Chunk, StepPlan

COMPUTE, BANDWIDTH, LINK = 0.5, 0.8, 0.8  # shares of the ceilings
MEMORY = 0.9  # share of a GPU's memory that weights and KV may take
STEP_S = 2e-3  # launches, sampling and the scheduler's own work
GATHER_S = 15e-6  # of one sum over the GPUs of a replica; there are two in a layer
BYTES = 2  # of a number in bf16


@dataclass(frozen=True, slots=True)
class Profile:
    """One replica's machine and model. Times in seconds, room in cells."""

    name: str
    step_s: float  # of every step, whatever is in it
    weights_s: float  # to read the weights once
    token_s: float  # to compute one token, without attention
    pair_s: float  # of attention, for one token and one cell, where computing is the bottleneck
    cell_s: float  # to read one cell
    reload_s: float  # to copy one cell between the tiers, either way
    cells: int
    host_cells: int  # of the second tier; 0: there is none
    sequence_s: float = 0.0  # of every sequence in a step

    def decode_s(self, sequences: int, contexts: int, steps: int = 1) -> float:
        """Seconds of `steps` decode steps of the same sequences, which read `contexts` cells in the first of them."""
        each = self.step_s + sequences * self.sequence_s + max(self.weights_s, sequences * self.token_s)
        cells = steps * contexts + sequences * steps * (steps - 1) // 2
        return steps * each + cells * self.cell_s

    def decode_steps(self, sequences: int, contexts: int, seconds: float, most: int) -> int:
        """The fewest decode steps that take `seconds` or longer; at least 1, at most `most`."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.decode_s(sequences, contexts, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

    def step(self, plan: StepPlan, page_size: int) -> float:
        """Seconds of one step of this plan; drafts in it cost nothing."""
        tokens = attention = 0.0
        for chunk in plan.chunks:
            n = len(chunk.tokens) - (chunk.draw.drafts if chunk.draw else 0)
            end = chunk.start + n
            tokens += n
            reading = end * self.cell_s
            attention += reading if n == 1 else max(reading, n * (chunk.start + end) / 2 * self.pair_s)
        forward = 0.0
        if plan.chunks:
            forward = self.step_s + len(plan.chunks) * self.sequence_s + max(self.weights_s, tokens * self.token_s)
        copies = (len(plan.saves) + len(plan.loads)) * page_size * self.reload_s
        return max(forward + attention, copies, self.step_s)

    def slowed(self, times: float) -> Profile:
        """The same machine with every step taking `times` as long."""
        names = ("step_s", "weights_s", "token_s", "pair_s", "cell_s", "reload_s", "sequence_s")
        return replace(self, **{name: getattr(self, name) * times for name in names})


def contexts(chunks: Sequence[Chunk]) -> int:
    """Cells that decoding chunks read in all, their own included."""
    return sum([chunk.start for chunk in chunks]) + len(chunks)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data sheet. `host` is the memory beside it for a second tier, after the Continuum paper."""

    flops: float
    bandwidth: float  # bytes a second
    memory: float  # bytes
    link: float  # bytes a second to the host, each way
    host: float


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder's shape, served on `gpus` GPUs."""

    parameters: float
    layers: int
    kv_heads: int
    width: int  # of all query heads
    gpus: int = 1
    head: int = 128

    @property
    def cell(self) -> int:
        """Bytes of one token's KV in every layer."""
        return 2 * self.layers * self.kv_heads * self.head * BYTES

    def profile(self, name: str, gpu: Gpu) -> Profile:
        """The profile of one replica. Work and cells are shared out evenly over its GPUs."""
        flops, bandwidth = COMPUTE * gpu.flops * self.gpus, BANDWIDTH * gpu.bandwidth * self.gpus
        room = MEMORY * gpu.memory * self.gpus - BYTES * self.parameters
        return Profile(
            name=name,
            step_s=STEP_S + (2 * self.layers * GATHER_S if self.gpus > 1 else 0.0),
            weights_s=BYTES * self.parameters / bandwidth,
            token_s=2 * self.parameters / flops,
            pair_s=4 * self.layers * self.width / flops,
            cell_s=self.cell / bandwidth,
            reload_s=self.cell / (LINK * gpu.link * self.gpus),
            cells=int(room / self.cell),
            host_cells=int(gpu.host * self.gpus / self.cell),
        )


GPUS = {
    "a100": Gpu(312e12, 2.039e12, 80e9, 32e9, 100e9),
    "h200": Gpu(989e12, 4.8e12, 141e9, 64e9, 200e9),
    "b200": Gpu(2250e12, 8e12, 180e9, 64e9, 200e9),
}
MODELS = {
    "8b": Model(8.03e9, 32, 8, 4096),  # Llama-3.1-8B
    "14b": Model(14.8e9, 40, 8, 5120),  # Qwen3-14B
    "70b": Model(70.6e9, 80, 8, 8192, gpus=4),  # Llama-3.1-70B
}
_MEASURED = (
    # 8B in bfloat16: 4,096 tokens take 101 ms, 512 behind 3,000 14.2, 32 sequences that decode 7 to 8.
    Profile("8b-h100", 1.2e-3, 6e-3, 21.5e-6, 1.3e-9, 44e-9, 2.6e-6, cells=427_000, host_cells=0),
    # 253 M in bfloat16 on two cores with AVX512-BF16: docs/results.md, forwards.
    Profile("253m-cpu", 2e-3, 13e-3, 1.2e-3, 2.7e-7, 1.3e-6, 1e-6, cells=60_000, host_cells=0),
    # 38 M in float32 on the same cores, fitted (`fitting.fit`) to 13,000 steps of coding agents.
    Profile("38m-cpu", 3.65e-3, 0.0, 1.61e-4, 6.15e-8, 1.04e-6, 1e-6, cells=60_000, host_cells=0),
    # Qwen3.5-27B in FP8 on an H100: 16 of 64 layers have cells, 64 KiB a token; a step moves 155 MB of state twice.
    Profile(
        "27b-hybrid-h100",
        2e-3,
        weights_s=27e9 / (0.8 * 3.35e12),
        token_s=2 * 27e9 / (0.5 * 1979e12),
        pair_s=4 * 16 * 6144 / (0.5 * 989e12),
        cell_s=65536 / (0.8 * 3.35e12),
        reload_s=65536 / (0.8 * 64e9),
        cells=320_000,
        host_cells=0,
        sequence_s=2 * 155e6 / (0.8 * 3.35e12),
    ),
)
MEASURED = {each.name: each for each in _MEASURED}


def names() -> list[str]:
    """Every profile's name."""
    return [*(f"{model}-{gpu}" for gpu in GPUS for model in MODELS), *MEASURED]


def profile(name: str, cells: int | None = None) -> Profile:
    """The profile called MODEL-GPU, as in `names`, with `cells` in place of its own. Raises ConfigError."""
    if name not in names():
        raise ConfigError(f"there is no profile {name!r}; there are {', '.join(names())}", "profile")
    model, _, gpu = name.partition("-")
    known_profile = MEASURED[name] if name in MEASURED else MODELS[model].profile(name, GPUS[gpu])
    return known_profile if cells is None else replace(known_profile, cells=cells)
