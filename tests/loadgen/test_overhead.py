"""The report of `holdfast bench overhead`, and the client that it measures with."""

import pytest
from stub_server import Answer, Asked, stub_server

from holdfast.loadgen.client import Client
from holdfast.loadgen.overhead import STREAMED, report


def echo(asked: Asked) -> Answer:
    """Says what it was asked; three events for a stream."""
    if asked.method == "GET":
        return Answer.of(b'{"path": "there"}', 200 if asked.path == "/there" else 404)
    return Answer.of(b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n" if asked.body.get("stream") else asked.content)


def test_the_client_reads_answers_events_and_errors() -> None:
    with stub_server(echo) as stub, Client(stub.url) as client:
        assert client.get("/there") == {"path": "there"}
        assert client.post("/x", {"a": 1}, {}) == {"a": 1}
        assert client.events("/x", {"stream": True}, {}) == 3
        with pytest.raises(OSError, match="404"):
            client.get("/elsewhere")


def test_the_report_is_of_medians_and_their_differences() -> None:
    further = STREAMED - 1
    samples = {
        "bare": [1.0, 2.0, 90.0],
        "served": [4.0, 6.0, 90.0],
        "hit": [1.0, 3.0, 90.0],
        f"bare {STREAMED}": [10.0 + further * 1.0],
        "bare 1": [10.0],
        f"served {STREAMED}": [20.0 + further * 1.25],
        "served 1": [20.0],
    }
    lines = {line[:46].strip(): line[46:].split() for line in report(samples)}
    assert lines["added to a request"] == ["4.000", "ms", "target", "5", "met"]
    assert lines["added to a streamed token"] == ["0.250", "ms", "target", "0.4", "met"]
    assert lines["response-cache hit, end to end"][-1] == "MISSED"
