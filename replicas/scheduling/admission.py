"""From waiting to running: who is started in a step, who waits for a leader, who has waited too long.

Admission counts cells (stateful inference, section 3.2): what runs, with what it may come to need, stays below a
ceiling. Grouped prefill (the same section): a prefix that several waiting prompts share is computed by one of them.
Deadlines: who cannot have its answer in the time that it gave is refused when it comes, or as soon as that is sure.
Where the queue is full who comes gives way, or the last of a lower class.

The leader is a running sequence in the middle of its prompt; a follower waits until the leader's cells reach the end of
what they share, and then aliases them through the tree like any cached prefix.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ContextLengthError, DeadlineError, ErrorInfo, ErrorKind, OverloadedError
from holdfast.replicas.events import Event, Rejected, Submit
from holdfast.replicas.kv.cache import Freed, KVCache
from holdfast.replicas.kv.limits import SHARED
from holdfast.replicas.kv.radix import Prefix
from holdfast.replicas.programs import ProgramPin, Programs, Sequence, Status
from holdfast.replicas.requests import GenerateRequest
from holdfast.replicas.scheduling.batch import Running, StepBuilder, Terminator
from holdfast.replicas.scheduling.queue import Line, RequestOrder, WaitingQueue
from holdfast.replicas.scheduling.shares import Bounds, Classes
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import common_prefix

_PASSED_OVER = 64  # requests that are held of one line, which others stand in, too, and are passed over in a step
_TOO_LATE = ErrorInfo(ErrorKind.OVERLOADED, "the request waited too long for a place in the batch")
_PASSED = ErrorInfo(ErrorKind.DEADLINE, "too little of the time that the request gave is left to serve it")
_GAVE_WAY = ErrorInfo(ErrorKind.OVERLOADED, "so much waits that this request had to give way to one of a higher class")


@dataclass(frozen=True, slots=True)
class Following:
    """`follower` gains `gain` tokens by waiting until `leader` has computed `shared`."""

    follower: Sequence
    leader: Sequence
    shared: int
    gain: int

    @property
    def over(self) -> bool:
        """Nothing is left to wait for: the shared tokens are computed, or the leader has gone."""
        return self.leader.status is not Status.RUNNING or self.leader.n_computed >= self.shared


class Held(Enum):
    """Why a waiting sequence is not started."""

    ALL = "all"  # there is no room: nobody passes it, but who has a floor to come to
    TENANT = "tenant"  # its tenant may have no more, or the floors of others are kept from it: theirs pass it


@dataclass(slots=True)
class _Round:
    """One look at all that wait. In cells, what those who run may come to need beyond what they have, and by tenant.

    `passed`: lines of tenants whose head is held; `aside`: heads that are, of lines that others stand in, too. `short`:
    somebody is held for lack of room, so that from then on only who stays within its floor is started.
    """

    needed: int
    promised: Counter[str]
    passed: set[Line] = field(default_factory=set)
    aside: list[Sequence] = field(default_factory=list)
    short: bool = False

    def after(self, cache: KVCache, sequence: Sequence, need: int, prefix: Prefix | None) -> int:
        """Cells that its tenant may come to use with a sequence that needs so many beyond its cached prefix."""
        scope = sequence.submit.scope
        return cache.cells.active_of(scope) + self.promised[scope] + need + cache.cells.available_in(prefix)

    def began(self, sequence: Sequence, need: int) -> None:
        self.needed += need
        self.promised[sequence.submit.scope] += need


class Admission:
    """The waiting sequences, and the rules by which they are started."""

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        programs: Programs,
        running: Running,
        waiting: WaitingQueue,
        classes: Classes,
        ends: Terminator,
        order: RequestOrder,
        stats: EngineStats,
    ) -> None:
        self._config = config
        self._cache = cache
        self._programs = programs
        self._running = running
        self._budget = Budget.of(config)
        self._stats = stats
        self._classes = classes
        self._order = order
        self._ends = ends
        self._waiting = waiting
        self._following: list[Following] = []
        self.forecast = ends.forecast
        self._deadlines: list[tuple[float, int, Sequence]] = []  # with the latest moment at which each may start

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    @property
    def tokens(self) -> int:
        """In the prompts of all that wait."""
        return self._waiting.tokens

    @property
    def tokens_ahead(self) -> int:
        """Of these, in work ahead."""
        return self._waiting.tokens_ahead

    def push(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        if sequence.submit.within_s < inf and not sequence.preempted:
            serving_s = self.forecast.serving_s(sequence.sampling.max_tokens, sequence.submit.begins)
            latest = _deadline(sequence) - serving_s
            heapq.heappush(self._deadlines, (latest, sequence.number, sequence))

    def make_room(self, sequence: Sequence, queued: int) -> list[Event]:
        """Room in the queue for one that comes; `queued` others wait elsewhere. What had to give way for it.

        Raises OverloadedError, and then nobody has given way.
        """
        bounds = Bounds(self._config.max_waiting - queued, self._config.max_waiting_tokens)
        lower = self._waiting.last_below(sequence.submit.rank)
        leaving = bounds.giving_way(lower, len(self._waiting), self.tokens, sequence.n_prompt)
        if leaving is None:
            self._stats.not_begun["full"] += 1
            raise OverloadedError(f"{len(self._waiting)} requests of {self.tokens} tokens are waiting already")
        return [self._end(each, _GAVE_WAY, "gave_way") for each in leaving]

    def judge(self, sequence: Sequence) -> None:
        """Raises DeadlineError for one that comes and whose answer cannot be expected in the time that it gives.

        Only where others wait, or the batch is half full: before that trying costs nobody much, and what was learned of
        a full batch does not hold.
        """
        within_s, n, forecast = sequence.submit.within_s, len(self._waiting), self.forecast
        if within_s == inf or not (n or self._half_full):
            return
        wants = sequence.sampling.max_tokens, sequence.submit.begins
        sequence.expected_s = forecast.answer_s(*wants, n)
        if sequence.expected_s * forecast.correction > within_s:  # were all of them before it
            sequence.expected_s = forecast.answer_s(*wants, self._waiting.before(sequence))
        expected_s = sequence.expected_s * forecast.correction
        if expected_s > within_s and not sequence.submit.foreseen:
            self._stats.not_begun["refused"] += 1
            raise _unmet(expected_s, within_s)

    @property
    def _half_full(self) -> bool:
        return 2 * len(self._running) >= self._config.max_sequences

    def foresee(self, submit: GenerateRequest, max_tokens: float, coming: int) -> bool:
        """`judge` from outside of a step, for a new program's request, which comes behind all that wait and are not of
        a lower class. `coming`: others that are not in the queue yet. Any thread may ask.

        Whether there was anything to judge by. Then its being let in stands: for a hair's breadth it would be refused
        after a step, when its client might have gone elsewhere.
        """
        waiting = self._waiting.up_to(submit.rank)
        if submit.within_s == inf or not (waiting or self._half_full):
            return False
        before = waiting + coming if waiting else 0
        expected_s = self.forecast.answer_s(max_tokens, submit.begins, before) * self.forecast.correction
        if expected_s > submit.within_s:
            self._stats.not_begun["foreseen"] += 1  # the caller's thread alone counts these
            raise _unmet(expected_s, submit.within_s)
        return True

    def leads(self, sequence: Sequence) -> bool:
        """Whether somebody waits for what this sequence computes."""
        return any(following.leader is sequence for following in self._following)

    def expire(self, now: float) -> list[Event]:
        """End the requests that waited too long without being started; the order may let others gain by waiting."""
        self._waiting.promote(now)
        late = [
            self._end(sequence, _TOO_LATE, "waited")
            for sequence in self._waiting.expired(now - self._config.queue_timeout_s)
        ]
        return late + self._past(now, over=True)

    def _past(self, now: float, *, over: bool) -> list[Event]:
        """End those that can no more be started in time; `over`: those alone whose time is over.

        The others of them have had this step to start in.
        """
        events, left = list[Event](), []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            sequence = entry[2]
            if sequence not in self._waiting or sequence.preempted:
                continue
            if over and _deadline(sequence) > now:
                left.append(entry)
            else:
                events.append(self._end(sequence, _PASSED, "dropped"))
        for entry in left:
            heapq.heappush(self._deadlines, entry)
        return events

    def _end(self, sequence: Sequence, why: ErrorInfo, counted: str) -> Event:
        """The end of one that waits, or has just left the queue."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._stats.not_begun[counted] += 1
        self._programs.end(sequence)
        self._order.left(sequence)
        sequence.move(Status.ENDED)
        return Rejected(sequence.request_id, why)

    def room_for_sessions(self, tenant: str) -> int:
        """Cells that a tenant's sessions may still come to keep."""
        room = self._budget.ceiling - self._running.cells_pinned
        if not self._cache.tree.tenants.any:
            return room
        return min(room, self._cache.cells.may_pin(tenant) - self._running.rows.session_cells_of(tenant))

    def admit(self, builder: StepBuilder, now: float) -> None:
        """Start waiting sequences, in order, while a row and the cell budget are there.

        The head is never overtaken, except by others while it waits for a leader to compute its prefix. Who is left and
        could only start too late from now on ends.
        """
        running = len(self._running)
        self._start_waiting(builder, now)
        self.forecast.started(max(0, len(self._running) - running), len(self._waiting), now)
        self._ends.events += self._past(now, over=False)

    def _start_waiting(self, builder: StepBuilder, now: float) -> None:
        for done in [f for f in self._following if f.over]:
            self._following.remove(done)
            self._waiting.put_back(done.follower)
        if not len(self._waiting):
            return
        this = _Round(*self._committed())
        while (sequence := self._waiting.head(this.passed)) is not None:
            try:
                need = self._start(builder, sequence, this, now)
            except Exception as failure:
                if sequence.status is Status.RUNNING:
                    self._waiting.remove(sequence)
                self._ends.fault(builder, sequence, failure, now)
                continue
            if not isinstance(need, Held):
                this.began(sequence, need)
            elif self._batch_gives_way(builder, sequence, need, this, now):
                this.needed, this.promised = self._committed()
            elif sequence.background and not len(self._running):
                self._ends.give_up(None, sequence, now)  # nobody leaves who would make room for it
            elif not self._pass_over(sequence, need, this):
                break
        for sequence in this.aside:
            self._waiting.put_back(sequence)

    def _committed(self) -> tuple[int, Counter[str]]:
        """What those who run may come to need, and, where tenants have limits, how much of it is whose."""
        needed, promised = self._budget.committed(self._running), Counter[str]()
        if self._cache.tree.tenants.any:
            for each in self._running:
                promised[each.submit.scope] += self._budget.committed((each,))
        return needed, promised

    def _pass_over(self, sequence: Sequence, held: Held, this: _Round) -> bool:
        """Let others be looked at past one that is held; False where nobody may be."""
        if sequence.background or not self._cache.tree.tenants.any:
            return False
        this.short |= held is Held.ALL
        line = self._waiting.line_of(sequence)
        if line is not None:
            this.passed.add(line)
        elif len(this.aside) < _PASSED_OVER:
            this.aside.append(self._waiting.set_aside(this.passed))
        else:
            return False
        return True

    def _batch_gives_way(self, builder: StepBuilder, sequence: Sequence, held: Held, this: _Round, now: float) -> bool:
        if held is Held.TENANT:  # its tenant's own batch alone helps
            return self.yields(builder, sequence, now, own=True)
        return not this.short and self._fits_over_batch(sequence, this.needed) and self.yields(builder, sequence, now)

    def yields(self, builder: StepBuilder, to: Sequence, now: float, *, own: bool = False) -> bool:
        """Preempt the last request of batch for an interactive one. False where there is none, or it is its turn.

        `own`: of its tenant alone; else of any whose cells are of use to it.
        """
        if to.batch or to.background or self._classes.due:
            return False
        those = [each for each in self._running.helpers(to) if each.batch]
        victim = next((each for each in reversed(those) if not own or each.submit.scope == to.submit.scope), None)
        if victim is None:
            return False
        self._ends.preempt(builder, victim, now)
        self._stats.yielded += 1
        return True

    def _fits_over_batch(self, sequence: Sequence, needed: int) -> bool:
        """Whether a waiting sequence could start if batch gave all its cells back: else it gives none for it."""
        batch = [each for each in self._running if each.batch]
        if not batch or sequence.batch or sequence.background:
            return False
        size = self._config.page_size
        given = sum(each.the_holding.n_pages * size for each in batch) + self._budget.committed(batch)
        need = self._budget.need(sequence, self._cached(sequence))
        alone = len(batch) == len(self._running)
        return self._budget.admits(self._cache.cells.active + needed - given, need, alone=alone)

    def _cached(self, sequence: Sequence) -> int:
        prefix = self._cache.find(sequence.cache_scope, sequence.tokens)
        return prefix.length if prefix is not None else 0

    def _start(self, builder: StepBuilder, sequence: Sequence, this: _Round, now: float) -> int | Held:
        """Start the head, or set it aside for a leader; the cells it may come to need, or why it has to wait."""
        if sequence.cache_scope is not None:
            self._cache.alias_shared(sequence.cache_scope, sequence.tokens, now)
        prefix = self._cache.find(sequence.cache_scope, sequence.tokens)
        n_cached = prefix.length if prefix is not None else 0
        if (following := self._find_leader(sequence, n_cached)) is not None:
            self._following.append(following)
            self._waiting.set_aside(this.passed)
            return 0
        tenants = self._cache.tree.tenants
        if tenants.any:  # they may have changed since it came
            check_cells(sequence.submit, self._cache)
        need = self._budget.need(sequence, n_cached)
        # Nobody else has what is within its tenant's floor, so it is there.
        floor = 0 if sequence.background else tenants.floor(sequence.submit.scope) * self._config.page_size
        within = floor > 0 and this.after(self._cache, sequence, need, prefix) <= floor
        if this.short and not within:
            return Held.ALL
        # What pins alone keep for programs that pause gives way to those who run; what this one reads of it is its own.
        taken = self._cache.cells.active + self._cache.cells.inactive_in(prefix)
        alone = not len(self._running) and not sequence.background
        if not self._running.rows.has_row(sequence.program):
            return Held.ALL
        if not within:
            if not self._budget.admits(taken + this.needed, need, alone=alone):
                return Held.ALL
            held = self._held(sequence, need, prefix, this)
            if held is not None:
                return held
        if not self._running.start(builder, sequence, prefix, now):
            return Held.ALL
        self._waiting.remove(sequence)
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.n_cached = min(sequence.n_computed, sequence.n_prompt)
            if sequence.counted:
                self._stats.prompt_cached += sequence.n_cached
        return need

    def _held(self, sequence: Sequence, need: int, prefix: Prefix | None, this: _Round) -> Held | None:
        """Why a sequence has not the cells that it needs beside its cached prefix, which is evicted for nobody then;
        None: it has.

        `prefix` is where that ends: giving way lets leases go and leaves the tree as it is.

        What is kept for programs that pause can give way: those behind it in order, as many as that needs, and none
        where all of them would not be enough. Where nothing runs all may give way, and the sequence starts in any case:
        nobody else would make room, so a queue never waits for pins alone (Continuum, section 5.3). To work ahead
        nothing gives way. A tenant at its ceiling has its own programs alone give way, and starts likewise where
        nothing of its own runs.
        """
        cells, scope = self._cache.cells, sequence.submit.scope
        retention, program = self._running.retention, sequence.program
        tenants, size = self._cache.tree.tenants, self._config.page_size
        alone, freed = not len(self._running), Freed(size, prefix)
        leaving: list[ProgramPin] = []
        if tenants.any and not sequence.background:
            over = this.after(self._cache, sequence, need, prefix) - tenants.ceiling(scope) * size
            first = not any(each.submit.scope == scope for each in self._running)

            def below(freed: Freed) -> bool:
                return over <= freed.pages[scope] * size

            found = retention.leaving(None if first else sequence, freed, below, besides=program, whose=scope.__eq__)
            if found is None and not first:
                return Held.TENANT
            if found is None:
                freed = Freed(size, prefix)
            else:
                leaving += found
        wanted = this.needed + need + cells.available_in(prefix)
        promised = {tenant: n // size for tenant, n in this.promised.items()}

        def enough(freed: Freed) -> bool:
            kept = tenants.kept(scope, promised, freed.pages) if tenants.any else 0
            return wanted <= cells.available + (freed.total - kept) * size

        if not enough(freed):
            found = None
            if not sequence.background:
                helps, to = self._running.helping(sequence, -(-need // size)), None if alone else sequence
                found = retention.leaving(to, freed, enough, besides=program, whose=helps)
            if found is None and (sequence.background or not alone):
                return Held.ALL if wanted > cells.available + freed.total * size else Held.TENANT
            leaving += found or ()
        retention.drop(leaving)
        return None

    def _find_leader(self, sequence: Sequence, n_cached: int) -> Following | None:
        config = self._config
        if (
            not (config.has("grouped_prefill") and config.has("prefix_cache"))
            or len(self._following) >= self._running.rows.total
        ):
            return None
        # What is shared is aliased in whole pages, so less than two pages would not be worth a step's wait.
        following = find_leader(sequence, self._running, n_cached, least=2 * config.page_size)
        if following is not None:
            self._stats.prompt_grouped += following.gain * sequence.counted
        return following


def check_cells(submit: Submit, cache: KVCache) -> None:
    """Raise ContextLengthError for a prompt that needs more cells than its tenant may have, beyond those of a shared
    preamble, and OverloadedError for a reply that does since the tenant's limits changed.
    """
    n_prompt, max_tokens, size = len(submit.tokens), submit.sampling.max_tokens, cache.page_size
    # One page more: the end of a cached prefix may be copied into a page of its own.
    room = pages_of(submit, cache) - 1
    most = cache.tree.tenants.most(submit.scope) * size
    if cache.pool.pages_for(n_prompt + min(max_tokens, 1)) > room:
        told = f"the prompt has {n_prompt} tokens, and this tenant {most} cells (its ceiling, and others' floors)"
        raise ContextLengthError(told, "prompt")
    if cache.pool.pages_for(n_prompt + max_tokens) > room:
        raise OverloadedError(f"this tenant has only {most} cells since its limits changed; send the request again")


def pages_of(submit: Submit, cache: KVCache) -> int:
    """Pages that a request may use: those that its tenant may have, and those of a shared preamble."""
    return cache.tree.tenants.most(submit.scope) + cache.peek(SHARED, submit.tokens) // cache.page_size


def _deadline(sequence: Sequence) -> float:
    """When its answer is wanted."""
    return sequence.arrived + sequence.submit.within_s


def _unmet(expected_s: float, within_s: float) -> DeadlineError:
    told = f"an answer is expected in {expected_s:.1f} s, and the request gives it {within_s:.1f} s"
    return DeadlineError(told, "timeout", retry_after_s=expected_s - within_s)


@dataclass(frozen=True, slots=True)
class Budget:
    """The cells that admitted requests may have at their ends, and how a request's need is estimated, in cells.

    `reserve` bounds the completion a request is charged for: most stop long before their `max_tokens`, and one
    that does not is covered by preemption.
    """

    ceiling: int
    reserve: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Budget":
        return cls(
            ceiling=int(config.cells * config.admission_ceiling),
            reserve=config.completion_reserve,
        )

    def need(self, sequence: Sequence, n_cached: int) -> int:
        """Cells the sequence will fill beyond its cached prefix: prompt - cached + completion."""
        completion = len(sequence.buffer) - sequence.length
        return sequence.length - n_cached + min(completion, self.reserve)

    def committed(self, running: Iterable[Sequence]) -> int:
        """The cells that all these may come to need beyond what they have computed. Work ahead has no claim to any."""
        reserve, those = self.reserve, [s for s in running if not s.background]
        return sum([s.length - s.n_computed + min(len(s.buffer) - s.length, reserve) for s in those])

    def admits(self, committed: int, need: int, *, alone: bool) -> bool:
        """Whether `need` more cells fit beside those that are `committed`: occupied, or yet to be computed.

        A request that runs alone always fits.
        """
        return alone or committed + need <= self.ceiling


def find_leader(sequence: Sequence, running: Iterable[Sequence], n_cached: int, least: int) -> Following | None:
    """The running prefill that shares most with `sequence` beyond its `n_cached` tokens; None under `least` tokens."""
    tokens = sequence.tokens[:-1]
    window = tokens[n_cached : n_cached + least]  # agrees, or the gain is less than `least`
    if len(window) < least:
        return None
    first = window.item(0)
    best: Following | None = None
    for leader in running:
        if leader.prompt_computed or leader.background or sequence.cache_scope is None:
            continue
        if leader.cache_scope not in (sequence.cache_scope, SHARED):
            continue
        if leader.length <= n_cached or leader.buffer.item(n_cached) != first:
            continue
        if not np.array_equal(leader.tokens[n_cached : n_cached + least], window):
            continue
        shared = common_prefix(tokens, leader.tokens)
        gain = shared - n_cached
        if shared > leader.n_computed and gain >= max(least, best.gain + 1 if best else 0):
            best = Following(sequence, leader, shared, gain)
    return best
