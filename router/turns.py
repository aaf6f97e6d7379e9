"""One generation request from its arrival to its answer: let it in, read it, look in the cache, ask a replica.

The order is that of the architecture: limits come before the body, and a cache hit reaches no replica. Whatever
happens, a request ends in exactly one outcome and gives back what it holds.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, SessionExistsError, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, Errored, GenerateRequest, SessionTurn, Usage
from holdfast.replicas.retention.latency import tool_set
from holdfast.replicas.types import Origin, Priority, salted
from holdfast.router import server_timing
from holdfast.router.accounts import Admission
from holdfast.router.answers import pieces_of, repeated
from holdfast.router.backend import Backend, Place, Routed
from holdfast.router.background import Background
from holdfast.router.choices import commands, generate, ids, stream, total, varied
from holdfast.router.config import RouterConfig
from holdfast.router.conversations import (
    Conversation,
    Conversations,
    Standing,
    conversation,
    hint,
    histories,
    mark_of,
    placed_by,
    preamble,
    prompt_tokens,
)
from holdfast.router.entry import Drain, Entry
from holdfast.router.event_stream import EVENT_HEADERS, SILENCE_S, Connection, EventStream, until_disconnect
from holdfast.router.formats import Arrival, Exchange, Format
from holdfast.router.http import answer_headers, json_response, retry_of
from holdfast.router.idempotency import KeptAnswers, NamedRequest, named
from holdfast.router.identity import (
    fresh_draw_named,
    neighbour,
    parent_named,
    priority_named,
    program_named,
    within_named,
)
from holdfast.router.metrics import Meter, Outcome, RouterMetrics, outcome_of
from holdfast.router.programs import Begun, ProgramTable
from holdfast.router.protocol.errors import ReplyError
from holdfast.router.protocol.turn import Choice, Turn
from holdfast.router.response_cache import Ask, CacheResult, Found, Lead, ResponseCache
from holdfast.router.session_homes import SessionHomes
from holdfast.router.tenants import Tenant
from holdfast.router.tool_latency import ToolLatencies
from holdfast.router.turn_report import TurnReport, TurnReports
from holdfast.router.turn_stream import TurnStream, soon

log = logging.getLogger(__name__)
T = TypeVar("T")

HEADERS_S = 5.0  # within which a stream that begins later, or fails, has an HTTP status of its own


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed authentication and validation. `ask` None: the cache is bypassed. `deadline`: when its
    answer is wanted, on the event loop's clock. `fresh_draw`: it gets a random seed where it names none. `named`: by an
    `Idempotency-Key`.

    `program`: the one that it names, else the conversation says which one it is. `near`: what a new one is placed with,
    and `parent` what it is a sub-agent of.
    """

    tenant: Tenant
    exchange: Exchange
    meter: Meter
    program: str | Conversation
    near: str
    parent: str
    ask: Ask | None
    unique: str
    report: TurnReport
    admission: Admission
    priority: Priority
    deadline: float
    fresh_draw: bool
    named: NamedRequest | None

    @property
    def turn(self) -> Turn:
        return self.exchange.turn


@dataclass(frozen=True, slots=True)
class Served:
    """An accepted request that has become a turn of a program; `standing` where that has no name. `lead`: others wait
    for its answer, or may come to.
    """

    accepted: Accepted
    begun: Begun
    standing: Standing | None
    lead: Lead | None = None

    @property
    def key(self) -> str:
        return self.begun.key


class Turns:
    """Serves generation requests of every format."""

    def __init__(
        self,
        backend: Backend,
        entry: Entry,
        programs: ProgramTable,
        conversations: Conversations,
        cache: ResponseCache,
        metrics: RouterMetrics,
        config: RouterConfig,
        latencies: ToolLatencies,
        reports: TurnReports | None = None,
        drain: Drain | None = None,
        sessions: SessionHomes | None = None,
        kept_answers: KeptAnswers | None = None,
    ) -> None:
        """`sessions` None: none are served. `kept_answers` None: no answer is kept under an `Idempotency-Key`."""
        self._backend = backend
        self._sessions = sessions
        self._kept_answers = kept_answers
        self._entry = entry
        self._drain = drain or Drain()
        self._programs = programs
        self._conversations = conversations
        self._cache = cache
        self._metrics = metrics
        self._config = config
        self._latencies = latencies
        self._reports = reports or TurnReports()
        self._background = Background()

    async def serve(self, request: Request, format_: Format) -> Response:
        """The answer to `request`. Raises HoldfastError or ClientGoneError, counted already."""
        arrived = asyncio.get_running_loop().time()
        # The server's own first request is served like any other, and counts among none.
        own = self._entry.warms_up(request)
        meter = Meter(RouterMetrics.unseen() if own else self._metrics, format_.name)
        reports = TurnReports() if own else self._reports
        report = reports.begin(request, format_.name, answer_headers(request).request_id)
        meter.on_end = report.ended
        try:
            principal = self._entry.authenticate(request)
            meter.tenant = report.facts.tenant = principal.tenant.name
            with ExitStack() as held:
                report.admission = admission = held.enter_context(self._entry.admitted(principal))
                try:
                    accepted = await self._accept(request, format_, admission, meter, report, arrived)
                    known = await _find_kept(accepted, self._kept_answers)
                except HoldfastError:
                    await admission.charge_call()  # what is wrong counts, too
                    raise
                if known is not None:
                    return await self._replay(request, accepted, known)
                for _ in accepted.turn.others:  # each answer counts against the tenant's limits
                    held.enter_context(self._entry.place(principal.tenant))
                await self._charge(request, accepted)
                served = await self._begin(accepted)
                if not accepted.turn.stream:
                    return await self._answer(request, served, held)
                return await self._stream(request, served, held.pop_all())
        except BaseException as error:
            meter.failed(error)
            raise

    async def _stream(self, request: Request, served: Served, held: ExitStack) -> Response:
        """The stream once it begins, or after `HEADERS_S` one that begins later: its client learns that it is served.

        What is refused or fails before has its HTTP status, by which clients know whether to try again.
        """
        accepted = served.accepted

        async def answer() -> Response:
            try:
                with held:
                    return await self._answer(request, served, held)
            except BaseException as error:
                accepted.meter.failed(error)
                raise

        try:
            response = await soon(answer(), HEADERS_S, accepted.exchange.encoder)
        except BaseException:
            held.close()  # where the answer was cancelled before it began
            raise
        if isinstance(response, Response):
            return response
        if accepted.report.facts.cache == "":  # it waits for the answer to an equal request
            answer_headers(request).cache = CacheResult.JOINED.value
            answer_headers(request).same_draw = _seeded_by_prompt(accepted.turn.sampling)
        return EventStream(response, None, self._config.stall_s, SILENCE_S)

    async def _answer(self, request: Request, served: Served, held: ExitStack) -> Response:
        """The answer from the cache, or else of a replica; a stream takes with it what is `held`.

        Raises HoldfastError that names the request's own fields.
        """
        try:
            found = await self._look_up(request, served.accepted, held)
            if isinstance(found, Found):
                own = replace(found, answer=repeated(found.answer, served.accepted.unique))
                data = self._written(request, served.accepted, own.answer)
                if data is not None:
                    return await self._repeat(request, served, own, data)
                found = None
            return await self._ask(request, replace(served, lead=found), held)
        except HoldfastError as error:
            raise served.accepted.turn.fields.error(error) from error.__cause__

    async def _accept(
        self,
        request: Request,
        format_: Format,
        admission: Admission,
        meter: Meter,
        report: TurnReport,
        arrived: float,
    ) -> Accepted:
        tenant = admission.principal.tenant
        models = await self._backend.models()
        if not models:
            raise UnavailableError("No model is loaded yet")
        if not self._config.model_defaults:
            models = [replace(card, defaults={}) for card in models]
        unique = admission.id
        exchange = await format_.read(request, Arrival(tenant.name, unique, int(time.time()), models))
        turn = exchange.turn
        report.facts.retry = (turn.session.content if turn.session is not None else "") or retry_of(request)
        answer_headers(request).skipped = exchange.skipped
        has_tools = isinstance(turn.prompt, ChatPrompt) and bool(turn.prompt.tools)
        answer_headers(request).tools_as_text = turn.model.tools_as_text and has_tools
        meter.asks(turn.model.name)
        if exchange.skipped:
            meter.skipped(exchange.skipped.count(",") + 1)
        config, headers = self._config, request.headers
        session = turn.session is not None  # it is its program, and its state is no part of a request's key
        program = None if session else program_named(tenant.name, turn.ids, headers, config.program_headers)
        fresh_draw = turn.fresh_draw or fresh_draw_named(headers)
        varies = not tenant.prompt_seed and _seeded_by_prompt(turn.sampling)
        bypassed = fresh_draw or varies or bool(turn.others) or session
        ask = None if bypassed else self._cache.ask(tenant, turn, request.headers.get("cache-control"))
        accepted = Accepted(
            tenant=tenant,
            exchange=exchange,
            meter=meter,
            program=program or exchange.program or conversation(salted(turn.model.name, turn.cache_salt), turn.prompt),
            near=neighbour(tenant.name, turn.ids, headers, config.placement_headers),
            parent=parent_named(tenant.name, headers, config.parent_headers),
            ask=ask,
            unique=unique,
            report=report,
            admission=admission,
            priority=tenant.class_of(turn.priority or priority_named(headers)),
            deadline=arrived + min(turn.timeout_s or inf, within_named(headers, config.deadline_headers)),
            fresh_draw=fresh_draw or not tenant.prompt_seed,
            named=None if session else named(tenant.name, request),
        )
        report.accepted(unique, tenant.name, program or exchange.program, turn.model.name, turn.stream)
        return accepted

    async def _replay(self, request: Request, accepted: Accepted, known: bytes) -> Response:
        """The answer that the same request got: it counts as a call, and has been billed. Raises QuotaError."""
        await accepted.admission.charge_call()
        answer_headers(request).standing = accepted.admission.standing
        answer_headers(request).replayed = True
        accepted.report.admission = None
        accepted.meter.end(Outcome.CACHED)
        return _response(accepted, known)

    async def _keep_answer(self, accepted: Accepted, data: bytes) -> None:
        """Keep the answer for the same request under its key. What fails here takes no answer away."""
        if accepted.named is not None and self._kept_answers is not None:
            with suppress(Exception):  # it is in the log
                await self._background.finish(self._kept_answers.keep(accepted.named, data))

    async def _charge(self, request: Request, accepted: Accepted) -> None:
        """What it is expected to need counts against the tenant's limits. Raises QuotaError."""
        admission, turn = accepted.admission, accepted.turn
        input_tokens = output_tokens = 0
        if admission.counts_tokens:
            prompts = [turn.prompt, *(other.prompt for other in turn.others if not other.again)]
            input_tokens = sum(map(prompt_tokens, prompts))
            drawn = [turn.sampling, *(other.sampling for other in turn.others)]
            output_tokens = sum(_drawn_at_most(each, self._config.output_estimate) for each in drawn)
        program = accepted.program.partition("/")[2] if isinstance(accepted.program, str) else ""
        await admission.charge(1 + len(turn.others), input_tokens, output_tokens, program)
        answer_headers(request).standing = admission.standing

    async def _look_up(self, request: Request, accepted: Accepted, held: ExitStack) -> Found | Lead | None:
        """The answer from the cache, or of whoever computes it just now. A Lead where others are to wait for this
        one's; it is `held`, so that they learn of any end.
        """
        ask, found = accepted.ask, None
        if ask is not None:

            async def wait(work: Coroutine[Any, Any, T]) -> T:
                async with self._drain.bounded():
                    return await until_disconnect(request.receive, work)

            def adopt(lead: Lead) -> None:
                held.push(lead)

            found = await self._cache.seek(ask, wait, adopt)
        if ask is None or ask.fresh:
            result = CacheResult.BYPASS
        elif isinstance(found, Found):
            result = CacheResult.JOINED if found.joined else CacheResult.HIT
        else:
            result = CacheResult.MISS
        answer_headers(request).cache = accepted.report.facts.cache = result.value
        accepted.meter.looked_up(result.value)
        return found

    def _written(self, request: Request, accepted: Accepted, answer: Answer) -> bytes | None:
        """The answer from the cache in the shape that was asked for.

        None where it cannot be written: the cache drops it, and this request computes its own.
        """
        try:
            if not accepted.turn.stream:
                return accepted.exchange.reply(answer)
            encoder = accepted.exchange.encoder()
            return encoder.opening() + encoder.encode(pieces_of(answer))
        except Exception:  # a bug, which would else be the answer to each repeat
            log.exception("a cached answer cannot be written; it is computed anew")
            assert accepted.ask is not None
            self._cache.drop(accepted.ask)
            answer_headers(request).cache = accepted.report.facts.cache = CacheResult.MISS.value
            return None

    async def _repeat(self, request: Request, served: Served, found: Found, data: bytes) -> Response:
        """The answer to an equal request, with ids of its own; `data`: as its client gets it."""
        accepted = served.accepted
        answer_headers(request).age_s = found.age_s
        answer_headers(request).same_draw = _seeded_by_prompt(accepted.turn.sampling)
        accepted.report.repeated(found.answer)
        accepted.meter.end(Outcome.CACHED)
        await self._settle(served, "", found.answer)
        if accepted.turn.program_end:  # no replica has seen this turn, and some may keep cells for the next one
            self._background.start(self._backend.end_program(accepted.tenant.name, served.key))
        data = accepted.exchange.kept(data)
        await self._keep_answer(accepted, data)
        return _response(accepted, data)

    async def _ask(self, request: Request, served: Served, held: ExitStack) -> Response:
        """The answer of a replica; a stream takes with it what is `held`."""
        accepted, program = served.accepted, served.begun.program
        command = GenerateRequest(
            request_id=accepted.unique,
            prompt=accepted.turn.prompt,
            sampling=_seeded(accepted, accepted.turn.sampling),
            stop=accepted.turn.stop,
            scope=accepted.tenant.name,
            origin=Origin.WARM_UP if self._entry.warms_up(request) else Origin.CLIENT,
            program_id=served.key,
            program_arrival=program.arrival,
            program_turns=program.turns,
            answered_turns=program.answered_turns,
            program_end=accepted.turn.program_end,
            weight=accepted.tenant.weight,
            cells=accepted.tenant.cells,
            priority=accepted.priority,
            within_s=accepted.deadline - asyncio.get_running_loop().time(),
            begins=accepted.turn.stream,
            root=served.begun.root,
            cache_salt=accepted.turn.cache_salt,
            session=accepted.turn.session,
            hints=accepted.turn.hints,
        )
        command = accepted.report.asking(command)
        place = await self._place(accepted, served.begun)
        command = replace(command, prefixes=place.prefixes)
        if not accepted.turn.stream:
            return await self._whole(request, served, command, place)
        connection = Connection(request.receive)
        try:
            stream = await self._begin_stream(connection, served, command, place)
        except BaseException:
            connection.close()
            raise
        answer_headers(request).replica = stream.replica_id
        stream.held = held.pop_all()
        return EventStream(stream, connection, self._config.stall_s, SILENCE_S)

    async def _whole(self, request: Request, served: Served, command: GenerateRequest, place: Place) -> Response:
        accepted = served.accepted
        with self._paid(accepted):
            async with self._drain.bounded():
                work = _generated(_served_by(command, self._backend, self._sessions), accepted, command, place)
                routed, others = await until_disconnect(request.receive, work)
        answer_headers(request).replica = routed.replica_id or "none"
        answer = routed.reply
        if isinstance(answer, Errored):
            raise ReplyError(answer.error, answer.usage)
        timing = answer.timing
        answer_headers(request).server_timing = server_timing.header(timing)
        accepted.report.answered(routed.replica_id, answer)
        body = accepted.exchange.reply(answer, others)
        accepted.meter.answered(answer.usage, timing)
        self._remember(served, answer)  # once it is encoded: an answer that cannot be would fail each repeat
        await self._settle(served, routed.replica_id, answer)
        body = accepted.exchange.kept(body)
        await self._keep_answer(accepted, body)
        return json_response(body)

    async def _begin_stream(
        self, connection: Connection, served: Served, command: GenerateRequest, place: Place
    ) -> TurnStream:
        """The stream after its first pieces, so that what fails before them is answered with an HTTP status."""
        accepted = served.accepted

        async def settle(replica_id: str, answer: Answer) -> None:
            self._remember(served, answer)
            await self._settle(served, replica_id, answer)

        def leave() -> None:
            if served.lead is not None:
                served.lead.leave()
            self._left(accepted)

        others = _others(accepted)
        if others:
            batches = stream(self._backend, commands(command, others), others, place)
        else:
            batches = _served_by(command, self._backend, self._sessions).stream(command, place)
        encoders = [accepted.exchange.encoder(choice) for choice in range(1 + len(others))]
        cut = partial(self._left, accepted)
        events = TurnStream(
            batches,
            encoders,
            accepted.meter,
            settle,
            accepted.report.answered,
            self._drain,
            leave,
            cut,
            accepted.exchange.kept,
            accepted.turn.fields,
        )
        if accepted.named is not None:
            events.on_whole = partial(self._keep_answer, accepted)
        with self._paid(accepted):
            try:
                await connection.during(events.start())
            except BaseException:
                await batches.aclose()
                raise
        return events

    @contextmanager
    def _paid(self, accepted: Accepted) -> Iterator[None]:
        """What is cut off while this is done, by its client or by a failure that says not what was done, is counted."""
        accepted.report.sent()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, ReplyError) and outcome_of(error) is not Outcome.REJECTED:
                self._left(accepted)
            raise

    def _left(self, accepted: Accepted) -> None:
        """Its end does not tell what was drawn, so that is asked. Where its client has left its tenant pays for it."""
        accepted.admission.count(_count(accepted, self._backend))

    async def _begin(self, accepted: Accepted) -> Served:
        """The request becomes a turn of its program; what that waited for took so long."""
        tenant, standing = accepted.tenant.name, None
        if isinstance(accepted.program, str):
            begun = await self._programs.begin(accepted.program, parent=accepted.parent)
        else:
            begun, standing = await self._conversations.begin(tenant, accepted.program, accepted.parent)
        accepted.report.began(begun.key, begun.pause)
        await accepted.admission.charge_program(begun.key.partition("/")[2])
        if begun.pause is not None:
            accepted.meter.resumed(begun.pause.seconds)
            self._latencies.record(tenant, begun.pause.tools, begun.pause.seconds)
        return Served(accepted, begun, standing)

    async def _place(self, accepted: Accepted, begun: Begun) -> Place:
        turn, last_replica, near = accepted.turn, begun.program.last_replica, accepted.near
        if turn.session is not None:
            return _at_session(turn.session, begun)
        scope = placed_by(accepted.tenant.name, turn.model.name, turn.cache_salt)
        begins = preamble(scope, turn.prompt)
        sent = accepted.program
        if isinstance(sent, str):  # branches of programs with names look for what these have sent, too
            sent = conversation(salted(turn.model.name, turn.cache_salt), turn.prompt)
        known = histories(scope, sent, begins.prompt_tokens)
        if last_replica is not None:
            return Place(last_replica, tokens=begins.prompt_tokens, histories=known)
        prefixes = ((hint(near),) if near else ()) + ((begins.digest,) if begins.digest else ())
        parent = await self._programs.look(near) if near else None
        near_replica = None if parent is None else parent.last_replica
        return Place(None, near_replica, prefixes, begins.prompt_tokens, begins.tokens, begun.shared, histories=known)

    async def _settle(self, served: Served, replica_id: str, answer: Answer) -> None:
        """The turn is served, by a replica or from the cache (""). Its client learns of the end after the cluster has:
        so whichever router gets the next turn finds this one. A client that goes meanwhile changes nothing.

        What fails here takes no answer away: that is whole, and counted as such.
        """
        with suppress(Exception):  # it is in the log
            await self._background.finish(self._end(served, replica_id, answer))

    async def _end(self, served: Served, replica_id: str, answer: Answer) -> None:
        accepted, called = served.accepted, answer.called
        over = accepted.turn.program_end or called.last
        tools = "" if over else tool_set(called.tools)
        stand = None if served.standing is None else self._conversations.replied(served.standing, mark_of(answer))
        run = await self._programs.end(served.begun, replica_id, tools, over=over, stand=stand)
        if run is not None:
            accepted.meter.program_ended(run)
        await accepted.exchange.keep(served.key)
        await accepted.admission.booked()

    def _remember(self, served: Served, answer: Answer) -> None:
        accepted = served.accepted
        if accepted.ask is not None:
            kept = _for_any_program(answer) if accepted.turn.program_end else answer
            self._cache.keep(accepted.ask, kept, served.lead)


async def _count(accepted: Accepted, backend: Backend) -> None:
    others = accepted.turn.others
    asked = ids(accepted.unique, others)
    told: Sequence[Usage | None] = [None] * len(asked)
    try:
        told = await asyncio.gather(*map(backend.drawn, asked))
    finally:
        if None in told:
            accepted.admission.uncounted()
        used = total([each or Usage() for each in told], others)
        accepted.meter.used(used)
        accepted.report.used(used)
        accepted.report.counted(used)


def _response(accepted: Accepted, data: bytes) -> Response:
    """A whole answer, or all events of one."""
    return Response(data, headers=EVENT_HEADERS) if accepted.turn.stream else json_response(data)


def _served_by(command: GenerateRequest, backend: Backend, sessions: SessionHomes | None) -> Backend | SessionHomes:
    if command.session is None:
        return backend
    assert sessions is not None
    return sessions


async def _generated(
    backend: Backend | SessionHomes, accepted: Accepted, command: GenerateRequest, place: Place
) -> tuple[Routed, Sequence[Answer]]:
    if not accepted.turn.others:
        return await backend.generate(command, place), ()
    assert not isinstance(backend, SessionHomes)  # an operation of a session has one answer
    others = _others(accepted)
    return await generate(backend, commands(command, others), others, place)


async def _find_kept(accepted: Accepted, kept: KeptAnswers | None) -> bytes | None:
    """The answer that the same request got under its key. Raises RefusedError (422)."""
    return None if accepted.named is None or kept is None else await kept.find(accepted.named)


def _drawn_at_most(sampling: Sampling, estimate: int) -> int:
    return min(sampling.max_tokens, estimate) if sampling.max_tokens >= 0 else estimate


def _seeded_by_prompt(sampling: Sampling) -> bool:
    """Whether tokens are drawn, and the request does not say with which seed."""
    return varied(sampling) is not sampling


def _seeded(accepted: Accepted, sampling: Sampling) -> Sampling:
    return varied(sampling) if accepted.fresh_draw else sampling


def _others(accepted: Accepted) -> list[Choice]:
    """The other answers that are asked for, each with a random seed of its own where the first has one."""
    return [replace(each, sampling=_seeded(accepted, each.sampling)) for each in accepted.turn.others]


def _at_session(session: SessionTurn, begun: Begun) -> Place:
    """Where it opens; its homes know where it is. Raises SessionExistsError where another opening came before."""
    if session.opens and begun.program.came > 1:
        raise SessionExistsError(f"session {session.session_id!r} is open already, or being opened", "id")
    return Place(shared=begun.shared)


def _for_any_program(answer: Answer) -> Answer:
    """An answer to a program's last turn as others may have it: its program is over only where it is whole and calls
    nothing. A call that has not closed is among the answer's, and is none that its program waits for.
    """
    cut = answer.reason == "length"
    return replace(answer, called=replace(answer.called, last=not (answer.called.tools or answer.tool_calls or cut)))
