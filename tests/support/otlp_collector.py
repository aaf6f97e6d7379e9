"""A collector of spans: OTLP over HTTP on loopback, everything it is sent kept and decoded."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SeenSpan:
    """One span as it came. Ids are in hex, "" where there is none; times in nanoseconds since the epoch."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    process: str
    begin: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[str]  # span ids
    failed: bool
    state: str


class Collector:
    """`spans` in the order of arrival; `bodies` are what was posted, as it was."""

    def __init__(self) -> None:
        self.url = ""
        self.paths: list[str] = []
        self.bodies: list[bytes] = []

    @property
    def spans(self) -> list[SeenSpan]:
        return [span for body in self.bodies for span in _decoded(body)]

    def by_name(self) -> dict[str, SeenSpan]:
        """The spans by name; each name once."""
        spans = self.spans
        named = {span.name: span for span in spans}
        assert len(named) == len(spans), [span.name for span in spans]
        return named


@contextmanager
def collecting() -> Iterator[Collector]:
    """A running collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.paths.append(self.path)
            collector.bodies.append(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _decoded(body: bytes) -> Iterator[SeenSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        process = _attributes(resource.resource.attributes)["service.instance.id"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    process,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    [(event.name, _attributes(event.attributes)) for event in span.events],
                    [link.span_id.hex() for link in span.links],
                    span.status.code == 2,
                    span.trace_state,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
