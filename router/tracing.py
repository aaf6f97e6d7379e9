"""The times of a request's stages: OpenTelemetry spans, and the stages reported to clients.

The router opens a span for a request, and a replica one below it, from the times that its engine reports. Without an
endpoint nothing of OpenTelemetry is imported or called; with one the `tracing` extra must be installed. Times of spans
are in seconds since the epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import Timing

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

Carrier = Mapping[str, str]  # `traceparent` and `tracestate`, as in W3C Trace Context

CLOSE_S = 3.0  # a stop waits so long for the last spans at most
EXPORT_S = 5.0  # a collector that takes longer misses a batch; requests never wait for it


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """The export of spans: OTLP over HTTP, in protobuf. Off without an endpoint."""

    endpoint: str = ""  # of a collector, as in http://collector:4318; without a path /v1/traces is added. Empty: off
    sample_ratio: float = 1.0  # of the requests whose caller has not decided (W3C traceparent); those follow the caller

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError(f"sample_ratio must be in [0, 1], not {self.sample_ratio}", "sample_ratio")
        if self.endpoint and not _is_url(self.endpoint):
            raise ConfigError(f"endpoint must be a URL like http://collector:4318, not {self.endpoint!r}", "endpoint")

    @property
    def url(self) -> str:
        """The URL to which batches of spans are posted."""
        bare = urlsplit(self.endpoint).path in ("", "/")
        return self.endpoint.rstrip("/") + "/v1/traces" if bare else self.endpoint


def start(config: TracingConfig, process: str) -> Spans | None:
    """The maker of this process's spans, None where tracing is off. `process` is their `service.instance.id`.

    Raises ConfigError where the packages are not installed.
    """
    if not config.endpoint:
        return None
    try:
        return Spans.exporting(config.url, config.sample_ratio, process)
    except ImportError as error:
        command = ".venv/bin/pip install -e '.[tracing]' -c constraints.txt"
        raise ConfigError(
            f"tracing needs packages that are missing ({error}): {command}", "tracing.endpoint"
        ) from error


class Spans:
    """Makes spans and sends them from a thread of its own. Call `close` at the end."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("holdfast", metadata.version("holdfast"))

    @classmethod
    def exporting(cls, url: str, sample_ratio: float, process: str) -> Spans:
        """Spans that are posted to `url`. Raises ImportError."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        names = {"service.name": "holdfast", "service.version": metadata.version("holdfast")}
        resource = Resource.create({**names, "service.instance.id": process})
        # The caller's decision stands. Where there is none it is drawn here, once for router and replica.
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_S)))
        return cls(provider)

    def serve(self, name: str, carrier: Carrier) -> Span:
        """An open span of a request to this process. `carrier` is the caller's context, empty for none."""
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(name, context=_context(carrier), kind=SpanKind.SERVER)
        return Span(self._tracer, span)

    def close(self) -> None:
        """Send what is left, unless the collector takes too long for it."""
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(CLOSE_S)


class Span:
    """One open span. Call `end` exactly once."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def carrier(self) -> Carrier:
        """This span's context, for another process. It says, too, whether the trace is recorded."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        return carrier

    @property
    def trace_id(self) -> str:
        return format(self._span.get_span_context().trace_id, "032x")

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def tell(self, **attributes: Any) -> None:
        """Set attributes, with `holdfast.` before their names. None and "" are left out."""
        self._span.set_attributes(_named(attributes))

    def link(self, carrier: Carrier) -> None:
        """Link this span to the one of `carrier`."""
        from opentelemetry.trace import get_current_span

        self._span.add_link(get_current_span(_context(carrier)).get_span_context())

    def event(self, name: str, **attributes: Any) -> None:
        """Add an event that happens now."""
        self._span.add_event(name, _named(attributes))

    def ask(self, name: str) -> Span:
        """An open span below this one, for a request to another process."""
        from opentelemetry.trace import SpanKind

        return Span(self._tracer, self._tracer.start_span(name, context=self._context, kind=SpanKind.CLIENT))

    def part(self, name: str, begin: float, end: float, **attributes: Any) -> None:
        """Add a part of this span that is over."""
        start, more = int(begin * 1e9), _named(attributes)
        part = self._tracer.start_span(name, context=self._context, start_time=start, attributes=more)
        part.end(int(max(begin, end) * 1e9))

    def fail(self, message: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, message)

    def end(self) -> None:
        self._span.end()

    @property
    def _context(self) -> Context:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, Context())


def stages(timing: Timing) -> dict[str, float]:
    """Milliseconds of each stage that a request reached: queue, prefill (to the first token), decode.

    Empty for an answer that no engine made.
    """
    ends = (("queue", timing.scheduled), ("prefill", timing.first_token), ("decode", timing.finished))
    milliseconds: dict[str, float] = {}
    begin = timing.arrived
    for name, end in ends:
        if end is None:
            break
        milliseconds[name] = round((end - begin) * 1e3, 3)
        begin = end
    return milliseconds


def server_timing(timing: Timing) -> str:
    """The value of the header `Server-Timing` (W3C Server Timing, section 3), "" where no engine made the answer."""
    return ", ".join(f"{name};dur={milliseconds}" for name, milliseconds in stages(timing).items())


def _context(carrier: Carrier) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier, Context())


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"holdfast.{name}": value for name, value in attributes.items() if value not in (None, "")}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
