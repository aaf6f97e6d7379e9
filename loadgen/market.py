"""`holdfast bench market`: questions about data that keeps arriving, after the paper Attention Once.

Each feed of prices belongs to one context. A line of prices arrives `rate` times a second. Every `every_s` seconds
someone asks a new question and reads the answer to a standing one. There are two ways to serve this:

    session   each line is appended to a session as it arrives; the standing question is registered with the session
    whole     each question is a chat request with all lines so far, as for any OpenAI-compatible server

Servers without `/v1/sessions` are measured the second way only. A prefix cache may have the previous request's lines.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from holdfast.loadgen.chat import PATH, ChatClient
from holdfast.loadgen.options import Market
from holdfast.loadgen.runner import sleep_until
from holdfast.loadgen.table import print_table

SESSIONS = "/v1/sessions"
SYSTEM = {"role": "system", "content": "You watch prices. Answer with a few words."}
STANDING = "Is the price rising or falling?"
HEADS = (
    "server", "way", "feeds", "lines a second", "tokens", "question ms p50", "p99", "cached", "standing ms p50",
    "up to date", "outdated s", "append ms p50", "p99", "failed",
)  # fmt: skip


@dataclass(slots=True)
class MarketResult:
    """One way of one server at one rate and length. Times are seconds.

    `outdated`: the age of each standing answer when it was read, counted from the first line that it has not seen.
    """

    server: str
    way: str
    feeds: int
    rate: float
    tokens: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    questions: list[float] = field(default_factory=list)
    standing: list[float] = field(default_factory=list)
    outdated: list[float] = field(default_factory=list)
    appends: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def row(self) -> list[str]:
        """The cells under `HEADS`."""
        fresh = f"{fmean(seconds == 0.0 for seconds in self.outdated):.0%}" if self.outdated else "-"
        tokens = f"{median(self.tokens):,.0f}" if self.tokens else "-"
        cached = f"{sum(self.cached) / (sum(self.tokens) or 1):.0%}"
        outdated = f"{fmean(self.outdated):.2f}" if self.outdated else "-"
        failed = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.failed.items())) or "0"
        return [
            self.server, self.way, str(self.feeds), f"{self.rate:g}", tokens, *_spread(self.questions), cached,
            _spread(self.standing)[0], fresh, outdated, *_spread(self.appends), failed,
        ]  # fmt: skip


def _spread(seconds: list[float]) -> tuple[str, str]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return "-", "-"
    return f"{median(ordered) * 1e3:.1f}", f"{ordered[int(0.99 * (len(ordered) - 1))] * 1e3:.1f}"


class Feed:
    """The lines of one stock, with the moment at which each arrived."""

    def __init__(self, name: str, draw: random.Random, lines: int) -> None:
        self.name, self._draw, self._price = name, draw, 100.0
        self.lines: list[str] = []
        self.arrived: list[float] = []
        for _ in range(lines):
            self.tick()

    def tick(self) -> str:
        """The next line arrives."""
        n = len(self.lines)
        self._price += self._draw.gauss(0.0, 0.4)
        clock = f"{12 + n // 3600:02d}:{n // 60 % 60:02d}:{n % 60:02d}"
        self.lines.append(f"\n{clock} {self.name} {self._price:.2f}")
        self.arrived.append(time.perf_counter())
        return self.lines[-1]

    @property
    def text(self) -> str:
        """All lines so far."""
        return "".join(self.lines)

    def outdated(self, n_seen: int) -> float:
        """Seconds since line number `n_seen`, counted from 0, arrived; 0 if it has not arrived."""
        return time.perf_counter() - self.arrived[n_seen] if n_seen < len(self.arrived) else 0.0


class WholePrompt:
    """Every question brings all lines."""

    name = "whole"

    def __init__(self, client: ChatClient, model: str, feed: Feed, max_tokens: int, result: MarketResult) -> None:
        self._client, self._model, self._feed = client, model, feed
        self._limits = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self._result = result

    async def call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> dict[str, Any] | None:
        """The answer. For another status than 200: None, counted as a failure."""
        status, answer = await self._client.call(method, path, body, {"cache-control": "no-store"})
        if status != 200:
            code = answer.get("error", {}).get("code") if isinstance(answer, dict) else ""
            failed, kind = self._result.failed, f"{status} {code}".strip()
            failed[kind] = failed.get(kind, 0) + 1
            return None
        assert isinstance(answer, dict)
        return answer

    async def open(self) -> bool:
        """Begin with the lines that are there. False: refused."""
        return await self._ask("Which price was first?") is not None

    async def append(self, line: str) -> None:
        """A line has arrived."""

    async def question(self, text: str) -> None:
        """Ask something new."""
        start = time.perf_counter()
        answer = await self._ask(text)
        if answer is not None:
            self._result.questions.append(time.perf_counter() - start)
            usage = answer["usage"]
            self._result.tokens.append(usage["prompt_tokens"])
            self._result.cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def _ask(self, text: str) -> dict[str, Any] | None:
        messages = [SYSTEM, {"role": "user", "content": f"{self._feed.text}\n{text}"}]
        return await self.call(PATH, {"model": self._model, "messages": messages, **self._limits})

    async def read_standing(self) -> None:
        """Read the answer to the standing question."""
        start, n_seen = time.perf_counter(), len(self._feed.lines)
        if await self._ask(STANDING) is not None:
            self._result.standing.append(time.perf_counter() - start)
            self._result.outdated.append(self._feed.outdated(n_seen))

    async def close(self) -> None:
        """Nothing is kept."""


class Session(WholePrompt):
    """Every line is appended to a session, with which the standing question is registered."""

    name = "session"
    _path, _standing, _lines_before = "", "", 0

    async def open(self) -> bool:
        opened = await self.call(SESSIONS, {"model": self._model, "messages": [SYSTEM]})
        if opened is None:
            return False
        self._path = f"{SESSIONS}/{opened['id']}"
        self._lines_before = len(self._feed.lines) - 1  # lines before the last one of the first append
        body = {"messages": [{"role": "user", "content": STANDING}], **self._limits}
        registered = None
        if await self.call(f"{self._path}/append", {"text": self._feed.text}) is not None:
            registered = await self.call(f"{self._path}/questions", body)
        self._standing = f"{self._path}/questions/{registered['id']}" if registered else ""
        return bool(registered)

    async def append(self, line: str) -> None:
        start = time.perf_counter()
        if await self.call(f"{self._path}/append", {"text": line}) is not None:
            self._result.appends.append(time.perf_counter() - start)

    async def _ask(self, text: str) -> dict[str, Any] | None:
        body = {"messages": [{"role": "user", "content": text}], **self._limits}
        return await self.call(f"{self._path}/query", body)

    async def read_standing(self) -> None:
        start = time.perf_counter()
        answer = await self.call(self._standing, method="GET")
        if answer is not None:
            self._result.standing.append(time.perf_counter() - start)
            n_seen = self._lines_before + answer["append"] if answer["answer"] else 0
            self._result.outdated.append(self._feed.outdated(n_seen))

    async def close(self) -> None:
        if self._path:
            await self.call(self._path, method="DELETE")


@asynccontextmanager
async def _opened(way: WholePrompt) -> AsyncIterator[bool]:
    try:
        yield await way.open()
    finally:
        await way.close()


async def watch(way: WholePrompt, feed: Feed, options: Market, rate: float, begin_s: float) -> None:
    """One feed from its opening to its close: lines arrive, questions are asked, the standing answer is read.

    `begin_s`: a delay before the feed begins, so that feeds do not ask at the same moment.
    """
    async with _opened(way) as accepted:
        if not accepted:
            return
        begin = time.perf_counter() + begin_s

        async def lines() -> None:
            for number in range(1, int(options.seconds * rate) + 1):
                await sleep_until(begin + number / rate)
                await way.append(feed.tick())

        async def questions() -> None:
            for number in range(1, int(options.seconds / options.every_s) + 1):
                await sleep_until(begin + number * options.every_s)
                await way.question(f"What was the price {number} lines ago?")
                await way.read_standing()

        await asyncio.gather(lines(), questions())


async def measure(options: Market) -> list[MarketResult]:
    """Every rate and length, and for each the servers' ways in turn. Raises UnavailableError."""
    results = list[MarketResult]()
    for rate in options.rates:
        for lines in options.lines:
            for name, url in options.servers:
                async with ChatClient(url, 300.0) as client:
                    model = (await client.get("/v1/models"))["data"][0]["id"]
                    status, _ = await client.call("GET", SESSIONS)
                    for way in (Session, WholePrompt) if status == 200 else (WholePrompt,):
                        result = MarketResult(name, way.name, options.feeds, rate)
                        results.append(result)
                        await _run(way, client, model, options, lines, result)
    return results


async def _run(
    way: type[WholePrompt], client: ChatClient, model: str, options: Market, lines: int, result: MarketResult
) -> None:
    watches = []
    for number in range(options.feeds):
        seed = f"{options.seed} {result.server} {way.name} {result.rate} {lines} {number}"
        feed = Feed(f"S{random.Random(seed).randrange(10**6)}", random.Random(seed), lines)
        client_way = way(client, model, feed, options.max_tokens, result)
        watches.append(watch(client_way, feed, options, result.rate, options.every_s * number / options.feeds))
    await asyncio.gather(*watches)


def main(options: Market) -> int:
    """Print the table. Raises UnavailableError for a server that does not answer."""
    results = asyncio.run(measure(options))
    print_table("questions about arriving data", HEADS, [result.row for result in results], left=2)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")
    return 0
