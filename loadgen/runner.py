"""Sends rounds of programs to servers in turn: wave by wave, each wave on every server before the next.

So other load on the machine affects all servers alike, and a server computes while the others are idle. There is a
pause between two servers, since a server may poll for work in a busy loop for a while. The first server changes from
wave to wave.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from holdfast.loadgen.chat import ChatClient, Exchange, streamed
from holdfast.loadgen.conversation import Manner, Request, assistant, digest, first, fits, following
from holdfast.loadgen.program import Output
from holdfast.loadgen.rows import Row
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.loadgen.traces.recording import Observed
from holdfast.loadgen.workloads.script import Lane, Load, Round, Wave

LEAD_S = 0.02
"""Seconds before its start that a request is prepared, so that preparation does not count as the server's time."""


async def sleep_until(due: float | None, lead: float = 0.0) -> None:
    """Return ``lead`` seconds before ``due``, a moment of `time.perf_counter`; at once if that is past, or None."""
    if due is not None and (delay := due - lead - time.perf_counter()) > 0:
        await asyncio.sleep(delay)


async def start_each(
    starts: Sequence[float | None], begin: Sequence[Callable[[], Coroutine[None, None, None]]], lead: float = LEAD_S
) -> None:
    """Run each of ``begin`` from ``lead`` seconds before its start on, until all are through.

    A task is made shortly before its start: thousands made in advance would delay the first ones. Raises the first
    error, after the other tasks have been cancelled.
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
    description: str = ""  # one line about the round

    @property
    def requests(self) -> int:
        """Requests to one server, those that are not measured included."""
        return _counts((*self.round.fill, *self.round.waves)).total()

    @property
    def measured(self) -> Mapping[str, int]:
        """The measured requests to one server, by the workload's name in their rows."""
        counts = Counter[str]()
        for place, count in _counts(self.round.waves).items():
            counts[self.reported(self.round.programs[place].tenant)] += count
        return counts

    def reported(self, tenant: str = "", *, loaded: bool = True) -> str:
        """The name under which the figures of a tenant's programs are reported."""
        load = self.load.name if self.load is not None and loaded else ""
        return " ".join(part for part in (self.workload, tenant.partition("-")[0], load) if part)


def _counts(waves: Sequence[Wave]) -> Counter[int]:
    """The number of turns of each program that these waves send, in their order."""
    return Counter(place for wave in waves for lane in wave for place in lane)


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
    on_sent: Callable[[], None] = lambda: None  # called after every request

    async def send(self, part: Part) -> None:
        """Send one part to every server."""
        for waves, keep_rows in ((part.round.fill, False), (part.round.waves, True)):
            passes = {server.name: _Pass(self, part, server, keep_rows, _counts(waves)) for server in self.servers}
            last_server: Server | None = None  # the first server waits too: others may have been busy a moment ago
            for number, wave in enumerate(waves):
                for place in range(len(self.servers)):
                    server = self.servers[(number + part.repetition + place) % len(self.servers)]
                    if server is not last_server and len(self.servers) > 1:
                        await asyncio.sleep(self.pause_s)
                    last_server = server
                    await passes[server.name].send(number, wave)

    def headers(self, session: str, tenant: str) -> dict[str, str]:
        """Headers of a request in addition to the client's own: its program, and the tenant's key."""
        key = self.keys.get(tenant)
        return {"x-session-id": session} | ({"authorization": f"Bearer {key}"} if key else {})

    def keep(self, row: Row) -> None:
        """Add the row of a request."""
        self.rows.append(row)


@dataclass(slots=True)
class _Pass:
    """The waves of a part on one server. `counts`: how many turns each program is to have."""

    runner: Runner
    part: Part
    server: Server
    measured: bool
    counts: Mapping[int, int]
    _next: dict[int, Request | None] = field(default_factory=dict)
    _turns: Counter[int] = field(default_factory=Counter)

    async def send(self, number: int, wave: Wave) -> None:
        """Send one wave."""
        began = time.perf_counter()
        due: list[float | None] = [began + s for s in self.part.round.due] or [None] * len(wave)
        lanes = [partial(self._lane, number, began, lane, at) for lane, at in zip(wave, due, strict=True)]
        await start_each(due, lanes)

    def _first(self, place: int) -> Request:
        part, program = self.part, self.part.round.programs[place]
        program = program if part.wording is None else worded(program, part.wording)
        return first(program, replace(part.manner, recorded=True) if part.round.forced else part.manner)

    async def _lane(self, wave: int, began: float, lane: Lane, due: float | None) -> None:
        """Send the turns of a lane, each when the one before is answered. `due`: when it begins; None: at once."""
        runner, ended_ms = self.runner, 0.0
        for at, place in enumerate(lane):
            request = self._next[place] if place in self._next else self._first(place)
            assert request is not None  # a program has as many turns as are sent
            if at:  # the tools of the turn before
                due_ms = request.due_ms(ended_ms)
                due = began + due_ms / 1e3 if due_ms > ended_ms else None
            await sleep_until(due, LEAD_S)
            program, turn = request.program, self._turns[place]
            body = {"model": self.server.model, "temperature": 0, **request.body}
            content, prompt = streamed(body), digest(request.messages, request.turn.tools)
            headers = runner.headers(quote(f"{self.part.round.session}-{program.id}"), program.tenant)
            await sleep_until(due)
            exchange = await self.server.client.send(content, headers)
            answer, ended_ms = exchange.said, (exchange.ended - began) * 1e3
            self._next[place] = following(request, None if answer is None else assistant(answer))
            self._turns[place] += 1
            if self.measured:
                fields = {"wave": wave, "turn": turn, "turns": self.counts[place], "prompt": prompt}
                runner.keep(self._row(request, exchange, due=self._since_start(due), **fields))
                if runner.record:
                    name = f"{self.part.reported()}/{self.part.repetition}/{program.id}"
                    sent_ms = _ms(exchange.started - runner.began)
                    observed = Observed(name, turn, sent_ms or 0.0, body, output_of(exchange), program.tenant)
                    runner.observed.append(observed)
            runner.on_sent()

    def _since_start(self, moment: float | None) -> float | None:
        return None if moment is None else round(moment - self.runner.began, 6)

    def _row(self, request: Request, exchange: Exchange, **fields: Any) -> Row:
        part, answer, parsed, tenant = self.part, exchange.answer, exchange.answer.said, request.program.tenant
        return Row(
            server=self.server.name,
            workload=part.reported(tenant),
            repetition=part.repetition,
            program=request.program.id,
            started=self._since_start(exchange.started) or 0.0,
            first_byte=self._since_start(exchange.first_byte),
            first_token=self._since_start(exchange.first_token),
            ended=self._since_start(exchange.ended) or 0.0,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            reason=answer.reason,
            calls=len(parsed.calls),
            fits=fits(parsed, request.turn.tools),
            as_scripted=request.is_answered_by(exchange.said),
            answer=parsed.plain,
            failure=exchange.failure or "",
            detail=exchange.detail,
            cache=exchange.cache,
            queue=answer.queue,
            prefill=answer.prefill,
            decode=answer.decode,
            swept=part.reported(tenant, loaded=False) if part.load else "",
            load=part.load,
            **fields,
        )


def output_of(exchange: Exchange) -> Output:
    """The fields of an answer that a trace keeps."""
    answer, parsed, first_token = exchange.answer, exchange.said, exchange.first_token
    return Output(
        answer=assistant(parsed) if parsed is not None and parsed.usable else None,
        prompt_tokens=answer.prompt_tokens or None,
        cached_tokens=answer.cached_tokens,
        tokens=answer.output_tokens or None,
        reason=answer.reason or None,
        failure=exchange.failure,
        first_token_ms=None if first_token is None else _ms(first_token - exchange.started),
        latency_ms=_ms(exchange.ended - exchange.started),
        queue_ms=_ms(answer.queue),
        prefill_ms=_ms(answer.prefill),
        decode_ms=_ms(answer.decode),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
