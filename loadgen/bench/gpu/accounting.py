"""What a device allows and what an engine did: bytes and operations over measured ceilings, and forwards as counted.

A decoder cannot go below `Bounds`. `CountingRunner` stands between engine and runner and counts what passes; `Totals`
joins that with the engine's own statistics, so that two moments can be compared. Not here: what is run meanwhile.
"""

import time
from dataclasses import asdict, dataclass, fields

import numpy as np

from holdfast.kernels.ceilings import Ceilings
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.description import (
    Attention,
    DenseAndExperts,
    Description,
    FeedForward,
    LinearAttention,
    MixtureOfExperts,
)
from holdfast.replicas.plan import Flight, Runner, StepOutput, StepPlan
from holdfast.replicas.requests import Finished, Tokens
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Bounds:
    """`item_bytes` of one weight, `cell_bytes` of one token's KV in all layers."""

    shape: Description  # of the model
    item_bytes: int
    cell_bytes: int
    ceilings: Ceilings

    @property
    def weight_bytes(self) -> int:
        """Read by every forward: all weights but the embedding."""
        return (self._layers + self.shape.hidden * self.shape.vocabulary) * self.item_bytes

    def flops(self, tokens: int, cached: int = 0) -> float:
        """Multiplications and additions of `tokens` after `cached` ones, attention with its causal mask and window; no
        head, and no recurrence.
        """
        sums = 2.0 * tokens * self._layers
        for mixer in self.shape.attentions:
            seen = np.minimum(np.arange(cached + 1, cached + tokens + 1), mixer.window or cached + tokens)
            sums += 4.0 * float(seen.sum()) * mixer.q_width
        return sums

    def compute_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds for these operations."""
        return self.flops(tokens, cached) / self.ceilings.rate

    def read_s(self, positions: int, forwards: int = 1) -> float:
        """Seconds in which `forwards` read the weights, and all of them together the KV of `positions`."""
        return (forwards * self.weight_bytes + positions * self.cell_bytes) / self.ceilings.bandwidth

    @property
    def _layers(self) -> int:
        """Weights of the layers' matrices."""
        return sum(outputs * inputs for outputs, inputs in matrix_sizes(self.shape))


def matrix_sizes(shape: Description) -> list[tuple[int, int]]:
    """Outputs and inputs of the matrices that a token is multiplied with in the layers, in order; of the experts those
    of as many as it chooses.
    """
    sizes = []
    for block in shape.blocks:
        op = block.op
        if isinstance(op, Attention):
            sizes += [(op.qkv_width, shape.hidden), (shape.hidden, op.q_width)]
        elif isinstance(op, LinearAttention):
            sizes += [(op.qkvz_width + op.shape.gates * op.shape.value_heads, shape.hidden), (shape.hidden, op.v_width)]
        elif isinstance(op, FeedForward):
            sizes += _pair(op, shape.hidden)
        else:
            if isinstance(op, DenseAndExperts):
                sizes += _pair(op.dense, shape.hidden)
                op = op.experts
            if not isinstance(op, MixtureOfExperts):
                raise ValueError(f"the matrices of {type(op).__name__} are not counted")
            width = op.latent or shape.hidden
            sizes += [(op.routing.experts, shape.hidden), *_pair(op, width) * op.routing.chosen]
            if op.latent:
                sizes += [(op.latent, shape.hidden), (shape.hidden, op.latent)]
            if op.shared:
                sizes += _pair(FeedForward(op.shared, op.activation), shape.hidden)
    return sizes


def _pair(op: FeedForward | MixtureOfExperts, hidden: int) -> list[tuple[int, int]]:
    return [(op.width, hidden), (hidden, op.inner)]


@dataclass(slots=True)
class Counts:
    """Totals. `positions`: tokens whose KV a forward read, once for each of its sequences."""

    forwards: int = 0
    positions: int = 0
    prepare_s: float = 0.0  # laying steps out, their copy to the device and their launches, with nothing running yet


class CountingRunner:
    """A runner over another one that counts what passes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._flying = 0
        self.counts = Counts()

    def begin(self, plan: StepPlan) -> Flight:
        """Begin a step. Raises like the runner."""
        began = time.perf_counter()
        flight = self._runner.begin(plan)
        counts, chunks = self.counts, plan.chunks
        if not self._flying:  # beside a step that runs it costs nobody anything
            counts.prepare_s += time.perf_counter() - began
        counts.forwards += bool(chunks)
        counts.positions += sum(chunk.start + len(chunk.tokens) for chunk in chunks)
        self._flying += 1
        return _CountedFlight(self, flight)

    def landed(self) -> None:
        self._flying -= 1


@dataclass(frozen=True, slots=True)
class _CountedFlight:
    runner: CountingRunner
    flight: Flight

    def land(self) -> StepOutput:
        try:
            return self.flight.land()
        finally:
            self.runner.landed()


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of an engine and its runner, or their difference between two moments. Seconds and numbers."""

    forwards: float
    positions: float
    drafted: float
    accepted: float
    forward_s: float
    sample_s: float
    prepare_s: float
    schedule_s: float
    commit_s: float

    @staticmethod
    def of(engine: Engine, runner: CountingRunner) -> "Totals":
        counted = asdict(runner.counts)
        names = [each.name for each in fields(Totals)]
        return Totals(**{name: counted[name] if name in counted else getattr(engine.stats, name) for name in names})

    def since(self, before: "Totals") -> "Totals":
        earlier = asdict(before)
        return Totals(**{name: value - earlier[name] for name, value in asdict(self).items()})


def drain(engine: Engine) -> dict[str, TokenIds]:
    """Run until nothing is left to do; the answer to each request. Raises RuntimeError where one failed."""
    answers: dict[str, list[int]] = {}
    while engine.busy:
        for event in engine.step(time.perf_counter(), time.perf_counter):
            if isinstance(event, Tokens):
                answers.setdefault(event.request_id, []).extend(event.tokens)
            elif not isinstance(event, Finished):
                raise RuntimeError(f"a turn did not finish: {event}")
    return {name: np.array(tokens, np.int32) for name, tokens in answers.items()}
