"""An HTTP server that answers what a test tells it to, when it tells it to, and keeps what it was asked and when."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """Pieces of a body, each sent so many seconds after the one before; ``cut`` ends the connection after them."""

    pieces: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    cut: bool = False
    hang: bool = False  # says nothing more until the server is closed

    @classmethod
    def of(cls, body: bytes, status: int = 200) -> "Answer":
        return cls(((0.0, body),), status)


@dataclass
class Asked:
    """One request, and when it was read and each piece of its answer was sent (`time.perf_counter`)."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str]
    received: float
    sent: list[float] = field(default_factory=list)

    @property
    def body(self) -> Any:
        return json.loads(self.content)


Answering = Callable[[Asked], Answer]


@dataclass
class Stub:
    url: str
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def stub_server(answering: Answering) -> Iterator[Stub]:
    """Serve on a port of its own; `answering` is called on the thread of each connection."""
    closing = threading.Event()
    stub = Stub("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer(b"")

        def do_DELETE(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, content: bytes) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, self.path, content, headers, time.perf_counter())
            stub.asked.append(asked)
            answer = answering(asked)
            self.send_response(answer.status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for delay, piece in answer.pieces:
                time.sleep(delay)
                asked.sent.append(time.perf_counter())
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            if answer.hang:
                closing.wait()
            if answer.hang or answer.cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            return  # a client that has gone

    with Server(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            closing.set()
            server.shutdown()
            thread.join()


def chunk(delta: dict[str, Any] | None = None, **more: Any) -> bytes:
    """One event of a streamed chat completion."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def usage(prompt: int, cached: int | None, output: int) -> bytes:
    """The last event before the end, with the counts."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return chunk(None, usage={"prompt_tokens": prompt, "completion_tokens": output, **details})


def call(name: str, arguments: dict[str, Any], call_id: str = "c") -> bytes:
    """A whole tool call in one event."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return chunk({"tool_calls": [{"index": 0, "id": call_id, "function": function}]})


def models(name: str = "m") -> Answer:
    """What `/v1/models` answers."""
    return Answer.of(json.dumps({"data": [{"id": name}]}).encode())


def calling(asked: Asked) -> Answer:
    """Call the first tool when the user speaks, and tell its result; ten bytes of a request are a token."""
    if asked.method == "GET":
        return models() if asked.path == "/v1/models" else Answer.of(b"{}", 404)
    last = asked.body["messages"][-1]
    if last["role"] == "user" and asked.body.get("tools"):
        tool = asked.body["tools"][0]["function"]
        said = call(tool["name"], dict.fromkeys(tool["parameters"]["required"], "a.py"), f"c{len(asked.content)}")
    else:
        said = chunk({"content": f"It is {last['content']}."})
    return Answer.of(said + usage(len(asked.content) // 10, 0, 12) + DONE)
