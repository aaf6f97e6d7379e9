"""The home replica of each session. Operations run there, and a session moves when its replica is gone.

    operation --> find its home --> replica --> commit what it added to the stored history --> answer
                       ^               |                      |
                       |              lost                    another router has moved it
                       '---- move <----'                      '--> again, at its home now

While a replica lives, it orders the operations. The record in Redis names that replica and holds the history. An
operation is answered once the record has it, so whoever moves the session finds everything that was answered. A move
opens the session at another replica with its history and replaces the record that it read. If the record has changed,
the move does not count, and neither does an operation that ends at the old home. So an operation is done once, by its
name, whatever is lost. While Redis is away, operations are refused.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import inf

import numpy as np

from holdfast.replicas.errors import (
    ErrorKind,
    HoldfastError,
    OverloadedError,
    SessionChangedError,
    SessionExistsError,
    SessionLostError,
    UnavailableError,
    UnknownSessionError,
    error_of,
)
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    AddQuestion,
    Answer,
    CloseSession,
    Completed,
    DescribeSession,
    Errored,
    GenerateRequest,
    History,
    PartialReply,
    Question,
    RawPrompt,
    RemoveQuestion,
    SessionCall,
    SessionState,
    SessionTurn,
)
from holdfast.router.backend import Backend, Batch, Routed, RoutingHint
from holdfast.router.background import Background
from holdfast.router.entry import RouterMetrics
from holdfast.router.protocol.sessions import SESSION_ID
from holdfast.router.records import (
    Home,
    ProgramTable,
    PutResult,
    SavedSession,
    SessionHistories,
    SessionRecord,
    session_program,
)
from holdfast.router.tenants import Tenant

log = logging.getLogger(__name__)

ATTEMPTS = 5  # of one operation or move, each at another home
CHANGES = 100  # tries to change a record that others change at the same time
PAUSE_S = (0.001, 0.05)  # between two of them: at most, doubled from the first to the second


class MoveReason(StrEnum):
    """The reason for a session's move."""

    GONE = "gone"  # its replica is no more
    SILENT = "silent"  # it did not answer, or stopped meanwhile
    FORGOTTEN = "forgotten"  # it does not have the session


MOVES = {  # the errors after which an operation may be done elsewhere
    ErrorKind.SESSION_LOST: MoveReason.GONE,
    ErrorKind.UNAVAILABLE: MoveReason.SILENT,
    ErrorKind.NO_SESSION: MoveReason.FORGOTTEN,
}


@dataclass(frozen=True, slots=True)
class Located:
    """A session's home. Without a `record` only the program table names it, and no history is kept."""

    tenant: str
    session_id: str
    home: Home
    record: SessionRecord | None

    @property
    def program(self) -> str:
        return session_program(self.tenant, self.session_id)

    @property
    def kept(self) -> bool:
        return self.record is not None and self.record.kept


class SessionHomes:
    """Serves operations of sessions, wherever they live. Every method raises UnavailableError while Redis is away."""

    def __init__(
        self, backend: Backend, programs: ProgramTable, histories: SessionHistories, metrics: RouterMetrics
    ) -> None:
        self._backend = backend
        self._programs = programs
        self._histories = histories
        self._metrics = metrics
        for reason in MoveReason:
            metrics.session_moves.labels(reason.value)  # from 0
        self._moves: dict[str, asyncio.Task[None]] = {}  # under way, by program
        self._background = Background()

    async def find(self, tenant: str, session_id: str) -> Located:
        """Raises UnknownSessionError."""
        located = await self._look(tenant, session_id)
        if located is None:
            raise UnknownSessionError(f"session {session_id!r} is not open: unknown or closed", "session_id")
        return located

    async def _look(self, tenant: str, session_id: str) -> Located | None:
        if not SESSION_ID.fullmatch(session_id):
            return None
        record = await self._histories.look(tenant, session_id)
        if record is not None:
            return Located(tenant, session_id, record.home, record)
        program = await self._programs.look(session_program(tenant, session_id))
        if program is not None and program.last_replica is not None:
            return Located(tenant, session_id, Home("", program.last_replica), None)
        if self._histories.degraded:
            raise UnavailableError("Redis does not answer, and may know the session; retry")
        return None

    async def check_free(self, tenant: str, session_id: str) -> None:
        """Raises SessionExistsError if a session of this name is open. Records of an earlier one are deleted."""
        located = await self._look(tenant, session_id)
        if located is None:
            return
        if not located.kept:
            call = DescribeSession(tenant, session_id, life=located.home.life)
            try:
                await self._backend.session(call, located.program, located.home.replica_id)
            except (UnknownSessionError, SessionLostError):
                await self.forget(tenant, session_id)
                return
        raise SessionExistsError(f"session {session_id!r} is open already", "id")

    async def forget(self, tenant: str, session_id: str) -> None:
        """Delete the records of a session that does not exist any more."""
        await self._programs.forget(session_program(tenant, session_id))
        await self._histories.drop(tenant, session_id)

    # ---- operations ----

    async def generate(self, command: GenerateRequest, place: RoutingHint) -> Routed:
        """The whole reply to an operation. One that opens its session goes to the `place`, the others to its home.

        Raises as `Backend.generate`, UnknownSessionError, and SessionLostError if its history was not kept.
        """
        session = _turn(command)
        if session.opens:
            return await self._open(command, session, place)
        async for located, request in self._attempts(command):
            error: HoldfastError
            try:
                result = await self._backend.generate(request, _at(located))
                if isinstance(result.reply, Answer):
                    if await self._committed(located, result.reply.history, session):
                        return result
                    continue
                if result.reply.error.kind not in MOVES:
                    return result
                error = error_of(result.reply.error)
            except (SessionLostError, UnavailableError) as lost:
                error = lost
            await self._move(located, error, command)
        raise _again()

    async def stream(self, command: GenerateRequest, place: RoutingHint) -> AsyncGenerator[Batch, None]:
        """The reply to a question as it is made. If its replica is lost, another one continues after what the client
        has, if the history there is the one that the reply began with. Ends and raises as `Backend.stream`.
        """
        session, partial, replica_id = _turn(command), PartialReply(command.drawn), ""
        sent_any = False
        async for located, request in self._attempts(command):
            if sent_any:
                request = replace(request, drawn=partial.whole, session=replace(_turn(request), at=partial.at))
            error: HoldfastError | None = None
            try:
                async with aclosing(self._backend.stream(request, _at(located))) as batches:
                    async for batch in batches:
                        last = batch.pieces[-1]
                        if isinstance(last, Errored) and last.error.kind in MOVES:
                            error = error_of(last.error)
                            break
                        replica_id = batch.replica_id or replica_id
                        partial.merge(batch.drawn)
                        if isinstance(last, Completed) and not await self._committed(located, last.history, session):
                            break
                        yield batch
                        sent_any = True
                        if isinstance(last, Completed | Errored):
                            return
            except (SessionLostError, UnavailableError) as lost:
                error = lost
            if error is not None:
                await self._move(located, error, command)
            if sent_any and (error is None or partial.at is None):
                changed = SessionChangedError("the session moved, and this is no part of it; ask again", "session_id")
                yield Batch(replica_id, (Errored(changed.info),))
                return
        raise _again()

    async def _attempts(self, command: GenerateRequest) -> AsyncGenerator[tuple[Located, GenerateRequest], None]:
        """The session's home now, and the operation for it. Each attempt has its own id: an earlier one may run on."""
        began, session = time.monotonic(), _turn(command)
        if session.keep:
            session = replace(session, name=session.name or f"op/{command.request_id}")
        for attempt in range(ATTEMPTS):
            located = await self.find(command.scope, session.session_id)
            request = replace(command, session=replace(session, life=located.home.life))
            if attempt:
                within_s = command.within_s - (time.monotonic() - began)
                request = replace(request, request_id=f"{command.request_id}/{attempt}", within_s=within_s)
            yield located, request

    async def ask(self, tenant: Tenant, call: SessionCall) -> SessionState:
        """Run a call on the session at its home. Raises as `Backend.session`, and as `generate`."""
        for _ in range(ATTEMPTS):
            located = await self.find(tenant.name, call.session_id)
            request = replace(call, life=located.home.life)
            try:
                state = await self._backend.session(request, located.program, located.home.replica_id)
                asks = isinstance(call, AddQuestion | RemoveQuestion)
                if not asks or await self._keep_question(located, call, state.expires_s):
                    return state
            except (SessionLostError, UnavailableError, UnknownSessionError) as error:
                await self._move(located, error, _opening(tenant, located))
        raise _again()

    async def forked(self, tenant: str, child: SessionState) -> None:
        """Start to store the history of a new fork."""
        await self._histories.drop(tenant, child.session_id)  # what is left of an earlier session
        await self._commit(Located(tenant, child.session_id, Home("", child.replica_id), None), child.history)

    async def close(self, tenant: str, session_id: str) -> None:
        """The session is over. Raises UnknownSessionError."""
        located = await self.find(tenant, session_id)
        # The record goes first: a router that finds the session gone from its replica then does not move it.
        await self.forget(tenant, session_id)
        await self._end(located, located.home)

    async def _open(self, command: GenerateRequest, session: SessionTurn, place: RoutingHint) -> Routed:
        life = secrets.token_hex(8)
        await self._histories.drop(command.scope, session.session_id)  # what is left of an earlier session
        opening = replace(session, life=life, name=f"open/{life}")
        result = await self._backend.generate(replace(command, session=opening), place)
        if isinstance(result.reply, Answer):
            located = Located(command.scope, session.session_id, Home(life, result.replica_id), None)
            try:
                await self._commit(located, result.reply.history)
            except UnavailableError:  # nobody would find it
                self._background.start(self._end(located, located.home))
                raise
        return result

    # ---- histories ----

    async def _committed(self, located: Located, history: History | None, session: SessionTurn) -> bool:
        """Whether the answer counts: the history has it, or it changes nothing."""
        try:
            return await self._commit(located, history) or not session.keep
        except UnavailableError:
            if session.keep:
                raise
            return True

    async def _commit(self, located: Located, history: History | None) -> bool:
        """Store the history that a home reports. False: the session has moved to another home, and the operation does
        not count.

        If the record also lacks earlier tokens of another router, they are read from the home.
        """
        if history is None or not self._histories.on:
            return True
        tenant, session_id, record = located.tenant, located.session_id, located.record
        home = Home(history.life, located.home.replica_id)
        async for _ in _tries():
            if record is None:
                history, questions = await self._history_from(located, history, 0)
                result = await self._histories.put(tenant, session_id, home, history, questions, None)
            elif record.home != home:
                return False
            else:
                if record.kept and record.tokens < history.start:
                    history, _ = await self._history_from(located, history, record.tokens)
                result = await self._histories.append(tenant, session_id, record, history.after(record.tokens))
            if result is PutResult.FULL:
                log.warning("the history of a session of tenant %s is not kept: it has no room for more", tenant)
                result = await self._histories.give_up(tenant, session_id, home, history.idle_s, record)
            if result is not PutResult.CONFLICT:
                if record is None and await self._programs.look(located.program) is None:  # it was closed meanwhile
                    await self._histories.drop(tenant, session_id)
                return True
            record = await self._histories.look(tenant, session_id)
            if record is None and await self._programs.look(located.program) is None:
                raise UnknownSessionError(f"session {session_id!r} was closed meanwhile", "session_id")
        raise _contended()

    async def _history_from(
        self, located: Located, history: History, start: int
    ) -> tuple[History, tuple[Question, ...]]:
        """The history that its home has behind the first `start` tokens, and the questions that stand."""
        if history.start <= start:  # all of it where it begins
            return history.after(start), ()
        call = DescribeSession(located.tenant, located.session_id, start, life=history.life)
        try:
            state = await self._backend.session(call, located.program, located.home.replica_id)
        except UnknownSessionError as error:  # another has its place by now
            raise SessionLostError(error.message, "session_id") from error
        assert state.history is not None
        return state.history, tuple(each.question for each in state.questions)

    async def _keep_question(self, located: Located, call: SessionCall, expires_s: float) -> bool:
        """Store the questions that stand now. False: the session has another home, which does not know them."""
        assert isinstance(call, AddQuestion | RemoveQuestion)
        tenant, session_id = located.tenant, located.session_id
        async for _ in _tries():
            saved = await self._histories.read(tenant, session_id) if located.kept else None
            if saved is None or not saved.record.kept:
                return True
            if saved.record.home != located.home:
                return False
            changed = call.question.question_id if isinstance(call, AddQuestion) else call.question_id
            questions = tuple(each for each in saved.questions if each.question_id != changed)
            if isinstance(call, AddQuestion):
                questions = (*questions, call.question)
            if await self._replace(located, located.home, saved, questions, expires_s) is PutResult.STORED:
                return True
        raise _contended()

    async def _replace(
        self, located: Located, home: Home, saved: SavedSession, questions: tuple[Question, ...], idle_s: float
    ) -> PutResult:
        """Store a whole history in the place of the one that was read, or only the home where there is no room."""
        tenant, session_id, record = located.tenant, located.session_id, saved.record
        history = replace(saved.history, life=home.life, idle_s=idle_s)
        result = await self._histories.put(tenant, session_id, home, history, questions, record)
        if result is PutResult.FULL:
            result = await self._histories.give_up(tenant, session_id, home, idle_s, record)
        return result

    # ---- moves ----

    async def _move(self, located: Located, error: HoldfastError, command: GenerateRequest) -> None:
        """Give the session another home, because of `error`. The move goes on if a waiting request leaves.

        Raises SessionLostError if its history was not kept, UnknownSessionError if it was closed, and the error of the
        replica that should take it.
        """
        if self._histories.degraded:
            raise error
        reason = MOVES[error.kind]
        if not located.kept:
            await self._give_up(located, reason, error)
            return
        task = self._moves.get(located.program)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._moved(located, reason, command))
            self._moves[located.program] = task
            task.add_done_callback(partial(_move_ended, self._moves, located.program))
        await asyncio.shield(task)

    async def _give_up(self, located: Located, reason: MoveReason, error: HoldfastError) -> None:
        """Handle a lost session without a stored history. Raises, unless another request has moved it already."""
        now = await self.find(located.tenant, located.session_id)
        if now.home.replica_id != located.home.replica_id or (now.kept and now.home.life != located.home.life):
            return
        if reason is MoveReason.SILENT:
            raise error
        if reason is MoveReason.FORGOTTEN and located.record is None:
            raise UnknownSessionError(error.message, "session_id")
        message = "the session's replica is gone, and its history was not kept"
        if not self._histories.on:
            message += ": `router.session_tenant_bytes` is 0"
        elif located.record is not None:
            message += ": those of its tenant's sessions take `router.session_tenant_bytes`"
        else:
            message += ", or the store has lost it"
        raise SessionLostError(f"{message}; open it again", "session_id")

    async def _moved(self, located: Located, reason: MoveReason, command: GenerateRequest) -> None:
        tenant, session_id = located.tenant, located.session_id
        saved = await self._histories.read(tenant, session_id)
        if saved is None:
            if await self._programs.look(located.program) is None:
                raise UnknownSessionError(f"session {session_id!r} was closed meanwhile", "session_id")
            raise SessionLostError("the session's replica is gone, and its history cannot be read", "session_id")
        if saved.record.home != located.home or not saved.record.kept:
            return
        home, idle_s = await _restore(self._backend, command, saved)
        for question in saved.questions:
            with suppress(OverloadedError):  # more stand there than a tenant may have
                call = AddQuestion(tenant, session_id, question, life=home.life)
                await self._backend.session(call, located.program, home.replica_id)
        if await self._replace(located, home, saved, saved.questions, idle_s) is PutResult.STORED:
            self._metrics.session_moves.labels(reason.value).inc()
            await self._programs.placed(located.program, home.replica_id)
            log.info("a session of program %s has moved to replica %s: %s", located.program, home.replica_id, reason)
            if reason is MoveReason.SILENT:  # it may live
                self._background.start(self._end(located, located.home))
            return
        now = await self._histories.look(tenant, session_id)
        if now is None or now.home != home:  # another was first, or it was closed
            self._background.start(self._end(located, home))

    async def _end(self, located: Located, home: Home) -> None:
        """Close the session at a former home. A replica that does not answer drops it once it is idle."""
        call = CloseSession(located.tenant, located.session_id, life=home.life)
        with suppress(SessionLostError, UnavailableError, UnknownSessionError):
            await self._backend.session(call, located.program, home.replica_id)


def _turn(command: GenerateRequest) -> SessionTurn:
    assert command.session is not None
    return command.session


def _at(located: Located) -> RoutingHint:
    return RoutingHint(located.home.replica_id, bound=True)


async def _restore(backend: Backend, command: GenerateRequest, saved: SavedSession) -> tuple[Home, float]:
    """Open the session at a replica with its history; at another one if that is lost meanwhile.

    Returns its home and the seconds after which it expires unused. Raises the replica's error.
    """
    history, life = saved.history, saved.record.next_life
    session = SessionTurn(
        _turn(command).session_id,
        opens=True,
        life=life,
        name=f"open/{life}",
        appends=max(history.appends - 1, 0),  # those before this one
        done=history.done,
    )
    prompt = RawPrompt(tuple(np.frombuffer(history.tokens, "<i4").tolist()))
    opening = replace(command, prompt=prompt, sampling=Sampling(max_tokens=0), stop=(), session=session)
    opening = replace(opening, within_s=inf, begins=False, drawn=None)
    for retries in reversed(range(ATTEMPTS)):
        opening = replace(opening, request_id=f"{command.program_id}/{secrets.token_hex(8)}")
        result = await backend.generate(opening, RoutingHint(tokens=history.end))
        if not isinstance(result.reply, Errored):
            assert result.reply.history is not None
            return Home(life, result.replica_id), result.reply.history.idle_s
        if not retries or result.reply.error.kind not in MOVES:
            raise error_of(result.reply.error)
    raise _again()


def _move_ended(moves: dict[str, asyncio.Task[None]], program: str, task: asyncio.Task[None]) -> None:
    del moves[program]
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        log.warning("a session of program %s could not be moved: %s", program, error)


def _opening(tenant: Tenant, located: Located) -> GenerateRequest:
    """A request of the tenant for the session, in case it has to be opened elsewhere."""
    return GenerateRequest(
        "",
        scope=tenant.name,
        program_id=located.program,
        weight=tenant.weight,
        cells=tenant.cells,
        priority=tenant.class_of(None),
        session=SessionTurn(located.session_id),
    )


async def _tries() -> AsyncGenerator[None, None]:
    """Attempts to change a record that others change, too. A random pause between attempts lets one succeed."""
    for attempt in range(CHANGES):
        yield
        await asyncio.sleep(random.uniform(0, min(PAUSE_S[0] * 2**attempt, PAUSE_S[1])))


def _contended() -> UnavailableError:
    return UnavailableError("other requests changed the session at the same time; try again")


def _again() -> UnavailableError:
    return UnavailableError("the session's replicas were lost one after the other; try again")
