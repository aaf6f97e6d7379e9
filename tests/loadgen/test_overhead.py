"""The report of `holdfast bench overhead`, and the client that it measures with."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from holdfast.loadgen.client import Client
from holdfast.loadgen.overhead import STREAMED, Samples, report


class Echo(BaseHTTPRequestHandler):
    """Says what it was asked; three events for a stream."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/there" else 404, b'{"path": "there"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n" if json.loads(body).get("stream") else body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_client_reads_answers_events_and_errors(url: str) -> None:
    with Client(url) as client:
        assert client.get("/there") == {"path": "there"}
        assert client.post("/x", {"a": 1}, {}) == {"a": 1}
        assert client.events("/x", {"stream": True}, {}) == 3
        with pytest.raises(OSError, match="404"):
            client.get("/elsewhere")


def test_the_report_is_of_medians_and_their_differences() -> None:
    further = STREAMED - 1
    samples = Samples(
        bare=[1.0, 2.0, 90.0],
        served=[4.0, 6.0, 90.0],
        hit=[1.0, 3.0, 90.0],
        bare_stream=[10.0 + further * 1.0],
        bare_short=[10.0],
        served_stream=[20.0 + further * 1.25],
        served_short=[20.0],
    )
    lines = {line.name: line for line in report(samples)}
    assert lines["added to a request"].value == 4.0
    assert lines["added to a streamed token"].value == pytest.approx(0.25)
    assert str(lines["added to a request"]).endswith("met")
    assert str(lines["response-cache hit, end to end"]).endswith("MISSED")
