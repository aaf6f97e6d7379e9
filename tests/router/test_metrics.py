import asyncio

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from holdfast.replicas.errors import ErrorInfo, ErrorKind, InvalidRequestError, OverloadedError, UnavailableError
from holdfast.router.event_stream import ClientGoneError
from holdfast.router.metrics import Meter, Outcome, RouterMetrics, merge_expositions, outcome_of
from holdfast.router.protocol.errors import ReplyError

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


def test_merging_keeps_every_sample_and_names_each_family_once():
    one, two = REPLICA.format("r1"), REPLICA.format("r2")
    merged = merge_expositions([one, two])
    assert samples(merged) == {**samples(one), **samples(two)}
    assert merged.count("# TYPE") == merged.count("# HELP") == 2
    lines = [line for line in merged.splitlines() if not line.startswith("#")]
    families = [line.split("{")[0].removesuffix("_total").rsplit("_", 1)[0] for line in lines]
    assert families == sorted(families, key=families.index), "samples of one family stand together"


def test_merging_samples_without_a_heading():
    assert merge_expositions(["a 1\n", 'a{x="y"} 2\nab 3\n']) == 'a 1\na{x="y"} 2\nab 3\n'


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequestError("no"), Outcome.REJECTED),
        (OverloadedError("full"), Outcome.REJECTED),
        (UnavailableError("gone"), Outcome.FAILED),
        (ReplyError(ErrorInfo(ErrorKind.TOO_LONG, "long")), Outcome.REJECTED),
        (ReplyError(ErrorInfo(ErrorKind.INTERNAL, "bug")), Outcome.FAILED),
        (ClientGoneError(), Outcome.ABORTED),
        (asyncio.CancelledError(), Outcome.ABORTED),
        (ZeroDivisionError(), Outcome.FAILED),
    ],
)
def test_how_an_error_counts(error, outcome):
    assert outcome_of(error) is outcome


def test_a_request_is_timed_and_counted_once():
    registry, now = CollectorRegistry(), [100.0]
    meter = Meter(RouterMetrics(registry, clock=lambda: now[0]), "chat")
    meter.tenant, meter.model = "acme", "m"
    who = {"tenant": "acme", "model": "m"}
    assert registry.get_sample_value("holdfast_requests_in_flight") == 1
    now[0] = 101.0
    meter.first_token()
    now[0] = 105.0
    meter.answered(tokens=5)
    meter.end(Outcome.ABORTED)
    assert registry.get_sample_value("holdfast_requests_in_flight") == 0
    assert registry.get_sample_value("holdfast_time_to_first_token_seconds_sum", who) == 1.0
    assert registry.get_sample_value("holdfast_time_per_output_token_seconds_sum", who) == 1.0
    assert registry.get_sample_value("holdfast_turn_seconds_sum", who) == 5.0
    labels = {**who, "endpoint": "chat"}
    assert registry.get_sample_value("holdfast_requests_total", {**labels, "outcome": "completed"}) == 1
    assert registry.get_sample_value("holdfast_requests_total", {**labels, "outcome": "aborted"}) is None
