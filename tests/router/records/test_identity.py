from math import inf

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.config import DEADLINE_HEADERS, PLACEMENT_HEADERS, PROGRAM_HEADERS
from holdfast.router.protocol.turn import ClaimedIds
from holdfast.router.records.identity import neighbour, program_named, unnamed_program, within_named

NOBODY = ClaimedIds(None, None, None)
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=40)


def key(ids=NOBODY, headers=None, tenant="acme"):
    return program_named(tenant, ids, httpx.Headers(headers or {}), PROGRAM_HEADERS)


def near(ids=NOBODY, headers=None, tenant="acme"):
    return neighbour(tenant, ids, httpx.Headers(headers or {}), PLACEMENT_HEADERS)


def test_the_first_name_in_the_documented_order_counts():
    headers = {name: f"h{i}" for i, name in enumerate(PROGRAM_HEADERS)}
    assert key(ClaimedIds("body", "response", "cache"), headers) == "acme/body"
    seen = []
    for name in PROGRAM_HEADERS:
        seen.append(key(ClaimedIds(None, "response", "cache"), headers))
        headers = {other: value for other, value in headers.items() if other != name}
    assert seen == [f"acme/h{i}" for i in range(len(PROGRAM_HEADERS))]
    assert key(ClaimedIds(None, "response", "cache")) == "acme/response"


SESSIONS = ("X-Program-ID", "X-Session-ID", "X-Session-Affinity", "X-Claude-Code-Session-Id", "x-opencode-session")


@pytest.mark.parametrize("name", [*SESSIONS, "session-id", "session_id", "conversation_id"])
def test_the_session_headers_of_known_agents_name_the_program(name):
    assert key(headers={name: "s"}) == "acme/s"


@pytest.mark.parametrize(
    ("ids", "headers"),
    [
        (NOBODY, {}),
        (NOBODY, {"X-Session-ID": ""}),
        (NOBODY, {"X-Correlation-ID": "one of many"}),
        (NOBODY, {"X-Parent-Session-ID": "parent"}),
        (ClaimedIds(None, None, "shared"), {}),
    ],
)
def test_what_names_no_program(ids, headers):
    assert key(ids, headers) is None


def test_a_parent_comes_before_a_key_of_a_cache_as_what_to_be_placed_with():
    headers = {"x-parent-session-id": "parent", "x-correlation-id": "c"}
    assert near(ClaimedIds(None, None, "shared"), headers) == key(ClaimedIds("parent", None, None))
    assert near(ClaimedIds(None, None, "shared")) == "acme/shared"
    assert near() == near(ClaimedIds(None, None, "a\nb")) == ""


@given(NAMES, NAMES, st.sampled_from(["a", "a.b", "b"]), st.sampled_from(["a", "a.b", "b"]))
def test_equal_keys_mean_equal_tenant_and_name(one, two, first, second):
    same = key(ClaimedIds(one, None, None), tenant=first) == key(ClaimedIds(two, None, None), tenant=second)
    assert same == (one == two and first == second)


@given(st.text("0123456789abcdef", min_size=1, max_size=24), st.sampled_from(["", "~", "~~"]))
def test_no_name_meets_a_program_without_one(token, before):
    """Tokens are digits in hexadecimal."""
    assert key(ClaimedIds(f"{before}{token}", None, None)) != unnamed_program("acme", token)


@pytest.mark.parametrize("value", ["x" * 257, "a\nb", "a\x00b"])
def test_an_id_that_is_too_long_or_unprintable_is_refused(value):
    with pytest.raises(InvalidRequestError) as refused:
        key(ClaimedIds(None, value, None))
    assert refused.value.field == "previous_response_id"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, inf),
        ({"x-stainless-timeout": "600"}, 600.0),
        ({"x-stainless-timeout": "600", "request-timeout": "2.5"}, 2.5),
        ({"grpc-timeout": "250m"}, 0.25),
        ({"grpc-timeout": "2H"}, 7200.0),
        ({"grpc-timeout": "2"}, inf),
        ({"x-envoy-expected-rq-timeout-ms": "1500"}, 1.5),
        ({"request-timeout": "soon"}, inf),
        ({"request-timeout": "nan"}, inf),
        ({"request-timeout": "-1"}, inf),
        ({"x-another": "1"}, inf),
    ],
)
def test_how_long_a_client_waits(headers, seconds):
    assert within_named(headers, DEADLINE_HEADERS) == pytest.approx(seconds)
