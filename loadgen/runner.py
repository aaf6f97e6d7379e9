"""Runs workloads against servers in turn: wave by wave, each wave on every server before the next.

So whatever else the machine does falls on all of them, and a server computes while the others are idle. The one that
begins changes from wave to wave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.loadgen.chat import ChatClient, Exchange
from holdfast.loadgen.conversation import Conversation, fits
from holdfast.loadgen.rows import Row
from holdfast.loadgen.workloads.script import Lane, Round, Script, Turn, Wave


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
    began: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)
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
                about = _About(workload, repetition, number, measured, server)
                began = time.perf_counter()
                due: list[float | None] = [began + seconds for seconds in drawn.due]
                due = due or [None] * len(wave)
                lanes = zip(wave, due, strict=True)
                await asyncio.gather(*(self._lane(about, lane, drawn, talks[server.name], at) for lane, at in lanes))

    async def _lane(
        self, about: _About, lane: Lane, drawn: Round, talks: Sequence[Conversation], due: float | None
    ) -> None:
        if due is not None:
            await asyncio.sleep(due - time.perf_counter())
        for turn in lane:
            script, talk = drawn.scripts[turn.script], talks[turn.script]
            digest = talk.digest
            exchange = await about.server.client.ask(self._body(about.server, talk), {"x-session-id": script.session})
            as_scripted = talk.take(exchange.said)
            if about.measured:
                row = self._row(about, turn, script, digest, exchange, as_scripted)
                self.rows.append(row if due is None else replace(row, due=self._since(due)))
            due = None
            self.sent()

    def _body(self, server: Server, talk: Conversation) -> dict[str, Any]:
        return {"model": server.model, **talk.request, "max_tokens": self.max_tokens, "temperature": 0}

    def _row(
        self, about: _About, turn: Turn, script: Script, digest: str, exchange: Exchange, as_scripted: bool
    ) -> Row:
        answer, said = exchange.answer, exchange.answer.said
        return Row(
            server=about.server.name,
            workload=about.workload,
            repetition=about.repetition,
            wave=about.wave,
            program=script.name,
            turn=turn.index,
            started=self._since(exchange.started),
            first_byte=None if exchange.first_byte is None else self._since(exchange.first_byte),
            first_token=None if exchange.first_token is None else self._since(exchange.first_token),
            ended=self._since(exchange.ended),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            reason=answer.reason,
            calls=len(said.calls),
            fits=fits(said, script.tools),
            as_scripted=as_scripted,
            prompt=digest,
            answer=said.plain,
            failure=exchange.failure or "",
            detail=exchange.detail,
            cache=exchange.cache,
        )

    def _since(self, moment: float) -> float:
        return round(moment - self.began, 6)


@dataclass(frozen=True, slots=True)
class _About:
    """What the rows of one wave on one server have in common."""

    workload: str
    repetition: int
    wave: int
    measured: bool
    server: Server
