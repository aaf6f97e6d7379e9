"""From the engine's first token to the first event of its text at the client, through all of `holdfast serve`.

    python tools/first_events.py [--streams 200]

Streams of the three formats take turns, one at a time, over loopback. Both ends read the machine's monotonic clock: the
engine when it has drawn the token (`Timing.first_token`), the client when the bytes are there. In between the replica
notes when it has the token's text and sends it to the router, so that what it takes, and what router, proxy and the
kernel take, can be told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import ray
from replicas_in_serve import note, noting

from holdfast.cluster.early import EarlySender
from holdfast.cluster.engine_replica import EngineReplica
from holdfast.replicas.requests import Completed, EarlyTo, GenerateRequest
from holdfast.router.backend import Batch

ENGINE = {"threads": 1, "kv_memory": 0.1}
WARM, TOKENS = 20, 32


class NotingReplica(EngineReplica):
    """Writes a line for each stream, once it is over: when its first token was drawn, and when its text was ready."""

    async def __init__(self, *told: Any) -> None:  # type: ignore[misc]
        await super().__init__(*told)
        self._early = self._noting = NotingSender(ray.util.get_node_ip_address())

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Batch]:
        self._noting.ready = None
        async with aclosing(super().stream(request)) as batches:
            async for batch in batches:
                yield batch
        last = batch.pieces[-1]
        if isinstance(last, Completed):
            note([last.timing.first_token, self._noting.ready])


class NotingSender(EarlySender):
    """Notes when it had a stream's first batch; there is one stream at a time."""

    ready: float | None = None

    def tell(self, to: EarlyTo | None, batch: Batch) -> bool:
        self.ready = self.ready or time.monotonic()
        return super().tell(to, batch)


@dataclass(frozen=True)
class Format:
    path: str
    text: re.Pattern[bytes]  # what the first event with text has
    fields: dict[str, Any]


FORMATS = {
    "chat": Format("/v1/chat/completions", re.compile(rb'"content":"[^"]'), {"max_tokens": TOKENS}),
    "responses": Format("/v1/responses", re.compile(rb"response.output_text.delta"), {"max_output_tokens": TOKENS}),
    "messages": Format("/v1/messages", re.compile(rb"content_block_delta"), {"max_tokens": TOKENS}),
}


def first_text(address: tuple[str, int], asked: Format, question: str) -> float:
    """When the first text of a stream came, on the monotonic clock; the stream is read to its end."""
    prompt = {"input": question} if "responses" in asked.path else {"messages": [{"role": "user", "content": question}]}
    body = json.dumps({"model": "pocket", "stream": True, **prompt, **asked.fields})
    head = f"POST {asked.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    came, told = None, b""
    with socket.create_connection(address) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while data := client.recv(65536):
            now = time.monotonic()
            told += data
            if came is None and asked.text.search(told):
                came = now
    assert came is not None, told
    return came


def measured(url: str, notes: Path, streams: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds by format: from the first token to its text in the replica, and to its event at the client."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    address = (parts.hostname, parts.port)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in FORMATS}
    with notes.open() as lines:
        lines.seek(0, os.SEEK_END)
        for number in range(-WARM, streams):
            for name, asked in FORMATS.items():
                came = first_text(address, asked, f"Question {number + 1000}: what is the weather in {name}?")
                while not (line := lines.readline()).endswith("\n"):
                    time.sleep(0.001)  # it is written behind the stream's end
                drawn, ready = json.loads(line)
                if number >= 0:
                    found[name].append(((ready - drawn) * 1e3, (came - drawn) * 1e3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=200, help="of each format (default: 200)")
    streams = parser.parse_args().streams
    with noting("first_events:NotingReplica", ENGINE) as (url, notes):
        found = measured(url, notes, streams)
    print(f"from the engine's first token, ms, {streams} streams of each format, one at a time")
    for name, pairs in found.items():
        for what, times in zip(("text in the replica", "event at the client"), zip(*pairs, strict=True), strict=True):
            last = sorted(times)[int(len(times) * 0.99)]
            print(f"{name:10} {what}: median {median(times):.3f}, 99 % within {last:.3f}, least {min(times):.3f}")


if __name__ == "__main__":
    main()
