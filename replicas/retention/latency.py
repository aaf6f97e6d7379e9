"""What a turn waits for, and how long that takes: the tools that a reply called, and statistics of their intervals.

An interval is measured by the server, from the end of decoding to the arrival of the program's next turn (Continuum,
section 4.2), and counts once, under the set of tools that the turn called. Here: what is known, frozen for readers, and
how one process adds an interval to it; and what one replica knows of pauses that are not over (`Pauses`). Not here:
where a cluster keeps its statistics (`router/tool_latency`).
"""

import math
import re
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

RECENT = 256  # durations kept for the distribution; the mean and the variance are of all


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
    """Intervals of one set of tools in seconds. `variance` is the sample's; `recent` are the last ones, ascending.

    `lasting`: how long those have lasted that are not over, where that is known. Without them long ones are missing
    from what is known until they end, and a tool looks quicker than it is.
    """

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    recent: tuple[float, ...] = ()
    lasting: tuple[float, ...] = ()


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


@dataclass(slots=True, eq=False)
class _Pause:
    """One pause: when it began, and until when it is known to have lasted; None: to this day. `over`: it ended then."""

    since: float
    until: float | None = None
    over: bool = False


class Pauses:
    """A replica's latest pauses, over or not: of each set of tools, and of all, the last `RECENT` that began.

    By when they began and not by when they ended, so that what is told of them is a sample of all lengths. A program
    that never comes back is a pause that lasts until it is none of the latest. Bounded: at most `most` sets; where
    there are more, the tenant that has most of them loses the one that it has not called for longest.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._all: deque[_Pause] = deque(maxlen=RECENT)
        self._sets: OrderedDict[ToolKey, deque[_Pause]] = OrderedDict()
        self._lasting: OrderedDict[Hashable, _Pause] = OrderedDict()  # by whose they are

    def began(self, whose: Hashable, tenant: str, tools: str, now: float) -> None:
        """Without a tool it counts among all alone, as in a `LatencyBook`."""
        self.forget(whose, now)
        pause = self._lasting[whose] = _Pause(now)
        self._all.append(pause)
        if tools:
            self._sets.setdefault((tenant, tools), deque(maxlen=RECENT)).append(pause)
            self._sets.move_to_end((tenant, tools))
        if len(self._lasting) > RECENT * self._most:
            self._lasting.popitem(last=False)
        if len(self._sets) > self._most:
            ((most, _),) = Counter(each for each, _ in self._sets).most_common(1)
            del self._sets[next(key for key in self._sets if key[0] == most)]

    def ended(self, whose: Hashable, now: float) -> None:
        """The next turn is here."""
        pause = self._lasting.pop(whose, None)
        if pause is not None:
            pause.until, pause.over = max(now, pause.since), True

    def forget(self, whose: Hashable, now: float) -> None:
        """There will be no next turn. How long it would have taken nobody knows: longer than it has."""
        pause = self._lasting.pop(whose, None)
        if pause is not None:
            pause.until = max(now, pause.since)

    def known(self, key: ToolKey | None, now: float) -> ToolLatency:
        """What is known of a set of tools; None: of all."""
        those = self._all if key is None else self._sets.get(key, ())
        over = sorted([pause.until - pause.since for pause in those if pause.over and pause.until is not None])
        until = [(now if pause.until is None else pause.until, pause.since) for pause in those if not pause.over]
        lasting = sorted([end - since for end, since in until])
        count = len(over)
        mean = sum(over) / count if count else 0.0
        variance = sum([(each - mean) ** 2 for each in over]) / (count - 1) if count > 1 else 0.0
        return ToolLatency(count, mean, variance, tuple(over), tuple(lasting))
