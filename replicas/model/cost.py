"""What verifying drafts costs on this machine with this model: a few steps timed when it is loaded.

Single sequences give the narrow widths, several with windows of drafts the wide ones, as steps have them. The figures
are the least of three, since what else runs on the machine only adds; the gate corrects them with every step.
"""

import time
from collections.abc import Iterator

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.events import Sampling
from holdfast.replicas.scheduling.plan import Chunk, Draw, RowWrite, Runner, StepPlan
from holdfast.replicas.speculation.gate import VerificationCost

_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 4), (8, 8), (8, 16))  # (sequences, tokens of each)
_CONTEXT = 256  # tokens each sequence has in its cache
_BUDGET_S = 5.0  # a model so slow that its steps take longer is measured at fewer widths


def measure_cost(runner: Runner, config: EngineConfig) -> VerificationCost | None:
    """Time decode steps of several widths, over pages that hold nothing yet; None where there is no room for it."""
    rows: list[int] = []
    seconds: list[float] = []
    began = time.perf_counter()
    for sequences, window in _SHAPES:
        plans = list(_plans(config, sequences, window))
        if not plans or (len(rows) >= 2 and time.perf_counter() - began > _BUDGET_S):
            break
        rows.append(sequences * window)
        seconds.append(min([_timed(runner, plan) for plan in plans][1:]))
    return VerificationCost(tuple(rows), tuple(seconds)) if len(rows) >= 2 else None


def _plans(config: EngineConfig, sequences: int, window: int) -> Iterator[StepPlan]:
    """The same step four times, the first to warm up; nothing where cache or context are too small."""
    context = min(_CONTEXT, config.context_length - window)
    pages = -(-(context + window) // config.page_size)
    if context < 1 or sequences * pages > config.cells // config.page_size or sequences > config.max_sequences:
        return
    numbers = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    writes = tuple(RowWrite(row, 0, numbers[row]) for row in range(sequences))
    draw = Draw(Sampling(), 0, drafts=window - 1)
    chunks = tuple(Chunk(row, context, np.ones(window, np.int32), draw) for row in range(sequences))
    for _ in range(4):
        yield StepPlan(chunks, writes)


def _timed(runner: Runner, plan: StepPlan) -> float:
    began = time.perf_counter()
    runner.run(plan)
    return time.perf_counter() - began
