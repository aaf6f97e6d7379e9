"""The time that HTTP, Ray and the router add: the same requests to a server and to an engine in this process.

Both get requests in turn within one run, so other load on the machine affects both. Medians and their
differences are printed, beside the targets for two cores. Speculation is off, so every token is a step and a message of
its own: the most expensive case.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from holdfast.loadgen.client import Client
from holdfast.loadgen.options import Overhead
from holdfast.loadgen.progress import bar
from holdfast.loadgen.serving import serving
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest
from holdfast.replicas.service import Service

UNCACHED = {"cache-control": "no-cache"}
PATH = "/v1/chat/completions"
STREAMED = 128  # tokens of a long stream
WARM = 20  # requests of each kind before the measured ones
Samples = Mapping[str, Sequence[float]]
"""Milliseconds of every measured request, by kind: bare, served, hit, and streams of one token and of many."""


def main(options: Overhead) -> int:
    """Measure and print the report; the exit status."""
    engine = {"threads": 1, "kv_memory": 0.1, "speculation": {"enabled": False}}
    with serving(options.model, engine) as url, Client(url) as client:
        samples = asyncio.run(_measure(options, client))
    print("\n".join(report(samples)))
    return 0


def report(samples: Samples) -> list[str]:
    """Lines of medians and of their differences, in milliseconds."""
    bare, over_http, hit = (median(samples[kind]) for kind in ("bare", "served", "hit"))
    bare_token, served_token = (
        (median(samples[f"{kind} {STREAMED}"]) - median(samples[f"{kind} 1"])) / (STREAMED - 1)
        for kind in ("bare", "served")
    )
    figures = (
        ("engine alone, one token", bare, None),
        ("over HTTP, one token", over_http, None),
        ("added to a request", over_http - bare, 5.0),
        ("engine alone, each further token", bare_token, None),
        ("over HTTP, each further streamed token", served_token, None),
        ("added to a streamed token", served_token - bare_token, 0.4),
        ("response-cache hit, end to end", hit, 2.5),
    )
    verdicts = {True: "met", False: "MISSED"}
    return [
        f"{name:<46}{value:8.3f} ms" + (f"   target {target:g}   {verdicts[value <= target]}" if target else "")
        for name, value, target in figures
    ]


async def _measure(options: Overhead, client: Client) -> Samples:
    config = EngineConfig(model=options.model, threads=1, kv_memory=0.1, speculation=DraftConfig(enabled=False))
    service = Service.load(config)
    model = client.get("/v1/models")["data"][0]["id"]
    samples, streams = defaultdict[str, list[float]](list), max(5, options.requests // 10)
    try:
        with bar("rounds", WARM + options.requests + 2 + streams) as progress:
            for i in range(-WARM, options.requests):
                single = {
                    "bare": await _timed_async(service, i, 1),
                    "served": _timed(lambda i=i: client.post(PATH, _body(model, i, 1), UNCACHED)),  # type: ignore[misc]
                    "hit": _timed(lambda: client.post(PATH, _body(model, -WARM, 1), {})),
                }
                for kind, milliseconds in single.items() if i >= 0 else ():
                    samples[kind].append(milliseconds)
                progress.advance()
            for i in range(-2, streams):
                for tokens in (1, STREAMED):
                    bare, body = await _timed_async(service, i, tokens), {**_body(model, i, tokens), "stream": True}
                    over_http = _timed(lambda body=body: client.events(PATH, body, UNCACHED))  # type: ignore[misc]
                    if i >= 0:
                        samples[f"bare {tokens}"].append(bare)
                        samples[f"served {tokens}"].append(over_http)
                progress.advance()
    finally:
        await service.close()
    return samples


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


async def _timed_async(service: Service, i: int, tokens: int) -> float:
    request = GenerateRequest(
        request_id=f"bare-{i}-{tokens}-{time.monotonic_ns()}",
        prompt=ChatPrompt(_messages(i)),
        sampling=Sampling(max_tokens=tokens, ignore_eos=True),
    )
    start = time.perf_counter()
    answer = await service.generate(request)
    milliseconds = (time.perf_counter() - start) * 1e3
    if not isinstance(answer, Answer):
        raise UnavailableError(f"the engine failed: {answer.error.message}")
    return milliseconds


def _messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Question {i + 1000}: what is the weather in Paris?"}]


def _body(model: str, i: int, tokens: int) -> dict[str, Any]:
    # One program throughout: the first turn of each asks the program table in Redis, further ones do not.
    body = {"model": model, "messages": _messages(i), "max_tokens": tokens, "temperature": 0}
    return body | {"ignore_eos": True, "program_id": "overhead"}
