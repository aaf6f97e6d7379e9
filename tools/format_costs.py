"""The cost of the router's formats compared with chat completions: `python tools/format_costs.py`.

There are three measurements, on the event loop of Serve's processes:

1. Processor time to read a request and to write its reply as events, token by token, without a socket. The formats take
   turns; the figure is the median of all rounds.
2. Time from a reply's first piece to its bytes, through the whole router.
3. Processor time of the router for whole requests with the same prompt: chat, a response that is not stored, a response
   stored in Redis, and a response that follows ten stored ones.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import orjson
import uvloop
from fake_backend import CARD, DONE, FakeBackend, World
from redis_server import RedisServer

from holdfast.replicas.requests import GenerateRequest, TextDelta
from holdfast.router.backend import ANYWHERE, Batch, RoutingHint
from holdfast.router.protocol.anthropic import AnthropicEncoder, chat_prompt, messages_turn, read_messages
from holdfast.router.protocol.chat import ChatEncoder, read_chat
from holdfast.router.protocol.replies import Encoder
from holdfast.router.protocol.responses import (
    ResponseEncoder,
    chat_messages,
    input_items,
    read_responses,
    response_object,
    responses_turn,
)
from holdfast.router.records import Records, RedisAddress

ROUNDS, TOKENS, STREAMS = 400, 256, 200
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [{"name": f"tool_{i}", "description": "What it does. " * 20, "parameters": SCHEMA} for i in range(12)]
CONVERSATION = [("user" if i % 2 == 0 else "assistant", "words that were said before " * 40) for i in range(21)]
MESSAGES = [{"role": role, "content": text} for role, text in CONVERSATION]
REPLY = ((TextDelta(CONVERSATION[1][1]),), (DONE,))

BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES, "tools": [{"type": "function", "function": each} for each in FUNCTIONS]},
    "responses": {"input": MESSAGES, "tools": [{"type": "function", **each} for each in FUNCTIONS]},
    "messages": {
        "messages": MESSAGES,
        "max_tokens": 100,
        "tools": [{"name": f["name"], "description": f["description"], "input_schema": SCHEMA} for f in FUNCTIONS],
    },
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def chat(raw: bytes) -> Encoder:
    read_chat(raw, (CARD,))
    return ChatEncoder("chatcmpl-1", 0, "pocket", False)


def responses(raw: bytes) -> Encoder:
    body = read_responses(raw)
    own = input_items(body, "1")
    responses_turn(body, chat_messages((), own, body.instructions, lambda text: text), CARD)
    return ResponseEncoder(response_object(body, "resp_1", 0), "1")


def messages(raw: bytes) -> Encoder:
    body = read_messages(raw)
    messages_turn(body, chat_prompt(body), CARD)
    return AnthropicEncoder("msg_1", "pocket", 100)


FORMATS: dict[str, Callable[[bytes], Encoder]] = {"chat": chat, "responses": responses, "messages": messages}


def costs() -> dict[str, tuple[float, float]]:
    """Milliseconds of processor time for a request and a token, by format."""
    raw = {name: orjson.dumps({"model": "pocket", "stream": True, **body}) for name, body in BODIES.items()}
    pieces = [(TextDelta(" word"),)] * TOKENS
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in FORMATS}
    for _ in range(ROUNDS):
        for name, read in FORMATS.items():
            start = time.thread_time()
            encoder = read(raw[name])
            encoder.opening()
            opened = time.thread_time()
            for piece in pieces:
                encoder.encode(piece)
            written = time.thread_time()
            encoder.encode((DONE,))
            ended = time.thread_time()
            times[name][0].append(opened - start + ended - written)
            times[name][1].append((written - opened) / TOKENS)
    return {name: (median(requests) * 1e3, median(tokens) * 1e3) for name, (requests, tokens) in times.items()}


class TimedBackend(FakeBackend):
    """A backend that records the time of its first piece."""

    at = 0.0

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        await asyncio.sleep(0)
        self.at = time.perf_counter()
        yield Batch("r1", (TextDelta("Hello"),))
        yield Batch("r1", (DONE,))


async def first_events() -> dict[str, list[float]]:
    """Milliseconds from the first piece to the bytes of its event, by format. All requests differ."""
    backend = TimedBackend()
    app = World(backend).app
    times: dict[str, list[float]] = {name: [] for name in BODIES}
    for number in range(STREAMS):
        for name, body in BODIES.items():
            raw = orjson.dumps({"model": "pocket", "stream": True, "temperature": number / 1000, **body})
            times[name].append(await _first_event(app, backend, PATHS[name], raw))
    return times


async def _first_event(app: Any, backend: TimedBackend, path: str, raw: bytes) -> float:
    return ((await _post(app, path, raw))[0][0] - backend.at) * 1e3


async def storing(address: str) -> dict[str, float]:
    """Milliseconds of the router's processor time for a whole request, by format and storage."""
    records = Records(RedisAddress(address), timeout_s=10.0)
    app = World(FakeBackend(REPLY), records=records).app
    fields = {"temperature": 0.5, "tools": BODIES["responses"]["tools"]}
    previous = None
    for index in range(
        0, len(CONVERSATION) - 1, 2
    ):  # ten stored responses; their answers are those of the conversation
        body = {**fields, "input": CONVERSATION[index][1], "previous_response_id": previous}
        previous = await _response_id(app, PATHS["responses"], body)
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": (PATHS["chat"], BODIES["chat"]),
        "responses, not stored": (PATHS["responses"], {**BODIES["responses"], "store": False}),
        "responses, stored": (PATHS["responses"], BODIES["responses"]),
        "responses, the next of ten": (
            PATHS["responses"],
            {**fields, "input": CONVERSATION[-1][1], "previous_response_id": previous},
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(ROUNDS):
        for name, (path, body) in bodies.items():
            raw = orjson.dumps({"model": "pocket", **body, "temperature": number / 1000})
            start = time.thread_time()
            await _post(app, path, raw)
            times[name].append(time.thread_time() - start)
    await records.close()
    return {name: median(each) * 1e3 for name, each in times.items()}


async def _response_id(app: Any, path: str, body: dict[str, Any]) -> str:
    _, answer = await _post(app, path, orjson.dumps({"model": "pocket", **body}))
    return str(orjson.loads(answer)["id"])


async def _post(app: Any, path: str, raw: bytes) -> tuple[list[float], bytes]:
    """The time of each part of the answer, and the whole answer."""
    times: list[float] = []
    parts: list[bytes] = []
    messages = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            times.append(time.perf_counter())
            parts.append(message.get("body", b""))

    address = ("127.0.0.1", 1)
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {
        "headers": [(b"host", b"localhost"), (b"cache-control", b"no-store")],
        "client": address,
        "server": address,
        "scheme": "http",
    }
    scope |= {"http_version": "1.1", "root_path": ""}
    await app(scope, receive, send)
    return times, b"".join(parts)


def main() -> None:
    cost_by_format = costs()
    print(f"processor time, {len(CONVERSATION)} messages and {len(FUNCTIONS)} tools; median of {ROUNDS}, interleaved")
    chat_request, chat_token = cost_by_format["chat"]
    for name, (request, token) in cost_by_format.items():
        extra = f"{request - chat_request:+.3f} ms a request, {token - chat_token:+.4f} ms a token"
        print(f"{name:10} {request:.3f} ms a request, {token:.4f} ms a token ({extra} beside chat)")
    for name, times in uvloop.run(first_events()).items():
        p99 = sorted(times)[int(len(times) * 0.99)]
        print(f"{name:10} first event after {median(times):.3f} ms, 99 % within {p99:.3f} ms")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            stored = uvloop.run(storing(server.url))
        finally:
            server.kill()
    for name, milliseconds in stored.items():
        print(f"{name:26} {milliseconds:.3f} ms a request ({milliseconds - stored['chat']:+.3f} ms beside chat)")


if __name__ == "__main__":
    main()
