import asyncio

import pytest
from fake_backend import Ends, World, begun, chat_body
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from holdfast.replicas.errors import ErrorInfo, ErrorKind, OverloadedError
from holdfast.replicas.requests import Timing, Usage
from holdfast.replicas.types import Origin
from holdfast.router.config import WARM_UP_HEADER
from holdfast.router.entry.metrics import OTHER, Merged, Outcome, RouterMetrics
from holdfast.router.protocol.errors import ClientGoneError, Refusal, RefusedError, ReplyError
from holdfast.router.records.programs import Run, ToolGap
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

REPLICA = """# HELP holdfast_steps_total Steps run.
# TYPE holdfast_steps_total counter
holdfast_steps_total{{replica="{0}"}} 3.0
# HELP holdfast_step_seconds Time of a step.
# TYPE holdfast_step_seconds histogram
holdfast_step_seconds_bucket{{replica="{0}",le="+Inf"}} 3.0
holdfast_step_seconds_count{{replica="{0}"}} 3.0
holdfast_step_seconds_sum{{replica="{0}"}} 0.5
"""


def samples(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def together(*texts):
    merged = Merged()
    for text in texts:
        merged.add(text)
    return "".join(merged.families())


def test_merging_keeps_every_sample_and_names_each_family_once():
    one, two = REPLICA.format("r1"), REPLICA.format("r2")
    merged = together(one, two)
    assert samples(merged) == {**samples(one), **samples(two)}
    assert merged.count("# TYPE") == merged.count("# HELP") == 2
    lines = [line for line in merged.splitlines() if not line.startswith("#")]
    families = [line.split("{")[0].removesuffix("_total").rsplit("_", 1)[0] for line in lines]
    assert families == sorted(families, key=families.index), "samples of one family stand together"


def test_merging_samples_without_a_heading():
    assert together("a 1\n", 'a{x="y"} 2\nab 3\n') == 'a 1\na{x="y"} 2\nab 3\n'


WHO = {"tenant": "acme", "model": "m"}


class Timed:
    """One request on a clock that is set by hand."""

    def __init__(self):
        self.registry, self.now = CollectorRegistry(), 100.0
        self.metrics = RouterMetrics(self.registry, clock=lambda: self.now)
        self.ends = Ends()
        self.call = begun(self.metrics, books=self.ends)
        self.call.facts.model = "m"

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"holdfast_{name}", labels)


def test_a_stream_is_timed_and_counted_once():
    timed = Timed()
    call = timed.call
    assert timed.value("requests_in_flight") == 1
    timed.now = 101.0
    call.first_token()
    timed.now = 105.0
    call.completed(Usage(prompt=7, cached=3, completion=5), Timing(50.0, 50.25, 50.75, 54.0))
    call.end(Outcome.ABORTED)
    assert timed.value("requests_in_flight") == 0
    assert timed.value("time_to_first_token_seconds_sum", **WHO) == 1.0
    assert timed.value("time_per_output_token_seconds_sum", **WHO) == 1.0
    assert timed.value("turn_seconds_sum", **WHO) == 5.0
    assert timed.value("queue_seconds_sum", **WHO) == 0.25
    assert timed.value("bubble_seconds_count", **WHO) is None, "its program waited for no tool"
    tokens = {kind: timed.value("tenant_tokens_total", **WHO, kind=kind) for kind in ("prompt", "cached", "completion")}
    assert tokens == {"prompt": 7, "cached": 3, "completion": 5}
    labels = {**WHO, "endpoint": "chat"}
    assert timed.value("requests_total", **labels, outcome="completed") == 1
    assert timed.value("requests_total", **labels, outcome="aborted") is None
    assert [end.record.outcome for end in timed.ends.ends] == ["completed"]


@pytest.mark.parametrize(("streamed", "bubble"), [(True, 0.5), (False, 0.75)])
def test_a_follow_up_turn_tells_how_long_nobody_worked_on_it(streamed, bubble):
    """0.25 s in the router, 0.25 in the queue, 0.5 to the first token and 3.0 to the last; 0.25 on the way back."""
    timed = Timed()
    timed.call.joined_program("acme/p", ToolGap("ls", 8.0))
    if streamed:
        timed.now = 101.0
        timed.call.first_token()
    timed.now = 104.25
    timed.call.completed(Usage(completion=1), Timing(50.0, 50.25, 50.75, 53.75))
    assert timed.value("tool_seconds_sum", **WHO) == 8.0
    assert timed.value("bubble_seconds_sum", **WHO) == pytest.approx(bubble)


@pytest.mark.parametrize(("streamed", "ftr"), [(True, 8.5), (False, 9.0), (None, 12.0)])
def test_a_program_that_has_its_answer(streamed, ftr):
    """Its last turn takes 4 s. The first token comes after half a second; of a stream the router sees it; an answer
    of the response cache (None) comes all at once.
    """
    timed = Timed()
    if streamed:
        timed.now = 100.5
        timed.call.first_token()
    timed.now = 104.0
    if streamed is not None:
        timed.call.completed(Usage(completion=9), Timing(50.0, 50.25, 51.0, 53.75))
    timed.call.program_ended(Run(12.0, 4), final=True)
    assert timed.value("program_seconds_sum", **WHO) == 12.0
    assert timed.value("program_turns_sum", **WHO) == 4.0
    assert timed.value("first_token_rendered_seconds_sum", **WHO) == ftr


def test_a_program_that_ends_with_calls_has_no_final_answer():
    timed = Timed()
    timed.call.program_ended(Run(12.0, 4), final=False)
    assert timed.value("program_seconds_sum", **WHO) == 12.0
    assert timed.value("first_token_rendered_seconds_sum", **WHO) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadedError("full"), "overloaded"),
        (RefusedError(Refusal.RATE_LIMITED, "slow"), "rate_limit_exceeded"),
        (ReplyError(ErrorInfo(ErrorKind.INTERNAL, "bug")), "internal_error"),
        (KeyError("bug"), "internal_error"),
    ],
)
def test_why_a_request_was_not_served(error, reason):
    timed = Timed()
    timed.call.failed(error)
    timed.call.failed(error)
    assert timed.value("request_errors_total", tenant="acme", reason=reason) == 1


@pytest.mark.parametrize("error", [ClientGoneError(), asyncio.CancelledError()])
def test_a_client_that_went_away_is_no_error(error):
    timed = Timed()
    timed.call.failed(error)
    counted = samples(asyncio.run(timed.metrics.exposition()))
    assert {value for (name, _), value in counted.items() if name == "holdfast_request_errors_total"} == {0}


def test_tenants_beyond_the_named_ones_share_their_series():
    timed = Timed()
    timed.metrics.name_tenants(["one", "two", "three"], 2)
    names = ("one", "two", "three", "four", "")
    assert [timed.metrics.tenant(name) for name in names] == ["one", "two", OTHER, OTHER, ""]


def test_every_sample_says_which_router_it_is_of():
    timed = Timed()
    timed.metrics.router = "i-1"
    timed.call.end(Outcome.COMPLETED)
    text = asyncio.run(timed.metrics.exposition())
    assert {labels["router"] for (_, pairs) in samples(text) for labels in [dict(pairs)]} == {"i-1"}
    assert "_created" not in text


def test_what_stands_elsewhere_is_asked_for_before_it_is_read():
    timed, asked = Timed(), []

    async def ask():
        asked.append(len(asked) + 5)

    timed.metrics.watch("requests_in_line", lambda: asked[-1] if asked else 0, ask)
    text = asyncio.run(timed.metrics.exposition())
    assert samples(text)["holdfast_requests_in_line", (("router", "router"),)] == 5


def test_the_servers_own_first_request_is_served_and_counts_among_none():
    world = World()
    for headers in ({WARM_UP_HEADER: "1"}, {}):
        answer = world.call("POST", "/v1/chat/completions", json=chat_body(cache_salt=str(headers)), headers=headers)
        assert answer.status_code == 200
        assert sum(world.outcomes().values()) == (not headers)
    own, asked = world.backend.requests
    assert (own.origin, asked.origin) == (Origin.WARM_UP, Origin.CLIENT)
    assert world.in_flight() == 0
    assert sum(totals.ended for totals in world.turns.totals.values()) == 1


def test_where_there_are_keys_nobody_can_ask_uncounted():
    world = World(tenants=TenantDirectory([Tenant("acme", (hash_key("k"),))]))
    world.call(
        "POST", "/v1/chat/completions", json=chat_body(), headers={WARM_UP_HEADER: "1", "Authorization": "Bearer k"}
    )
    assert sum(world.outcomes().values()) == 1
    assert world.backend.requests[0].origin is Origin.CLIENT
