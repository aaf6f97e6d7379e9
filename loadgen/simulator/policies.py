"""Orders and retention policies of the papers, which Holdfast's own are compared with, and the pairs that are compared.

A server runs one by its `module:Class` (docs/scheduling.md); the tables give them the short names of the command line.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.loadgen.simulator.machines import Profile
from holdfast.loadgen.simulator.workloads import CONTEXT
from holdfast.replicas.config import DraftConfig, EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.programs import ProgramKey, Sequence, Status
from holdfast.replicas.retention.latency import LatencySnapshot, ToolLatency
from holdfast.replicas.retention.policy import Conditions, Pause, RetentionPolicy
from holdfast.replicas.scheduling.queue import Chunks, Key, ProgramOrder, RequestOrder, Sequences
from holdfast.replicas.types import Priority

_NOBODY: Mapping[Priority, int] = {}


class Plas(RequestOrder):
    """Autellix's order: levels by attained service, first come, first served within a level.

    Service is the seconds of the steps that the program's requests took part in, on this replica. A request begins at
    the level of its program's service and sinks as it is served. Level i ends at `quantum_s * factor**i`. A request
    that has waited `patience` times its program's service goes back to the first level, once: after that it only sinks,
    so the order of the running requests settles. The paper leaves the constants open. Service of `programs` programs is
    remembered; the least recently served is forgotten first.
    """

    settled = False

    def __init__(
        self,
        levels: int = 8,
        quantum_s: float = 1.0,
        factor: float = 2.0,
        patience: float = 4.0,
        programs: int = 65_536,
    ) -> None:
        self._ends = [quantum_s * factor**i for i in range(levels - 1)]
        self._patience = patience
        self._programs = programs
        self._of_programs: OrderedDict[ProgramKey, float] = OrderedDict()
        self.attained: dict[Sequence, float] = {}  # service that counts against each request that waits or runs
        self._due: list[tuple[float, int, Sequence]] = []  # a heap: when requests have waited too long

    def key(self, sequence: Sequence) -> Key:
        attained = self.attained.get(sequence, 0.0)
        return (sum(attained >= end for end in self._ends), sequence.arrived, sequence.number)

    def arrive(self, sequence: Sequence, *, alone: bool = False) -> None:
        program = ProgramKey.of(sequence.submit)
        attained = self.attained[sequence] = self._of_programs.get(program, 0.0) if program is not None else 0.0
        if attained >= self._ends[0]:
            heapq.heappush(self._due, (sequence.arrived + self._patience * attained, sequence.number, sequence))

    def left(self, sequence: Sequence) -> None:
        self.attained.pop(sequence, None)

    def serve(
        self, sequences: Sequences, chunks: Chunks, seconds: float, waiting: Mapping[Priority, int] = _NOBODY
    ) -> None:
        for sequence in sequences:
            if sequence in self.attained:
                self.attained[sequence] += seconds
            program = ProgramKey.of(sequence.submit)
            if program is None:
                continue
            self._of_programs[program] = self._of_programs.get(program, 0.0) + seconds
            self._of_programs.move_to_end(program)
            if len(self._of_programs) > self._programs:
                self._of_programs.popitem(last=False)

    def promote(self, now: float) -> Iterator[Sequence]:
        while self._due and self._due[0][0] <= now:
            sequence = heapq.heappop(self._due)[2]
            if sequence in self.attained and sequence.status is Status.WAITING and not sequence.preempted:
                self.attained[sequence] = 0.0
                yield sequence


class ArrivalOfProgram(ProgramOrder):
    """InferCept's order: by the program's first arrival alone, whether its cells are pinned or not.

    It goes with the retention policy `infercept`.
    """

    def waiting(self, sequence: Sequence) -> Key:
        return self.key(sequence)


class Fixed(RetentionPolicy):
    """Continuum's simplified retention (section 4.5): the same time for all quick tools.

    Keeps cells for `limit_s` seconds, unless the mean interval of the tools is longer. Unknown tools are quick.
    """

    def __init__(self, limit_s: float = 2.0) -> None:
        self._limit_s = limit_s

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return self._limit_s if latency.of(pause.tenant, pause.tools).mean <= self._limit_s else 0.0


TTL_S = 6.0  # Sutradhara's baseline with a time to live


class SutradharaTtl(Fixed):
    """The time to live of Sutradhara's baseline."""

    def __init__(self) -> None:
        super().__init__(TTL_S)


class Bernstein(RetentionPolicy):
    """Continuum's first retention: an upper bound of the mean interval, longer at the beginning of a program.

    Keeps cells for the bound, times 1 + turns_weight * max(0, 1 - turn / mean turns). The bound is of the tools from
    `tool_samples` calls on, else of all tools from `overall_samples` calls on, else `unknown_s`. The paper leaves the
    values open and its scaling by turns is lost; both are ours.
    """

    def __init__(
        self,
        delta: float = 0.05,
        tool_samples: int = 10,
        overall_samples: int = 10,
        unknown_s: float = 2.0,
        turns_weight: float = 1.0,
    ) -> None:
        self._delta = delta
        self._tool_samples = tool_samples
        self._overall_samples = overall_samples
        self._unknown_s = unknown_s
        self._turns_weight = turns_weight

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        tool = latency.of(pause.tenant, pause.tools)
        if tool.count >= self._tool_samples:
            bound = upper_bound(tool, self._delta)
        elif latency.overall.count >= self._overall_samples:
            bound = upper_bound(latency.overall, self._delta)
        else:
            bound = self._unknown_s
        remaining = max(0.0, 1.0 - pause.turn / max(conditions.mean_turns, 1.0))
        return bound * (1.0 + self._turns_weight * remaining)


def upper_bound(tool: ToolLatency, delta: float) -> float:
    """Empirical Bernstein bound of the mean (Maurer & Pontil 2009, theorem 4), with probability 1 - delta.

    The range of the intervals is unknown beforehand; the longest recent one stands for it.
    """
    if tool.count < 2:
        return tool.mean
    log = math.log(2.0 / delta)
    widest = tool.recent[-1] if tool.recent else tool.mean
    return tool.mean + math.sqrt(2.0 * tool.variance * log / tool.count) + 7.0 * widest * log / (3.0 * (tool.count - 1))


class RestoreTime(RetentionPolicy):
    """The classic rule for an unknown pause: keep the cells as long as restoring them takes.

    It costs at most twice as much as knowing the length of the pause beforehand would.
    """

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return conditions.restore.seconds(pause.cells)


ORDERS = {"plas": f"{__name__}:Plas", "infercept": f"{__name__}:ArrivalOfProgram"}
RETENTION = {
    "fixed": f"{__name__}:Fixed",
    "bernstein": f"{__name__}:Bernstein",
    "restore-cost": f"{__name__}:RestoreTime",
}
SUTRADHARA_TTL = f"{__name__}:SutradharaTtl"


@dataclass(frozen=True, slots=True)
class Policy:
    """`engine.order` and `engine.retention.policy`."""

    order: str
    retention: str


_DEFAULTS = EngineConfig()
POLICIES = {
    "request": Policy("request", "none"),
    "plas": Policy(ORDERS["plas"], "none"),
    "infercept-request": Policy("request", "infercept"),
    "infercept-program": Policy("program", "infercept"),
    "infercept": Policy(ORDERS["infercept"], "infercept"),
    "program": Policy("program", "none"),
    "fixed": Policy("program", RETENTION["fixed"]),
    "bernstein": Policy("program", RETENTION["bernstein"]),
    "restore-cost": Policy("program", RETENTION["restore-cost"]),
    "continuum": Policy("program", "continuum"),
    "expected_waste": Policy("program", "expected_waste"),
    "default": Policy(_DEFAULTS.order, _DEFAULTS.retention.policy),
}
USUAL = tuple(name for name in POLICIES if name not in ("infercept-program", "restore-cost", "default"))
PAGE = 16
_ENDLESS = 1e12  # seconds, and requests: a request waits as long as it has to


def policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}", "policy")
    return POLICIES[name]


def engine_config(name: str, profile: Profile, host: bool) -> EngineConfig:
    """One replica under the policy of that name, with a second tier or without. Raises ConfigError."""
    named = policy(name)
    if host and not profile.host_cells:
        raise ConfigError(f"nothing is known of a second tier of {profile.name}", "host-tier")
    return EngineConfig(
        model=profile.name,
        context_length=CONTEXT,
        cells=profile.cells // PAGE * PAGE,
        host_cells=profile.host_cells // PAGE * PAGE if host else 0,
        page_size=PAGE,
        max_sequences=256,
        session_rows=128,
        max_waiting=int(_ENDLESS),
        queue_timeout_s=_ENDLESS,
        speculation=DraftConfig(enabled=False),
        order=named.order,
        retention=RetentionConfig(policy=named.retention),
    )
