"""Which tools a turn waits for, and statistics of how long they take.

The server measures an interval from the end of decoding to the arrival of the program's next turn (Continuum, section
4.2). It counts once, under the set of tools that the turn called. `LatencyBook` is one process's statistics, frozen for
readers in a `LatencySnapshot`; `Pauses` are the latest pauses of one replica, over or not. Not here: where a cluster
keeps its statistics (`router/tool_latency`).
"""

import math
import re
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

RECENT = 256  # latest durations kept for the distribution; mean and variance are of all
AGES = np.concatenate(([0.0], np.geomspace(0.02, 3600.0, 47)))  # seconds: the resolution of a pause, in steps of 30 %
MAX_NAME = 64  # characters of a tool's name; the rest is cut
MAX_KEY = 256  # characters of the key of a set of tools
ToolKey: TypeAlias = tuple[str, str]  # tenant and set of tools

_AGES: list[float] = AGES.tolist()
_BLOCK = re.compile(r"```bash[ \t]*\n(.*?)```", re.DOTALL)
_JOINED = re.compile(r"&&|\|\|")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Called:
    """`tools`: names in the order of the calls, each once. `last`: the program is not expected to come back."""

    tools: tuple[str, ...] = ()
    last: bool = False


def called(names: Sequence[str], text: str, *, interface: bool, cut: bool, ends: bool) -> Called:
    """The tools that a reply with calls of `names`, or with `text`, waits for (Continuum, section 5.2).

    `interface`: the request declared tools, and the tracker has read the calls. Without it the tools are the commands
    of a bash block. `cut`: the reply ended for its length, or inside a call. `ends`: the request said that it is the
    program's last. A whole reply that calls nothing is a final answer.
    """
    found = tuple(dict.fromkeys(names if names or interface else commands(text)))
    return Called(found, ends or not (found or cut))


def commands(text: str) -> tuple[str, ...]:
    """The first word of each part of the one bash block in `text`; `&&` and `||` separate parts.

    Empty for no block, or several: it is not known then which one is run. Variables set for a command are skipped, as
    their values would make a tool each.
    """
    blocks = _BLOCK.findall(text)
    if len(blocks) != 1:
        return ()
    parts = (part.split() for part in _JOINED.split(blocks[0]))
    firsts = (next((word for word in words if not _ASSIGNMENT.match(word)), "") for words in parts)
    return tuple(first for first in firsts if first)


def tool_set(names: Iterable[str]) -> str:
    """The key of a set of tools called at once: its names, sorted and joined. Empty for no tool."""
    return ",".join(sorted({name[:MAX_NAME] for name in names if name}))[:MAX_KEY]


# ---- statistics of intervals that are over ----


@dataclass(frozen=True, slots=True)
class ToolLatency:
    """Intervals of one set of tools in seconds. `variance` is the sample's; `recent` the latest, in ascending order."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    recent: tuple[float, ...] = ()


UNKNOWN = ToolLatency()


@dataclass(frozen=True, slots=True)
class LatencySnapshot:
    """The statistics of all tools at one moment. `overall` is of every tool of every tenant."""

    overall: ToolLatency = UNKNOWN
    tools: Mapping[ToolKey, ToolLatency] = field(default_factory=dict)

    def of(self, tenant: str, tools: str) -> ToolLatency:
        return self.tools.get((tenant, tools), UNKNOWN)


def pooled(several: Iterable[ToolLatency]) -> ToolLatency:
    """The statistics of several sets of tools together."""
    those = [each for each in several if each.count]
    count = sum(each.count for each in those)
    if not count:
        return UNKNOWN
    mean = sum(each.count * each.mean for each in those) / count
    squares = sum((each.count - 1) * each.variance + each.count * (each.mean - mean) ** 2 for each in those)
    recent = tuple(sorted(chain.from_iterable(each.recent for each in those)))
    return ToolLatency(count, mean, squares / (count - 1) if count > 1 else 0.0, recent)


class Tally:
    """One running statistic: Welford's mean and variance, and the latest durations."""

    __slots__ = ("_ascending", "_latency", "_recent", "_squares", "count", "mean")

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0, recent: Sequence[float] = ()) -> None:
        """Continues from another process's figures; `recent` in the order in which they came."""
        self.count = count
        self.mean = mean
        self._squares = squares
        self._recent: deque[float] = deque(recent)
        self._ascending = sorted(recent)  # the same, so that a snapshot sorts nothing
        self._latency: ToolLatency | None = None if count else UNKNOWN  # None: it has changed

    def add(self, seconds: float) -> None:
        if len(self._recent) == RECENT:
            del self._ascending[bisect_left(self._ascending, self._recent.popleft())]
        self._recent.append(seconds)
        insort(self._ascending, seconds)
        self.count += 1
        error = seconds - self.mean
        self.mean += error / self.count
        self._squares += error * (seconds - self.mean)
        self._latency = None

    def latency(self) -> ToolLatency:
        if self._latency is None:
            variance = self._squares / (self.count - 1) if self.count > 1 else 0.0
            self._latency = ToolLatency(self.count, self.mean, variance, tuple(self._ascending))
        return self._latency


class LatencyBook:
    """The statistics of one process, of at most `most` sets of tools.

    Beyond that the tenant with the most sets loses its least recently used one: a tenant that invents names without end
    pushes out only its own.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._overall = Tally()
        self._tools: dict[ToolKey, Tally] = {}
        self._sets: dict[str, dict[ToolKey, None]] = {}  # by tenant, the least recently used first

    def record(self, tenant: str, tools: str, seconds: float) -> None:
        """Add an interval. A negative one, of clocks that disagree, counts as 0; one without a tool counts overall."""
        if not math.isfinite(seconds):
            return
        seconds = max(seconds, 0.0)
        self._overall.add(seconds)
        if not tools:
            return
        key = (tenant, tools)
        tally = self._tools.get(key) or Tally()
        tally.add(seconds)
        self.put(key, tally)

    def put(self, key: ToolKey | None, tally: Tally) -> None:
        """Continue from another process's statistics of a set of tools; None: of all."""
        if key is None:
            self._overall = tally
            return
        self._tools[key] = tally
        sets = self._sets.setdefault(key[0], {})
        sets.pop(key, None)
        sets[key] = None  # the last one
        if len(self._tools) > self._most:
            most = max(self._sets.values(), key=len)
            gone = next(iter(most))
            del most[gone], self._tools[gone]
            if not most:
                del self._sets[gone[0]]

    def snapshot(self) -> LatencySnapshot:
        return LatencySnapshot(self._overall.latency(), {key: tally.latency() for key, tally in self._tools.items()})


# ---- pauses of one replica, over or not ----


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCounts:
    """`by_age` [2, ages]: of `n` pauses, how many were over at each of `AGES`, and how many were not and no older.

    Without the second row long pauses are missing until they end, and a tool looks quicker than it is. `count`: how
    many are known to be over, of which `by_age` may hold only the latest.
    """

    by_age: npt.NDArray[np.float64]
    n: int
    count: int

    @classmethod
    def of(cls, tool: ToolLatency) -> "SurvivalCounts":
        """From statistics of pauses that are over."""
        by_age = np.zeros((2, len(AGES)))
        by_age[0] = np.asarray(tool.recent).searchsorted(AGES, side="right")
        return cls(by_age, len(tool.recent), tool.count)


@dataclass(slots=True, eq=False)
class ToolPause:
    """One pause of a set of tools, and since when. Once it has ended, `age` is the index of the first age reached.

    `kind`: 0 for a pause that is over, 1 for one that was given up on.
    """

    key: ToolKey
    since: float
    kind: int = 0
    age: int = 0


class _Latest:
    """The last `RECENT` pauses that began: those that last, one by one, and the others as counts."""

    __slots__ = ("_counts", "_lasting", "_pauses")

    def __init__(self) -> None:
        self._pauses: deque[ToolPause] = deque()
        self._lasting: dict[ToolPause, None] = {}
        self._counts = np.zeros((2, len(AGES) + 1))  # by kind and age

    def began(self, pause: ToolPause) -> None:
        if len(self._pauses) == RECENT:
            oldest = self._pauses.popleft()
            if oldest in self._lasting:
                del self._lasting[oldest]
            else:
                self._counts[oldest.kind, oldest.age] -= 1
        self._pauses.append(pause)
        self._lasting[pause] = None

    def ended(self, pause: ToolPause) -> None:
        """A pause that is no longer among the latest does not count."""
        if pause in self._lasting:
            del self._lasting[pause]
            self._counts[pause.kind, pause.age] += 1

    def known(self, now: float) -> SurvivalCounts:
        counts = self._counts
        if self._lasting:
            counts = counts.copy()
            ages = AGES.searchsorted([now - pause.since for pause in self._lasting])
            counts[1] += np.bincount(ages, minlength=len(AGES) + 1)
        sums = counts.cumsum(axis=1)
        return SurvivalCounts(sums[:, :-1], len(self._pauses), int(sums[0, -1]))


class Pauses:
    """A replica's latest pauses, over or not: the last `RECENT` that began of each set of tools, and of all.

    The latest by beginning, not by end, are a fair sample of all lengths. A program that never comes back is a pause
    that lasts until it is no longer among the latest. Of more than `most` sets the tenant that has the most loses the
    one that it has not called for longest.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._all = _Latest()
        self._sets: OrderedDict[ToolKey, _Latest] = OrderedDict()

    def began(self, tenant: str, tools: str, now: float) -> ToolPause:
        """Without a tool it counts among all only, as in a `LatencyBook`."""
        pause = ToolPause((tenant, tools), now)
        self._all.began(pause)
        if tools:
            latest = self._sets.get(pause.key)
            if latest is None:
                latest = self._sets[pause.key] = _Latest()
            latest.began(pause)
            self._sets.move_to_end(pause.key)
        if len(self._sets) > self._most:
            ((most, _),) = Counter(each for each, _ in self._sets).most_common(1)
            del self._sets[next(key for key in self._sets if key[0] == most)]
        return pause

    def ended(self, pause: ToolPause, now: float, *, returned: bool) -> None:
        """`returned`: the next turn has come. Else none will, and the pause counts as longer than it has lasted."""
        pause.kind, pause.age = 0 if returned else 1, bisect_left(_AGES, max(now - pause.since, 0.0))
        self._all.ended(pause)
        latest = self._sets.get(pause.key)
        if latest is not None:
            latest.ended(pause)

    def known(self, key: ToolKey | None, now: float) -> SurvivalCounts:
        """The counts of a set of tools; None: of all."""
        latest = self._all if key is None else self._sets.get(key)
        return latest.known(now) if latest is not None else SurvivalCounts.of(UNKNOWN)
