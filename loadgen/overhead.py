"""What HTTP, Ray and the router add to the engine: the same requests to a server and to an engine in this process.

Both get requests in turn within one run, so that whatever else the machine does falls on both. Medians and their
differences are printed, beside the targets for two cores. Speculation is off, so every token is a step and a message of
its own: the most expensive case.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.loadgen.client import Client
from holdfast.loadgen.progress import bar
from holdfast.loadgen.serving import serving
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest
from holdfast.replicas.service import Service

UNCACHED = {"cache-control": "no-cache"}
PATH = "/v1/chat/completions"
STREAMED = 128  # tokens of a long stream
WARM = 20  # requests of each kind before the measured ones


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report, in milliseconds."""

    name: str
    value: float
    target: float | None = None

    def __str__(self) -> str:
        target = (
            ""
            if self.target is None
            else f"   target {self.target:g}   {'met' if self.value <= self.target else 'MISSED'}"
        )
        return f"{self.name:<46}{self.value:8.3f} ms{target}"


@dataclass(frozen=True, slots=True)
class Samples:
    """Milliseconds of every measured request, by kind."""

    bare: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)
    bare_stream: list[float] = field(default_factory=list)
    served_stream: list[float] = field(default_factory=list)
    bare_short: list[float] = field(default_factory=list)
    served_short: list[float] = field(default_factory=list)


def main(model: str, requests: int) -> int:
    """Measure with `requests` of each kind and print the report; the exit status. Raises ConfigError below one."""
    if requests < 1:
        raise ConfigError("requests must be at least 1", "requests")
    engine = {"threads": 1, "kv_memory": 0.1, "speculation": {"enabled": False}}
    with serving(model, engine) as url, Client(url) as client:
        samples = asyncio.run(_measure(model, client, requests))
    for line in report(samples):
        print(line)
    return 0


def report(samples: Samples) -> Sequence[Line]:
    bare, served, hit = (statistics.median(kind) for kind in (samples.bare, samples.served, samples.hit))
    bare_token = _per_token(samples.bare_stream, samples.bare_short)
    served_token = _per_token(samples.served_stream, samples.served_short)
    return (
        Line("engine alone, one token", bare),
        Line("over HTTP, one token", served),
        Line("added to a request", served - bare, 5.0),
        Line("engine alone, each further token", bare_token),
        Line("over HTTP, each further streamed token", served_token),
        Line("added to a streamed token", served_token - bare_token, 0.4),
        Line("response-cache hit, end to end", hit, 2.5),
    )


def _per_token(long: Sequence[float], short: Sequence[float]) -> float:
    return (statistics.median(long) - statistics.median(short)) / (STREAMED - 1)


async def _measure(model: str, client: Client, requests: int) -> Samples:
    service = Service.load(EngineConfig(model=model, threads=1, kv_memory=0.1, speculation=DraftConfig(enabled=False)))
    served_name = client.get("/v1/models")["data"][0]["id"]
    samples, warm = Samples(), Samples()
    streams = max(5, requests // 10)
    try:
        with bar("rounds", WARM + requests + 2 + streams) as shown:
            for i in range(-WARM, requests):
                await _single(samples if i >= 0 else warm, service, client, served_name, i)
                shown.advance()
            for i in range(-2, streams):
                await _streams(samples if i >= 0 else warm, service, client, served_name, i)
                shown.advance()
    finally:
        await service.close()
    return samples


async def _single(kept: Samples, service: Service, client: Client, model: str, i: int) -> None:
    """One token from each, and an answer of the response cache."""
    kept.bare.append(await _timed_async(service, i, 1))
    kept.served.append(_timed(lambda: client.post(PATH, _body(model, i, 1), UNCACHED)))
    kept.hit.append(_timed(lambda: client.post(PATH, _body(model, -WARM, 1), {})))


async def _streams(kept: Samples, service: Service, client: Client, model: str, i: int) -> None:
    """A short and a long stream from each."""
    for tokens, bare, streamed in (
        (1, kept.bare_short, kept.served_short),
        (STREAMED, kept.bare_stream, kept.served_stream),
    ):
        bare.append(await _timed_async(service, i, tokens))
        body = {**_body(model, i, tokens), "stream": True}
        streamed.append(_timed(lambda body=body: client.events(PATH, body, UNCACHED)))  # type: ignore[misc]


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


async def _timed_async(service: Service, i: int, tokens: int) -> float:
    request = GenerateRequest(
        request_id=f"bare-{i}-{tokens}-{time.monotonic_ns()}",
        prompt=ChatPrompt(_messages(i)),
        sampling=Sampling(max_tokens=tokens, ignore_eos=True),
    )
    began = time.perf_counter()
    answer = await service.generate(request)
    took = (time.perf_counter() - began) * 1e3
    if not isinstance(answer, Answer):
        raise UnavailableError(f"the engine failed: {answer.error.message}")
    return took


def _messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {i + 1000}: what is the weather in Paris?"}]


def _body(model: str, i: int, tokens: int) -> dict[str, Any]:
    # One program throughout: the first turn of each asks the program table in Redis, further ones do not.
    return {
        "model": model,
        "messages": _messages(i),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "program_id": "overhead",
    }
