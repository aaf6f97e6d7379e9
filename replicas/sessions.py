"""Sessions: token histories that clients open, append to, query, fork and close.

    open --> [history] <-- append (computed into the cache, nothing drawn)
                |    <---- query (its answer kept or not)
                '--> fork --> [the same history]

Here: which sessions there are, their histories, and the order of their operations. An operation is a request like any
other once it has begun. Not here: cells and rows (`scheduling/places` keeps them between operations).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.replicas.errors import HoldfastError, InvalidRequestError, OverloadedError
from holdfast.replicas.events import (
    Abort,
    Aborted,
    CloseSession,
    Event,
    Failed,
    Finished,
    ForkSession,
    OpenSession,
    Rejected,
    SessionCommand,
    Stop,
    Submit,
    Terminal,
    Timing,
    Usage,
)
from holdfast.replicas.retention.rows import Places
from holdfast.replicas.sequences import Owner, Sequence, Status
from holdfast.replicas.types import NO_TOKENS, TokenIds


@dataclass(frozen=True, slots=True)
class Operation:
    """Accepted at `accepted`, and not begun."""

    command: Submit | ForkSession
    accepted: float


@dataclass(slots=True, eq=False)
class Session:
    """`history` is what finished operations made; `running` is the request that goes on from it now."""

    owner: Owner
    opened: float
    used: float
    history: TokenIds = field(default_factory=lambda: NO_TOKENS)
    queue: deque[Operation] = field(default_factory=deque)
    running: Sequence | None = None


class Host(Protocol):
    """What sessions need of the engine."""

    @property
    def places(self) -> Places: ...

    def begin(self, submit: Submit, history: TokenIds, arrived: float, began: float, promised: int) -> Sequence | None:
        """Start a request that goes on from `history`; None where it has ended at once.

        `began` is when its program did, where the request does not say it. `promised` cells of the room that sessions
        have are other operations' to come.
        """

    def end(self, command: Stop | Abort, now: float) -> None:
        """End a request that has begun."""


class Sessions:
    """At most `most` sessions at once, each closed after `idle_s` seconds without an operation.

    `events` belongs to the engine; what happens here is added to it.
    """

    def __init__(self, host: Host, events: list[Event], most: int, idle_s: float) -> None:
        self._host = host
        self._events = events
        self._most = most
        self._idle_s = idle_s
        self._sessions: dict[Owner, Session] = {}
        self._queued: dict[str, Session] = {}  # by the request id of an operation that has not begun

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, request_id: str) -> bool:
        """Whether an operation of this id waits for its turn."""
        return request_id in self._queued

    @property
    def n_queued(self) -> int:
        return len(self._queued)

    # ---- commands ----

    def command(self, command: Submit | SessionCommand, now: float, arrived: float) -> None:
        """Open, fork or close; or an operation, which begins at once, or after those before it.

        `arrived` is when it was sent, from which its time counts.
        Raises InvalidRequestError and OverloadedError, naming the field.
        """
        if isinstance(command, OpenSession):
            self._open(Owner(command.scope, command.session_id, session=True), now)
            self._events.append(_done(command.request_id, arrived, now))
            return
        session = self._find(command.scope, command.session_id)
        if isinstance(command, CloseSession):
            self._close(session, now)
            self._events.append(_done(command.request_id, arrived, now))
            return
        session.used = now
        session.queue.append(Operation(command, arrived))
        self._queued[command.request_id] = session
        self._advance(session, now)

    def abort(self, request_id: str, now: float) -> None:
        """End an operation that waits for its turn."""
        session = self._queued.pop(request_id)
        operation = next(each for each in session.queue if each.command.request_id == request_id)
        session.queue.remove(operation)
        self._events.append(Aborted(request_id, Usage(), Timing(operation.accepted, finished=now)))

    def ended(self, sequence: Sequence, event: Terminal, now: float) -> None:
        """An operation has ended, and the next one begins. Only what finished becomes history."""
        session = self._sessions.get(sequence.owner) if sequence.owner is not None else None
        if session is None or session.running is not sequence:
            return
        session.running, session.used = None, now
        if isinstance(event, Finished) and sequence.submit.keep:
            session.history = sequence.tokens.copy()
        self._advance(session, now)

    def expire(self, now: float) -> None:
        """Close the sessions that nobody has used for too long."""
        for session in list(self._sessions.values()):
            if session.running is None and now >= session.used + self._idle_s:
                self._close(session, now)

    @property
    def due(self) -> float | None:
        """When the next session is to be closed, if nobody uses it before; None: there is none, or all are in use."""
        used = [session.used for session in self._sessions.values() if session.running is None]
        return min(used) + self._idle_s if used else None

    def fail_all(self, error: HoldfastError) -> None:
        """Forget every session; operations that have not begun fail with `error`."""
        for request_id in self._queued:
            self._events.append(Failed(request_id, error.info))
        self._queued.clear()
        for owner in list(self._sessions):
            del self._sessions[owner]
            self._host.places.forget(owner)

    # ---- parts ----

    def _find(self, scope: str, session_id: str) -> Session:
        session = self._sessions.get(Owner(scope, session_id, session=True))
        if session is None:
            raise InvalidRequestError(
                f"session {session_id!r} is not open: unknown, closed, or unused for {self._idle_s:g} s", "session_id"
            )
        return session

    def _open(self, owner: Owner, now: float) -> Session:
        if not owner.name:
            raise InvalidRequestError("a session needs an id", "session_id")
        if owner in self._sessions:
            raise InvalidRequestError(f"session {owner.name!r} is open already", "session_id")
        if len(self._sessions) >= self._most:
            raise OverloadedError(f"{self._most} sessions are open already", "session_id")
        session = self._sessions[owner] = Session(owner, now, now)
        return session

    def _close(self, session: Session, now: float) -> None:
        del self._sessions[session.owner]
        for operation in list(session.queue):
            self.abort(operation.command.request_id, now)
        if session.running is not None:
            self._host.end(Abort(session.running.request_id), now)
        self._host.places.forget(session.owner)

    def _advance(self, session: Session, now: float) -> None:
        """Begin the next operation when none is running."""
        while session.running is None and session.queue:
            operation = session.queue.popleft()
            command = operation.command
            del self._queued[command.request_id]
            if isinstance(command, ForkSession):
                self._fork(session, command, operation.accepted, now)
                continue
            promised = sum(map(_promised, self._sessions.values()))
            session.running = self._host.begin(command, session.history, operation.accepted, session.opened, promised)

    def _fork(self, session: Session, command: ForkSession, accepted: float, now: float) -> None:
        try:
            child = self._open(Owner(command.scope, command.child_id, session=True), now)
        except HoldfastError as error:
            self._events.append(Rejected(command.request_id, error.info))
            return
        child.history = session.history
        self._host.places.fork(child.owner, child.history, now)
        self._events.append(_done(command.request_id, accepted, now))


def _promised(session: Session) -> int:
    """Cells that the operation which has begun may come to leave to be kept, beyond the history before it."""
    running = session.running
    if running is None or running.status is Status.ENDED:
        return 0
    return to_be_kept(running.submit, running.n_history)


def _done(request_id: str, accepted: float, now: float) -> Finished:
    return Finished(request_id, "stop", Usage(), Timing(accepted, finished=now))


def to_be_kept(submit: Submit, n_history: int) -> int:
    """Cells that a session's operation may add to those of its history; `submit` has all the tokens, history first."""
    return len(submit.tokens) - n_history + submit.sampling.max_tokens if submit.keep else 0


def check_room(submit: Submit, n_history: int, room: int) -> None:
    """Raise OverloadedError for a session's operation that may leave more cells to be kept than the `room` there is."""
    more, room = to_be_kept(submit, n_history), max(room, 0)
    if more > room:
        raise OverloadedError(f"the open sessions have room for {room} more cells, not {more}", "session_id")
