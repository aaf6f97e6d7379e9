"""What planning and committing a step costs, without a model: the runner draws what it likes.

Time is that of the processor in this thread, the median of the steps: whatever else the machine does hardly counts.
"""

import time
from itertools import cycle
from statistics import median

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.events import Finished, OpenSession, Sampling, Submit, TurnEnded
from holdfast.replicas.retention.config import RetentionConfig
from holdfast.replicas.scheduling.plan import Drawn, StepOutput, StepPlan
from holdfast.replicas.speculation.config import DraftConfig
from holdfast.replicas.tokens import TokenIds

_RUNNING, _WAITING = 64, 10_000
_PROMPT, _PREAMBLE = 200, 2_000
_PINNED, _QUEUED = 500, 1_000
_STEPS, _WARM_UP = 200, 40
_VOCABULARY = 50_000


class _Dice:
    """A runner without a model: every draft is wrong, and the text repeats itself now and then."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        phrases = [rng.integers(1, _VOCABULARY, 12).tolist() for _ in range(40)]
        self._text = cycle([token for i in rng.integers(0, 40, 4000) for token in phrases[i]])

    def run(self, plan: StepPlan) -> StepOutput:
        return StepOutput(tuple(Drawn((next(self._text),)) if chunk.draw else None for chunk in plan.chunks))


def scheduler_costs() -> dict[str, float]:
    """Milliseconds of planning and commit a step, by what is in the engine."""
    return {
        "64 decoding": _cost(drafts=False),
        "64 decoding, drafter on": _cost(drafts=True),
        "64 decoding, 10,000 waiting": _cost(drafts=False, waiting=_WAITING),
        "64 decoding, 10,000 waiting over one preamble": _cost(drafts=False, waiting=_WAITING, preamble=_PREAMBLE),
        "64 decoding, 10,000 waiting, 16 open sessions": _cost(drafts=False, waiting=_WAITING, parked=16),
        "64 decoding, 1,000 waiting": _cost(drafts=False, waiting=_QUEUED),
        "64 decoding, 1,000 waiting, 500 programs pinned": _cost(drafts=False, waiting=_QUEUED, pinned=_PINNED),
    }


def _cost(*, drafts: bool, waiting: int = 0, preamble: int = 0, parked: int = 0, pinned: int = 0) -> float:
    config = EngineConfig(
        cells=1_000_000,
        context_length=8192,
        max_sequences=_RUNNING + parked,
        session_rows=parked,
        max_waiting=2 * _WAITING,
        admission_ceiling=1.0,
        speculation=DraftConfig(enabled=drafts),
        retention=RetentionConfig(policy="fixed", fixed_s=1e9, most_s=1e9),
    )
    engine = Engine(config, _Dice(), frozenset(), _VOCABULARY, stopwatch=time.thread_time)
    rng = np.random.default_rng(0)
    shared = rng.integers(1, _VOCABULARY, preamble).astype(np.int32)
    for i in range(parked):
        engine.handle(OpenSession(f"open{i}", f"s{i}"), 0.0)
        engine.handle(Submit(f"append{i}", _ids(rng, shared), Sampling(0), session_id=f"s{i}"), 0.0)
    for i in range(pinned):
        engine.handle(Submit(f"turn{i}", _ids(rng, shared), Sampling(1), program_id=f"p{i}"), 0.0)
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Finished) and event.request_id.startswith("turn"):
                engine.handle(TurnEnded(event.request_id, "", f"p{event.request_id[4:]}"), 0.0)
    assert engine.occupancy().pins == pinned
    for i in range(_RUNNING + waiting):
        engine.handle(Submit(f"r{i}", _ids(rng, shared), Sampling(4000), program_arrival=1.0 + i), 1.0)
    costs = []
    for step in range(_WARM_UP + _STEPS):
        before = engine.stats.schedule_s + engine.stats.commit_s
        engine.step(2.0)
        if step >= _WARM_UP:
            costs.append(engine.stats.schedule_s + engine.stats.commit_s - before)
    assert engine.occupancy().running == _RUNNING
    return 1e3 * median(costs)


def _ids(rng: np.random.Generator, shared: TokenIds) -> TokenIds:
    return np.concatenate((shared, rng.integers(1, _VOCABULARY, _PROMPT))).astype(np.int32)
