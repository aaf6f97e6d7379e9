"""A request's trace from the caller's context to the engine's steps: router and replica as they are, Ray left out."""

import contextvars
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from fake_backend import CALL, FakeBackend, World, chat_body
from otlp_collector import Collector, SeenSpan, collecting

from holdfast.cluster import replica_spans
from holdfast.replicas import logs
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError, ErrorInfo, ErrorKind
from holdfast.replicas.logs import About
from holdfast.replicas.requests import Completed, Errored, GenerateRequest
from holdfast.replicas.retention.latency import Called
from holdfast.replicas.service import Service
from holdfast.router import tracing
from holdfast.router.backend import ANYWHERE, Batch, Routed, RoutingHint
from holdfast.router.entry.turn_log import TurnLog
from holdfast.router.tracing import Spans, TracingConfig

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]


class TracedReplica(FakeBackend):
    """What `cluster/engine_replica` does, around a real engine or a script."""

    service: Service | None = None

    def __init__(self, spans: Spans, engine: bool) -> None:
        super().__init__()
        self.spans = spans
        self.engine = engine

    async def generate(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> Routed:
        span = replica_spans.begin(self.spans, request)
        assert span is not None
        routed = await super().generate(request, place)
        span.reply(routed.reply)
        span.end()
        return routed

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        if not self.engine:
            async for batch in super().stream(request):
                yield batch
            return
        self.service = self.service or Service.load(EngineConfig(cells=4096, threads=1))
        async for pieces in self.service.stream(request):
            yield Batch("r1", pieces)


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
        yield Traced(collector, router, replica, World(TracedReplica(replica, False), turns=TurnLog(router)))
        router.close()
        replica.close()


def test_one_trace_from_the_caller_to_the_engines_steps(traced: Traced) -> None:
    backend = TracedReplica(traced.replica, engine=True)
    world = World(backend, turns=TurnLog(traced.router))
    body = chat_body(messages=QUESTION, tools=[TOOL], temperature=0, max_tokens=40, program_id="trip")
    try:
        with world.served() as address, httpx.Client(base_url=address, trust_env=False) as client:
            headers = {"traceparent": CALLER, "tracestate": "vendor=1"}
            answer = client.post("/v1/chat/completions", json=body, headers=headers, timeout=60.0).json()
    finally:
        if backend.service is not None:
            backend.service.bridge.thread.stop()
            backend.service.bridge.thread.join()
    traced.spans()
    assert traced.collector.paths[0] == "/v1/traces"
    spans = traced.collector.by_name()
    assert {span.trace_id for span in spans.values()} == {CALLER.split("-")[1]}
    names = {span.span_id: name for name, span in spans.items()}
    parents = {name: names.get(span.parent_id, span.parent_id) for name, span in spans.items()}
    parts = ("render", "queue", "prefill", "decode", "validate")
    turn = "POST /v1/chat/completions"
    below = {"replica": turn, "generate": "replica", **dict.fromkeys(parts, "generate")}
    assert parents == {turn: CALLER.split("-")[2], **below}
    assert {name: span.process for name, span in spans.items()} == {
        turn: "router",
        "replica": "router",
        "generate": "replica r1",
        **dict.fromkeys(parts, "replica r1"),
    }
    for name in (turn, "generate"):
        told = spans[name].attributes
        assert told["holdfast.request_id"] == answer["id"].removeprefix("chatcmpl-")
        assert told["holdfast.program_id"] == "default/trip"
        assert told["holdfast.tenant"] == "default"
        assert told["holdfast.completion_tokens"] == answer["usage"]["completion_tokens"]
    assert spans[turn].attributes["holdfast.outcome"] == "completed"
    assert spans[turn].state == "vendor=1"
    assert not any(span.failed for span in spans.values())
    for before, after in zip(("render", "queue", "prefill"), ("queue", "prefill", "decode"), strict=True):
        assert spans[before].end == spans[after].begin
    assert spans["generate"].end >= spans["validate"].end >= spans["decode"].end > spans["prefill"].begin
    validate = spans["validate"]
    assert 0 < validate.attributes["holdfast.busy_s"] < 1e-9 * (validate.end - validate.begin)


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
    with pytest.raises(ConfigError) as caught:
        TracingConfig(**changes)
    assert caught.value.field == next(iter(changes))


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
        return logs._about.get()

    context = contextvars.copy_context()
    assert context.run(told, trace={"traceparent": CALLER}) == About("r", "acme/p", "acme", CALLER.split("-")[1])
    assert context.run(told).trace_id == ""
