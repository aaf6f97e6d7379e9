"""Programs between their turns: the cells of a turn that is over stay pinned for as long as that is worth it.

    a turn ends           pinned for a moment, until it is known what the turn called
    what it called        known: pinned for what the policy says, or not at all
    the next turn comes   kept past the deadline while it waits; given back as it begins
    others need cells     programs behind them in order give way; where nothing runs, any

Not here: for how long (`retention/ttl`), the pins themselves (`kept`). The rows of paused programs are `places`'.
"""

from collections.abc import Callable

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.events import Notice, ProgramEnded, TurnEnded
from holdfast.replicas.kv.cache import KVCache, in_use, running
from holdfast.replicas.kv.holding import Pin
from holdfast.replicas.retention.latency import tool_set
from holdfast.replicas.retention.learned import Learned
from holdfast.replicas.retention.pins import Held
from holdfast.replicas.retention.ttl import Pause, policy_of
from holdfast.replicas.scheduling.kept import Kept
from holdfast.replicas.scheduling.order import Key, Order
from holdfast.replicas.scheduling.waiting import WaitingQueue
from holdfast.replicas.sequences.parking import Owner
from holdfast.replicas.sequences.sequence import Sequence
from holdfast.replicas.stats import EngineStats


class Keeping:
    """Decides what is kept, as the engine tells it what happens to programs.

    `idle` says how many cells idle sessions keep from being evicted.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: KVCache,
        waiting: WaitingQueue,
        order: Order,
        learned: Learned,
        stats: EngineStats,
        idle: Callable[[], int],
    ) -> None:
        self._order = order
        self._config = config.retention
        self._policy = policy_of(config.retention)
        self._active = config.retention.policy != "none" and config.prefix_cache
        self._learned = learned
        self._cache = cache
        self._stats = stats
        self._idle = idle
        self.kept = Kept(config.retention, cache, waiting)

    @property
    def due(self) -> float | None:
        """When `expire` has something to look at next; None: nothing is kept."""
        return self.kept.due

    def holds(self, owner: Owner | None) -> bool:
        return self.kept.find(owner) is not None

    def arrived(self, sequence: Sequence) -> None:
        """A request comes in, before it is put in the queue."""
        sequence.pinned = self.holds(sequence.owner)
        if sequence.submit.program_turns and self._active:
            if sequence.pinned:
                self._stats.pin_hits += 1
            else:
                self._stats.pin_misses += 1

    def begins(self, sequence: Sequence, now: float) -> bool:
        """A sequence gets its cells now: its program's pin, if there is one, is given back. Whether there was one."""
        held = self.kept.find(sequence.owner)
        if held is not None:
            self.kept.drop(held)
        elif sequence.submit.program_turns and sequence.scheduled is None:
            self._learned.waited(now - sequence.arrived)
        return held is not None

    def wants(self, sequence: Sequence) -> bool:
        """Whether a finished sequence leaves cells that a next turn of its program may come back for."""
        owner = sequence.owner
        return owner is not None and not owner.session and self._active and not sequence.submit.program_end

    def paused(self, sequence: Sequence, pin: Pin, now: float) -> None:
        """A program's turn is over, its cells have a `pin`: keep that until it is known what the turn called."""
        assert sequence.owner is not None
        self._stats.pins_refused += self.kept.keep(sequence, sequence.owner, pin, now, now + self._config.settle_s)

    def notice(self, notice: Notice, now: float) -> None:
        """Something about programs that pause. What comes too late is ignored."""
        self.expire(now)
        if isinstance(notice, TurnEnded):
            self._turn_ended(notice)
        elif isinstance(notice, ProgramEnded):
            held = self.kept.find(Owner(notice.scope, notice.program_id, session=False))
            if held is not None:
                self._learned.turns.ended(held.run_turn)
                self.kept.drop(held)
        else:
            self._learned.latency = notice.latency

    def expire(self, now: float) -> None:
        """Drop the pins whose time is over and whose program has no turn waiting."""
        for held in self.kept.expired(now):
            self._stats.pins_expired += 1
            self.kept.drop(held)

    def give_way(self, to: Sequence | None, besides: Owner | None = None) -> bool:
        """Drop the pin of the program that comes last in order, if it comes behind `to`; None: wherever it comes.

        False where there is none to drop.
        """
        held = self._last(besides)
        if held is None or (to is not None and self._rank(held) <= self._order.asking(to)):
            return False
        self._stats.pins_given_way += 1
        self.kept.drop(held)
        return True

    def makes_room(self, mark: int, to: Sequence) -> bool:
        """Whether fewer than `mark` cells are in use, once pins behind `to` have given way as far as that needs it.

        Where all pins would not be enough, none gives way.
        """
        if running(self._cache) >= mark:
            return False
        while in_use(self._cache) >= mark:
            if not self.give_way(to):
                return False
        return True

    def _last(self, besides: Owner | None) -> Held | None:
        if self._order.by_arrival:
            return self.kept.latest(besides)
        return max((held for held in self.kept if held.owner != besides), key=self._rank, default=None)

    def _rank(self, held: Held) -> Key:
        return self._order.paused(held.owner.scope, held.arrival)

    def _turn_ended(self, ended: TurnEnded) -> None:
        """Keep the turn's cells as long as that is worth it, from its end on.

        The last turn lets go of its program's cells whichever branch left them, unless that was a later turn's.
        """
        if ended.last:
            self._learned.turns.ended(ended.run_turn)
        held = self.kept.find(Owner(ended.scope, ended.program_id, session=False))
        if held is None:
            return
        if held.request_id != ended.request_id and not (ended.last and held.turn <= ended.turn):
            return
        ttl = 0.0 if ended.last else self._ttl(ended, held)
        if ttl > 0.0:
            self._stats.pins += 1
            self.kept.until(held, held.since + min(ttl, self._config.most_s))
        else:
            self.kept.drop(held)

    def _ttl(self, ended: TurnEnded, held: Held) -> float:
        """What the policy says of a turn that left a pin."""
        # What is kept for programs and for idle sessions waits for nobody.
        busy = max(running(self._cache) - self._idle(), 0)
        pause = Pause(ended.scope, tool_set(ended.tools), held.pin.length, held.run_turn)
        return self._policy.ttl(pause, self._learned.latency, self._learned.conditions(busy))
