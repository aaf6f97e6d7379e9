"""How long a program's KV cells are kept between two turns, and the load statistics that decide it.

A policy answers three questions about a program that pauses, each a pure function of the pause, the tools' statistics
and the replica's load. `ExpectedWaste` is the default: InferCept's waste, weighed by the distribution of the pause.
`Continuum` is that paper's rule (section 4.3), `InferCept` that of InferCept. Policies that are only compared with
these are in `loadgen/simulator/policies.py`. Not here: how long tools take (`latency`), which cells are kept.
"""

import math
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.replicas.config import made
from holdfast.replicas.retention.latency import AGES, LatencySnapshot, Pauses, SurvivalCounts, ToolKey, ToolLatency

Array: TypeAlias = npt.NDArray[np.float64]
LocalCounts: TypeAlias = Callable[[ToolKey | None], SurvivalCounts]  # of a set of tools; None: of all
Span: TypeAlias = tuple[int, int]  # positions of a sequence: the first one, and the one after the last


@dataclass(frozen=True, slots=True)
class Pause:
    """A program between two turns, with `cells` in the cache. `tools` is the key of what it called (`tool_set`).

    `turn` counts from 1 after the program's last answer. `state`: how many cells its recurrent state is worth.
    """

    tenant: str
    tools: str
    cells: int
    turn: int = 1
    state: int = 0

    @property
    def held(self) -> int:
        """Memory that is kept for it, in cells."""
        return self.cells + self.state


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """Seconds until the KV of `n` tokens is there again: a n^2 + b n + c, or `reload` a cell from a host tier.

    `read`: seconds that a chunk of a few tokens takes for each cell that it reads.
    """

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    reload: float | None = None
    read: float = 0.0

    def seconds(self, n: int) -> float:
        """The cheaper way."""
        computed = self.computed(n)
        return computed if self.reload is None else min(computed, self.reload * n)

    def computed(self, n: int) -> float:
        """Without a host tier."""
        return (self.a * n + self.b) * n + self.c if n > 0 else 0.0

    def between(self, start: int, end: int) -> float:
        """Seconds that a step takes longer with the tokens from `start` to `end` of a prompt in it."""
        return (self.a * (start + end) + self.b) * (end - start) + self.read * end if end > start else 0.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """The load of a replica, as measured.

    `wait_s` is the mean queue delay of follow-up turns without pinned cells. `mean_turns` is the mean number of turns
    from a question to its answer. `eta`, 0 to 1, tells how well the turns so far predict the turns that are left.
    `others` counts the cells of running sequences, `paused` the cells kept for programs between turns; of these,
    `returning` cells a second are asked for again. `local` has the replica's own latest pauses.
    """

    wait_s: float = 0.0
    eta: float = 1.0
    mean_turns: float = 1.0
    others: int = 0
    paused: int = 0
    returning: float = 0.0
    restore: RestoreCost = field(default_factory=RestoreCost)
    local: LocalCounts | None = None

    def back_within(self, seconds: float) -> int:
        """Cells of paused programs that are expected to be asked for again within that time."""
        return int(min(self.paused, self.returning * seconds))


# ---- policies ----


class RetentionPolicy(Protocol):
    """The interface of a retention policy. A subclass has to define `ttl`. Times are seconds from the turn's end."""

    yielding: ClassVar[bool] = False
    """True: cells past their `ttl` stay until another request needs them, and go first then. False: they go at once."""

    @abstractmethod
    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        """How long the cells are kept; 0: not at all."""
        raise NotImplementedError

    def away(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        """The time after which the program gives way before programs that arrived later; inf: never."""
        return math.inf

    def first_within(self, pause: Pause, conditions: Conditions, *, lost: bool) -> float:
        """The time within which the next turn goes before turns of programs without cells; inf: always.

        `lost`: other programs have taken the program's own cells.
        """
        return 0.0 if lost else math.inf


class NoRetention(RetentionPolicy):
    """Keeps nothing but what the prefix cache keeps anyway."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return 0.0


class Continuum(RetentionPolicy):
    """Continuum, section 4.3: the t with the largest P(back within t) * (wait * eta + cost to restore) - t."""

    TRUSTED: ClassVar[int] = 100  # calls up to which a tool counts as the average one, and all as unknown (the paper)

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        benefit = conditions.wait_s * conditions.eta + conditions.restore.seconds(pause.cells)
        if latency.overall.count <= self.TRUSTED:
            # The paper's case of unknown tools: exponential intervals with a mean of 1 s.
            return math.log(benefit) if benefit > 1.0 else 0.0
        tool = latency.of(pause.tenant, pause.tools)
        return best_time(tool if tool.count > self.TRUSTED else latency.overall, benefit)


def best_time(tool: ToolLatency, benefit: float) -> float:
    """argmax over t in {0} and the recent durations of P(duration <= t) * benefit - t; the smallest of equals."""
    best, most, n = 0.0, 0.0, len(tool.recent)
    for i in range(bisect_left(tool.recent, benefit), 0, -1):
        returned, t = i / n * benefit, tool.recent[i - 1]
        if returned < most:
            break  # no shorter one can gain as much
        if returned - t >= most and returned > t:
            best, most = t, returned - t
    return best


class InferCept(RetentionPolicy):
    """InferCept: keep while that wastes less than losing the cells, as if a pause lasted as long again as it has."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return break_even_s(pause, conditions)


def discard_waste(pause: Pause, conditions: Conditions, *, returning: bool = False) -> float:
    """Cell-seconds that computing the cells again wastes: they and those of the running sequences wait (InferCept).

    `returning`: the cells of programs that come back meanwhile wait, too. InferCept does not count them.
    """
    seconds = conditions.restore.computed(pause.cells)
    waiting_cells = conditions.others + (conditions.back_within(seconds) if returning else 0)
    return seconds * (pause.held + waiting_cells)


def swap_waste(pause: Pause, conditions: Conditions) -> float:
    """Cell-seconds that copying the cells out and in wastes, beside steps that go on; inf without a host tier."""
    reload = conditions.restore.reload
    return math.inf if reload is None else 2 * (reload * pause.cells) * pause.held


def break_even_s(pause: Pause, conditions: Conditions, *, returning: bool = False) -> float:
    """Seconds for which keeping the cells wastes less than restoring them the cheaper way."""
    waste = min(discard_waste(pause, conditions, returning=returning), swap_waste(pause, conditions))
    return waste / pause.held if pause.held else 0.0


class ExpectedWaste(RetentionPolicy):
    """Keep while the expected waste of keeping is less than that of losing the cells, by the known pauses of the tools.

    At age e of a pause T, keeping for t more holds the cells for E[min(T - e, t)] and saves their loss with
    probability P(T <= e + t), both given T > e. It pays while

        loss * max over t of P(T - e <= t | T > e) / E[min(T - e, t) | T > e]  >=  cells

    The maximum is the Gittins index of a job of age e. It falls as the pause outlasts the quick calls of a tool, and
    `ttl` is the first age at which it is too low. Asking again later gives the same age as long as the conditions and
    statistics are the same. Cells that no request is short of cost nothing, so the policy is `yielding`.

    The latest program gives way first: cells taken from an earlier one are taken back when that returns. A program is
    `away` when the median of the rest of its pause is over `AWAY_WAITS` times what turns without cells wait. Then it
    returns later than that anyway.

    A turn that still has its cells goes first, as they are held while it waits. A turn without cells, or whose cells a
    host tier restores for less than computing them costs, goes first if it comes before the break-even time.
    """

    yielding: ClassVar[bool] = True
    PRIOR_S: ClassVar[float] = 1.0  # median pause of unknown tools: the mean that Continuum assumes for them
    DELTA: ClassVar[float] = 0.05  # probability that the truth is beyond a bound from samples; the usual 5 %
    AWAY_WAITS: ClassVar[float] = 2.0  # 1 to 5 measure alike (docs/decisions.md)

    def __init__(self) -> None:
        self._known: tuple[LatencySnapshot, LocalCounts | None] = (LatencySnapshot(), None)  # source of `_pauses`
        self._pauses: dict[ToolKey, ExpectedPause] = {}

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        keep_s = break_even_s(pause, conditions, returning=True)
        return self._expected(pause, latency, conditions.local).stop(keep_s) if keep_s > 0.0 else 0.0

    def away(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        if not conditions.wait_s:  # no turn has waited yet
            return math.inf
        return self._expected(pause, latency, conditions.local).away(self.AWAY_WAITS * conditions.wait_s)

    def first_within(self, pause: Pause, conditions: Conditions, *, lost: bool) -> float:
        cheap = swap_waste(pause, conditions) < discard_waste(pause, conditions, returning=True)
        return break_even_s(pause, conditions, returning=True) if lost or cheap else math.inf

    def _expected(self, pause: Pause, latency: LatencySnapshot, local: LocalCounts | None) -> "ExpectedPause":
        if self._known[0] is not latency or self._known[1] is not local:
            self._known = latency, local
            self._pauses.clear()
        key = pause.tenant, pause.tools
        expected = self._pauses.get(key)
        if expected is None:
            known = []
            for tool, which in ((latency.overall, None), (latency.of(*key), key)):
                known.append(SurvivalCounts.of(tool.recent, tool.count))
                if local is not None:  # a replica's own counts include pauses that are not over
                    known.append(local(which))
            expected = self._pauses[key] = ExpectedPause.of(survival(known, self.PRIOR_S, self.DELTA))
        return expected


POLICIES: Mapping[str, Callable[[], RetentionPolicy]] = {
    "none": NoRetention,
    "continuum": Continuum,
    "infercept": InferCept,
    "expected_waste": ExpectedWaste,
}


def retention_policy(name: str) -> RetentionPolicy:
    """The policy called `name`, or of the class `module:Class`. Raises ConfigError."""
    return made(name, POLICIES, RetentionPolicy, "retention.policy")


# ---- the distribution of a pause ----

_HALF_WIDTHS = np.diff(AGES) / 2


def survival(known: Iterable[SurvivalCounts], prior_s: float, delta: float) -> Array:
    """P(T > age) for each of `AGES`, mixed from the life tables of `known`, the most general first, and a prior.

    Each table counts by its `trust`, the more general ones and then the prior have the rest. The prior is
    prior_s / (prior_s + age): half of all pauses are over by `prior_s`, and one that lasts is expected to last as long
    again. Its Gittins index is 1 / (prior_s + age), so with nothing known this is InferCept's rule.
    """
    trusted = [(share, counts) for counts in known if counts.n and (share := trust(counts.count, delta)) > 0.0]
    left, shares = 1.0, []
    for share, _ in reversed(trusted):
        shares.append(left * share)
        left -= left * share
    alive: Array = left * prior_s / (prior_s + AGES)
    if trusted:
        alive += np.array(shares) @ life_tables([counts for _, counts in reversed(trusted)])
    return alive


def life_tables(several: Sequence[SurvivalCounts]) -> Array:
    """P(T > age) for each of `several` and each of `AGES`, as an actuarial life table. None may be of 0 pauses.

    Between two ages it is the pauses that end over the pauses at risk. A pause that is not over and has not yet reached
    the later age is at risk for half of the interval. If all are over, the table is their distribution.
    """
    over, lasting = np.array([each.by_age for each in several]).swapaxes(0, 1)
    n = np.array([[float(each.n)] for each in several])
    at_risk = n - over[:, :-1] - (lasting[:, :-1] + lasting[:, 1:]) / 2  # in halves; where it is 0 no pause ends
    alive: Array = np.empty(over.shape)
    alive[:, :1] = (n - over[:, :1]) / n
    alive[:, 1:] = 1.0 - (over[:, 1:] - over[:, :-1]) / np.maximum(at_risk, 0.5)
    np.cumprod(alive, axis=1, out=alive)
    return alive


def trust(count: int, delta: float) -> float:
    """Weight, from 0 to 1, of the distribution of `count` durations against what is known in general.

    1 less the empirical Bernstein bound (Maurer & Pontil 2009, theorem 4) of the error of a share of 1/2 among them.
    """
    if count < 2:
        return 0.0
    log = math.log(2.0 / delta)
    return max(0.0, 1.0 - math.sqrt(log / (2.0 * count)) - 7.0 * log / (3.0 * (count - 1)))


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedPause:
    """A pause at each of `AGES`, in expectation.

    `alive`: the probability that it lasts that long. `held`: seconds for which cells are held that are given up then.
    `left`: the median of the rest of the pause, in seconds.
    """

    alive: Array
    held: Array
    left: Array

    @classmethod
    def of(cls, alive: Array) -> "ExpectedPause":
        """From P(T > age)."""
        held = np.zeros(len(AGES))
        np.cumsum(_HALF_WIDTHS * (alive[1:] + alive[:-1]), out=held[1:])
        half = np.searchsorted(-alive, -alive / 2).clip(max=len(AGES) - 1)
        return cls(alive, held, AGES[half] - AGES)

    def stop(self, keep_s: float) -> float:
        """The age of least expected waste, where losing the cells wastes as much as holding them for `keep_s`.

        It is the first age at which the Gittins index is less than 1 / keep_s: keeping on to it pays from any earlier
        age, and no later age is worth it.
        """
        return float(AGES[(self.held + keep_s * self.alive).argmin()])

    def away(self, seconds: float) -> float:
        """The first age at which more than `seconds` are left; inf: there is none."""
        longer = self.left > seconds
        at = longer.argmax()
        return float(AGES[at]) if longer[at] else math.inf


# ---- the load of a replica ----

_WAITS = 128  # latest turns that the queue delay is averaged over; Continuum: 100 to 256
_RETURNS = 128  # latest programs that came back to their cells, for the rate of returns
_INSTANT = 1e-6  # seconds, so that the rate is finite when the first one has just come
LOOKED_AT_S = 1.0  # how old a view of the replica's own pauses may be


class LoadStats:
    """The load of a replica as it measures it, for the policies. The engine reports to it as it runs.

    `latency` is the latest snapshot of the tools' statistics, `reload` seconds a cell from a host tier, if there is
    one. It outlives the books of the cache: a replica that rebuilds them still knows its load.
    """

    def __init__(self) -> None:
        self.latency = LatencySnapshot()
        self.pauses = Pauses()
        self.turns = Turns()
        self.reload: float | None = None
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._returns: deque[tuple[float, int]] = deque(maxlen=_RETURNS)
        self._prefill = PrefillFit()
        self._local: LocalCounts | None = None  # as of `_local_at`
        self._local_at = -math.inf

    def waited(self, seconds: float) -> None:
        """A follow-up turn without pinned cells waited `seconds` before it began."""
        self._waits.append(seconds)

    def returned(self, cells: int, now: float) -> None:
        """A turn arrived whose program had `cells` pinned cells."""
        self._returns.append((now, cells))

    def prefilled(self, spans: Iterable[Span], seconds: float) -> None:
        """A step that computed `spans` took `seconds`."""
        self._prefill.measured(spans, seconds)

    @property
    def cost(self) -> RestoreCost:
        """The cost of computing a prompt; all 0 until enough steps were measured."""
        return self._prefill.cost

    @property
    def token_s(self) -> float:
        """Seconds a token of a prompt of a thousand; 0: not known yet."""
        return self.cost.seconds(1000) / 1000

    def conditions(self, others: int = 0, paused: int = 0, now: float = 0.0) -> Conditions:
        """The load `now`; `others` and `paused` are those of `Conditions`."""
        if now - self._local_at >= LOOKED_AT_S:  # each set of tools is counted when it is first asked for
            self._local, self._local_at = cache(partial(self.pauses.known, now=now)), now
        wait = sum(self._waits) / len(self._waits) if self._waits else 0.0
        cost = self.cost if self.reload is None else replace(self.cost, reload=self.reload, read=0.0)
        returning = 0.0
        if self._returns:
            returning = sum(cells for _, cells in self._returns) / max(now - self._returns[0][0], _INSTANT)
        return Conditions(wait, self.turns.eta, self.turns.mean, others, paused, returning, cost, self._local)


class Turns:
    """How many turns finished programs had, and how well the turns done predict the turns left.

    Each turn of a finished program is one point (turns done, turns left). A program that is asked again after its
    answer counts as another one.
    """

    def __init__(self) -> None:
        self.programs = 0
        self._sums = np.zeros(6)  # over all points: 1, done, done^2, left, left^2, done * left

    def ended(self, turns: int) -> None:
        """A program has ended after `turns` turns."""
        done = np.arange(1.0, turns + 1)
        left = turns - done
        self.programs += 1
        self._sums += np.array((turns, done.sum(), done @ done, left.sum(), left @ left, done @ left))

    @property
    def mean(self) -> float:
        return float(self._sums[0]) / self.programs if self.programs else 1.0

    @property
    def eta(self) -> float:
        """Minus the correlation of turns done and turns left, kept within [0, 1]; 1 until it is known.

        Programs with ever more turns before them would make it negative, but a wait that is saved is never a loss.
        """
        n, done, done2, left, left2, product = self._sums.tolist()
        spread = (n * done2 - done**2) * (n * left2 - left**2)
        return min(max((done * left - n * product) / math.sqrt(spread), 0.0), 1.0) if spread > 0 else 1.0


_KEPT = 0.98  # weight of all earlier steps when one is added
_FIRST, _REFRESH = (2, 4), 8  # numbers of measured steps after which the fit is computed: first these, then every 8
# The prior: at so many tokens, once a step, and at so many cells read, each term takes as long as the tokens do.
_EVEN = 16_384  # tokens before a token, for attention
_FIXED = 128  # tokens that take as long as the fixed part of a step
_READ = 512  # cells read while a token is computed
_PRIOR = 1e-4  # weight of the prior, as a share of what all steps say about tokens
_ALIKE = _PRIOR * np.array(((1, -1, 0, 0), (-1, 3, -1, -1), (0, -1, 1, 0), (0, -1, 0, 1)))  # (x1 - x)^2, of the others


class PrefillFit:
    """The coefficients of `RestoreCost`, by least squares over steps with a prefill; older steps count less.

    A step that computes the tokens from `start` to `end` takes a (end^2 - start^2) + b (end - start) + c. Continuum
    fits the same polynomial beforehand. Sequences that decode beside it and short chunks take `read` for each cell.
    No coefficient is negative.

    The error is relative to a step's seconds, so a step that was held up, however long, is wrong by 1 at most. Steps
    that are all alike, or too short to take longer than reading the weights, do not tell the terms apart. A weak prior
    (`_EVEN`, `_FIXED`, `_READ`) does until other steps come.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._products = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self.cost = RestoreCost()

    def measured(self, spans: Iterable[Span], seconds: float) -> None:
        """A step that computed `spans`, at least one of them of a prompt, took `seconds`."""
        if seconds <= 0:
            return
        squares = tokens = cells = 0.0
        for start, end in spans:
            squares += end * end - start * start
            tokens += end - start
            cells += end
        x = np.array((squares / (2 * _EVEN), tokens, _FIXED, cells / _READ)) / seconds
        self._products = _KEPT * self._products + x[:, None] * x
        self._sums = _KEPT * self._sums + x
        self._seen += 1
        if self._seen in _FIRST or self._seen % _REFRESH == 0:
            a, b, c, read = not_negative(self._products + self._products[1, 1] * _ALIKE, self._sums).tolist()
            self.cost = RestoreCost(a / (2 * _EVEN), b, c * _FIXED, read=read / _READ)


def not_negative(products: Array, sums: Array) -> Array:
    """The coefficients x >= 0 with the least |Ax - y|, from A'A [n, n] and A'y [n]: of all terms, or of the best set.

    Looks at every set of terms where one coefficient would be negative, so n is to be small.
    """
    n, best, least = len(sums), np.zeros(len(sums)), 0.0
    for terms in (list(each) for size in range(n, 0, -1) for each in combinations(range(n), size)):
        square = products[np.ix_(terms, terms)]
        x = np.linalg.lstsq(square, sums[terms], rcond=1e-10)[0]
        loss = float(x @ square @ x - 2 * x @ sums[terms])
        if (x >= 0).all() and loss < least:
            best, least = np.zeros(n), loss
            best[terms] = x
            if len(terms) == n:
                break
    return best
