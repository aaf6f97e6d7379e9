"""The engine: takes commands in, runs steps, gives events out. One thread calls it; it never waits and reads no clock.

Whatever happens inside a step, every submitted request ends in exactly one terminal event.
"""

import logging
import time
from collections.abc import Callable
from itertools import count

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import (
    ContextLengthError,
    EngineError,
    HoldfastError,
    InvalidRequestError,
    OverloadedError,
)
from holdfast.replicas.events import Aborted, Command, Event, Rejected, Stop, Submit, Terminal
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.scheduling.order import Order
from holdfast.replicas.scheduling.plan import Runner
from holdfast.replicas.scheduling.scheduler import Scheduler, Step
from holdfast.replicas.seed import prompt_seed
from holdfast.replicas.sequences.pool import SequencePool
from holdfast.replicas.sequences.sequence import Sequence
from holdfast.replicas.speculation.drafter import Drafter
from holdfast.replicas.speculation.gate import VerificationCost
from holdfast.replicas.stats import EngineStats, Occupancy

log = logging.getLogger(__name__)

Stopwatch = Callable[[], float]


class Engine:
    """One replica's requests and their steps.

    `config` is resolved: it has no "auto" and no 0 where a number is needed. `eos` are the model's own end tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        eos: frozenset[int] = frozenset(),
        vocabulary: int | None = None,
        order: Order | None = None,
        cost: VerificationCost | None = None,
        stopwatch: Stopwatch = time.perf_counter,
    ) -> None:
        self.config = config
        self._runner = runner
        self._eos = eos
        self._vocabulary = vocabulary
        self._stopwatch = stopwatch
        self.cache = KVCache(config.cells // config.page_size, config.page_size, config.prefix_cache)
        self._pool = SequencePool(config.max_sequences, config.session_rows)
        self._scheduler = Scheduler(config, self.cache, self._pool, Drafter(config.speculation, cost), order)
        self._numbers = count()
        self._live: dict[str, Sequence] = {}

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self._scheduler.busy

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats

    def occupancy(self) -> Occupancy:
        return self._scheduler.occupancy()

    def handle(self, command: Command, now: float) -> list[Event]:
        """Take a command in. An unknown id in `Stop` or `Abort` is a request that has just ended: ignored."""
        if isinstance(command, Submit):
            return self._submit(command, now)
        sequence = self._live.get(command.request_id)
        if sequence is None:
            return []
        self._scheduler.end(sequence, now)
        if isinstance(command, Stop):
            return self._ended([sequence.finished("stop", now)])
        return self._ended([Aborted(sequence.request_id, sequence.usage, sequence.timing(now))])

    def step(self, now: float, clock: Stopwatch | None = None) -> list[Event]:
        """Run one step. `clock` gives the time of its end, for the events; without it they carry `now`."""
        stats, watch = self.stats, self._stopwatch
        t0 = watch()
        step = self._scheduler.schedule(now)
        t1 = watch()
        stats.schedule_s += t1 - t0
        events = list(step.ended)
        if step.plan.chunks:
            events += self._run(step, now, clock)
            stats.steps += 1
        return self._ended(events)

    def fail_all(self, error: HoldfastError, now: float) -> list[Event]:
        """End every request with `error`: the engine is stopping."""
        events: list[Event] = []
        for sequence in self._scheduler.everything():
            self._scheduler.end(sequence, now, keep=False)
            events.append(sequence.failed(error.info))
        return self._ended(events)

    def _run(self, step: Step, now: float, clock: Stopwatch | None) -> list[Event]:
        stats, watch = self.stats, self._stopwatch
        try:
            output = self._runner.run(step.plan)
        except Exception as failure:
            # The supervisor of a step: whatever a model or a kernel raises fails the requests in it, no others.
            log.exception("step failed")
            return self._scheduler.fail(step, EngineError(f"the engine failed: {failure}"), now)
        stats.forward_s += output.forward_s
        stats.sample_s += output.sample_s
        t0 = watch()
        events = self._scheduler.commit(step, output, clock() if clock else now)
        stats.commit_s += watch() - t0
        return events

    def _submit(self, command: Submit, now: float) -> list[Event]:
        try:
            self._validate(command)
        except HoldfastError as error:
            self.stats.ended["rejected"] += 1
            return [Rejected(command.request_id, error.info)]
        sampling = command.sampling
        seed = sampling.seed if sampling.seed is not None else 0
        if sampling.temperature > 0 and sampling.seed is None:
            seed = prompt_seed(command.tokens)
        sequence = Sequence.of(command, next(self._numbers), now, self._eos, seed)
        self._live[command.request_id] = sequence
        self._scheduler.add(sequence)
        return []

    def _validate(self, command: Submit) -> None:
        n_prompt, max_tokens = len(command.tokens), command.sampling.max_tokens
        context, page = self.config.context_length, self.config.page_size
        if command.request_id in self._live:
            raise InvalidRequestError(f"request id {command.request_id} is in use", "request_id")
        if n_prompt == 0:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {max_tokens}", "max_tokens")
        if n_prompt >= context:
            raise ContextLengthError(
                f"the prompt has {n_prompt} tokens; the context has room for {context}, one of them new", "prompt"
            )
        if n_prompt + max_tokens > context:
            raise ContextLengthError(
                f"{n_prompt} prompt tokens and max_tokens {max_tokens} exceed the context of {context}", "max_tokens"
            )
        # One page more: the end of a cached prefix may be copied into a page of its own.
        if -(-(n_prompt + max_tokens) // page) + 1 > self.config.cells // page:
            raise ContextLengthError(
                f"{n_prompt} prompt tokens and max_tokens {max_tokens} exceed the cache of {self.config.cells} cells",
                "max_tokens",
            )
        if self._vocabulary is not None and not (
            int(command.tokens.min()) >= 0 and int(command.tokens.max()) < self._vocabulary
        ):
            raise InvalidRequestError(f"token ids must be in [0, {self._vocabulary})", "prompt")
        if self._scheduler.n_waiting >= self.config.max_waiting:
            raise OverloadedError(f"{self.config.max_waiting} requests are waiting already")

    def _ended(self, events: list[Event]) -> list[Event]:
        """Forget the requests whose terminal event is among `events`, and count them."""
        for event in events:
            if isinstance(event, Terminal):
                del self._live[event.request_id]
                self.stats.ended[type(event).__name__.lower()] += 1
        return events
