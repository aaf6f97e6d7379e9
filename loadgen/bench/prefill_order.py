"""When prompts have their first token, by how prefills share a step.

``python -m holdfast.loadgen.bench.prefill_order``: the real engine over the simulator's cost model (8B on an A100), so
it takes seconds and no GPU. `equal` is `engine.equal_chunks`, the rule of stateful inference, section 3.2; the others
spend a step in program order, with that many tokens for everybody behind (`engine.chunk_floor`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from holdfast.loadgen.simulator.machines import profile
from holdfast.loadgen.simulator.policies import PAGE, engine_config
from holdfast.loadgen.simulator.runner import CostRunner
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.events import Sampling, Submit, Tokens

PROFILE = profile("8b-a100")
FLOORS = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of `sizes` tokens that come at `came`, in seconds, and draw `replies` tokens; each another program."""

    name: str
    sizes: npt.NDArray[np.int64]
    came: npt.NDArray[np.float64]
    replies: npt.NDArray[np.int64]


def loads() -> Iterator[Load]:
    """Bursts, which order helps, and a stream of prompts of very different lengths, where sharing helps the short."""
    rng = np.random.default_rng(1)
    yield Load("16 prompts of 4,096 at once", np.full(16, 4096), np.zeros(16), np.full(16, 32))
    yield Load("64 of 200 to 12,000 at once", rng.integers(200, 12_000, 64), np.zeros(64), np.full(64, 64))
    sizes = np.minimum(rng.lognormal(7.6, 1.0, 300), 30_000).astype(np.int64) + 10
    yield Load("300 log-normal, 3 a second", sizes, np.cumsum(rng.exponential(1 / 3, 300)), rng.integers(16, 200, 300))


def first_tokens(load: Load, config: EngineConfig) -> npt.NDArray[np.float64]:
    """Seconds from each prompt's arrival to its first token."""
    runner = CostRunner(PROFILE, PAGE)
    engine = Engine(config, runner, stopwatch=lambda: 0.0)
    rng = np.random.default_rng(0)
    first: dict[str, float] = {}
    now, i, n = 0.0, 0, len(load.sizes)
    while i < n or engine.busy:
        while i < n and (load.came[i] <= now or not engine.busy):
            now, came = max(now, float(load.came[i])), float(load.came[i])
            tokens = (rng.integers(1, 30_000) + np.arange(load.sizes[i]) % 20_000).astype(np.int32)
            reply = Sampling(int(load.replies[i]))
            engine.handle(Submit(str(i), tokens, reply, "", f"program {i}", came + 1.0), now, came)
            i += 1
        events = engine.step(now)
        now += runner.seconds
        for event in events:
            if isinstance(event, Tokens):
                first.setdefault(event.request_id, now)
    return np.array([first[str(i)] for i in range(n)]) - load.came


def main() -> int:
    """Print mean, median, 99th percentile and longest, in seconds, of each load under each rule."""
    base = engine_config("default", PROFILE, host=False)
    rules = {"equal": replace(base, equal_chunks=True)}
    rules |= {f"in order, floor {floor}": replace(base, chunk_floor=floor) for floor in FLOORS}
    for load in loads():
        print(f"{load.name:<28} {'mean':>8} {'median':>8} {'p99':>8} {'longest':>8}")
        for rule, config in rules.items():
            waits = first_tokens(load, config)
            figures = (waits.mean(), np.median(waits), np.percentile(waits, 99), waits.max())
            print(f"  {rule:<26} " + " ".join(f"{figure:8.3f}" for figure in figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
