"""What a turn waits for, and how long that takes: the tools that a reply called, and statistics of their intervals.

An interval is measured by the server, from the end of decoding to the arrival of the program's next turn (Continuum,
section 4.2), and counts once, under the set of tools that the turn called. Here: what is known, frozen for readers, and
how one process adds an interval to it; and what one replica knows of its latest pauses, over or not (`Pauses`), counted
as they end. Not here: where a cluster keeps its statistics (`router/tool_latency`).
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

RECENT = 256  # durations kept for the distribution; the mean and the variance are of all


AGES = np.concatenate(([0.0], np.geomspace(0.02, 3600.0, 47)))
"""Ages of a pause that are told apart, in seconds: from one to the next three tenths more."""


_AGES: list[float] = AGES.tolist()


MAX_NAME = 64  # characters of a tool's name; the rest is cut


MAX_KEY = 256  # characters of a set's key


ToolKey: TypeAlias = tuple[str, str]
"""Tenant and set of tools."""


_BLOCK = re.compile(r"```bash[ \t]*\n(.*?)```", re.DOTALL)


_JOINED = re.compile(r"&&|\|\|")


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Called:
    """`tools`: names, in the order of the calls, none twice. `last`: the program is not expected to come back."""

    tools: tuple[str, ...] = ()
    last: bool = False


def called(names: Sequence[str], text: str, *, interface: bool, cut: bool, ends: bool) -> Called:
    """What a reply with calls of `names`, or with `text`, waits for now (Continuum, section 5.2).

    With the function interface the tracker has read the calls, in whatever format the model writes them. Without it a
    program runs what stands in a bash block; its commands are the tools.

    `interface`: the request declared tools. `cut`: the reply ended for its length, or inside of a call. `ends`: the
    request said that it is the program's last. A reply that is whole and calls nothing is a final answer.
    """
    found = tuple(dict.fromkeys(names if names or interface else commands(text)))
    return Called(found, ends or not (found or cut))


def commands(text: str) -> tuple[str, ...]:
    """The first word of each part of the one bash block in `text`, parts joined by `&&` or `||`.

    None for no block, or several: then nobody knows which one is run. Variables that are set for a command are no word
    of it: their values would make a tool each.
    """
    blocks = _BLOCK.findall(text)
    if len(blocks) != 1:
        return ()
    parts = (part.split() for part in _JOINED.split(blocks[0]))
    firsts = (next((word for word in words if not _ASSIGNMENT.match(word)), "") for words in parts)
    return tuple(first for first in firsts if first)


def tool_set(names: Iterable[str]) -> str:
    """The key of a set of tools called at once: its names, sorted and joined. Empty for no tool at all."""
    return ",".join(sorted({name[:MAX_NAME] for name in names if name}))[:MAX_KEY]


@dataclass(frozen=True, slots=True)
class ToolLatency:
    """Intervals of one set of tools in seconds. `variance` is the sample's; `recent` are the last ones, ascending."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    recent: tuple[float, ...] = ()


UNKNOWN = ToolLatency()


@dataclass(frozen=True, slots=True)
class LatencySnapshot:
    """What was known of all tools at one moment. `overall` is of every tool of every tenant."""

    overall: ToolLatency = UNKNOWN
    tools: Mapping[ToolKey, ToolLatency] = field(default_factory=dict)

    def of(self, tenant: str, tools: str) -> ToolLatency:
        return self.tools.get((tenant, tools), UNKNOWN)


def pooled(several: Iterable[ToolLatency]) -> ToolLatency:
    """What several sets of tools have together."""
    those = [each for each in several if each.count]
    count = sum(each.count for each in those)
    if not count:
        return UNKNOWN
    mean = sum(each.count * each.mean for each in those) / count
    squares = sum((each.count - 1) * each.variance + each.count * (each.mean - mean) ** 2 for each in those)
    recent = tuple(sorted(chain.from_iterable(each.recent for each in those)))
    return ToolLatency(count, mean, squares / (count - 1) if count > 1 else 0.0, recent)


class Tally:
    """One running statistic: Welford's mean and variance, and the last durations."""

    __slots__ = ("_ascending", "_latency", "_recent", "_squares", "count", "mean")

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0, recent: Sequence[float] = ()) -> None:
        """Go on from figures that another process has; `recent` as they came."""
        self.count = count
        self.mean = mean
        self._squares = squares
        self._recent: deque[float] = deque(recent)  # as they came
        self._ascending = sorted(recent)  # the same: a snapshot sorts nothing
        self._latency: ToolLatency | None = None if count else UNKNOWN  # what is known; None: it has changed

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
    """The statistics of one process, at most `most` sets of tools.

    Where there are more, the tenant that has most of them loses its least recently used one: who invents names without
    end pushes out nobody else's.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._overall = Tally()
        self._tools: dict[ToolKey, Tally] = {}
        self._sets: dict[str, dict[ToolKey, None]] = {}  # of each tenant, the least recently used first

    def record(self, tenant: str, tools: str, seconds: float) -> None:
        """One interval; negative ones, of clocks that disagree, count as 0. Without a tool it counts overall alone."""
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
        """Go on from what another process has of a set of tools; None: of all."""
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


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalCounts:
    """How many of `n` pauses were over at each of `AGES`, and how many had lasted no longer and were not over.

    `by_age`: these two, [2, ages]. Without the second, long pauses are missing until they end, and a tool looks quicker
    than it is. `count`: how many are known to be over, of which those told apart by age may be the latest alone.
    """

    by_age: npt.NDArray[np.float64]
    n: int
    count: int

    @classmethod
    def of(cls, tool: ToolLatency) -> "SurvivalCounts":
        """Of statistics that tell only of pauses that are over."""
        by_age = np.zeros((2, len(AGES)))
        by_age[0] = np.asarray(tool.recent).searchsorted(AGES, side="right")
        return cls(by_age, len(tool.recent), tool.count)


@dataclass(slots=True, eq=False)
class ToolPause:
    """One pause: of which set, when it began, and once it has ended the first of `AGES` at which it had.

    `kind`: 0 for one that is over, 1 for one of which nobody knows when it would have been.
    """

    key: ToolKey
    since: float
    kind: int = 0
    age: int = 0


class _Latest:
    """The last `RECENT` pauses that began, of some kind: those that last, one by one, and the others counted."""

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
        """Of one that is none of the latest any more nothing is told."""
        if pause in self._lasting:
            del self._lasting[pause]
            self._counts[pause.kind, pause.age] += 1

    def known(self, now: float) -> SurvivalCounts:
        """What there is to tell at `now`, seconds."""
        counts = self._counts
        if self._lasting:
            counts = counts.copy()
            ages = AGES.searchsorted([now - pause.since for pause in self._lasting])
            counts[1] += np.bincount(ages, minlength=len(AGES) + 1)
        sums = counts.cumsum(axis=1)
        return SurvivalCounts(sums[:, :-1], len(self._pauses), int(sums[0, -1]))


class Pauses:
    """A replica's latest pauses, over or not: of each set of tools, and of all, the last `RECENT` that began.

    By when they began and not by when they ended, so that they are a sample of all lengths. A program that never comes
    back is a pause that lasts until it is none of the latest. Bounded: at most `most` sets; where there are more, the
    tenant that has most of them loses the one that it has not called for longest.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._all = _Latest()
        self._sets: OrderedDict[ToolKey, _Latest] = OrderedDict()

    def began(self, tenant: str, tools: str, now: float) -> ToolPause:
        """Without a tool it counts among all alone, as in a `LatencyBook`."""
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
        """The next turn is here, or there will be none: then the pause would have lasted longer than it has."""
        pause.kind, pause.age = 0 if returned else 1, bisect_left(_AGES, max(now - pause.since, 0.0))
        self._all.ended(pause)
        latest = self._sets.get(pause.key)
        if latest is not None:
            latest.ended(pause)

    def known(self, key: ToolKey | None, now: float) -> SurvivalCounts:
        """What is known of a set of tools; None: of all."""
        latest = self._all if key is None else self._sets.get(key)
        return latest.known(now) if latest is not None else SurvivalCounts.of(UNKNOWN)
