"""The report of `holdfast bench overhead`, and the client that it measures with."""

import pytest
from stub_server import Answer, Asked, stub_server

from holdfast.loadgen.client import Client
from holdfast.loadgen.overhead import STREAMED, Samples, main, report
from holdfast.replicas.errors import ConfigError


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


def test_nothing_is_started_to_measure_no_request() -> None:
    with pytest.raises(ConfigError, match="requests"):
        main("no such model", 0)


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
