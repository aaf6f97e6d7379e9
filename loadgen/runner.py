"""Sends rounds of programs to servers in turn: wave by wave, each wave on every server before the next.

So whatever else the machine does falls on all of them, and a server computes while the others are idle. There is a
pause before one server begins after another, since a server may look for work for a while in a busy loop. The server
that begins changes from wave to wave.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from holdfast.loadgen.chat import ChatClient, Exchange, streamed
from holdfast.loadgen.conversation import Answers, Manner, Request, assistant, digest, first, fits, following
from holdfast.loadgen.program import Output
from holdfast.loadgen.rows import Row
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.loadgen.traces.recording import Observed
from holdfast.loadgen.workloads.script import Lane, Load, Round, Wave

LEAD_S = 0.02
"""How long before its moment a request is made ready, so that making it does not count as the server's time."""


async def sleep_until(due: float | None, lead: float = 0.0) -> None:
    """Return ``lead`` seconds before ``due``, a moment of `time.perf_counter`; at once if that is past, or None."""
    if due is not None and (left := due - lead - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def start_each(
    starts: Sequence[float | None], begin: Sequence[Callable[[], Coroutine[None, None, None]]], lead: float = LEAD_S
) -> None:
    """Run each of ``begin`` from ``lead`` seconds before its start on, until all are through.

    A task is made when its moment nears: thousands made in advance would delay the first ones. Raises the first error
    of any, after the others have been cancelled.
    """
    order = sorted(range(len(starts)), key=lambda place: starts[place] or 0.0)
    try:
        async with asyncio.TaskGroup() as tasks:
            for place in order:
                await sleep_until(starts[place], lead)
                tasks.create_task(begin[place]())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement, and the name of its model."""

    name: str
    client: ChatClient
    model: str


@dataclass(frozen=True, slots=True)
class Part:
    """One repetition of a workload or a trace, to be sent to every server."""

    workload: str
    repetition: int
    round: Round
    manner: Manner
    load: Load | None = None  # of a sweep
    wording: Wording | None = None  # makes texts of prompts that are only lengths
    about: str = ""  # one line about the round

    @property
    def requests(self) -> int:
        """Requests to one server, those that are not measured included."""
        return sum(len(lane) for wave in (*self.round.fill, *self.round.waves) for lane in wave)

    @property
    def measured(self) -> Mapping[str, int]:
        """The measured requests to one server, by the workload's name in their rows."""
        names = [reported(self.workload, program.tenant, self.load) for program in self.round.programs]
        return Counter(names[place] for wave in self.round.waves for lane in wave for place in lane)


def reported(workload: str, tenant: str = "", load: Load | None = None) -> str:
    """The name under which a program's figures are reported."""
    kind = tenant.partition("-")[0]
    return " ".join(part for part in (workload, kind, load.name if load else "") if part)


@dataclass(slots=True)
class Runner:
    """Sends parts and keeps a row for every measured request, also of a run that is interrupted."""

    servers: Sequence[Server]
    keys: Mapping[str, str] = field(default_factory=dict)  # of tenants; the others are sent with the client's own
    began: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)
    pause_s: float = 0.0  # between servers
    record: bool = False
    observed: list[Observed] = field(default_factory=list)  # with ``record``
    sent: Callable[[], None] = lambda: None  # called after every request

    async def send(self, part: Part) -> None:
        """Send one part to every server."""
        for waves, measured in ((part.round.fill, False), (part.round.waves, True)):
            await self._pass(part, waves, measured)

    async def _pass(self, part: Part, waves: Sequence[Wave], measured: bool) -> None:
        counts = Counter(place for wave in waves for lane in wave for place in lane)
        talks = {server.name: _Talks(part, counts) for server in self.servers}
        last: Server | None = None  # the first server waits too: others may have been busy a moment ago
        for number, wave in enumerate(waves):
            for place in range(len(self.servers)):
                server = self.servers[(number + part.repetition + place) % len(self.servers)]
                if server is not last and len(self.servers) > 1:
                    await asyncio.sleep(self.pause_s)
                last = server
                began = time.perf_counter()
                due: list[float | None] = [began + s for s in part.round.due] or [None] * len(wave)
                lanes = [
                    _Sending(self, part, server, number, measured, talks[server.name], began, lane, at).run
                    for lane, at in zip(wave, due, strict=True)
                ]
                await start_each(due, lanes)

    def headers(self, session: str, tenant: str) -> dict[str, str]:
        """Of a request beside the client's own: its program, and the tenant's key."""
        key = self.keys.get(tenant)
        return {"x-session-id": session} | ({"authorization": f"Bearer {key}"} if key else {})

    def keep(self, row: Row) -> None:
        """Add the row of a request."""
        self.rows.append(row)

    def since(self, moment: float | None) -> float | None:
        """Seconds since the run began; None for None."""
        return None if moment is None else round(moment - self.began, 6)


class _Talks:
    """The next request of every program of a part on one server. `counts`: how many each is to have."""

    def __init__(self, part: Part, counts: Mapping[int, int]) -> None:
        self._part = part
        self.counts = counts
        self._next: dict[int, Request | None] = {}
        self._turns: Counter[int] = Counter()

    def next(self, place: int) -> tuple[int, Request]:
        """The number of a program's next turn, and its request."""
        if place not in self._next:
            part, program = self._part, self._part.round.programs[place]
            program = program if part.wording is None else worded(program, part.wording)
            manner = replace(part.manner, answers=Answers.RECORDED) if part.round.forced else part.manner
            self._next[place] = first(program, manner)
        request = self._next[place]
        assert request is not None  # a program has as many turns as are sent
        return self._turns[place], request

    def answered(self, place: int, request: Request, exchange: Exchange) -> None:
        said = exchange.said
        self._next[place] = following(request, None if said is None else assistant(said))
        self._turns[place] += 1


@dataclass(frozen=True, slots=True)
class _Sending:
    """One lane of one wave on one server. `due`: when it begins; None: at once."""

    runner: Runner
    part: Part
    server: Server
    wave: int
    measured: bool
    talks: _Talks
    began: float
    lane: Lane
    due: float | None

    async def run(self) -> None:
        due, ended_ms = self.due, 0.0
        for at, place in enumerate(self.lane):
            turn, request = self.talks.next(place)
            if at:  # the tools of the turn before
                due_ms = request.due_ms(ended_ms)
                due = self.began + due_ms / 1e3 if due_ms > ended_ms else None
            await sleep_until(due, LEAD_S)
            program, model = request.program, self.server.model
            body = {"model": model, "temperature": 0, **request.body}
            content, prompt = streamed(body), digest(request.messages, request.turn.tools)
            headers = self.runner.headers(quote(f"{self.part.round.session}-{program.id}"), program.tenant)
            await sleep_until(due)
            exchange = await self.server.client.send(content, headers)
            self.talks.answered(place, request, exchange)
            ended_ms = (exchange.ended - self.began) * 1e3
            if self.measured:
                self.runner.keep(self._row(request, turn, self.talks.counts[place], prompt, due, exchange))
                if self.runner.record:
                    name = f"{reported(self.part.workload, load=self.part.load)}/{self.part.repetition}/{program.id}"
                    sent_ms = _ms(exchange.started - self.runner.began)
                    self.runner.observed.append(
                        Observed(name, turn, sent_ms, body, output_of(exchange), program.tenant)
                    )
            self.runner.sent()

    def _row(self, request: Request, turn: int, turns: int, prompt: str, due: float | None, exchange: Exchange) -> Row:
        part, answer, said, since = self.part, exchange.answer, exchange.answer.said, self.runner.since
        program, started, ended = request.program, since(exchange.started), since(exchange.ended)
        assert started is not None
        assert ended is not None
        return Row(
            server=self.server.name,
            workload=reported(part.workload, program.tenant, part.load),
            repetition=part.repetition,
            wave=self.wave,
            program=program.id,
            turn=turn,
            started=started,
            first_byte=since(exchange.first_byte),
            first_token=since(exchange.first_token),
            ended=ended,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            reason=answer.reason,
            calls=len(said.calls),
            fits=fits(said, request.turn.tools),
            as_scripted=request.is_answered_by(exchange.said),
            prompt=prompt,
            answer=said.plain,
            failure=exchange.failure or "",
            detail=exchange.detail,
            cache=exchange.cache,
            queue=answer.timing.queue,
            prefill=answer.timing.prefill,
            decode=answer.timing.decode,
            due=since(due),
            swept=reported(part.workload, program.tenant) if part.load else "",
            load=part.load,
            turns=turns,
        )


def output_of(exchange: Exchange) -> Output:
    """What a trace keeps of an answer."""
    answer, timing, said = exchange.answer, exchange.answer.timing, exchange.said
    first_token = exchange.first_token
    return Output(
        answer=assistant(said) if said is not None and said.usable else None,
        prompt_tokens=answer.prompt_tokens or None,
        cached_tokens=answer.cached_tokens,
        tokens=answer.output_tokens or None,
        reason=answer.reason or None,
        failure=exchange.failure,
        first_token_ms=None if first_token is None else _ms(first_token - exchange.started),
        latency_ms=_ms(exchange.ended - exchange.started),
        queue_ms=None if timing.queue is None else _ms(timing.queue),
        prefill_ms=None if timing.prefill is None else _ms(timing.prefill),
        decode_ms=None if timing.decode is None else _ms(timing.decode),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
