"""One generation request from its arrival to its answer. `Turns.serve` names the stages in their order.

Limits come before the body, and a hit in the response cache reaches no replica. Whatever happens, a request has exactly
one outcome and gives back what it holds.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, SessionExistsError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, Errored, GenerateRequest, SessionTurn, Usage
from holdfast.replicas.retention.latency import tool_set
from holdfast.replicas.types import Origin, Priority, salted
from holdfast.router.backend import Backend, Routed, RoutingHint
from holdfast.router.background import Background
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints.formats import Arrival, Exchange, Format, loaded_models
from holdfast.router.endpoints.session_homes import SessionHomes
from holdfast.router.entry import (
    Call,
    Cost,
    Entry,
    KeptAnswers,
    NamedRequest,
    Outcome,
    estimate,
    json_response,
    named,
    retry_of,
)
from holdfast.router.protocol.errors import ReplyError
from holdfast.router.protocol.turn import Choice, Turn
from holdfast.router.records import (
    Begun,
    CachedAnswer,
    CacheQuery,
    CacheResult,
    Conversation,
    ProgramTable,
    ResponseCache,
    ToolLatencies,
    commands,
    conversation,
    fresh_draw_named,
    generate,
    hint,
    histories,
    ids,
    mark_of,
    neighbour,
    parent_named,
    pieces_of,
    placed_by,
    priority_named,
    program_named,
    prompt_tokens,
    repeated,
    shared_prefix,
    stream,
    total,
    varied,
    within_named,
)
from holdfast.router.streaming import (
    EVENT_HEADERS,
    SILENCE_S,
    Connection,
    EventStream,
    TurnStream,
    soon,
    until_disconnect,
)
from holdfast.router.tenants import Tenant
from holdfast.router.tracing import server_timing

log = logging.getLogger(__name__)

HEADERS_S = 5.0  # within which a stream that begins later, or fails, has an HTTP status of its own
OUTPUT_ESTIMATE = 512  # tokens that a request without `max_tokens` is expected to generate


@dataclass(slots=True)
class Generation:
    """A generation request that was read, and its turn.

    `program` is the key of the program that it names, else the conversation by which its program is found. A new
    program is placed with `neighbour`, and is a sub-agent of `parent`. `cache_query` None: the response cache is
    bypassed. `deadline` is on the event loop's clock. `fresh_draw`: it gets a random seed where it names none.
    """

    call: Call
    exchange: Exchange
    program: str | Conversation
    neighbour: str
    parent: str
    cache_query: CacheQuery | None
    priority: Priority
    deadline: float
    fresh_draw: bool
    named: NamedRequest | None  # by an `Idempotency-Key`
    begun: Begun = field(init=False)  # once it is a turn of its program

    @property
    def turn(self) -> Turn:
        return self.exchange.turn

    @property
    def tenant(self) -> Tenant:
        return self.call.tenant

    @property
    def others(self) -> list[Choice]:
        """The other requested answers. Each has a random seed of its own if the first has one."""
        return [replace(each, sampling=self.seeded(each.sampling)) for each in self.turn.others]

    def seeded(self, sampling: Sampling) -> Sampling:
        return varied(sampling) if self.fresh_draw else sampling


class Turns:
    """Serves generation requests of every format."""

    def __init__(
        self,
        backend: Backend,
        entry: Entry,
        programs: ProgramTable,
        cache: ResponseCache,
        config: RouterConfig,
        latencies: ToolLatencies,
        sessions: SessionHomes,
        kept_answers: KeptAnswers,
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._cache = cache
        self._config = config
        self._latencies = latencies
        self._sessions = sessions
        self._kept_answers = kept_answers
        self._background = Background()

    async def serve(self, request: Request, format_: Format) -> Response:
        """The answer to `request`. Raises HoldfastError or ClientGoneError, counted already."""
        arrived = asyncio.get_running_loop().time()
        call = self._entry.begin(request, format_.name)
        try:
            with ExitStack() as held:
                held.enter_context(self._entry.admitted(call))
                try:
                    generation = await self._read(call, format_, arrived)
                    request_key = generation.named
                    answer = None if request_key is None else await self._kept_answers.find(request_key)
                except HoldfastError:
                    await call.charge(Cost(), lease=False)  # invalid requests count, too
                    raise
                if answer is not None:
                    return await self._replay(generation, answer)
                await self._charge(generation, held)
                await self._join_program(generation)
                if generation.turn.stream:
                    return await self._stream(generation, held.pop_all())
                return await self._answer(generation, held)
        except BaseException as error:
            call.failed(error)
            raise

    # ---- before the answer ----

    async def _read(self, call: Call, format_: Format, arrived: float) -> Generation:
        """Read the request. Raises HoldfastError or ClientGoneError."""
        request, tenant, config = call.request, call.tenant, self._config
        models = await loaded_models(self._backend)
        if not config.model_defaults:
            models = [replace(card, defaults={}) for card in models]
        exchange = await format_.read(request, Arrival(tenant.name, call.id, int(time.time()), models))
        turn, headers = exchange.turn, request.headers
        session = turn.session is not None  # it is its program, and its state is no part of a request's key
        program = None if session else program_named(tenant.name, turn.ids, headers, config.program_headers)
        fresh_draw = turn.fresh_draw or fresh_draw_named(headers)
        retry = (turn.session.content if turn.session is not None else "") or retry_of(request)
        call.asks(turn.model.name, turn.stream, program or exchange.program, retry)
        call.skipped(", ".join(turn.skipped))
        call.headers.tools_as_text = (
            turn.model.tools_as_text and isinstance(turn.prompt, ChatPrompt) and bool(turn.prompt.tools)
        )
        by_prompt = tenant.prompt_seed and turn.model.prompt_seed
        varies = not by_prompt and _seeded_by_prompt(turn.sampling)
        bypassed = fresh_draw or varies or bool(turn.others) or session
        return Generation(
            call=call,
            exchange=exchange,
            program=program or exchange.program or conversation(salted(turn.model.name, turn.cache_salt), turn.prompt),
            neighbour=neighbour(tenant.name, turn.ids, headers, config.placement_headers),
            parent=parent_named(tenant.name, headers, config.parent_headers),
            cache_query=None if bypassed else self._cache.query(tenant, turn, headers.get("cache-control")),
            priority=tenant.class_of(turn.priority or priority_named(headers)),
            deadline=arrived + min(turn.timeout_s or inf, within_named(headers, config.deadline_headers)),
            fresh_draw=fresh_draw or not by_prompt,
            named=None if session else named(tenant.name, request),
        )

    async def _replay(self, generation: Generation, answer: bytes) -> Response:
        """The stored answer to the same request. It counts as a call, and has been billed. Raises QuotaError."""
        call = generation.call
        await call.charge(Cost(), lease=False)
        call.headers.replayed = call.free = True
        call.end(Outcome.CACHED)
        return _response(generation, answer)

    async def _charge(self, generation: Generation, held: ExitStack) -> None:
        """Reserve the expected cost of the request, and a place for each answer. Raises QuotaError."""
        call, turn = generation.call, generation.turn
        for _ in turn.others:
            held.enter_context(self._entry.place(call.tenant))
        input_tokens = output_tokens = 0
        if call.tenant.limits.counts_tokens:  # a long prompt takes a tenth of a millisecond
            prompts = [turn.prompt, *(other.prompt for other in turn.others if not other.again)]
            input_tokens = sum(map(prompt_tokens, prompts))
            samplings = [turn.sampling, *(other.sampling for other in turn.others)]
            output_tokens = sum(map(_generates_at_most, samplings))
        program = generation.program.partition("/")[2] if isinstance(generation.program, str) else ""
        await call.charge(estimate(self._config.prices, 1 + len(turn.others), input_tokens, output_tokens), program)

    async def _join_program(self, generation: Generation) -> None:
        """The request becomes a turn of its program. Raises QuotaError where its tenant has too many programs."""
        call, tenant = generation.call, generation.tenant.name
        if isinstance(generation.program, str):
            begun = await self._programs.begin(generation.program, parent=generation.parent)
        else:
            begun = await self._programs.begin_conversation(tenant, generation.program, generation.parent)
        generation.begun = begun
        call.joined_program(begun.key, begun.pause)
        if call.tenant.limits.max_programs is not None:
            await call.charge(Cost(0), begun.key.partition("/")[2])
        if begun.pause is not None:
            self._latencies.record(tenant, begun.pause.tools, begun.pause.seconds)

    # ---- the answer ----

    async def _stream(self, generation: Generation, held: ExitStack) -> Response:
        """The stream once it begins. After `HEADERS_S` it is a stream that begins later, so that the client gets its
        headers.

        A request that fails before that gets an HTTP status, by which clients know whether to retry.
        """
        call = generation.call

        async def answer() -> Response:
            try:
                with held:
                    return await self._answer(generation, held)
            except BaseException as error:
                call.failed(error)
                raise

        try:
            response = await soon(answer(), HEADERS_S, partial(generation.exchange.encoder, 0))
        except BaseException:
            held.close()  # where the answer was cancelled before it began
            raise
        if isinstance(response, Response):
            return response
        return EventStream(response, None, self._config.stall_s, SILENCE_S)

    async def _answer(self, generation: Generation, held: ExitStack) -> Response:
        """The answer from the cache, else of a replica. A stream takes over the resources in `held`.

        Raises HoldfastError that names the request's own fields.
        """
        try:
            cached = await self._look_up(generation)
            if cached is not None:
                return await self._repeat(generation, cached)
            return await self._ask_replica(generation, held)
        except HoldfastError as error:
            raise generation.turn.fields.error(error) from error.__cause__

    # ---- from the response cache ----

    async def _look_up(self, generation: Generation) -> CachedAnswer | None:
        query = generation.cache_query
        cached = None if query is None else await self._cache.find(query)
        if query is None or query.fresh:
            result = CacheResult.BYPASS
        else:
            result = CacheResult.MISS if cached is None else CacheResult.HIT
        generation.call.looked_up(result.value)
        return cached

    async def _repeat(self, generation: Generation, cached: CachedAnswer) -> Response:
        """The answer to an equal request, with ids of its own."""
        call, exchange = generation.call, generation.exchange
        answer = repeated(cached.answer, call.id)
        if generation.turn.stream:
            encoder = exchange.encoder(0)
            data = encoder.opening() + encoder.encode(pieces_of(answer))
        else:
            data = exchange.reply(answer, ())
        call.headers.age_s = cached.age_s
        call.headers.same_draw = _seeded_by_prompt(generation.turn.sampling)
        call.repeats(answer)
        await self._settle(generation, "", answer)
        if generation.turn.program_end:  # no replica got this turn, and some may keep cells for the next one
            self._background.start(self._backend.end_program(generation.tenant.name, generation.begun.key))
        data = exchange.kept(data)
        await self._keep_answer(generation, data)
        return _response(generation, data)

    # ---- of a replica ----

    async def _ask_replica(self, generation: Generation, held: ExitStack) -> Response:
        """The answer of a replica. A stream takes over the resources in `held`."""
        call, turn, tenant, begun = generation.call, generation.turn, generation.tenant, generation.begun
        command = GenerateRequest(
            request_id=call.id,
            prompt=turn.prompt,
            sampling=generation.seeded(turn.sampling),
            stop=turn.stop,
            scope=tenant.name,
            origin=Origin.WARM_UP if self._entry.warms_up(call.request) else Origin.CLIENT,
            program_id=begun.key,
            program_arrival=begun.program.arrival,
            program_turns=begun.program.turns,
            answered_turns=begun.program.answered_turns,
            program_end=turn.program_end,
            weight=tenant.weight,
            cells=tenant.cells,
            priority=generation.priority,
            within_s=generation.deadline - asyncio.get_running_loop().time(),
            begins=turn.stream,
            root=begun.root,
            cache_salt=turn.cache_salt,
            session=turn.session,
            hints=turn.hints,
        )
        command = call.asking(command)
        place = await self._place(generation)
        command = replace(command, prefixes=place.prefixes)
        call.sent(partial(_usage_of_all, self._backend, ids(call.id, turn.others), turn.others))
        if not turn.stream:
            return await self._whole(generation, command, place)
        connection = Connection(call.request.receive)
        try:
            events = await self._begin_stream(connection, generation, command, place)
        except BaseException:
            connection.close()
            raise
        call.headers.replica = events.replica_id
        events.held = held.pop_all()
        return EventStream(events, connection, self._config.stall_s, SILENCE_S)

    async def _whole(self, generation: Generation, command: GenerateRequest, place: RoutingHint) -> Response:
        call, exchange = generation.call, generation.exchange
        async with self._entry.drain.bounded():
            work = self._generate(generation, command, place)
            result, others = await until_disconnect(call.request.receive, work)
        call.headers.replica = result.replica_id or "none"
        answer = result.reply
        if isinstance(answer, Errored):
            raise ReplyError(answer.error, answer.usage)
        call.headers.server_timing = server_timing(answer.timing)
        call.answered(result.replica_id, answer)
        body = exchange.reply(answer, others)
        call.completed(answer.usage, answer.timing)
        self._cache_answer(generation, answer)  # once it is encoded: one that cannot be would fail each repeat
        await self._settle(generation, result.replica_id, answer)
        body = exchange.kept(body)
        await self._keep_answer(generation, body)
        return json_response(body)

    async def _generate(
        self, generation: Generation, command: GenerateRequest, place: RoutingHint
    ) -> tuple[Routed, Sequence[Answer]]:
        others = generation.others
        if others:
            return await generate(self._backend, commands(command, others), others, place)
        backend = self._backend if command.session is None else self._sessions
        return await backend.generate(command, place), ()

    async def _begin_stream(
        self, connection: Connection, generation: Generation, command: GenerateRequest, place: RoutingHint
    ) -> TurnStream:
        """The stream after its first pieces, so that a failure before them is answered with an HTTP status."""
        exchange, others = generation.exchange, generation.others

        async def finish(replica_id: str, answer: Answer) -> None:
            self._cache_answer(generation, answer)
            await self._settle(generation, replica_id, answer)

        if others:
            batches = stream(self._backend, commands(command, others), others, place)
        else:
            batches = (self._backend if command.session is None else self._sessions).stream(command, place)
        events = TurnStream(
            batches,
            [exchange.encoder(choice) for choice in range(1 + len(others))],
            generation.call,
            self._entry.drain,
            finish,
            exchange.kept,
            generation.turn.fields,
            None if generation.named is None else partial(self._keep_answer, generation),
        )
        try:
            await connection.during(events.start())
        except BaseException:
            await batches.aclose()
            raise
        return events

    async def _place(self, generation: Generation) -> RoutingHint:
        """The best replica for the turn: the one with its program's state, its prompt's prefix, or its parent."""
        turn, begun, nearby = generation.turn, generation.begun, generation.neighbour
        if turn.session is not None:
            return _at_session(turn.session, begun)
        scope = placed_by(generation.tenant.name, turn.model.name, turn.cache_salt)
        history = generation.program
        if isinstance(history, str):  # branches of named programs match the messages of those programs, too
            history = conversation(salted(turn.model.name, turn.cache_salt), turn.prompt)
        preamble, earlier = history.preamble, histories(scope, history)
        if begun.program.last_replica is not None:
            return RoutingHint(begun.program.last_replica, tokens=preamble.prompt_tokens, histories=earlier)
        prefixes = tuple(each for each in (hint(nearby) if nearby else "", shared_prefix(scope, history)) if each)
        parent = await self._programs.look(nearby) if nearby else None
        near_replica = None if parent is None else parent.last_replica
        tokens = (preamble.prompt_tokens, preamble.tokens)
        return RoutingHint(None, near_replica, prefixes, *tokens, begun.shared, histories=earlier)

    # ---- after the answer ----

    async def _settle(self, generation: Generation, replica_id: str, answer: Answer) -> None:
        """End the turn, which was served by a replica or from the cache (""). The client gets the end of the answer
        after that, so that any router that gets the next turn finds this one. A client that leaves during this changes
        nothing.

        An error here does not affect the answer, which is complete and counted.
        """
        with suppress(Exception):  # it is in the log
            await self._background.finish(self._end_turn(generation, replica_id, answer))

    async def _end_turn(self, generation: Generation, replica_id: str, answer: Answer) -> None:
        call, called = generation.call, answer.called
        over = generation.turn.program_end or called.last
        tools = "" if over else tool_set(called.tools)
        run = await self._programs.end(generation.begun, replica_id, tools, over=over, mark=mark_of(answer))
        if run is not None:
            call.program_ended(run, final=not called.tools)
        await generation.exchange.keep(generation.begun.key)
        await call.booked()

    async def _keep_answer(self, generation: Generation, data: bytes) -> None:
        """Keep the answer under its request's `Idempotency-Key`. An error here does not affect the answer."""
        if generation.named is not None:
            with suppress(Exception):  # it is in the log
                await self._background.finish(self._kept_answers.keep(generation.named, data))

    def _cache_answer(self, generation: Generation, answer: Answer) -> None:
        if generation.cache_query is not None:
            stored = _for_any_program(answer) if generation.turn.program_end else answer
            self._cache.keep(generation.cache_query, stored)


async def _usage_of_all(backend: Backend, request_ids: Sequence[str], others: Sequence[Choice]) -> tuple[Usage, bool]:
    """The usage of all answers of a request that was cut off, and whether every replica reported."""
    usages = await asyncio.gather(*map(backend.drawn, request_ids))
    return total([each or Usage() for each in usages], others), None not in usages


def _response(generation: Generation, data: bytes) -> Response:
    """A whole answer, or all events of one."""
    return Response(data, headers=EVENT_HEADERS) if generation.turn.stream else json_response(data)


def _generates_at_most(sampling: Sampling) -> int:
    return min(sampling.max_tokens, OUTPUT_ESTIMATE) if sampling.max_tokens >= 0 else OUTPUT_ESTIMATE


def _seeded_by_prompt(sampling: Sampling) -> bool:
    """Whether tokens are sampled, and the request names no seed."""
    return varied(sampling) is not sampling


def _at_session(session: SessionTurn, begun: Begun) -> RoutingHint:
    """The place to open a session; `SessionHomes` finds an open one. Raises SessionExistsError if it exists."""
    if session.opens and begun.program.came > 1:
        raise SessionExistsError(f"session {session.session_id!r} is open already, or being opened", "id")
    return RoutingHint(shared=begun.shared)


def _for_any_program(answer: Answer) -> Answer:
    """An answer to a program's last turn, in the form for other programs. It ends a program only if it is complete and
    has no tool call. An unclosed call counts as one, although no program waits for it.
    """
    cut = answer.reason == "length"
    return replace(answer, called=replace(answer.called, last=not (answer.called.tools or answer.tool_calls or cut)))
