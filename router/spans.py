"""Spans of this process, and the one file that knows OpenTelemetry: importing it takes the `tracing` extra.

Which spans there are is decided by those who ask for them: `turn_report` in the router, `cluster/replica_spans` in a
replica. Times are in seconds since the epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Carrier = Mapping[str, str]  # `traceparent` and `tracestate`, as W3C Trace Context has them

CLOSE_S = 3.0  # a stop waits so long for it at most
EXPORT_S = 5.0  # a collector that takes longer misses a batch; requests never wait for it
_CONTEXT = TraceContextTextMapPropagator()


class Spans:
    """Makes spans and sends them on from a thread of its own. Call `close` at the end."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("holdfast", metadata.version("holdfast"))

    @classmethod
    def exporting(cls, url: str, sample_ratio: float, process: str) -> Spans:
        """Spans that are posted to `url`; `process` is their `service.instance.id`."""
        resource = Resource.create(
            {
                "service.name": "holdfast",
                "service.version": metadata.version("holdfast"),
                "service.instance.id": process,
            }
        )
        # The caller's decision stands; who has none is drawn here, once for router and replica.
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_S)))
        return cls(provider)

    def serve(self, name: str, carrier: Carrier) -> Span:
        """An open span of something this process was asked to do; `carrier` is the asker's, empty for none."""
        context = _CONTEXT.extract(carrier, Context())
        return Span(self._tracer, self._tracer.start_span(name, context=context, kind=trace.SpanKind.SERVER))

    def close(self) -> None:
        """Send what is left, unless the collector takes too long for it."""
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(CLOSE_S)


class Span:
    """One open span. Exactly one `end`."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def carrier(self) -> Carrier:
        """This span's context, for whoever goes on with it; it tells them, too, whether the trace is recorded."""
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, self._context)
        return carrier

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def tell(self, **attributes: Any) -> None:
        """Attributes, `holdfast.` before their names; None and "" are left out."""
        self._span.set_attributes(named(**attributes))

    def link(self, carrier: Carrier) -> None:
        """This has to do with the span of `carrier`, wherever that is."""
        self._span.add_link(trace.get_current_span(_CONTEXT.extract(carrier, Context())).get_span_context())

    def event(self, name: str, **attributes: Any) -> None:
        """Something that happens now."""
        self._span.add_event(name, named(**attributes))

    def ask(self, name: str) -> Span:
        """An open span below this one: another process is asked to do something."""
        opened = self._tracer.start_span(name, context=self._context, kind=trace.SpanKind.CLIENT)
        return Span(self._tracer, opened)

    def part(self, name: str, begin: float, end: float, **attributes: Any) -> None:
        """A part of this span that is over."""
        part = self._tracer.start_span(
            name, context=self._context, start_time=_nanoseconds(begin), attributes=named(**attributes)
        )
        part.end(_nanoseconds(max(begin, end)))

    def fail(self, why: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, why)

    def end(self) -> None:
        self._span.end()

    @property
    def _context(self) -> Context:
        return trace.set_span_in_context(self._span, Context())


def named(**attributes: Any) -> dict[str, Any]:
    """Attributes as they stand in a span."""
    return {f"holdfast.{name}": value for name, value in attributes.items() if value not in (None, "")}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
