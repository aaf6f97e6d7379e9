"""Runs workloads against servers in turn: wave by wave, each wave on every server before the next.

So whatever else the machine does falls on all of them, and a server computes while the others are idle: before one
begins after another there is a pause, since a server may look for work for a while in a busy loop. The one that begins
changes from wave to wave.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.loadgen.chat import ChatClient, Exchange, streamed
from holdfast.loadgen.conversation import Conversation, fits
from holdfast.loadgen.observing import observed
from holdfast.loadgen.rows import Row
from holdfast.loadgen.schedule import LEAD_S, sleep_until, start_each
from holdfast.loadgen.traces.recording import Observed
from holdfast.loadgen.workloads.script import Json, Lane, Load, Round, Wave


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement, and the name of its model."""

    name: str
    client: ChatClient
    model: str


@dataclass(slots=True)
class Runner:
    """Sends rounds and keeps a row for every measured request, also of a run that is interrupted."""

    servers: Sequence[Server]
    max_tokens: int = 128
    forced: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)  # of tenants; the others are sent with the client's own
    began: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)
    pause_s: float = 0.0  # between servers: one that waits for more to do may keep its cores busy for a while
    record: bool = False
    observed: list[Observed] = field(default_factory=list)  # with ``record``
    sent: Callable[[], None] = lambda: None  # called after every request

    async def run(self, workload: str, repetition: int, drawn: Round, load: Load | None = None) -> None:
        """Send one repetition to every server."""
        for waves, measured in ((drawn.fill, False), (drawn.waves, True)):
            if waves:
                await self._pass(_Pass(workload, repetition, load, measured), drawn, waves)

    async def _pass(self, told: _Pass, drawn: Round, waves: Sequence[Wave]) -> None:
        forced = self.forced or drawn.forced
        talks = {server.name: [Conversation(script, forced) for script in drawn.scripts] for server in self.servers}
        turns = Counter(turn.script for wave in waves for lane in wave for turn in lane)
        last: Server | None = None  # also before the first: others were sent something a moment ago
        for number, wave in enumerate(waves):
            for place in range(len(self.servers)):
                server = self.servers[(number + told.repetition + place) % len(self.servers)]
                if server is not last and len(self.servers) > 1:
                    await asyncio.sleep(self.pause_s)
                last = server
                about = About(told.workload, told.repetition, number, told.measured, server, told.load)
                began = time.perf_counter()
                due: list[float | None] = [began + seconds for seconds in drawn.due]
                due = due or [None] * len(wave)
                lanes = zip(wave, due, strict=True)
                begin = [partial(self._lane, about, lane, turns, talks[server.name], at) for lane, at in lanes]
                await start_each(due, begin)

    async def _lane(
        self, about: About, lane: Lane, turns: Mapping[int, int], talks: Sequence[Conversation], due: float | None
    ) -> None:
        for turn in lane:
            talk = talks[turn.script]
            script = talk.script
            await sleep_until(due, LEAD_S)
            sent = Sent(script.name, turn.index, turns[turn.script], script.tools, talk.digest, due, script.tenant)
            body = self._body(about.server, talk)
            content = streamed(body)
            await sleep_until(due)
            exchange = await about.server.client.send(content, self.headers(script.session, script.tenant))
            as_scripted = talk.take(exchange.said)
            if about.measured:
                self.keep(about, sent, exchange, as_scripted)
                if self.record:
                    name = f"{reported(about.workload, load=about.load)}/{about.repetition}/{script.name}"
                    self.observed.append(observed(name, turn.index, body, exchange, self.began, script.tenant))
            seconds = script.pause(turn.index).seconds
            due = exchange.ended + seconds if seconds else None
            self.sent()

    def _body(self, server: Server, talk: Conversation) -> dict[str, Any]:
        request = {**talk.request, "messages": list(talk.messages)}  # the conversation goes on
        return {"model": server.model, **request, "max_tokens": self.max_tokens, "temperature": 0}

    def headers(self, session: str, tenant: str) -> dict[str, str]:
        """Of a request beside the client's own: whose turn it is, and the tenant's key."""
        key = self.keys.get(tenant)
        return {"x-session-id": session} | ({"authorization": f"Bearer {key}"} if key else {})

    def keep(self, about: About, sent: Sent, exchange: Exchange, as_scripted: bool) -> None:
        """Add the row of a request."""
        answer, said = exchange.answer, exchange.answer.said
        row = Row(
            server=about.server.name,
            workload=reported(about.workload, sent.tenant, about.load),
            repetition=about.repetition,
            wave=about.wave,
            program=sent.program,
            turn=sent.turn,
            started=self._since(exchange.started),
            first_byte=None if exchange.first_byte is None else self._since(exchange.first_byte),
            first_token=None if exchange.first_token is None else self._since(exchange.first_token),
            ended=self._since(exchange.ended),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            reason=answer.reason,
            calls=len(said.calls),
            fits=fits(said, sent.tools),
            as_scripted=as_scripted,
            prompt=sent.digest,
            answer=said.plain,
            failure=exchange.failure or "",
            detail=exchange.detail,
            cache=exchange.cache,
            queue=answer.timing.queue,
            prefill=answer.timing.prefill,
            decode=answer.timing.decode,
            due=None if sent.due is None else self._since(sent.due),
            swept=reported(about.workload, sent.tenant) if about.load else "",
            load=about.load,
            turns=sent.turns,
        )
        self.rows.append(row)

    def _since(self, moment: float) -> float:
        return round(moment - self.began, 6)


def reported(workload: str, tenant: str = "", load: Load | None = None) -> str:
    """The name under which a program's figures are reported."""
    kind = tenant.partition("-")[0]
    return " ".join(part for part in (workload, kind, f"{load.told}" if load else "") if part)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the rows of all servers have in common."""

    workload: str
    repetition: int
    load: Load | None
    measured: bool


@dataclass(frozen=True, slots=True)
class About:
    """What the rows of one wave on one server have in common."""

    workload: str
    repetition: int
    wave: int
    measured: bool
    server: Server
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as far as a row tells of it. ``due`` is a moment of `time.perf_counter`."""

    program: str
    turn: int
    turns: int  # of the program
    tools: tuple[Json, ...]
    digest: str
    due: float | None = None  # None: when the answer before had come
    tenant: str = ""
