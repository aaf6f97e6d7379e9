"""Sessions over HTTP: contexts that stay on a replica, fed as data comes and asked at the cost of the question alone.

A session is a program: its record in the program table counts its operations. To open, append and query are generation
requests and go the way of `turns`; the rest is asked of the session's replica. Which that is, and where it goes on when
that is gone, is for `session_homes` to say.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import (
    ErrorKind,
    HoldfastError,
    InvalidRequestError,
    SessionExistsError,
    UnavailableError,
)
from holdfast.replicas.requests import (
    AddQuestion,
    Answer,
    DescribeSession,
    ForkSession,
    ModelCard,
    RemoveQuestion,
    SessionState,
)
from holdfast.router.backend import Backend
from holdfast.router.background import Background
from holdfast.router.entry import Entry
from holdfast.router.event_stream import until_disconnect
from holdfast.router.formats import Arrival, Exchange, Format, KeepsNothing
from holdfast.router.http import DELIVERY, IDEMPOTENCY, json_response, retry_of
from holdfast.router.identity import MAX_LENGTH, session_program
from holdfast.router.programs import Begun, ProgramTable
from holdfast.router.protocol.completions import completion_reply
from holdfast.router.protocol.sessions import (
    appended_reply,
    closed_reply,
    opened_reply,
    question_removed_reply,
    question_reply,
    questions_reply,
    read_append,
    read_fork,
    read_open,
    read_query,
    read_question,
    session_reply,
    sessions_reply,
)
from holdfast.router.protocol.turn import Turn
from holdfast.router.session_homes import SessionHomes
from holdfast.router.streaming import CompletionEncoder, Encoder
from holdfast.router.turns import Turns

MOST_LISTED = 1000
NAMED = "session"  # attribute of a request's state: the tenant and the id of the session that it is about


@dataclass(frozen=True, slots=True)
class SessionExchange(KeepsNothing):
    """An operation of a session, its program."""

    turn: Turn
    program: str
    make_encoder: Callable[[], Encoder]
    make_reply: Callable[[Answer], bytes]

    @property
    def skipped(self) -> str:
        return ", ".join(self.turn.skipped)

    def encoder(self, choice: int = 0) -> Encoder:
        return self.make_encoder()

    def reply(self, answer: Answer, others: Sequence[Answer] = ()) -> bytes:
        return self.make_reply(answer)


class OpenFormat:
    """`POST /v1/sessions`."""

    name = "session_open"

    def __init__(self, entry: Entry, sessions: SessionHomes) -> None:
        self._entry = entry
        self._sessions = sessions

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        turn = await self._entry.read(request, read_open, arrival.models, f"sess_{arrival.unique}")
        assert turn.session is not None
        session_id, created, model = turn.session.session_id, arrival.created, turn.model.name
        await self._sessions.check_free(arrival.tenant, session_id)
        setattr(request.state, NAMED, (arrival.tenant, session_id))
        return SessionExchange(
            turn,
            session_program(arrival.tenant, session_id),
            lambda: CompletionEncoder(session_id, created, model, False),
            lambda answer: opened_reply(session_id, created, model, answer),
        )


class AppendFormat:
    """`POST /v1/sessions/{session_id}/append`."""

    name = "session_append"

    def __init__(self, entry: Entry, sessions: SessionHomes) -> None:
        self._entry = entry
        self._sessions = sessions

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        session_id = request.path_params["session_id"]
        turn = _named(request, await self._entry.read(request, read_append, arrival.models, session_id))
        await self._sessions.find(arrival.tenant, session_id)
        setattr(request.state, NAMED, (arrival.tenant, session_id))
        return SessionExchange(
            turn,
            session_program(arrival.tenant, session_id),
            lambda: CompletionEncoder(session_id, arrival.created, turn.model.name, False),
            lambda answer: appended_reply(session_id, answer),
        )


class QueryFormat:
    """`POST /v1/sessions/{session_id}/query`: answered as a plain completion is, whole or streamed."""

    name = "session_query"

    def __init__(self, entry: Entry, sessions: SessionHomes) -> None:
        self._entry = entry
        self._sessions = sessions

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        session_id = request.path_params["session_id"]
        turn = _named(request, await self._entry.read(request, read_query, arrival.models, session_id))
        await self._sessions.find(arrival.tenant, session_id)
        setattr(request.state, NAMED, (arrival.tenant, session_id))
        reply_id, created, model = f"cmpl-{arrival.unique}", arrival.created, turn.model.name
        return SessionExchange(
            turn,
            session_program(arrival.tenant, session_id),
            lambda: CompletionEncoder(reply_id, created, model, turn.include_usage),
            lambda answer: completion_reply(reply_id, created, model, answer),
        )


class SessionEndpoints:
    """What a tenant may do with its sessions."""

    def __init__(
        self, backend: Backend, entry: Entry, programs: ProgramTable, turns: Turns, homes: SessionHomes
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._turns = turns
        self._homes = homes
        self._open = OpenFormat(entry, homes)
        self._append = AppendFormat(entry, homes)
        self._query = QueryFormat(entry, homes)
        self._background = Background()

    async def open(self, request: Request) -> Response:
        return await self._serve(request, self._open)

    async def append(self, request: Request) -> Response:
        return await self._serve(request, self._append)

    async def query(self, request: Request) -> Response:
        return await self._serve(request, self._query)

    async def fork(self, request: Request) -> Response:
        """A second session with the history that the first one has now."""
        async with self._entry.entered(request) as tenant:
            child = await self._entry.read(request, read_fork) or f"sess_{secrets.token_hex(12)}"
            session_id, life = request.path_params["session_id"], secrets.token_hex(8)
            await self._homes.find(tenant.name, session_id)
            await self._homes.check_free(tenant.name, child)
            parent = session_program(tenant.name, session_id)
            begun = await self._programs.begin(session_program(tenant.name, child), parent=parent)
            if begun.program.came > 1:
                raise SessionExistsError(f"session {child!r} is being opened", "id")
            try:
                call = ForkSession(tenant.name, session_id, child, child_life=life)
                state = await until_disconnect(request.receive, self._homes.ask(tenant, call))
                await self._homes.forked(tenant.name, state)
            except BaseException:
                self._background.start(self._homes.forget(tenant.name, child))
                raise
            await self._background.finish(self._end(begun, state))
            return json_response(session_reply(state, (await self._card()).name))

    async def show(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            state = await self._homes.ask(tenant, DescribeSession(tenant.name, request.path_params["session_id"]))
            return json_response(session_reply(state, (await self._card()).name))

    async def listed(self, request: Request) -> Response:
        """The caller's own ones that replicas have, the latest first."""
        async with self._entry.entered(request) as tenant:
            limit = _limit(request.query_params.get("limit", "100"))
            found = {}  # where a session has moved from its old home may still have it, as it was then
            for state in sorted(await self._backend.sessions(tenant.name), key=lambda state: state.tokens):
                found[state.session_id] = state
            states = sorted(found.values(), key=lambda state: state.age_s)
            return json_response(sessions_reply(states, (await self._card()).name, limit))

    async def close(self, request: Request) -> Response:
        """The session is over. One that was lost with its replica is over, too."""
        async with self._entry.entered(request) as tenant:
            session_id = request.path_params["session_id"]
            await self._homes.close(tenant.name, session_id)
            return json_response(closed_reply(session_id))

    # ---- standing questions ----

    async def stand(self, request: Request) -> Response:
        """A question is to be answered ahead, after each append."""
        async with self._entry.entered(request) as tenant:
            session_id, question_id = request.path_params["session_id"], f"q_{secrets.token_hex(8)}"
            question = await self._entry.read(request, read_question, (await self._card(),), question_id)
            state = await self._homes.ask(tenant, AddQuestion(tenant.name, session_id, question))
            return json_response(question_reply(state, question_id))

    async def questions(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            state = await self._homes.ask(tenant, DescribeSession(tenant.name, request.path_params["session_id"]))
            return json_response(questions_reply(state))

    async def answer(self, request: Request) -> Response:
        """The latest answer, with what it has seen."""
        async with self._entry.entered(request) as tenant:
            named = request.path_params
            call = DescribeSession(tenant.name, named["session_id"], question_id=named["question_id"])
            state = await self._homes.ask(tenant, call)
            return json_response(question_reply(state, named["question_id"]))

    async def withdraw(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            named = request.path_params
            await self._homes.ask(tenant, RemoveQuestion(tenant.name, named["session_id"], named["question_id"]))
            return json_response(question_removed_reply(named["question_id"]))

    # ---- parts ----

    async def _serve(self, request: Request, format_: Format) -> Response:
        try:
            return await self._turns.serve(request, format_)
        except BaseException as error:
            named: tuple[str, str] | None = getattr(request.state, NAMED, None)
            if named is not None and _nothing_left(error, opens=format_ is self._open):
                self._background.start(self._homes.forget(*named))
            raise

    async def _end(self, begun: Begun, state: SessionState) -> None:
        await self._programs.end(begun, state.replica_id)

    async def _card(self) -> ModelCard:
        models = await self._backend.models()
        if not models:
            raise UnavailableError("No model is loaded yet")
        return models[0]


def _named(request: Request, turn: Turn) -> Turn:
    """What changes a session with the name that its client, or the proxy, has given it: it is done once.

    Raises InvalidRequestError for a name that is too long.
    """
    name = next((name for name in (IDEMPOTENCY, DELIVERY) if name in request.headers), None)
    if name is None or turn.session is None or not turn.session.keep:
        return turn
    given = request.headers[name]
    if len(given) > MAX_LENGTH:
        raise InvalidRequestError(f"'{name}' must be at most {MAX_LENGTH} characters", name)
    session = replace(turn.session, name=f"{name}/{given}", content=retry_of(request, name))
    return replace(turn, session=session)


def _nothing_left(error: BaseException, *, opens: bool) -> bool:
    """Whether there is no session of this name after an operation that ended in `error`."""
    if opens:
        return not isinstance(error, SessionExistsError)
    return isinstance(error, HoldfastError) and error.kind is ErrorKind.NO_SESSION


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= 4 and 1 <= int(given) <= MOST_LISTED):
        raise InvalidRequestError(f"'limit' must be a number from 1 to {MOST_LISTED}", "limit")
    return int(given)
