"""Where a session lives: asked there, and moved where its replica is gone.

    operation --> find its home --> replica --> commit what it added to the history kept --> answer
                       ^               |                      |
                       |               lost                   another router has moved it
                       '---- move <----'                      '--> again, at its home now

While a replica lives it says in which order operations are done; the record in the store says which replica that is,
and what of the history it was told. Nothing is answered before it is there, so whoever moves the session finds all that
was. A move opens it anew at another replica, with its history as what it begins with, and puts the new home in the
place of the record that it was made of: where that has changed meanwhile, it does not count, and neither does an
operation that ends at a home that is none any more. So an operation is done once, by its name, whatever is lost.
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
from math import inf

import numpy as np

from holdfast.replicas.errors import (
    ErrorInfo,
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
from holdfast.router.identity import session_program
from holdfast.router.lru import Lru
from holdfast.router.metrics import RouterMetrics
from holdfast.router.programs import ProgramTable
from holdfast.router.protocol.sessions import SESSION_ID
from holdfast.router.session_histories import Home, Kept, Record, SessionHistories
from holdfast.router.store import Put
from holdfast.router.tenants import Tenant

log = logging.getLogger(__name__)

ATTEMPTS = 5  # of one operation, each at another home
AWAY = "the session's replica does not answer, and while Redis is away the session does not move; try again"
CHANGES = 100  # tries to change a record that others change at the same time
PAUSE_S = (0.001, 0.05)  # between two of them: at most, doubled from the first to the second
SEEN = 65536  # sessions of which this router knows where they were and how much was done


class Why(StrEnum):
    """Why a session moves."""

    GONE = "gone"  # its replica is none any more
    SILENT = "silent"  # it did not answer, or stopped meanwhile
    FORGOTTEN = "forgotten"  # it is there and does not have the session


@dataclass(frozen=True, slots=True)
class Found:
    """A session's home, with its record; None: the program table says so, for nothing is kept or can be reached."""

    tenant: str
    session_id: str
    home: Home
    record: Record | None

    @property
    def program(self) -> str:
        return session_program(self.tenant, self.session_id)

    @property
    def kept(self) -> bool:
        return self.record is not None and self.record.kept


class SessionHomes:
    """Serves what is asked of sessions, wherever they are."""

    def __init__(
        self, backend: Backend, programs: ProgramTable, histories: SessionHistories, metrics: RouterMetrics
    ) -> None:
        self._backend = backend
        self._programs = programs
        self._histories = histories
        self._metrics = metrics
        for why in Why:
            metrics.session_moves.labels(why.value)  # from 0
        self._moves: dict[str, asyncio.Task[None]] = {}  # under way, by program
        self._seen: Lru[tuple[Home, int]] = Lru(SEEN)  # by program: its home, and tokens as its record or clients know
        self._background = Background()

    async def find(self, tenant: str, session_id: str) -> Found:
        """Raises UnknownSessionError, or UnavailableError while Redis, which may know the session, is away."""
        found = await self._look(tenant, session_id)
        if found is not None:
            return found
        if self._histories.away and SESSION_ID.fullmatch(session_id):
            raise UnavailableError("Redis does not answer, and may know the session; retry")
        raise UnknownSessionError(f"session {session_id!r} is not open: unknown or closed", "session_id")

    async def _look(self, tenant: str, session_id: str) -> Found | None:
        """The session as far as anybody knows it."""
        named = SESSION_ID.fullmatch(session_id)
        record = await self._histories.look(tenant, session_id) if named else None
        if record is not None:
            self._see(session_program(tenant, session_id), record.home, record.tokens)
            return Found(tenant, session_id, record.home, record)
        if self._histories.away and (seen := self._seen.get(session_program(tenant, session_id), 0.0)) is not None:
            return Found(tenant, session_id, seen[0], None)
        known = await self._programs.look(session_program(tenant, session_id)) if named else None
        if known is None or known.last_replica is None:
            return None
        return Found(tenant, session_id, Home("", known.last_replica), None)

    async def check_free(self, tenant: str, session_id: str) -> None:
        """Raises SessionExistsError where a session of this name is open. What is left of one that was is forgotten."""
        found = await self._look(tenant, session_id)
        if found is None:
            return
        if not found.kept:
            call = DescribeSession(tenant, session_id, life=found.home.life)
            try:
                await self._backend.session(call, found.program, found.home.replica_id)
            except (UnknownSessionError, SessionLostError):
                await self.forget(tenant, session_id)
                return
        raise SessionExistsError(f"session {session_id!r} is open already", "id")

    async def forget(self, tenant: str, session_id: str) -> None:
        """There is no such session, or none any more."""
        await self._programs.forget(session_program(tenant, session_id))
        await self._histories.drop(tenant, session_id)
        self._seen.remove(session_program(tenant, session_id))

    # ---- operations ----

    async def generate(self, command: GenerateRequest, place: RoutingHint) -> Routed:
        """The whole reply to an operation. One that opens its session goes to the `place`, the others to its home.

        Raises as `Backend.generate`, UnknownSessionError, and SessionLostError where its history was not kept.
        """
        session = _turn(command)
        if session.opens:
            return await self._open(command, session, place)
        began = time.monotonic()
        for attempt in range(ATTEMPTS):
            found = await self.find(command.scope, session.session_id)
            error: HoldfastError
            try:
                routed = await self._backend.generate(_sent(command, found, attempt, began), _at(found))
                if isinstance(routed.reply, Answer):
                    if await self._commit(found, routed.reply.history) or not session.keep:
                        return routed
                    continue
                if (why := _lost(routed.reply.error)) is None or (why is Why.SILENT and not found.kept):
                    return routed
                error = error_of(routed.reply.error)
            except (SessionLostError, UnavailableError) as lost:
                why, error = _reason(lost), lost
            await self._move(found, why, error, command)
        raise _again()

    async def stream(self, command: GenerateRequest, place: RoutingHint) -> AsyncGenerator[Batch, None]:
        """The reply to a question as it is made. What its client has of it is gone on with elsewhere, where the history
        there is what it was begun with. Ends and raises as `Backend.stream` and `generate`.
        """
        session, drawing, replica_id = _turn(command), PartialReply(command.drawn), ""
        began, told = time.monotonic(), False
        for attempt in range(ATTEMPTS):
            found = await self.find(command.scope, session.session_id)
            sent = _sent(command, found, attempt, began)
            if told:
                sent = replace(sent, drawn=drawing.whole, session=replace(_turn(sent), at=drawing.at))
            why: Why | None = None
            error: HoldfastError = _again()
            try:
                async with aclosing(self._backend.stream(sent, _at(found))) as batches:
                    async for batch in batches:
                        last = batch.pieces[-1]
                        if isinstance(last, Errored) and found.kept and (why := _lost(last.error)) is not None:
                            error = error_of(last.error)
                            break
                        replica_id = batch.replica_id or replica_id
                        drawing.merge(batch.drawn)
                        if isinstance(last, Completed) and not await self._commit(found, last.history) and session.keep:
                            break
                        yield batch
                        told = True
                        if isinstance(last, Completed | Errored):
                            return
            except (SessionLostError, UnavailableError) as lost:
                why, error = _reason(lost), lost
            if why is not None:
                await self._move(found, why, error, command)
            if told and (why is None or drawing.at is None):
                left = SessionChangedError("the session moved, and this is no part of it; ask again", "session_id")
                yield Batch(replica_id, (Errored(left.info),))
                return
        raise _again()

    async def ask(self, tenant: Tenant, call: SessionCall) -> SessionState:
        """What the session says at its home. Raises as `Backend.session`, and as `generate`."""
        for _ in range(ATTEMPTS):
            found = await self.find(tenant.name, call.session_id)
            try:
                state = await self._backend.session(
                    replace(call, life=found.home.life), found.program, found.home.replica_id
                )
                if isinstance(call, AddQuestion | RemoveQuestion) and not await self._changed(
                    found, call, state.expires_s
                ):
                    continue
                return state
            except (SessionLostError, UnavailableError, UnknownSessionError) as error:
                await self._move(found, _reason(error), error, _opening(tenant, found))
        raise _again()

    async def forked(self, tenant: str, child: SessionState) -> None:
        """A fork has begun: what it has is kept from now on."""
        await self._histories.drop(tenant, child.session_id)  # what is left of one that was
        await self._commit(Found(tenant, child.session_id, Home("", child.replica_id), None), child.history)

    async def close(self, tenant: str, session_id: str) -> None:
        """The session is over. Raises UnknownSessionError, or UnavailableError while Redis is away: its history would
        stay there, and whoever finds that opens the session again.
        """
        found = await self.find(tenant, session_id)
        if self._histories.on and self._histories.away:
            raise UnavailableError("Redis does not answer, and may have the session's history; retry")
        # First here, so that whoever finds it gone from its replica does not move it.
        await self.forget(tenant, session_id)
        await self._end(found, found.home)

    async def _open(self, command: GenerateRequest, session: SessionTurn, place: RoutingHint) -> Routed:
        life = secrets.token_hex(8)
        await self._histories.drop(command.scope, session.session_id)  # what is left of one that was
        opened = replace(session, life=life, name=f"open/{life}")
        routed = await self._backend.generate(replace(command, session=opened), place)
        if isinstance(routed.reply, Answer):
            found = Found(command.scope, session.session_id, Home(life, routed.replica_id), None)
            await self._commit(found, routed.reply.history)
        return routed

    # ---- what is kept ----

    async def _commit(self, found: Found, told: History | None) -> bool:
        """What a home has told is kept. False: the session has another by now, and what was done there does not count.

        What is kept may lack more, which another router has not told yet, or never did: the home has it.
        """
        if told is None or not self._histories.on:
            return True
        tenant, session_id, record = found.tenant, found.session_id, found.record
        home, most = Home(told.life, found.home.replica_id), told.end
        for attempt in range(CHANGES):
            if self._histories.away:
                put = Put.AWAY
            elif record is None:
                told, questions = await self._told_from(found, told, 0)
                put = await self._histories.put(tenant, session_id, home, told, questions, None)
            elif record.home != home:
                return False
            elif record.kept and record.tokens < told.start:
                told, _ = await self._told_from(found, told, record.tokens)
                put = await self._histories.add(tenant, session_id, record, told)
            elif record.kept and record.tokens < told.end:
                put = await self._histories.add(tenant, session_id, record, told.after(record.tokens))
            else:  # it is there: whoever changes the record meanwhile makes it live on
                await self._histories.add(tenant, session_id, record, told.after(told.end))
                put = Put.DONE
            if put is Put.FULL:
                log.warning("the history of a session of tenant %s is not kept: it has no room for more", tenant)
                put = await self._histories.give_up(tenant, session_id, home, told.idle_s, record)
            if put is not Put.CHANGED:
                made = record is None and put is not Put.AWAY
                if made and await self._programs.look(found.program) is None:  # it was closed meanwhile
                    await self._histories.drop(tenant, session_id)
                self._see(found.program, home, most)
                return True
            record = await self._histories.look(tenant, session_id)
            if record is None and await self._programs.look(found.program) is None:
                raise UnknownSessionError(f"session {session_id!r} was closed meanwhile", "session_id")
            await _pause(attempt)
        raise _contended()

    def _see(self, program: str, home: Home, tokens: int) -> None:
        seen = self._seen.get(program, 0.0)
        if seen is not None and seen[0] == home:
            tokens = max(tokens, seen[1])
        self._seen.put(program, (home, tokens), inf)

    async def _told_from(self, found: Found, told: History, start: int) -> tuple[History, tuple[Question, ...]]:
        """As much of the history as its home has behind the first `start` tokens, and the questions that stand."""
        if told.start <= start:  # all of it where it begins
            return told.after(start), ()
        call = DescribeSession(found.tenant, found.session_id, start, life=told.life)
        try:
            state = await self._backend.session(call, found.program, found.home.replica_id)
        except UnknownSessionError as error:  # another has its place by now
            raise SessionLostError(error.message, "session_id") from error
        assert state.history is not None
        return state.history, tuple(each.question for each in state.questions)

    async def _changed(self, found: Found, call: AddQuestion | RemoveQuestion, expires_s: float) -> bool:
        """The questions that stand are kept. False: the session has another home, which has not been told."""
        tenant, session_id = found.tenant, found.session_id
        for attempt in range(CHANGES):
            kept = await self._histories.read(tenant, session_id) if found.kept else None
            if kept is None or not kept.record.kept:
                return True
            if kept.record.home != found.home:
                return False
            changed = call.question.question_id if isinstance(call, AddQuestion) else call.question_id
            questions = tuple(each for each in kept.questions if each.question_id != changed)
            if isinstance(call, AddQuestion):
                questions = (*questions, call.question)
            history = replace(kept.history, idle_s=expires_s)
            put = await self._histories.put(tenant, session_id, found.home, history, questions, kept.record)
            if put is Put.FULL:
                put = await self._histories.give_up(tenant, session_id, found.home, expires_s, kept.record)
            if put is not Put.CHANGED:
                return True
            await _pause(attempt)
        raise _contended()

    # ---- moves ----

    async def _move(self, found: Found, why: Why, error: HoldfastError, command: GenerateRequest) -> None:
        """The session has another home afterwards. Who waits for a move may leave; it goes on.

        Raises SessionLostError where its history was not kept, UnknownSessionError where it was closed, and what a
        replica says that is to take it in.
        """
        if not found.kept:
            await self._give_up(found, why, error)
            return
        task = self._moves.get(found.program)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._moved(found, why, command))
            self._moves[found.program] = task
            task.add_done_callback(lambda done: self._ended(found.program, done))
        await asyncio.shield(task)

    def _ended(self, program: str, task: asyncio.Task[None]) -> None:
        del self._moves[program]
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            log.warning("a session of program %s could not be moved: %s", program, error)

    async def _give_up(self, found: Found, why: Why, error: HoldfastError) -> None:
        """Nothing is kept of what its replica had. Raises, unless somebody has found it a home meanwhile."""
        now = await self.find(found.tenant, found.session_id)
        if now.home.replica_id != found.home.replica_id or (now.kept and now.home.life != found.home.life):
            return
        if self._histories.on and self._histories.away:
            raise UnavailableError(AWAY)
        if why is Why.SILENT:
            raise error
        if why is Why.FORGOTTEN and found.record is None:
            raise UnknownSessionError(error.message, "session_id")
        told = "the session's replica is gone, and its history was not kept"
        if not self._histories.on:
            told += ": `router.session_tenant_bytes` is 0"
        elif found.record is not None:
            told += ": those of its tenant's sessions take `router.session_tenant_bytes`"
        else:
            told += ", or the store has lost it"
        raise SessionLostError(f"{told}; open it again", "session_id")

    async def _moved(self, found: Found, why: Why, command: GenerateRequest) -> None:
        tenant, session_id = found.tenant, found.session_id
        kept = await self._histories.read(tenant, session_id)
        if kept is None:
            if self._histories.away:
                raise UnavailableError(AWAY)
            if await self._programs.look(found.program) is None:
                raise UnknownSessionError(f"session {session_id!r} was closed meanwhile", "session_id")
            raise SessionLostError("the session's replica is gone, and its history cannot be read", "session_id")
        if kept.record.home != found.home or not kept.record.kept:
            return
        seen = self._seen.get(found.program, 0.0)
        if seen is not None and seen[0] == found.home and kept.history.end < seen[1]:
            raise SessionLostError("the session's replica is gone, and a part of its history was lost", "session_id")
        life = kept.record.next_life
        routed = await self._backend.generate(_restoring(command, kept, life), RoutingHint(tokens=kept.history.end))
        if isinstance(routed.reply, Errored):
            raise error_of(routed.reply.error)
        told, home = routed.reply.history, Home(life, routed.replica_id)
        assert told is not None
        for question in kept.questions:
            with suppress(OverloadedError):  # more stand there than a tenant may have
                call = AddQuestion(tenant, session_id, question, life=life)
                await self._backend.session(call, found.program, home.replica_id)
        history = replace(kept.history, life=life, idle_s=told.idle_s)
        put = await self._histories.put(tenant, session_id, home, history, kept.questions, kept.record)
        if put is Put.FULL:
            put = await self._histories.give_up(tenant, session_id, home, told.idle_s, kept.record)
        if put is Put.DONE:
            self._metrics.session_moves.labels(why.value).inc()
            await self._programs.placed(found.program, home.replica_id)
            log.info("a session of program %s has moved to replica %s: %s", found.program, home.replica_id, why)
            if why is Why.SILENT:  # it may live
                self._background.start(self._end(found, found.home))
            return
        now = await self._histories.look(tenant, session_id)
        if now is None or now.home != home:  # another was first, or it was closed
            self._background.start(self._end(found, home))

    async def _end(self, found: Found, home: Home) -> None:
        """Nobody comes to this home any more. One that does not answer lets it go when nobody has used it for long."""
        call = CloseSession(found.tenant, found.session_id, life=home.life)
        with suppress(SessionLostError, UnavailableError, UnknownSessionError):
            await self._backend.session(call, found.program, home.replica_id)


def _turn(command: GenerateRequest) -> SessionTurn:
    assert command.session is not None
    return command.session


def _at(found: Found) -> RoutingHint:
    return RoutingHint(found.home.replica_id, bound=True)


def _sent(command: GenerateRequest, found: Found, attempt: int, began: float) -> GenerateRequest:
    """An operation as a home gets it. It may meet itself there, so each attempt has an id of its own."""
    session = _turn(command)
    if session.keep:
        session = replace(session, name=session.name or f"op/{command.request_id}")
    within_s = command.within_s - (time.monotonic() - began) if attempt else command.within_s
    request_id = f"{command.request_id}/{attempt}" if attempt else command.request_id
    return replace(command, request_id=request_id, within_s=within_s, session=replace(session, life=found.home.life))


def _restoring(command: GenerateRequest, kept: Kept, life: str) -> GenerateRequest:
    """What opens a session with the history that is kept of it."""
    history = kept.history
    session = SessionTurn(
        _turn(command).session_id,
        opens=True,
        life=life,
        name=f"open/{life}",
        appends=max(history.appends - 1, 0),  # those before this, which is one
        done=history.done,
    )
    return replace(
        command,
        request_id=f"{command.program_id}/{secrets.token_hex(8)}",
        prompt=RawPrompt(tuple(np.frombuffer(history.tokens, "<i4").tolist())),
        sampling=Sampling(max_tokens=0),
        stop=(),
        within_s=inf,
        begins=False,
        drawn=None,
        session=session,
    )


def _opening(tenant: Tenant, found: Found) -> GenerateRequest:
    """A request of the tenant for the session, for the case that it has to be opened elsewhere."""
    return GenerateRequest(
        "",
        RawPrompt(()),
        Sampling(max_tokens=0),
        scope=tenant.name,
        program_id=found.program,
        weight=tenant.weight,
        cells=tenant.cells,
        priority=tenant.class_of(None),
        session=SessionTurn(found.session_id),
    )


def _lost(error: ErrorInfo) -> Why | None:
    """Why an operation that failed so may be done elsewhere; None: it may not."""
    if error.kind is ErrorKind.NO_SESSION:
        return Why.FORGOTTEN
    return Why.SILENT if error.kind is ErrorKind.UNAVAILABLE else None


def _reason(error: HoldfastError) -> Why:
    if isinstance(error, SessionLostError):
        return Why.GONE
    return Why.FORGOTTEN if isinstance(error, UnknownSessionError) else Why.SILENT


async def _pause(attempt: int) -> None:
    """Between two tries to change a record that others change. A random time lets one of them be first."""
    await asyncio.sleep(random.uniform(0, min(PAUSE_S[0] * 2**attempt, PAUSE_S[1])))


def _contended() -> UnavailableError:
    return UnavailableError("other requests changed the session at the same time; try again")


def _again() -> UnavailableError:
    return UnavailableError("the session's replicas were lost one after the other; try again")
