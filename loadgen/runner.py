"""Runs workloads against servers in turn: wave by wave, each wave on every server before the next.

So whatever else the machine does falls on all of them, and a server computes while the others are idle. The one that
begins changes from wave to wave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.loadgen.chat import ChatClient, Exchange, streamed
from holdfast.loadgen.conversation import Conversation, fits
from holdfast.loadgen.observing import observed
from holdfast.loadgen.rows import Row
from holdfast.loadgen.traces.recording import Observed
from holdfast.loadgen.workloads.script import Json, Lane, Round, Script, Wave

LEAD_S = 0.02
"""How long before its moment a request is made ready, so that making it is not taken for the server's time."""


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
    record: bool = False
    observed: list[Observed] = field(default_factory=list)  # with ``record``
    sent: Callable[[], None] = lambda: None  # called after every request

    async def run(self, workload: str, repetition: int, drawn: Round) -> None:
        """Send one repetition to every server."""
        if drawn.fill:
            await self._pass(workload, repetition, drawn, drawn.fill, measured=False)
        await self._pass(workload, repetition, drawn, drawn.waves, measured=True)

    async def _pass(self, workload: str, repetition: int, drawn: Round, waves: Sequence[Wave], measured: bool) -> None:
        forced = self.forced or drawn.forced
        talks = {server.name: [Conversation(script, forced) for script in drawn.scripts] for server in self.servers}
        for number, wave in enumerate(waves):
            for place in range(len(self.servers)):
                server = self.servers[(number + repetition + place) % len(self.servers)]
                about = About(workload, repetition, number, measured, server)
                began = time.perf_counter()
                due: list[float | None] = [began + seconds for seconds in drawn.due]
                due = due or [None] * len(wave)
                lanes = zip(wave, due, strict=True)
                await asyncio.gather(*(self._lane(about, lane, drawn, talks[server.name], at) for lane, at in lanes))

    async def _lane(
        self, about: About, lane: Lane, drawn: Round, talks: Sequence[Conversation], due: float | None
    ) -> None:
        for turn in lane:
            script, talk = drawn.scripts[turn.script], talks[turn.script]
            await sleep_until(due, LEAD_S)
            sent = Sent(script.name, turn.index, script.tools, talk.digest, due, script.tenant)
            body = self._body(about.server, talk)
            content = streamed(body)
            await sleep_until(due)
            exchange = await about.server.client.send(content, self._headers(script))
            as_scripted = talk.take(exchange.said)
            if about.measured:
                self.keep(about, sent, exchange, as_scripted)
                if self.record:
                    name = f"{about.workload}/{about.repetition}/{script.name}"
                    self.observed.append(observed(name, turn.index, body, exchange, self.began, script.tenant))
            seconds = script.pause(turn.index).seconds
            due = exchange.ended + seconds if seconds else None
            self.sent()

    def _body(self, server: Server, talk: Conversation) -> dict[str, Any]:
        request = {**talk.request, "messages": list(talk.messages)}  # the conversation goes on
        return {"model": server.model, **request, "max_tokens": self.max_tokens, "temperature": 0}

    def _headers(self, script: Script) -> dict[str, str]:
        key = self.keys.get(script.tenant)
        return {"x-session-id": script.session} | ({"authorization": f"Bearer {key}"} if key else {})

    def keep(self, about: About, sent: Sent, exchange: Exchange, as_scripted: bool) -> None:
        """Add the row of a request."""
        answer, said = exchange.answer, exchange.answer.said
        row = Row(
            server=about.server.name,
            workload=reported(about.workload, sent.tenant),
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
        )
        self.rows.append(row)

    def _since(self, moment: float) -> float:
        return round(moment - self.began, 6)


async def sleep_until(due: float | None, lead: float = 0.0) -> None:
    """Return ``lead`` seconds before ``due``, a moment of `time.perf_counter`; at once if that is past, or None."""
    if due is not None and (left := due - lead - time.perf_counter()) > 0:
        await asyncio.sleep(left)


def reported(workload: str, tenant: str) -> str:
    """The name under which a program's figures are reported."""
    kind = tenant.partition("-")[0]
    return f"{workload} {kind}" if kind else workload


@dataclass(frozen=True, slots=True)
class About:
    """What the rows of one wave on one server have in common."""

    workload: str
    repetition: int
    wave: int
    measured: bool
    server: Server


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as far as a row tells of it. ``due`` is a moment of `time.perf_counter`."""

    program: str
    turn: int
    tools: tuple[Json, ...]
    digest: str
    due: float | None = None  # None: when the answer before had come
    tenant: str = ""
