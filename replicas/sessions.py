"""Sessions: token histories that clients open, append to, query, fork and close.

    open --> [history] <-- append (computed into the cache, nothing drawn)
                |    <---- query (its answer kept or not)
                '--> fork --> [the same history]

A session is a program with an explicit history (`programs.Session`). Here: which are open, and the order of their
operations. An operation is a request like any other once it has begun; the engine begins it.
"""

from dataclasses import dataclass, replace

import numpy as np

from holdfast.replicas.errors import (
    HoldfastError,
    InvalidRequestError,
    OperationDoneError,
    OverloadedError,
    SessionChangedError,
    SessionExistsError,
    UnknownSessionError,
)
from holdfast.replicas.kv.pages import NO_PAGES
from holdfast.replicas.programs import KeptRow, Kind, Operation, ProgramKey, Programs, Rows, Sequence, Session, Status
from holdfast.replicas.requests import (
    LOGGED_OPERATIONS,
    Aborted,
    CloseSession,
    Event,
    Failed,
    Finished,
    ForkSession,
    OpenSession,
    OpRecord,
    Rejected,
    SessionLog,
    SessionTurn,
    Submit,
    Terminal,
    Timing,
    Usage,
)
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """An open session as other threads see it. Times of the engine's clock; `busy`: an operation waits or runs."""

    session_id: str
    opened: float
    used: float
    past: SessionLog
    busy: bool


class Sessions:
    """The open sessions: at most `most`, and `most_of_tenant` of one tenant, 0: all of them. A session is closed after
    `idle_s` seconds without an operation.

    `events` and `rows` are the engine's: ends of operations are added to its events, and rows change with its books.
    """

    def __init__(
        self, programs: Programs, rows: Rows, events: list[Event], most: int, idle_s: float, most_of_tenant: int = 0
    ) -> None:
        self.rows = rows
        self._programs = programs
        self._events = events
        self._most = most
        self._most_of_tenant = most_of_tenant or most
        self.idle_s = idle_s
        self._queued: dict[str, Session] = {}  # by the request id of an operation that has not begun

    def __len__(self) -> int:
        return len(self._programs.sessions)

    def __contains__(self, request_id: str) -> bool:
        """Whether an operation with this id waits for operations before it."""
        return request_id in self._queued

    @property
    def n_queued(self) -> int:
        return len(self._queued)

    @property
    def promised(self) -> int:
        """Cells that running operations may add to histories."""
        running = (session.running for session in self._open)
        return sum(
            to_be_kept(each.submit, each.n_history) for each in running if each and each.status is not Status.ENDED
        )

    @property
    def _open(self) -> list[Session]:
        return [session for program in self._programs.sessions if (session := program.session) is not None]

    # ---- commands; they raise InvalidRequestError and OverloadedError, naming the field ----

    def replaced(self, command: OpenSession) -> CloseSession | None:
        """The command that closes an older session of the same name; None: there is none."""
        program = self._programs.find(ProgramKey(command.scope, command.session_id, Kind.SESSION))
        if program is None or program.session is None or command.life in ("", program.session.life):
            return None
        return CloseSession(command.scope, command.session_id, request_id=f"{command.request_id}/replaced")

    def open(self, command: OpenSession, now: float, accepted: float) -> None:
        past = SessionLog(command.life, appends=command.appends, done=command.done)
        self._open_one(command.scope, command.session_id, now, past)
        self._done(command.request_id, accepted, now)

    def enqueue(self, command: Submit | ForkSession, now: float, accepted: float) -> Session:
        """Accept an operation, after those before it. Its time counts from `accepted`."""
        operation = command.turn if isinstance(command, Submit) else command
        session = self._find(command.scope, operation.session_id, operation.life)
        if not (isinstance(operation, SessionTurn) and operation.standing):
            session.used = now
        session.queue.append(Operation(command, accepted))
        self._queued[command.request_id] = session
        return session

    def close(self, command: CloseSession, now: float) -> Session:
        """Forget a session and abort operations that have not begun. The caller ends the running one, then calls
        `closed`.
        """
        session = self._find(command.scope, command.session_id, command.life)
        self._programs.close_session(session.program)
        for operation in list(session.queue):
            self.abort(operation.command.request_id, now)
        return session

    def closed(self, command: CloseSession, session: Session, now: float, accepted: float) -> None:
        """Free the cells and the row of a session whose last operation has ended."""
        self.rows.forget(session.program)
        self._done(command.request_id, accepted, now)

    def abort(self, request_id: str, now: float) -> None:
        """Abort an operation that has not begun."""
        session = self._queued.pop(request_id)
        operation = next(each for each in session.queue if each.command.request_id == request_id)
        session.queue.remove(operation)
        self._events.append(Aborted(request_id, Usage(), Timing(operation.accepted, finished=now)))

    # ---- operations, in order ----

    def next_request(self, session: Session, now: float) -> tuple[Submit, float] | None:
        """The request to begin now and when it was accepted; None while one runs. Forks before it are done."""
        while session.running is None and session.queue:
            operation = session.queue.popleft()
            command = operation.command
            del self._queued[command.request_id]
            if isinstance(command, ForkSession):
                self._fork(session, command, operation.accepted, now)
            elif not self._is_over(session, command, operation.accepted, now):
                return command, operation.accepted
        return None

    def ended(self, sequence: Sequence, event: Terminal, now: float) -> Session | None:
        """An operation has ended. Returns its session, whose next operation may begin. Finished ones are history."""
        session = sequence.program.session if sequence.program is not None else None
        if session is None or session.running is not sequence:
            return None
        session.running = None
        turn = sequence.submit.turn
        if not turn.standing:
            session.used = now
        if isinstance(event, Finished) and turn.keep:
            tokens, past = closed_reply(sequence.tokens, sequence.submit.closing), session.past
            named = (OpRecord(turn.name, turn.content, len(tokens)),) if turn.name else ()
            session.past = SessionLog(past.life, tokens, past.appends + 1, (*past.done, *named)[-LOGGED_OPERATIONS:])
        return session

    # ---- state for readers; any thread may ask ----

    def of(self, scope: str) -> list[SessionFacts]:
        """The open sessions of a tenant."""
        return [
            SessionFacts(each.program.key.name, each.opened, each.used, each.past, bool(each.running or each.queue))
            for each in self._open
            if each.program.key.scope == scope
        ]

    def expire(self, now: float) -> None:
        """Close sessions that were not used for too long."""
        for session in self._open:
            if session.running is None and now >= session.used + self.idle_s:
                self._programs.close_session(session.program)
                self.rows.forget(session.program)

    @property
    def due(self) -> float | None:
        """The time at which the next session expires unless it is used; None: there is none, or all are in use."""
        used = [session.used for session in self._open if session.running is None]
        return min(used) + self.idle_s if used else None

    def fail_all(self, error: HoldfastError) -> None:
        """Forget every session; operations that have not begun fail with `error`."""
        for request_id in self._queued:
            self._events.append(Failed(request_id, error.info))
        self._queued.clear()
        for program in self._programs.sessions:
            self._programs.close_session(program)
            self.rows.forget(program)

    # ---- parts ----

    def _find(self, scope: str, session_id: str, life: str) -> Session:
        program = self._programs.find(ProgramKey(scope, session_id, Kind.SESSION))
        session = program.session if program is not None else None
        if session is None or life not in ("", session.life):
            raise UnknownSessionError(
                f"session {session_id!r} is not open: unknown, closed, or unused for {self.idle_s:g} s", "session_id"
            )
        return session

    def _is_over(self, session: Session, submit: Submit, accepted: float, now: float) -> bool:
        """End an operation that is already in the history, or expects another history. False: it may begin."""
        past, turn = session.past, submit.turn
        done = next((each for each in past.done if each.name == turn.name), None) if turn.name else None
        if done is None and turn.at in (None, len(past.tokens)):
            return False
        error: HoldfastError
        if done is None:
            error = SessionChangedError("the session changed while its replica was lost; retry", "session_id")
        elif done.content != turn.content:
            error = OperationDoneError("another operation of this session has used this key", "idempotency-key")
        elif submit.sampling.max_tokens:
            error = OperationDoneError("this question and its answer are already in the session", "idempotency-key")
        else:
            usage, timing = Usage(done.end, done.end), Timing(accepted, finished=now)
            self._events.append(Finished(submit.request_id, "stop", usage, timing, past, len(past.tokens)))
            return True
        self._events.append(Rejected(submit.request_id, error.info))
        return True

    def _open_one(self, scope: str, name: str, now: float, past: SessionLog) -> Session:
        sessions, key = self._programs.sessions, ProgramKey(scope, name, Kind.SESSION)
        if not name:
            raise InvalidRequestError("a session needs an id", "session_id")
        if self._programs.find(key) is not None:
            raise SessionExistsError(f"session {name!r} is open already", "session_id")
        if len(sessions) >= self._most:
            raise OverloadedError(f"{self._most} sessions are open already", "session_id")
        if sum(other.key.scope == scope for other in sessions) >= self._most_of_tenant:
            raise OverloadedError(f"a tenant has at most {self._most_of_tenant} sessions open", "session_id")
        return self._programs.open_session(key, now, past)

    def _fork(self, session: Session, command: ForkSession, accepted: float, now: float) -> None:
        try:
            past = replace(session.past, life=command.child_life, done=())
            child = self._open_one(command.scope, command.child_id, now, past)
        except HoldfastError as error:
            self._events.append(Rejected(command.request_id, error.info))
            return
        self.rows.keep_history(child.program, child.history, KeptRow(len(child.history), None, NO_PAGES), now)
        self._done(command.request_id, accepted, now)

    def _done(self, request_id: str, accepted: float, now: float) -> None:
        self._events.append(Finished(request_id, "stop", Usage(), Timing(accepted, finished=now)))


def closed_reply(tokens: TokenIds, closing: TokenIds) -> TokenIds:
    """`tokens` with the missing rest of `closing` appended; `tokens` may end with the first tokens of `closing`."""
    n_present = next((n for n in range(len(closing), 0, -1) if np.array_equal(tokens[-n:], closing[:n])), 0)
    return np.concatenate((tokens, closing[n_present:])) if len(closing) > n_present else tokens.copy()


def to_be_kept(submit: Submit, n_history: int) -> int:
    """Cells that an operation may add to its session's history. `submit` has all tokens, the history first."""
    if not submit.turn.keep:
        return 0
    return len(submit.tokens) - n_history + submit.sampling.max_tokens + len(submit.closing)


def check_room(submit: Submit, n_history: int, room: int) -> None:
    """Raise OverloadedError for an operation that may add more cells to its history than there is `room` for."""
    more = to_be_kept(submit, n_history)
    if more > max(room, 0):
        raise OverloadedError(f"the open sessions have room for {max(room, 0)} more cells, not {more}", "session_id")
