"""For how long a program's cells are kept after a turn, and what a replica learns to decide it (Continuum, 4.3).

Seven policies behind three pure calls: for how long, from when on a program is away, and until when its next turn goes
first. `gittins`, the default, weighs InferCept's waste by what is known of the tools. Source of the other formulas:
Continuum's first version (`bernstein`), its simplified one (`fixed`), its later one (`continuum`). `infercept` is
InferCept's rule, `none` and `restore-cost` are what to measure them against. Below them what they look at: the cost of
having cells again, fitted to the steps that the engine runs, the turns of programs, how fast they come back, the queue
delay. Not here: how long tools take (`latency`), whose cells are kept (`pins`).
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.replicas.config import PolicyName, RetentionConfig
from holdfast.replicas.retention.latency import (
    AGES,
    UNKNOWN,
    LatencySnapshot,
    Pauses,
    SurvivalCounts,
    ToolKey,
    ToolLatency,
)

Array: TypeAlias = npt.NDArray[np.float64]
Span: TypeAlias = tuple[int, int]  # positions of a sequence: the first, and the one behind the last


@dataclass(frozen=True, slots=True)
class Pause:
    """A turn is over and its program is expected back: `tools` is the key of what it called.

    `turn` counts from 1 after the program's last answer.
    """

    tenant: str
    tools: str
    cells: int
    turn: int = 1


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """Seconds to have `n` cells again: a n^2 + b n + c, or `reload` a cell where there is a tier to copy them from.

    `read`: what a chunk of a few tokens takes for each of the cells that it looks at.
    """

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    reload: float | None = None
    read: float = 0.0

    def seconds(self, n: int) -> float:
        computed = self.computed(n)
        return computed if self.reload is None else min(computed, self.reload * n)

    def computed(self, n: int) -> float:
        """Without a tier."""
        return (self.a * n + self.b) * n + self.c if n > 0 else 0.0

    def between(self, start: int, end: int) -> float:
        """How much longer a step takes with the tokens from `start` to `end` of a prompt in it."""
        return (self.a * (start + end) + self.b) * (end - start) + self.read * end if end > start else 0.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the replica has measured. `wait_s`: mean queue delay of follow-up turns without a pin. `eta`: how much the
    turns a program has behind it say of those before it. `mean_turns` from a question to its answer. `local`: its own
    latest pauses.

    `others` are the cells of the sequences that run, `paused` those that are kept for programs between their turns, of
    which so many a second are `returning`.
    """

    wait_s: float = 0.0
    eta: float = 1.0
    mean_turns: float = 1.0
    others: int = 0
    paused: int = 0
    returning: float = 0.0
    restore: RestoreCost = field(default_factory=RestoreCost)
    local: "LocalPauses | None" = None

    def back_within(self, seconds: float) -> int:
        """Cells of programs between their turns that are asked for again so soon, by how fast that has gone."""
        return int(min(self.paused, self.returning * seconds))


class Policy(Protocol):
    yielding: ClassVar[bool]
    """What is kept past its time stays until somebody is short of cells, and goes first then. Else it goes at once."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        """Seconds from the turn's end; 0: not at all."""
        ...

    def away(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        """Seconds from the turn's end after which the next is so far off that the program gives way before later ones.

        inf: it never is.
        """
        ...

    def first_within(self, pause: Pause, conditions: Conditions, *, lost: bool) -> float:
        """Seconds from the turn's end within which the next one stands before those of programs without cells.

        `lost`: its own are gone, for others needed them. inf: whenever it comes.
        """
        ...


def policy_of(config: RetentionConfig) -> Policy:
    """The policy that `config` names."""
    policies: dict[PolicyName, Policy] = {
        "none": NoRetention(),
        "fixed": Fixed(config),
        "bernstein": Bernstein(config),
        "continuum": Continuum(config),
        "restore-cost": RestoreTime(),
        "infercept": InferCept(),
        "gittins": Gittins(config),
    }
    return policies[config.policy]


class Dropping:
    """A policy for which what is past its time goes at once, and before that the latest program gives way."""

    yielding: ClassVar[bool] = False

    def away(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return math.inf

    def first_within(self, pause: Pause, conditions: Conditions, *, lost: bool) -> float:
        return 0.0 if lost else math.inf


class NoRetention(Dropping):
    """Nothing is kept beyond what the cache keeps anyway."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Fixed(Dropping):
    """The same for all tools whose mean interval is at most as long, and for those that nobody knows (section 4.5)."""

    config: RetentionConfig

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        limit = self.config.fixed_s
        return limit if latency.of(pause.tenant, pause.tools).mean <= limit else 0.0


@dataclass(frozen=True, slots=True)
class Bernstein(Dropping):
    """An upper bound of the interval, longer for a program that is likely to have many turns before it.

    The paper's scaling by turns is lost; ours is 1 + weight * max(0, 1 - turn / mean turns).
    """

    config: RetentionConfig

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        config, tool = self.config, latency.of(pause.tenant, pause.tools)
        if tool.count >= config.tool_samples:
            bound = upper_bound(tool, config.delta)
        elif latency.overall.count >= config.overall_samples:
            bound = upper_bound(latency.overall, config.delta)
        else:
            bound = config.unknown_s
        left = max(0.0, 1.0 - pause.turn / max(conditions.mean_turns, 1.0))
        return bound * (1.0 + config.turns_weight * left)


def upper_bound(tool: ToolLatency, delta: float) -> float:
    """Empirical Bernstein bound of the mean (Maurer & Pontil 2009, theorem 4), with probability 1 - delta.

    The range of the intervals is unknown beforehand; the longest recent one stands for it.
    """
    if tool.count < 2:
        return tool.mean
    log = math.log(2.0 / delta)
    widest = tool.recent[-1] if tool.recent else tool.mean
    return tool.mean + math.sqrt(2.0 * tool.variance * log / tool.count) + 7.0 * widest * log / (3.0 * (tool.count - 1))


@dataclass(frozen=True, slots=True)
class Continuum(Dropping):
    """Where keeping pays most: argmax over t of P(back within t) * (wait * eta + cost to restore) - t."""

    config: RetentionConfig

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        benefit = conditions.wait_s * conditions.eta + conditions.restore.seconds(pause.cells)
        enough = self.config.trusted_samples
        if latency.overall.count <= enough:
            # Nobody knows the tools: as if their intervals were exponential with a mean of 1 s.
            return math.log(benefit) if benefit > 1.0 else 0.0
        tool = latency.of(pause.tenant, pause.tools) if pause.tools else UNKNOWN
        return best_time(tool if tool.count > enough else latency.overall, benefit)


def best_time(tool: ToolLatency, benefit: float) -> float:
    """argmax over t in {0} and the recent durations of P(duration <= t) * benefit - t; the smallest of equals."""
    best, most = 0.0, 0.0
    for i in range(bisect_left(tool.recent, benefit) - 1, -1, -1):
        returned = (i + 1) / len(tool.recent) * benefit
        if returned < most:
            break  # no shorter one can gain as much
        gain = returned - tool.recent[i]
        if gain >= most and gain > 0.0:
            best, most = tool.recent[i], gain
    return best


class RestoreTime(Dropping):
    """As long as having the cells again would take: at most twice the cost of who knew the interval beforehand."""

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return conditions.restore.seconds(pause.cells)


class InferCept(Dropping):
    """As long as keeping wastes less memory and time than computing again, or copying out and in (InferCept).

    The time that a pause has lasted is taken for the time it will last.
    """

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        return preserve_until(interception(pause, conditions))


def interception(pause: Pause, conditions: Conditions, *, pauses_too: bool = False) -> "Interception":
    """What a pause costs under these conditions; copies overlap with steps. `pauses_too`: who comes back meanwhile
    waits as those do that run.
    """
    cost = conditions.restore
    swap = math.inf if cost.reload is None else cost.reload * pause.cells
    recompute_s, others = cost.computed(pause.cells), conditions.others
    if pauses_too:
        others += conditions.back_within(recompute_s)
    return Interception(pause.cells, others, recompute_s, swap, stalled=pause.cells)


@dataclass(frozen=True, slots=True)
class Interception:
    """A program that pauses: its `cells`, and what it costs to have them again (InferCept). Times are in seconds.

    Waste is cells times the seconds in which they do nothing useful. All three ways pay for the same bytes a cell, so
    bytes do not appear.

    `others` are the cells of those that wait while this one's are computed again: the others that run, and who comes
    back meanwhile where that is counted. `stalled` are the cells that wait while cells are copied: the whole batch
    where a copy stops it, the program's own where copies overlap with steps.
    """

    cells: int
    others: int
    recompute_s: float
    swap_s: float = math.inf  # one way; without a host tier there is none
    stalled: int = 0

    @property
    def discard(self) -> float:
        """Cell-seconds: its own cells fill up again, and the others wait meanwhile."""
        return self.recompute_s * (self.cells + self.others)

    @property
    def swap(self) -> float:
        """Cell-seconds: out and in again."""
        return 2 * self.swap_s * max(self.stalled, self.cells)

    def preserve(self, pause_s: float) -> float:
        """Cell-seconds of a pause of that length."""
        return pause_s * self.cells


def preserve_until(pause: Interception) -> float:
    """For how many seconds preserving wastes least. As a time to live this is the rule for a pause of unknown length:
    InferCept takes the time that a pause has lasted for the time it will last.
    """
    return min(pause.discard, pause.swap) / pause.cells if pause.cells else 0.0


class Gittins:
    """While the expected waste of keeping on is less than that of losing the cells, which is InferCept's, but that who
    comes back while they are computed again waits for it as well.

    At age e of a pause T, keeping for t more holds its cells for E[min(T - e, t)] and saves their loss with
    P(T <= e + t), both given T > e. So it pays where

        loss * max over t of P(T - e <= t | T > e) / E[min(T - e, t) | T > e]  >=  cells

    The maximum is Gittins' index of a job of age e: as a pause goes on it falls from that of the quick calls of a tool
    to that of its slow ones. The first age at which it is too low is the time to stop. It does not matter when that is
    asked: nothing but new conditions, or new statistics, changes the answer. A cell that nobody is short of costs
    nothing to keep, so the policy is `yielding`.

    Of programs that may give way it is the latest: its cells are taken sooner or later, and an earlier one would come
    back and take them. Not so where it is `away` for longer than that takes: the median of what is left of its pause is
    over `away_waits` times what turns wait whose cells are gone.

    A turn that has its cells goes first, for they are held while it waits. One whose cells were `lost`, or come back
    from a host tier for less than computing takes, does where it comes before keeping them would have cost as much.
    """

    yielding: ClassVar[bool] = True

    def __init__(self, config: RetentionConfig) -> None:
        self._config = config
        self._known: tuple[LatencySnapshot, LocalPauses | None] = (LatencySnapshot(), None)  # what the pauses are of
        self._pauses: dict[ToolKey, ExpectedPause] = {}

    def ttl(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        keep_s = preserve_until(interception(pause, conditions, pauses_too=True))
        if keep_s <= 0.0:
            return 0.0
        return self._expected(pause, latency, conditions.local).stop(keep_s)

    def away(self, pause: Pause, latency: LatencySnapshot, conditions: Conditions) -> float:
        if not conditions.wait_s:  # nobody has waited yet
            return math.inf
        return self._expected(pause, latency, conditions.local).away(self._config.away_waits * conditions.wait_s)

    def first_within(self, pause: Pause, conditions: Conditions, *, lost: bool) -> float:
        loss = interception(pause, conditions, pauses_too=True)
        return preserve_until(loss) if lost or loss.swap < loss.discard else math.inf

    def _expected(self, of: Pause, latency: LatencySnapshot, local: "LocalPauses | None") -> "ExpectedPause":
        key = of.tenant, of.tools
        if self._known[0] is not latency or self._known[1] is not local:
            self._known = latency, local
            self._pauses.clear()
        pause = self._pauses.get(key)
        if pause is None:
            known = [SurvivalCounts.of(latency.overall), SurvivalCounts.of(latency.of(*key))]
            if local is not None:
                known = [known[0], local.of(None), known[1], local.of(key)]
            pause = self._pauses[key] = ExpectedPause.of(survival(known, self._config.prior_s, self._config.delta))
        return pause


LOOKED_AT_S = 1.0  # from one look at a replica's own pauses to the next

_HALF_WIDTHS = np.diff(AGES) / 2


def survival(known: Iterable[SurvivalCounts], prior_s: float, delta: float) -> Array:
    """P(T > age) for each of `AGES`: what is `known`, the most general first, each with its `trust`; else the prior.

    What a replica has seen itself stands behind what the cluster says of the same tools: it has the pauses that last.

    The prior is prior_s / (prior_s + age): half of all pauses are over by `prior_s`, and one that lasts is expected to
    last as long again. Gittins' index of it is 1 / (prior_s + age), so with nothing known this is InferCept's rule.
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
    """P(T > age) for each of `several` and each of `AGES`, as a life table has it. None of them is of no pauses.

    From one age to the next those that end, over those that could have been seen to: who still lasts and has not yet
    lasted through it is counted as half a one. Where all are over this is their distribution.
    """
    over, lasting = np.array([each.by_age for each in several]).swapaxes(0, 1)
    n = np.array([[float(each.n)] for each in several])
    at_risk = n - over[:, :-1] - (lasting[:, :-1] + lasting[:, 1:]) / 2  # halves; where none is, none ends
    alive: Array = np.empty(over.shape)
    alive[:, :1] = (n - over[:, :1]) / n
    alive[:, 1:] = 1.0 - (over[:, 1:] - over[:, :-1]) / np.maximum(at_risk, 0.5)
    np.cumprod(alive, axis=1, out=alive)
    return alive


def trust(count: int, delta: float) -> float:
    """How much the distribution of so many durations counts against what is known of others, from 0 to 1.

    1 less Bernstein's bound (`upper_bound`) of how far a share of 1/2 among them may be from the truth.
    """
    if count < 2:
        return 0.0
    log = math.log(2.0 / delta)
    return max(0.0, 1.0 - math.sqrt(log / (2.0 * count)) - 7.0 * log / (3.0 * (count - 1)))


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedPause:
    """A pause at each of `AGES`: `alive`, whether it lasts that long, and `held`, for how long cells are held by then
    that are given up no earlier; in expectation. `left`: the median of what is left of it then, in seconds.
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
        """The age at which to give up what holding for `keep_s` costs as much as losing, for the least waste.

        That is the first age at which Gittins' index is less than 1 / keep_s. Up to the age of least waste going on to
        it is worth it from wherever one stands, and behind it nothing is.
        """
        return float(AGES[(self.held + keep_s * self.alive).argmin()])

    def away(self, seconds: float) -> float:
        """The first age at which more than that is left; inf: there is none."""
        longer = self.left > seconds
        at = longer.argmax()
        return float(AGES[at]) if longer[at] else math.inf


# ---- what is learned ----

_RETURNS = 128  # of programs to their cells, the latest, that tell how fast it goes
_INSTANT = 1e-6  # seconds, for what has only just begun


class LoadStats:
    """What a replica learns of its own load for the policies. `latency` is the latest snapshot of tools' statistics.

    Told by the engine as it runs. It outlives the books of the cache: a replica that starts anew still knows its load.

    `reload` is seconds a cell from a host tier, where there is one.
    """

    def __init__(self, wait_window: int) -> None:
        self.latency = LatencySnapshot()
        self.pauses = Pauses()
        self.turns = Turns()
        self.reload: float | None = None
        self._waits: deque[float] = deque(maxlen=wait_window)
        self._waited = 0.0
        self._returns: deque[tuple[float, int]] = deque(maxlen=_RETURNS)
        self._returned = 0
        self._prefill = PrefillFit()
        self._local = LocalPauses(self.pauses, -math.inf)

    def waited(self, seconds: float) -> None:
        """A follow-up turn whose cells were not pinned waited so long before it began."""
        if len(self._waits) == self._waits.maxlen:
            self._waited -= self._waits[0]
        self._waits.append(seconds)
        self._waited += seconds

    def returned(self, cells: int, now: float) -> None:
        """A turn came, and so many cells had been kept for its program."""
        if len(self._returns) == _RETURNS:
            self._returned -= self._returns[0][1]
        self._returns.append((now, cells))
        self._returned += cells

    def prefilled(self, spans: Iterable[Span], seconds: float) -> None:
        """A step that computed these took so long."""
        self._prefill.measured(spans, seconds)

    @property
    def cost(self) -> RestoreCost:
        """What computing takes; nothing until enough has been seen."""
        return self._prefill.cost

    @property
    def token_s(self) -> float:
        """Seconds that a prompt of a thousand tokens takes for each of them; 0: not known yet."""
        return self._prefill.cost.seconds(1000) / 1000

    def conditions(self, others: int = 0, paused: int = 0, now: float = 0.0) -> Conditions:
        """What a policy may know `now`; `others` and `paused` are as of `Conditions`."""
        if now - self._local.at >= LOOKED_AT_S:
            self._local = LocalPauses(self.pauses, now)
        wait = max(self._waited, 0.0) / len(self._waits) if self._waits else 0.0
        cost = self._prefill.cost
        if self.reload is not None:
            cost = type(cost)(cost.a, cost.b, cost.c, self.reload)
        returning = self._returned / max(now - self._returns[0][0], _INSTANT) if self._returns else 0.0
        return Conditions(wait, self.turns.eta, self.turns.mean, others, paused, returning, cost, self._local)


class LocalPauses:
    """What a replica knows of its own latest pauses, as they were `at` one moment or are when first asked for."""

    def __init__(self, pauses: Pauses, at: float) -> None:
        self.at = at
        self._pauses = pauses
        self._known: dict[ToolKey | None, SurvivalCounts] = {}

    def of(self, key: ToolKey | None) -> SurvivalCounts:
        """Of a set of tools; None: of all."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._pauses.known(key, self.at)
        return known


class Turns:
    """How many turns finished programs had, and what the turns done say of the turns left.

    A program that is asked again after its answer counts as another one. Each turn of a finished program is one point
    (turns done, turns left); sums over a program have closed forms.
    """

    def __init__(self) -> None:
        self.programs = 0
        self._points = self._done = self._done2 = self._left = self._left2 = self._both = 0.0

    def ended(self, turns: int) -> None:
        """A program has ended after so many turns."""
        n = turns
        done, done2 = n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6
        self.programs += 1
        self._points += n
        self._done += done
        self._done2 += done2
        self._left += n * n - done
        self._left2 += n * n * n - 2 * n * done + done2
        self._both += n * done - done2

    @property
    def mean(self) -> float:
        return self._points / self.programs if self.programs else 1.0

    @property
    def eta(self) -> float:
        """Minus the correlation of turns done and turns left, kept within [0, 1]; 1 until it is known.

        Programs with ever more turns before them would make it negative, and a wait that is saved is no loss.
        """
        n = self._points
        spread = (n * self._done2 - self._done**2) * (n * self._left2 - self._left**2)
        if spread <= 0:
            return 1.0
        correlation = (n * self._both - self._done * self._left) / math.sqrt(spread)
        return min(max(-correlation, 0.0), 1.0)


_KEPT = 0.98  # weight of what is known already when a step is added


_FIRST = (2, 4)  # steps with a prefill after which the fit says anything, and more


_REFRESH = 8  # steps after which it is drawn anew


_EVEN = 16_384  # tokens: one behind so many is taken to need as much for attention as for all else


_FIXED = 128  # tokens that are taken to need as much as all that a step does once


_READ = 512  # cells that are taken to be read while a token is computed


_DOUBT = 1e-4  # how much that counts, as a share of what all steps say of tokens


_ALIKE = _DOUBT * np.array(((1, -1, 0, 0), (-1, 3, -1, -1), (0, -1, 1, 0), (0, -1, 0, 1)))  # (x1 - x)^2, of the others


class PrefillFit:
    """The coefficients of `RestoreCost`, by least squares over the steps with a prefill, the older the less.

    A step that computes the tokens from `start` to `end` of a prompt takes a (end^2 - start^2) + b (end - start) + c;
    Continuum fits the same polynomial beforehand. Sequences that decode beside it, and chunks of few tokens, take what
    reading their cells does, `read` each. No coefficient is negative.

    What is squared is the share of a step's seconds that the fit is wrong by: a step that something else held up, by
    however much, is wrong by 1 at most. Steps that are all alike, or so short that they take what reading the weights
    takes, say little of what each term takes. Then all take about what `_EVEN`, `_FIXED` and `_READ` say, which steps
    that do tell soon outweigh.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._products = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self.cost = RestoreCost()

    def measured(self, spans: Iterable[Span], seconds: float) -> None:
        """A step that computed these took `seconds`, a part of a prompt among them."""
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
    whole = np.linalg.lstsq(products, sums, rcond=1e-10)[0]
    if (whole >= 0).all():
        return np.asarray(whole)
    best, least = np.zeros(len(sums)), 0.0
    for size in range(1, len(sums)):
        for terms in combinations(range(len(sums)), size):
            chosen = list(terms)
            square = products[np.ix_(chosen, chosen)]
            x = np.linalg.lstsq(square, sums[chosen], rcond=1e-10)[0]
            loss = float(x @ square @ x - 2 * x @ sums[chosen])
            if (x >= 0).all() and loss < least:
                best, least = np.zeros(len(sums)), loss
                best[chosen] = x
    return best
