"""The scheduler: chooses the tokens that the next step computes, and takes in its result.

    schedule    drop what waited too long; then decode, admit, prefill, and prefill ahead in the room that is left
    commit      take in what was loaded, computed and drawn; end what is finished

No tensors and no clock: cells and rows come through `batch.Running`, time from the caller.
"""

import math
from contextlib import nullcontext

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import HoldfastError, InvalidRequestError
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.states import RunningState
from holdfast.replicas.plan import Chunk, Drawn, StepOutput
from holdfast.replicas.programs import ProgramKey, Programs, Rows, Sequence, SequencePool, Status
from holdfast.replicas.requests import (
    Event,
    FinishReason,
    HandleReleased,
    Notice,
    ProgramEnded,
    ServedElsewhere,
    Started,
    Tokens,
    TurnEnded,
)
from holdfast.replicas.retention.policy import LoadStats, RestoreCost
from holdfast.replicas.scheduling.admission import Admission
from holdfast.replicas.scheduling.batch import (
    NO_ROOM,
    UNBOUNDED,
    Running,
    Step,
    StepBuilder,
    Terminator,
    as_if_over,
    lost_state,
)
from holdfast.replicas.scheduling.pins import Retention
from holdfast.replicas.scheduling.queue import RequestOrder, WaitingQueue
from holdfast.replicas.scheduling.shares import BATCH_SHARE, Classes
from holdfast.replicas.speculation.drafter import NO_DRAFT, Drafter
from holdfast.replicas.stats import OTHERS, EngineStats, Occupancy
from holdfast.replicas.types import Origin, Priority, common_prefix

HIGH_WATER = 0.95  # share of all cells; above it chunks of prompts wait, so that running sequences can finish
LATENCY_MAX_TOKENS = 32  # a request for so few tokens waits mostly for its first one: prompts beside it are cut
BACKGROUND_CHUNK = 128  # prompt tokens of a step that are computed ahead of their turns: they make it hardly longer
_TENANTS = 200  # whose seconds are counted apart
_UNKNOWN = RestoreCost()


class Scheduler:
    """Plans steps over the queue, the batch, retention and drafts, and commits their results.

    An exception while one sequence is planned or committed fails that sequence. Only `BooksError` leaves the scheduler:
    then the caller needs a new one over new books. Events are added to `events`, so none is lost even then.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        pool: SequencePool,
        programs: Programs,
        drafter: Drafter,
        order: RequestOrder,
        stats: EngineStats,
        events: list[Event],
        load: LoadStats,
    ) -> None:
        self._config = config
        self._cache = cache
        self._order = order
        self._stats = stats
        self._load = load
        self._latency_chunk = config.latency_chunk
        self._last_commit = 0.0  # when the last step was over
        self._high_water = int(config.cells * HIGH_WATER) if config.has("chunk_deferral") else config.cells
        self._classes = Classes(BATCH_SHARE)
        self._waiting = waiting = WaitingQueue(order, self._classes)
        self._programs = programs
        self.rows = Rows(cache, pool, programs, keep=config.has("sessions"), share=config.has("prefix_cache"))
        self.retention = Retention(config, cache, programs, self.rows, waiting, order, load, stats)
        self._running = Running(cache, programs, self.rows, order, stats, self.retention, tags=config.has("kv_tags"))
        self.drafts = drafter
        self.terminator = Terminator(programs, self._running, waiting, self.drafts, order, stats, events)
        self.admission = Admission(
            config, cache, programs, self._running, waiting, self._classes, self.terminator, order, stats
        )

    # ---- requests come and go ----

    @property
    def busy(self) -> bool:
        return len(self._running) > 0 or len(self.admission) > 0

    def add(self, sequence: Sequence, now: float) -> None:
        for prefill in overtaken(sequence):
            self.terminator.finish(prefill, "stop", now)
        self._programs.begin(sequence)
        self.retention.arrived(sequence)
        self.admission.push(sequence)

    def take_notice(self, notice: Notice, now: float) -> None:
        """Take in a notice about a paused program, or about service elsewhere."""
        if isinstance(notice, ServedElsewhere):
            self._order.learn(notice.seconds)
            return
        key = ProgramKey.noticed(notice)
        program = self._programs.find(key) if key is not None else None
        if program is not None and isinstance(notice, ProgramEnded | HandleReleased):
            for prefill in program.ahead.copy():
                self.terminator.abort(prefill, now)
        self.retention.notice(notice, now)
        if program is not None and isinstance(notice, ProgramEnded):
            self._running.program_ended(program)
        elif program is not None and isinstance(notice, TurnEnded) and notice.last:
            self._programs.use_prefilled(program, 0)

    def everything(self) -> list[Sequence]:
        return [*self._running, *self.admission]

    def occupancy(self) -> Occupancy:
        """The present use of cells, rows and slots. Read by other threads, differences may be off, but not negative."""
        cells, ahead_waiting, states = self._cache.stats, max(0, self._waiting.ahead), self._cache.states
        return Occupancy(
            running=len(self._running),
            waiting=len(self.admission),
            rows_taken=max(0, self.rows.taken),
            cells_total=cells.total,
            cells_free=cells.free,
            cells_tree=cells.tree,
            cells_held=cells.held,
            rows_parked=self.rows.kept,
            cells_host=cells.host_used,
            reload_cells_per_s=self._running.reloads.speed.cells_per_s,
            pins=len(self.retention.pins),
            cells_pinned=self.retention.pins.cells,
            cells_raised=self._cache.tree.queue.raised * self._config.page_size,
            tokens_waiting=self.admission.tokens,
            start_gap_s=self.admission.forecast.gap_s,
            ahead_running=max(0, self._programs.ahead - ahead_waiting),
            ahead_waiting=ahead_waiting,
            tokens_ahead=self.admission.tokens_ahead,
            slots_total=states.pool.total if states is not None else 0,
            slots_free=states.pool.free if states is not None else 0,
            checkpoints=states.idle if states is not None else 0,
        )

    # ---- planning a step ----

    def schedule(self, now: float, flying: Step | None = None) -> Step:
        """Plan the next step.

        With a step `flying`, which must be `open`, the plan is for the time after it; it may be empty.
        """
        builder = StepBuilder()
        if self._cache.states is not None:
            self._cache.states.begin_step()
        with as_if_over(flying) if flying is not None else nullcontext():
            self.terminator.events += self.admission.expire(now)
            self.retention.expire(now)
            if not self._decode(builder, now):
                # Not in a step that had to preempt: the cells it freed are for those that run.
                self.admission.admit(builder, now)
                self._resume(builder, now)
            self._prefill(builder, now)
        if flying is None:
            self._make_progress(builder, now)
        reloads = self._running.reloads
        # The host's books may have begun anew since a load was planned: a later save may have its pages.
        builder.loads = [load for load in builder.loads if reloads.reach(load.holding) >= load.end]
        if (states := self._cache.states) is not None:
            builder.use_states(states)
            self._stats.checkpoints_evicted += states.checkpoints.evicted
            states.checkpoints.evicted = 0
        return builder.step(reloads, now, undrafted=self.drafts.silent)

    def _make_progress(self, builder: StepBuilder, now: float) -> None:
        """Free cells if every sequence lacks some and no step in flight will free any.

        Pins are dropped first, then the last sequence in order is preempted. A sequence that is alone restarts without
        its cached prefix: it may need the partly used pages that it shares with others.
        """
        while not builder.busy and len(self._running):
            if self.retention.drop_next(to=None):
                self._prefill(builder, now)
                continue
            victim = self._running.in_order()[-1]
            if len(self._running) == 1 and not victim.reuse:
                self.terminator.fail(victim, NO_ROOM, now)
                continue
            victim.reuse = len(self._running) > 1
            self.terminator.preempt(builder, victim, now)
            if not len(self._running):
                self.admission.admit(builder, now)
            self._prefill(builder, now)

    def _decode(self, builder: StepBuilder, now: float) -> bool:
        """Plan the last token of each decoding sequence, and drafts after it, in order.

        Returns whether sequences had to be preempted for lack of cells.
        """
        preempted = False
        decoding = self._running.part(decoding=True)
        self.drafts.prepare(decoding)
        for sequence in decoding:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            try:
                preempted |= self._decode_one(builder, sequence, now)
            except Exception as failure:
                self.terminator.fault(builder, sequence, failure, now)
        return preempted

    def _decode_one(self, builder: StepBuilder, sequence: Sequence, now: float) -> bool:
        drafts, end = self.drafts.propose(sequence), sequence.planned_length
        if self._running.grow(builder, sequence, end + len(drafts)):
            builder.compute(sequence, 1, drafts)
            return False
        preempted = False
        while sequence.status is Status.RUNNING and not self._running.grow(builder, sequence, end):
            # The program that arrived last gives way, whether it runs or pauses.
            helpers = self._running.helpers(sequence)
            alone, last = len(helpers) == 1, helpers[-1]
            if self._running.drop_pins_for(sequence, end, None if alone else last):
                continue
            if not alone:
                self.terminator.preempt(builder, last, now)
            elif len(self._running) > 1:
                self.terminator.restart_without_prefix(builder, sequence, now)
            else:
                return preempted
            preempted = True
        if sequence.status is Status.RUNNING:
            builder.compute(sequence, 1)
        return preempted

    def _resume(self, builder: StepBuilder, now: float) -> None:
        """Decode preempted sequences at once if they are admitted again with all their cells still cached."""
        if len(builder.sequences) == len(self._running):
            return
        for sequence in self._running.part(decoding=True):
            if sequence.preempted and sequence not in builder.sequences:
                try:
                    if self._running.grow(builder, sequence, sequence.planned_length):
                        builder.compute(sequence, 1)
                except Exception as failure:
                    self.terminator.fault(builder, sequence, failure, now)

    def _prefill(self, builder: StepBuilder, now: float) -> None:
        """Plan chunks of prompts, and if all of those make progress, of background prefills."""
        if len(builder.sequences) == len(self._running):
            return  # all of them decode
        prefilling = self._running.part(decoding=False)
        prompts = [each for each in prefilling if not each.background]
        if self._prefill_prompts(builder, prompts, now):
            self._prefill_ahead(builder, prompts, prefilling[len(prompts) :], now)

    def _prefill_prompts(self, builder: StepBuilder, prefilling: list[Sequence], now: float) -> bool:
        """Plan a chunk for each prompt, in order. Above the high-water mark all but the first wait.

        False: one of them waits for cells.
        """
        if not prefilling:
            return True
        deferred = False
        stuck: Sequence | None = None
        for sequence, size in zip(prefilling, self._chunks(prefilling), strict=True):
            if sequence.status is not Status.RUNNING:
                continue  # preempted for one before it
            if not size:
                continue
            if builder.chunks and not below_high_water(self, self._high_water, builder, sequence, now):
                self._stats.chunks_deferred += 1
                deferred = True
                continue
            try:
                if self._running.load(builder, sequence, self._config.step_tokens):
                    continue
                room = self._running.room(sequence)
                if room < size:  # and do not leave a prompt's last token alone (`_chunks`)
                    size = room - (self._config.batch_invariant and room == sequence.pending - 1)
                if size < 1:
                    continue  # pages behind the window are freed once the step in flight ends
                # Tokens that a grammar forces after the prompt are computed with the prompt's end.
                whole = size == sequence.pending
                drafts = self.drafts.propose(sequence)[: room - size] if whole else NO_DRAFT
                end = sequence.n_computed + sequence.in_flight + size
                grown = self._running.grow_dropping_pins(builder, sequence, end + len(drafts))
                while not grown and self.admission.preempt_batch(builder, sequence, now):
                    grown = self._running.grow(builder, sequence, end + len(drafts))
                if grown:
                    builder.compute(sequence, size, drafts)
                else:
                    stuck = stuck or sequence
            except Exception as failure:
                self.terminator.fault(builder, sequence, failure, now)
        if stuck is not None and stuck.status is Status.RUNNING and builder.busy and self._cache.tree.tenants.any:
            break_deadlock(self._running, self.terminator, builder, stuck, now)
        return stuck is None and not deferred

    def _chunks(self, prefilling: list[Sequence]) -> list[int]:
        """Tokens of each chunk, in order. Batch requests share what foreground requests leave of the step."""
        config, cost = self._config, self._load.cost
        seconds = prompt_seconds(config, cost, prefilling[0])
        most = config.step_tokens
        if config.step_ms and not cost.computed(1):  # the cost is not known yet, so time gives no bound
            most = min(most, self._latency_chunk)
        foreground = [each for each in prefilling if not each.batch or self._classes.due]
        sizes: list[int] = []
        for part in (foreground, prefilling[len(foreground) :]):
            left = most - sum(sizes)
            pending = [(each.n_computed + each.in_flight, each.pending) for each in part]
            if not part or left <= 0 or (sizes and tokens_within(seconds, pending[0][0], cost) < 1):
                continue
            more = chunk_sizes(pending, latency_limited(part, self._running), self._latency_chunk, left, seconds, cost)
            seconds -= _taken(pending, more, cost)
            sizes += more
        if config.batch_invariant and sizes:  # a prompt's last token alone would be summed like a decoded one
            sizes = [size - (size == each.pending - 1) for size, each in zip(sizes, prefilling, strict=False)]
            sizes[0] = sizes[0] or min(2, most - sum(sizes))  # the first gets on
        return [*sizes, *[0] * (len(prefilling) - len(sizes))]

    def _prefill_ahead(self, builder: StepBuilder, prompts: list[Sequence], ahead: list[Sequence], now: float) -> None:
        """Give background prefills a few tokens of the room that prompts leave in the step. A prefill that gets no more
        cells ends early.
        """
        if not ahead:
            return
        cost, foreground = self._load.cost, set(prompts)
        room, seconds = self._config.step_tokens, prompt_seconds(self._config, cost, (prompts or ahead)[0])
        for sequence, chunk in zip(builder.sequences, builder.chunks, strict=True):
            if sequence in foreground:
                room -= len(chunk.tokens)
                seconds -= cost.between(chunk.start, chunk.start + len(chunk.tokens))
        left = min(room, BACKGROUND_CHUNK)
        for sequence in ahead:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for a prompt
            start = sequence.n_computed + sequence.in_flight
            least = int(not prompts and sequence is ahead[0])
            size = min(sequence.pending, left, max(tokens_within(seconds, start, cost), least))
            size = min(size, self._running.room(sequence))
            if size < 1 or (builder.chunks and self._cache.cells.in_use >= self._high_water):
                return
            try:
                if self._running.load(builder, sequence, self._config.step_tokens):
                    continue
                if self._running.grow(builder, sequence, start + size):
                    builder.compute(sequence, size)
                    left -= size
                    seconds -= cost.between(start, start + size)
                else:
                    self.terminator.finish_early(builder, sequence, now)
            except Exception as failure:
                self.terminator.fault(builder, sequence, failure, now)

    # ---- taking in its result ----

    def commit(self, step: Step, output: StepOutput, now: float) -> None:
        """Take in what a step loaded, computed and drew; finished sequences hand their cells to the tree.

        Tokens of a sequence that left while the step was in flight are dropped.
        """
        seconds = now - max(step.begun, self._last_commit)
        self._last_commit = now
        plan = step.plan
        if plan.moves:
            self._bring_back(step, output, now)
        # Beside a load a step may take longer than its forward.
        if seconds > 0 and plan.chunks and not step.loads:
            if plan.prefills:
                self._load.prefilled(((c.start, c.start + len(c.tokens)) for c in plan.chunks), seconds)
            else:
                self.drafts.measured(sum(len(chunk.tokens) for chunk in plan.chunks), seconds, len(plan.chunks))
        self._order.serve(step.sequences, plan.chunks, seconds, self._waiting.waiting)
        if plan.chunks:
            self._share(step, seconds)
        of_each = zip(step.sequences, step.holdings, plan.chunks, output.drawn, strict=True)
        stateful = self._cache.states is not None
        for sequence, holding, chunk, drawn in of_each:
            if sequence.holding is not holding or chunk.start > sequence.n_computed:
                continue  # it left, or the token before these was refused
            try:
                self._advance(sequence, chunk, drawn, now)
                reason: FinishReason | None = None
                if drawn is not None:
                    reason = self._take_in(sequence, drawn, now)
                elif sequence.n_computed == len(sequence.buffer):  # a prompt that was only to be computed is over
                    reason = "length"
            except Exception as failure:
                self.terminator.fault(None, sequence, failure, now)
                continue
            if reason is not None:
                self.terminator.finish(sequence, reason, now)
            elif stateful and drawn is not None and lost_state(sequence):
                self.terminator.preempt(None, sequence, now)
            elif stateful:
                self._cache.computed(sequence.the_holding, sequence.n_computed)

    def _share(self, step: Step, seconds: float) -> None:
        """Charge a step's seconds to tenants and classes: its sequences share them by their tokens."""
        tokens: dict[str, int] = {}
        batch = 0
        for sequence, chunk in zip(step.sequences, step.plan.chunks, strict=True):
            n, scope = len(chunk.tokens), sequence.submit.scope
            tokens[scope] = tokens.get(scope, 0) + n
            if sequence.batch:
                batch += n
        token_s, served = seconds / sum(tokens.values()), self._stats.served_s
        for scope, n in tokens.items():
            counted = scope if scope in served or len(served) < _TENANTS else OTHERS
            served[counted] = served.get(counted, 0.0) + token_s * n
        batch_active = batch > 0 or self._waiting.waiting[Priority.BATCH] > 0
        if batch_active or self._classes.due:
            self._classes.serve(seconds - token_s * batch, token_s * batch, wanted=batch_active)

    def fail(self, step: Step, error: HoldfastError, now: float) -> None:
        """A step failed: fail its sequences and drop what they computed. The others go on.

        Sequences that got pages in it without a chunk restart: it is unknown whether their rows were written.
        """
        self._stats.failed_steps += 1
        if self._cache.states is not None:
            self._lose_states(step.plan.states_written, now)
        if step.plan.moves or self._cache.states is not None:  # a state that it was to write may be on its way already
            self._running.reloads.lose()
        for _, sequence in step.present():
            self.terminator.fail(sequence, error.info, now)
        written = {write.row for write in step.plan.writes}
        for sequence in [s for s in self._running if s.row in written]:
            self.terminator.preempt(None, sequence, now)

    def _lose_states(self, slots: set[int], now: float) -> None:
        """A failed step may have written `slots`. Restart sequences whose state came from one of them."""
        states = self._cache.states
        assert states is not None
        states.checkpoints.lose(slots)
        for sequence in list(self._running):
            holding = sequence.the_holding
            if isinstance(holding.state, RunningState) and holding.state.origin in slots:
                states.end(holding.state)
                holding.state = None
                self.terminator.preempt(None, sequence, now)

    def _bring_back(self, step: Step, output: StepOutput, now: float) -> None:
        """Count loaded cells as computed and as cached. After failed copies the cells are computed instead."""
        reloads, stats = self._running.reloads, self._stats
        if not output.moved:
            stats.failed_moves += 1
            reloads.lose()
            return
        stats.pages_out += len(step.plan.saves)
        stats.pages_in += len(step.plan.loads)
        reloads.speed = reloads.speed.measured(len(step.plan.loads) * self._config.page_size, output.load_s)
        self._load.reload = reloads.speed.cell_s
        for load in step.loads:
            if not load.present or reloads.reach(load.holding) < load.end:
                continue  # it left, or its copy in host memory is no longer valid
            sequence = load.sequence
            try:
                stats.tokens_reloaded += load.end - sequence.n_computed
                sequence.n_computed = load.end
                if self._cache.states is not None and load.holding.state is not None:
                    self._cache.states.landed(load.holding.state, load.end)
                if not sequence.preempted:
                    more = min(load.end, sequence.n_prompt) - sequence.n_cached
                    sequence.n_cached += more
                    stats.prompt_cached += more * sequence.counted
                reloads.loaded(load.holding, load.end)
                if sequence.reuse:
                    self._running.publish(sequence, now)
            except Exception as failure:
                self.terminator.fault(None, sequence, failure, now)

    def _advance(self, sequence: Sequence, chunk: Chunk, drawn: Drawn | None, now: float) -> None:
        """Count a chunk's tokens. Publish a prompt once it is complete, or before that if followers wait for it."""
        stats, end = self._stats, chunk.start + len(chunk.tokens)
        drafts = chunk.draw.drafts if chunk.draw else 0
        more = len(drawn.tokens) - 1 if drawn else 0  # accepted drafts, or tokens of further steps
        sequence.n_computed = end - drafts
        if drafts:
            stats.drafted += drafts
            stats.accepted += more
            sequence.drafted += drafts
            sequence.accepted += more
        if chunk.start < sequence.n_prompt:
            computed = min(end, sequence.n_prompt) - chunk.start
            if sequence.submit.begins and not sequence.prompt_work:
                usage = sequence.usage
                self.terminator.events.append(Started(sequence.request_id, usage.prompt, usage.cached))
            sequence.prompt_work += computed
            if sequence.background:
                stats.ahead_computed += computed
            elif sequence.counted:
                stats.prompt_computed += computed
            count_own(stats, sequence, computed)
            # Not without reuse: the tree and the sequence would hold the same cells twice, without room for both.
            if sequence.reuse and (drawn or self.admission.leads(sequence)):
                self._running.publish(sequence, now)
        sequence.n_computed += more  # these are not among its tokens yet

    def _take_in(self, sequence: Sequence, drawn: Drawn, now: float) -> FinishReason | None:
        """Append the drawn tokens. Returns why the sequence ends, if it does."""
        stats, matcher, tokens, predicted = self._stats, sequence.matcher, drawn.tokens, drawn.predicted
        guarded = matcher is not None and not matcher.given_up
        kept, reason = sequence.append(tokens, now)
        n = len(kept)
        if guarded and matcher is not None and matcher.given_up:
            stats.unguarded += 1
        if n < len(tokens):  # it ends before the last one, or that is drawn again
            sequence.n_computed = min(sequence.n_computed, sequence.length - 1)
            stats.refused += reason is None
            predicted = None
        if self.drafts.enabled:
            self.drafts.learn(sequence, kept, predicted)
        if sequence.counted:
            stats.completion += n
        else:
            count_own(stats, sequence, n)
        sequence.drawn += n
        if not n:
            return None
        self.terminator.events.append(Tokens(sequence.request_id, kept, drawn.logprobs[:n]))
        if matcher is not None and matcher.failed:
            raise InvalidRequestError("the grammar of the reply grew beyond its limits; simplify its schemas")
        return reason


def overtaken(coming: Sequence) -> list[Sequence]:
    """Background prefills that end because a request of their program arrives: a turn that begins with all they have
    computed, or another prefill for the same handle.

    A prefill for another handle does not end them: it may be shorter, and keeps no cells for their handle.
    """
    ahead = coming.target.ahead if coming.target is not None else ()
    return [
        each for each in ahead if each.program is coming.program or (not coming.background and _continues(coming, each))
    ]


def _continues(coming: Sequence, prefill: Sequence) -> bool:
    """Whether `coming` goes on from what `prefill` has computed, and has more of it to compute."""
    shared = common_prefix(coming.tokens, prefill.tokens)
    return shared >= prefill.n_computed and shared > prefill.n_cached


def count_own(stats: EngineStats, sequence: Sequence, tokens: int) -> None:
    """Count tokens that were computed or drawn for a request of the server itself."""
    if sequence.submit.origin is not Origin.CLIENT:
        stats.own_tokens[sequence.submit.origin] += tokens


def below_high_water(scheduler: Scheduler, cells: int, builder: StepBuilder, sequence: Sequence, now: float) -> bool:
    """Whether another chunk may be computed, after dropping later pins and then batch requests if needed."""
    while not scheduler.retention.make_room_below(cells, sequence):
        if not scheduler.admission.preempt_batch(builder, sequence, now):
            return False
    return True


def break_deadlock(
    running: Running, terminator: Terminator, builder: StepBuilder, sequence: Sequence, now: float
) -> None:
    """Preempt one of the sequences whose cells `sequence` could use, if none of them makes progress.

    Sequences of other tenants may make progress, so steps always have work. That does not help a tenant that is at its
    ceiling, or kept out by the floors of others.
    """
    helpers = running.helpers(sequence)
    if any(each.in_flight or each in builder.sequences for each in helpers):
        return
    if running.retention.drop_next(to=None, of_tenants=running.helping(sequence)):
        return  # the next step uses the room
    if len(helpers) > 1:
        terminator.preempt(builder, helpers[-1], now)
    else:
        terminator.restart_without_prefix(builder, sequence, now)


def latency_limited(prefilling: list[Sequence], running: Running) -> list[bool]:
    """Whether each chunk is limited to LATENCY_CHUNK tokens.

    A latency-sensitive request limits all chunks. Any other request limits chunks of prompts without an answer, and
    interactive requests limit chunks of batch.
    """
    if len(running) == 1:
        return [False]
    latency_sensitive = any(0 < s.sampling.max_tokens <= LATENCY_MAX_TOKENS for s in running)
    waited_for = any(not s.batch and not s.background for s in running)
    return [latency_sensitive or s.sampling.max_tokens == 0 or (s.batch and waited_for) for s in prefilling]


def prompt_seconds(config: EngineConfig, cost: RestoreCost, first: Sequence) -> float:
    """How much longer prompts may make a step: `step_ms`, but at least the fixed cost of a step, and twice the time
    that reading the cells of the `first` prompt takes.

    Running sequences wait that long for their next token, and a new request waits that long to be admitted. With less
    time a step would spend most of it on weights and old cells, and throughput would fall faster than latency.
    """
    start = first.n_computed + first.in_flight
    return max(config.step_ms / 1e3, cost.c, 2 * cost.read * start) if config.step_ms else math.inf


def tokens_within(seconds: float, start: int, cost: RestoreCost) -> int:
    """The number of tokens from position `start` on that add `seconds` to a step: the greatest n with
    a ((start + n)^2 - start^2) + b n + read (start + n) <= seconds.
    """
    seconds -= cost.read * start
    if seconds <= 0:
        return 0
    token_s = 2 * cost.a * start + cost.b + cost.read
    if seconds == math.inf or not (token_s or cost.a):
        return UNBOUNDED
    # This form of the root subtracts no numbers of similar size.
    slope = token_s + math.sqrt(token_s * token_s + 4 * cost.a * seconds)
    return int(2 * seconds / slope)


def chunk_sizes(
    pending: list[tuple[int, int]],
    limited: list[bool],
    latency_chunk: int,
    step_tokens: int,
    seconds: float = math.inf,
    cost: RestoreCost = _UNKNOWN,
) -> list[int]:
    """How many prompt tokens each prefilling sequence computes in a step.

    `pending`: for each sequence, in service order, its position and the number of tokens left. The step has room for
    `step_tokens` tokens and for `seconds` of work at this `cost`.

    A quarter of both goes to the sequences behind the first, fewest tokens left first: a short prompt does not wait
    for a long one that began before it. The rest is spent in order. A chunk that would spend more than half of its time
    reading the cells before it is left to a later step. The first sequence gets at least one token. A `limited` chunk
    has at most `latency_chunk` tokens.
    """
    limits = [min(n, latency_chunk) if short else n for (_, n), short in zip(pending, limited, strict=True)]
    sizes = [1, *[0] * (len(pending) - 1)]
    room, kept = step_tokens // 4, seconds / 4
    for i in sorted(range(1, len(pending)), key=lambda i: pending[i][1]):
        sizes[i] = _fitting(pending[i][0], min(limits[i], room), kept, cost)
        room -= sizes[i]
        kept -= _taken(pending[i : i + 1], sizes[i : i + 1], cost)
    room, seconds = step_tokens - sum(sizes), seconds - _taken(pending, sizes, cost)
    for i, (start, _) in enumerate(pending):
        room += sizes[i]
        seconds += cost.between(start, start + sizes[i])
        sizes[i] = max(sizes[i], _fitting(start, min(limits[i], room), seconds, cost, first=i == 0))
        room -= sizes[i]
        seconds -= cost.between(start, start + sizes[i])
    return sizes


def _fitting(start: int, limit: int, seconds: float, cost: RestoreCost, *, first: bool = False) -> int:
    """Tokens of a chunk at `start`: at most `limit` and as many as take `seconds`.

    0 where reading the cells before it would take more than half of its time, unless it is the `first`.
    """
    size = max(0, min(limit, tokens_within(seconds, start, cost)))
    end = start + size
    return size if first or 2 * cost.read * end <= cost.between(start, end) else 0


def _taken(pending: list[tuple[int, int]], sizes: list[int], cost: RestoreCost) -> float:
    """Seconds that chunks of these sizes add to a step."""
    return sum(cost.between(start, start + n) for (start, _), n in zip(pending, sizes, strict=True))
