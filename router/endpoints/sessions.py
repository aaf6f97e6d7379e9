"""Sessions over HTTP: contexts that stay on a replica, are fed as data arrives, and are queried at the cost of the
query.

A session is a program: its record in the program table counts its operations. Open, append and query are generation
requests and are served by `turns`; the other calls go to the session's replica. `session_homes` knows which replica
that is, and where the session continues when the replica is lost.
"""

import secrets
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import ErrorKind, HoldfastError, InvalidRequestError, SessionExistsError
from holdfast.replicas.requests import (
    AddQuestion,
    Answer,
    DescribeSession,
    ForkSession,
    RemoveQuestion,
)
from holdfast.router.backend import Backend
from holdfast.router.background import Background
from holdfast.router.endpoints.formats import Arrival, Exchange, loaded_models
from holdfast.router.endpoints.session_homes import SessionHomes
from holdfast.router.endpoints.turns import Turns
from holdfast.router.entry import DELIVERY, IDEMPOTENCY, Entry, json_response, retry_of
from holdfast.router.protocol.body import deleted_reply, read_query
from holdfast.router.protocol.completions import CompletionEncoder, completion_reply
from holdfast.router.protocol.sessions import (
    READERS,
    Operation,
    SessionsQuery,
    appended_reply,
    opened_reply,
    question_object,
    question_reply,
    read_fork,
    read_question,
    session_object,
)
from holdfast.router.protocol.turn import Turn
from holdfast.router.records import MAX_LENGTH, ProgramTable, session_program
from holdfast.router.streaming import until_disconnect

NAMED = "session"  # attribute of a request's state: the tenant and the id of its session


class SessionFormat:
    """`POST /v1/sessions`, and `append` and `query` below a session. A query is answered like a completion."""

    def __init__(self, operation: Operation, entry: Entry, homes: SessionHomes) -> None:
        self.name = f"session_{operation}"
        self._operation = operation
        self._entry = entry
        self._homes = homes

    async def read(self, request: Request, arrival: Arrival) -> Exchange:
        opens = self._operation == "open"
        session_id = f"sess_{arrival.unique}" if opens else request.path_params["session_id"]
        turn = await self._entry.read(request, READERS[self._operation], arrival.models, session_id)
        assert turn.session is not None
        session_id = turn.session.session_id
        if opens:
            await self._homes.check_free(arrival.tenant, session_id)
        else:
            turn = _named(request, turn)
            await self._homes.find(arrival.tenant, session_id)
        setattr(request.state, NAMED, (arrival.tenant, session_id))
        created, model = arrival.created, turn.model.name

        def reply(answer: Answer, others: object) -> bytes:
            if opens:
                return opened_reply(session_id, created, model, answer)
            if self._operation == "append":
                return appended_reply(session_id, answer)
            return completion_reply(f"cmpl-{arrival.unique}", created, model, answer)

        return Exchange(
            turn,
            lambda choice: CompletionEncoder(f"cmpl-{arrival.unique}", created, model, turn.include_usage),
            reply,
            session_program(arrival.tenant, session_id),
        )


class SessionEndpoints:
    """The calls of a tenant about its sessions."""

    def __init__(
        self, backend: Backend, entry: Entry, programs: ProgramTable, turns: Turns, homes: SessionHomes
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._turns = turns
        self._homes = homes
        self._formats = {name: SessionFormat(name, entry, homes) for name in READERS}
        self._background = Background()

    async def open(self, request: Request) -> Response:
        """Open a session."""
        return await self._serve(request, "open")

    async def append(self, request: Request) -> Response:
        """Append to a session."""
        return await self._serve(request, "append")

    async def query(self, request: Request) -> Response:
        """Query a session."""
        return await self._serve(request, "query")

    async def fork(self, request: Request) -> Response:
        """A second session with the present history of the first one."""
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
            await self._background.finish(self._programs.end(begun, state.replica_id))
            return json_response(orjson.dumps(session_object(state, await self._model())))

    async def show(self, request: Request) -> Response:
        """A session."""
        async with self._entry.entered(request) as tenant:
            state = await self._homes.ask(tenant, DescribeSession(tenant.name, request.path_params["session_id"]))
            return json_response(orjson.dumps(session_object(state, await self._model())))

    async def listed(self, request: Request) -> Response:
        """The caller's own sessions on replicas, the latest first."""
        async with self._entry.entered(request) as tenant:
            limit = read_query(SessionsQuery, request.query_params).limit
            # A session that has moved may be on its old replica too, with fewer tokens.
            by_tokens = sorted(await self._backend.sessions(tenant.name), key=lambda state: state.tokens)
            states = sorted({each.session_id: each for each in by_tokens}.values(), key=lambda state: state.age_s)
            model = await self._model()
            data = [session_object(each, model) for each in states[:limit]]
            return json_response(orjson.dumps({"object": "list", "data": data, "has_more": len(states) > limit}))

    async def close(self, request: Request) -> Response:
        """End a session, also one whose replica was lost."""
        async with self._entry.entered(request) as tenant:
            session_id = request.path_params["session_id"]
            await self._homes.close(tenant.name, session_id)
            return json_response(deleted_reply("session.deleted", session_id))

    # ---- standing questions ----

    async def stand(self, request: Request) -> Response:
        """Register a question that is answered ahead after each append."""
        async with self._entry.entered(request) as tenant:
            session_id, question_id = request.path_params["session_id"], f"q_{secrets.token_hex(8)}"
            models = (await loaded_models(self._backend))[:1]
            question = await self._entry.read(request, read_question, models, question_id)
            state = await self._homes.ask(tenant, AddQuestion(tenant.name, session_id, question))
            return json_response(question_reply(state, question_id))

    async def questions(self, request: Request) -> Response:
        """The standing questions of a session."""
        async with self._entry.entered(request) as tenant:
            state = await self._homes.ask(tenant, DescribeSession(tenant.name, request.path_params["session_id"]))
            data = [question_object(each, state) for each in state.questions]
            return json_response(orjson.dumps({"object": "list", "data": data}))

    async def answer(self, request: Request) -> Response:
        """The latest answer to a question, with the number of the append that it has seen."""
        async with self._entry.entered(request) as tenant:
            names = request.path_params
            call = DescribeSession(tenant.name, names["session_id"], question_id=names["question_id"])
            return json_response(question_reply(await self._homes.ask(tenant, call), names["question_id"]))

    async def withdraw(self, request: Request) -> Response:
        """Withdraw a question."""
        async with self._entry.entered(request) as tenant:
            names = request.path_params
            await self._homes.ask(tenant, RemoveQuestion(tenant.name, names["session_id"], names["question_id"]))
            return json_response(deleted_reply("session.question.deleted", names["question_id"]))

    # ---- parts ----

    async def _serve(self, request: Request, operation: Operation) -> Response:
        try:
            return await self._turns.serve(request, self._formats[operation])
        except BaseException as error:
            session: tuple[str, str] | None = getattr(request.state, NAMED, None)
            if session is not None and _is_gone(error, opens=operation == "open"):
                self._background.start(self._homes.forget(*session))
            raise

    async def _model(self) -> str:
        return (await loaded_models(self._backend))[0].name


def _named(request: Request, turn: Turn) -> Turn:
    """`turn` with the client's or the proxy's name for the operation, if it changes the session, so that it runs only
    once.

    Raises InvalidRequestError for a name that is too long.
    """
    header = next((name for name in (IDEMPOTENCY, DELIVERY) if name in request.headers), None)
    if header is None or turn.session is None or not turn.session.keep:
        return turn
    value = request.headers[header]
    if len(value) > MAX_LENGTH:
        raise InvalidRequestError(f"'{header}' must be at most {MAX_LENGTH} characters", header)
    session = replace(turn.session, name=f"{header}/{value}", content=retry_of(request, header))
    return replace(turn, session=session)


def _is_gone(error: BaseException, *, opens: bool) -> bool:
    """Whether the session does not exist after an operation that ended in `error`."""
    if opens:
        return not isinstance(error, SessionExistsError)
    return isinstance(error, HoldfastError) and error.kind is ErrorKind.NO_SESSION
