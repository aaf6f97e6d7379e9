"""Spans of the router and of a replica. In a real cluster, one trace from the caller to the engine: `test_stopping`."""

import contextvars
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fake_backend import CALL, FakeBackend, World, chat_body
from otlp_collector import Collector, SeenSpan, collecting
from refused import refused

from holdfast.cluster import replica_spans
from holdfast.replicas import logs
from holdfast.replicas.errors import ConfigError, ErrorInfo, ErrorKind
from holdfast.replicas.logs import About
from holdfast.replicas.requests import Completed, Errored, GenerateRequest
from holdfast.replicas.retention.latency import Called
from holdfast.router import tracing
from holdfast.router.backend import ANYWHERE, Routed, RoutingHint
from holdfast.router.entry.turn_log import TurnLog
from holdfast.router.tracing import Spans, TracingConfig

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]


class TracedReplica(FakeBackend):
    """What `cluster/engine_replica` does, around a script."""

    def __init__(self, spans: Spans) -> None:
        super().__init__()
        self.spans = spans

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        span = replica_spans.begin(self.spans, request)
        assert span is not None
        routed = await super().generate(request, place)
        span.reply(routed.reply)
        span.end()
        return routed


@dataclass
class Traced:
    """A router and a replica, each with spans of its own, and where they go."""

    collector: Collector
    router: Spans
    replica: Spans
    world: World

    def spans(self) -> list[SeenSpan]:
        self.router.close()
        self.replica.close()
        return self.collector.spans


@pytest.fixture
def traced(request: pytest.FixtureRequest) -> Iterator[Traced]:
    with collecting() as collector:
        config = TracingConfig(collector.url, getattr(request, "param", 1.0))
        router, replica = tracing.start(config, "router"), tracing.start(config, "replica r1")
        assert router is not None
        assert replica is not None
        yield Traced(collector, router, replica, World(TracedReplica(replica), turns=TurnLog(router)))
        router.close()
        replica.close()


def test_a_programs_next_turn_tells_how_long_its_tools_took_and_where_the_one_before_is(traced: Traced) -> None:
    world, path = traced.world, "/v1/chat/completions"
    done = replace(CALL[-1][-1], called=Called(("get_weather",)))
    world.backend.script = (*CALL[:-1], (done,))
    first = {"json": chat_body(program_id="p", tools=[TOOL], temperature=0.5)}
    other = {"json": chat_body(program_id="p", tools=[TOOL], temperature=0.5, messages=[*QUESTION, *QUESTION])}
    world.calls([("POST", path, first), ("POST", path, other)])
    one, two = [span for span in traced.spans() if span.process == "router" and span.name.startswith("POST")]
    assert one.links == []
    assert two.links == [one.span_id]
    assert one.trace_id != two.trace_id
    assert "holdfast.tool_wait_s" not in one.attributes
    assert two.attributes["holdfast.tool_wait_s"] == 0.0  # by the world's clock
    assert two.attributes["holdfast.tools"] == "get_weather"


def test_what_fails_is_marked(traced: Traced) -> None:
    world = traced.world
    world.backend.script = [(Errored(ErrorInfo(ErrorKind.INTERNAL, "the step failed: secret words")),)]
    assert world.chat().status_code == 500
    assert world.chat(nonsense=1).status_code == 400
    spans = traced.spans()
    assert [(span.name, span.failed) for span in spans if span.process == "router"] == [
        ("replica", False),
        ("POST /v1/chat/completions", True),
        ("POST /v1/chat/completions", True),
    ]
    outcomes = [span.attributes.get("holdfast.outcome") for span in spans if span.name.startswith("POST")]
    assert outcomes == ["failed", "rejected"]
    assert next(span for span in spans if span.name == "generate").failed
    assert b"secret words" not in b"".join(traced.collector.bodies)
    assert b"hello" not in b"".join(traced.collector.bodies)


@pytest.mark.parametrize(("traced", "headers"), [(0.0, {}), (1.0, {"traceparent": UNSAMPLED})], indirect=["traced"])
def test_a_trace_that_is_not_sampled_is_recorded_nowhere(traced: Traced, headers: dict[str, str]) -> None:
    class Seen(FakeBackend):
        async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
            assert replica_spans.begin(traced.replica, request) is None
            return await super().generate(request, place)

    world = World(Seen(), turns=TurnLog(traced.router))
    assert world.call("POST", "/v1/chat/completions", json=chat_body(), headers=headers).status_code == 200
    flags = int(world.backend.requests[0].trace["traceparent"].rpartition("-")[2], 16)
    assert not flags & 1
    assert traced.spans() == []


def test_a_caller_that_leaves_early_is_an_aborted_span(traced: Traced) -> None:
    span = replica_spans.begin(traced.replica, _request(trace={"traceparent": CALLER}))
    assert span is not None
    span.pieces(())
    span.end()
    assert [(seen.name, seen.failed, seen.parent_id) for seen in traced.spans()] == [
        ("generate", True, CALLER.split("-")[2])
    ]


def test_tool_calls_of_a_stream_are_events(traced: Traced) -> None:
    span = replica_spans.begin(traced.replica, _request(trace={"traceparent": CALLER}))
    assert span is not None
    for pieces in CALL:
        span.pieces(pieces)
    span.end()
    generate = next(seen for seen in traced.spans() if seen.name == "generate")
    assert generate.events == [("tool call", {"holdfast.index": 0, "holdfast.tool": "get_weather"})]
    assert isinstance(CALL[-1][-1], Completed)
    assert not generate.failed


def test_off_means_off() -> None:
    script = (
        "import json, sys; from holdfast.router import app, tracing; from holdfast.router.tracing import TracingConfig;"
        "from holdfast.cluster import replica_spans; started = tracing.start(TracingConfig(), 'x');"
        "print(json.dumps([started, [n for n in sys.modules if n.startswith('opentelemetry.exporter.otlp')]]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [None, []]
    assert replica_spans.begin(None, _request(trace={"traceparent": CALLER})) is None


@pytest.mark.parametrize("changes", [{"endpoint": "collector:4318"}, {"sample_ratio": 1.5}, {"sample_ratio": -0.1}])
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with refused(next(iter(changes))):
        TracingConfig(**changes)


def test_the_path_of_a_collector_may_be_left_out() -> None:
    assert TracingConfig("http://c:4318").url == "http://c:4318/v1/traces"
    assert TracingConfig("http://c:4318/").url == "http://c:4318/v1/traces"
    assert TracingConfig("https://c/otlp/traces").url == "https://c/otlp/traces"


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"\[tracing\]"):
        tracing.start(TracingConfig("http://c"), "x")


def _request(**changes: Any) -> GenerateRequest:
    from holdfast.replicas.plan import Sampling
    from holdfast.replicas.requests import RawPrompt

    return GenerateRequest("r", RawPrompt("x"), Sampling(), **changes)


def test_a_collector_that_is_away_costs_the_spans_and_no_time_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.0)
    nobody = Spans.exporting("http://127.0.0.1:9/v1/traces", 1.0, "router")
    world = World(turns=TurnLog(nobody))
    assert world.chat().status_code == 200
    nobody.close()


def test_lines_of_a_replica_are_about_the_request_and_its_trace() -> None:
    from holdfast.cluster import engine_replica

    def told(**changes: Any) -> Any:
        engine_replica._serving(replace(_request(scope="acme", program_id="acme/p"), **changes))
        return logs._request.get()

    context = contextvars.copy_context()
    assert context.run(told, trace={"traceparent": CALLER}) == About("r", "acme/p", "acme", CALLER.split("-")[1])
    assert context.run(told).trace_id == ""
