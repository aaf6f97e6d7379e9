"""The tool calls that a turn waits for, and statistics of their duration.

The server measures an interval from the end of decoding to the arrival of the program's next turn (Continuum, section
4.2). It counts once, under the set of tools that the turn called. `LatencyBook` is one process's statistics, frozen for
readers in a `LatencySnapshot`; `Pauses` are the latest pauses of one replica, over or not. Not here: where a cluster
keeps its statistics (`router/tool_latency`).
"""

import math
import re
import shlex
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

V = TypeVar("V")
ToolKey: TypeAlias = tuple[str, str]  # tenant and set of tools

RECENT = 256  # latest durations kept for the distribution; mean and variance are of all
AGES = np.concatenate(([0.0], np.geomspace(0.02, 3600.0, 47)))  # seconds: the resolution of a pause, in steps of 30 %
MAX_NAME = 64  # characters of a tool's name; the rest is cut
MAX_BLOCK = 4096  # characters of a block of commands that are read
MAX_KEY = 256  # characters of the key of a set of tools

_AGES: list[float] = AGES.tolist()
_BLOCK = re.compile(r"```bash[ \t]*\n(.*?)```", re.DOTALL)
_COMMENT = re.compile(r"^[ \t]*#.*", re.MULTILINE)
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
    tools = tuple(dict.fromkeys(names if names or interface else commands(text)))
    return Called(tools, ends or not (tools or cut))


def commands(text: str) -> tuple[str, ...]:
    """The first word of each part of the one bash block in `text`; `&&` and `||` separate parts.

    Empty for no block, or several: it is not known then which one is run. Words are a shell's: quotes hold them
    together. Lines of comment are left out, and variables set for a command, as their values would make a tool each.
    """
    blocks = _BLOCK.findall(text)
    if len(blocks) != 1:
        return ()
    block = _COMMENT.sub("", blocks[0][:MAX_BLOCK]).replace("\\\n", " ")
    words = shlex.shlex(block, posix=True, punctuation_chars="&|")
    words.whitespace_split, words.commenters = True, ""  # shlex would take a `#` inside a word for a comment
    firsts, begins = list[str](), True
    with suppress(ValueError):  # an apostrophe in a here-document, say: the words before it count
        for word in words:
            if word in ("&&", "||"):
                begins = True
            elif begins and word and not _ASSIGNMENT.match(word):
                firsts.append(word)
                begins = False
    return tuple(firsts)


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
    latencies = [each for each in several if each.count]
    count = sum(each.count for each in latencies)
    if not count:
        return UNKNOWN
    mean = sum(each.count * each.mean for each in latencies) / count
    squares = sum((each.count - 1) * each.variance + each.count * (each.mean - mean) ** 2 for each in latencies)
    recent = tuple(sorted(chain.from_iterable(each.recent for each in latencies)))
    return ToolLatency(count, mean, squares / (count - 1) if count > 1 else 0.0, recent)


class Tally:
    """One running statistic: Welford's mean and variance, and the latest durations."""

    __slots__ = ("_ascending", "_latency", "_recent", "_squares", "count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        self._recent: deque[float] = deque()
        self._ascending: list[float] = []  # the same, so that a snapshot sorts nothing
        self._latency: ToolLatency | None = UNKNOWN  # None: it has changed

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


class _Sets(OrderedDict[ToolKey, V]):
    """Values of at most `most` sets of tools, the least recently used first.

    Beyond that the tenant with the most sets loses its least recently used one: a tenant that invents names without end
    pushes out only its own.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: ToolKey, value: V) -> V:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._most:
            ((tenant, _),) = Counter(each for each, _ in self).most_common(1)
            del self[next(key for key in self if key[0] == tenant)]
        return value


class LatencyBook:
    """The statistics of one process, of at most `most` sets of tools."""

    def __init__(self, most: int = 4096) -> None:
        self._overall = Tally()
        self._tools: _Sets[Tally] = _Sets(most)

    def record(self, tenant: str, tools: str, seconds: float) -> None:
        """Add an interval. A negative one, of clocks that disagree, counts as 0; one without a tool counts overall."""
        if math.isfinite(seconds):
            seconds = max(seconds, 0.0)
            self._overall.add(seconds)
            if tools:
                key = tenant, tools
                self._tools.keep(key, self._tools.get(key) or Tally()).add(seconds)

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
    def of(cls, over: Sequence[float], count: int) -> "SurvivalCounts":
        """From durations of pauses that are over, in ascending order."""
        by_age = np.zeros((2, len(AGES)))
        by_age[0] = np.asarray(over).searchsorted(AGES, side="right")
        return cls(by_age, len(over), count)


class _Latest:
    """The last `RECENT` pauses that began: those that last, one by one, and the others as counts."""

    __slots__ = ("ended", "lasting", "pauses")

    def __init__(self) -> None:
        self.pauses: deque[ToolPause] = deque()
        self.lasting: dict[ToolPause, None] = {}
        self.ended = np.zeros((2, len(AGES) + 1))  # by `ToolPause.ended`

    def began(self, pause: "ToolPause") -> None:
        self.pauses.append(pause)
        self.lasting[pause] = None
        if len(self.pauses) > RECENT:
            oldest = self.pauses.popleft()
            if oldest.ended is not None:
                self.ended[oldest.ended] -= 1
            else:
                del self.lasting[oldest]


@dataclass(slots=True, eq=False)
class ToolPause:
    """One pause. `ended`: 0, or 1 if it was given up on, and the index of the first age that it did not outlast."""

    since: float
    among: tuple[_Latest, ...]
    ended: tuple[int, int] | None = None

    def end(self, now: float, *, returned: bool) -> None:
        """`returned`: the next turn has come. Else none will, and the pause counts as longer than it has lasted."""
        self.ended = int(not returned), bisect_left(_AGES, now - self.since)
        for latest in self.among:
            if self in latest.lasting:  # else it is no longer one of them
                del latest.lasting[self]
                latest.ended[self.ended] += 1


class Pauses:
    """A replica's latest pauses, over or not: the last `RECENT` that began of each set of tools, and of all.

    The latest by beginning, not by end, are a fair sample of all lengths. A program that never comes back is a pause
    that lasts until it is no longer among the latest.
    """

    def __init__(self, most: int = 256) -> None:
        self._all = _Latest()
        self._sets: _Sets[_Latest] = _Sets(most)

    def began(self, tenant: str, tools: str, now: float) -> ToolPause:
        """Without a tool it counts among all only, as in a `LatencyBook`."""
        among: tuple[_Latest, ...] = (self._all,)
        if tools:
            key = tenant, tools
            among = self._all, self._sets.keep(key, self._sets.get(key) or _Latest())
        pause = ToolPause(now, among)
        for latest in among:
            latest.began(pause)
        return pause

    def known(self, key: ToolKey | None, now: float) -> SurvivalCounts:
        """The counts of a set of tools; None: of all."""
        latest = self._all if key is None else self._sets.get(key)
        if latest is None:
            return SurvivalCounts.of((), 0)
        sums = latest.ended.cumsum(axis=1)
        by_age, over = sums[:, :-1], int(sums[0, -1])
        if latest.lasting:
            lasting = sorted([now - each.since for each in latest.lasting])
            by_age[1] += np.asarray(lasting).searchsorted(AGES, side="right")
        return SurvivalCounts(by_age, len(latest.pauses), over)
