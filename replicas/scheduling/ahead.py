"""Work ahead: prompts that nobody waits for yet, computed in what the others leave (Sutradhara, section 4.1).

    a client's       the beginning of a prompt whose end is not known yet, under a handle
    the engine's     how the next prompt shows the turn that has just ended

It stands behind everything else. It is admitted where nothing waits and cells are free, a step has one narrow chunk of
it at most and none beside another prompt, no pin gives way to it, and it ends where the turn comes that it is for: what
is computed by then is in the cache, and the rest is that turn's. Here: which of it there is, and whether it was of use.
"""

from collections import OrderedDict

from holdfast.replicas.events import HandleReleased, Notice, ProgramEnded
from holdfast.replicas.sequences import Owner, Sequence
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import common_prefix

_PROGRAMS = 65_536  # whose work ahead is remembered until they come back, the oldest forgotten first


class WorkAhead:
    """The background sequences that are not over, by program, and the tokens computed for programs that pause.

    A token is of use where the program's next turn finds it cached, and wasted where it does not, or never comes.
    """

    def __init__(self, stats: EngineStats, programs: int = _PROGRAMS) -> None:
        self._stats = stats
        self._most = programs
        self._live: dict[Owner, list[Sequence]] = {}
        self._n = 0  # of them: other threads ask, too
        self._done: OrderedDict[Owner, tuple[int, int]] = OrderedDict()  # positions: the first, and behind the last

    def __len__(self) -> int:
        return self._n

    def begin(self, sequence: Sequence) -> None:
        self._live.setdefault(_program(sequence), []).append(sequence)
        self._n += 1

    def end(self, sequence: Sequence) -> None:
        program = _program(sequence)
        live = self._live[program]
        live.remove(sequence)
        self._n -= 1
        if not live:
            del self._live[program]

    def overtaken(self, coming: Sequence) -> list[Sequence]:
        """What ends because a request of its program comes that begins with all it has computed, or takes its place.

        No work ahead ends a client's but under the same handle: it may be shorter, and keeps nothing for that handle.
        """
        live = self._live.get(_program(coming), ())
        return [
            each
            for each in live
            if each.owner == coming.owner
            or (_contains(coming, each) and not (coming.background and each.owner != _program(each)))
        ]

    def meant(self, notice: Notice) -> list[Sequence]:
        """What ends because of a notice."""
        if isinstance(notice, ProgramEnded):
            return list(self._live.get(Owner(notice.scope, notice.program_id, session=False), ()))
        if isinstance(notice, HandleReleased):
            owner = Owner.handle(notice.scope, notice.handle)
            return [each for live in self._live.values() for each in live if each.owner == owner]
        return []

    def computed(self, sequence: Sequence, end: int) -> None:
        """It is over, and what it found cached is followed by what it computed, up to position `end`.

        Of what does not go on from each other only the longer one is remembered: the next turn can find one alone.
        """
        program, start = _program(sequence), sequence.n_cached
        if end <= start:
            return
        before = self._done.pop(program, None)
        if before is not None and before[0] <= start <= before[1] < end:
            start = before[0]  # it goes on from there
        elif before is not None:
            self._stats.ahead_wasted += min(end - start, before[1] - before[0])
            start, end = max(before, (start, end), key=lambda each: each[1] - each[0])
        self._done[program] = start, end
        if len(self._done) > self._most:
            _, (first, last) = self._done.popitem(last=False)
            self._stats.ahead_wasted += last - first

    def used(self, sequence: Sequence, n_cached: int) -> None:
        """A turn begins, and finds so much of its prompt cached."""
        found = self._done.pop(_program(sequence), None) if self._done else None
        if found is not None:
            start, end = found
            used = max(min(n_cached, end) - start, 0)
            self._stats.ahead_used += used
            self._stats.ahead_wasted += end - start - used

    def over(self, program: Owner) -> None:
        """A program has no next turn."""
        start, end = self._done.pop(program, (0, 0))
        self._stats.ahead_wasted += end - start


def _program(sequence: Sequence) -> Owner:
    return Owner(sequence.submit.scope, sequence.submit.program_id, session=False)


def _contains(coming: Sequence, ahead: Sequence) -> bool:
    """Whether `coming` goes on from what `ahead` has computed, and has more of it to compute."""
    shared = common_prefix(coming.tokens, ahead.tokens)
    return shared >= ahead.n_computed and shared > ahead.n_cached
