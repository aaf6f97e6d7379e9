import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt, RawPrompt
from holdfast.router.identity import HEADERS, program_key
from holdfast.router.protocol.turn import ClaimedIds

NOBODY = ClaimedIds(None, None, None)
SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
PROMPT = ChatPrompt([SYSTEM, ASK])
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=40)


def key(ids=NOBODY, headers=None, prompt=PROMPT, tenant="acme"):
    return program_key(tenant, ids, httpx.Headers(headers or {}), prompt)


def test_the_first_name_in_the_documented_order_counts():
    headers = {"X-Program-ID": "1", "X-Session-ID": "2", "X-Session-Affinity": "3", "X-Correlation-ID": "4"}
    ids = ClaimedIds("0", "5", "6")
    expected = ["acme/0", "acme/1", "acme/2", "acme/3", "acme/4", "acme/5", "acme/6"]
    seen = [key(ids, headers)]
    ids = ClaimedIds(None, "5", "6")
    for name in HEADERS:
        seen.append(key(ids, headers))
        headers = {other: value for other, value in headers.items() if other.lower() != name}
    seen += [key(ids), key(ClaimedIds(None, None, "6"))]
    assert seen == expected


def test_an_empty_header_names_nobody():
    assert key(headers={"X-Session-ID": ""}) == key()


def test_a_growing_conversation_stays_one_program():
    later = [SYSTEM, ASK, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    assert key(prompt=ChatPrompt(later)) == key()


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt([ASK]),
        ChatPrompt([SYSTEM, {"role": "user", "content": "other"}]),
        ChatPrompt([SYSTEM, ASK], tools=(TOOL,)),
        RawPrompt("hello"),
    ],
)
def test_another_beginning_is_another_program(prompt):
    assert key(prompt=prompt) != key()


def test_a_growing_plain_prompt_stays_one_program():
    head = "x" * 300
    assert key(prompt=RawPrompt(head)) == key(prompt=RawPrompt(head + "more"))
    assert key(prompt=RawPrompt(tuple(range(300)))) == key(prompt=RawPrompt(tuple(range(400))))


@given(NAMES, NAMES, st.sampled_from(["a", "a.b", "b"]), st.sampled_from(["a", "a.b", "b"]))
def test_equal_keys_mean_equal_tenant_and_name(one, two, first, second):
    same = key(ClaimedIds(one, None, None), tenant=first) == key(ClaimedIds(two, None, None), tenant=second)
    assert same == (one == two and first == second)


def test_no_name_meets_a_digest():
    digest = key().removeprefix("acme/")
    assert key(ClaimedIds(digest, None, None)) != key()


@pytest.mark.parametrize("value", ["x" * 257, "a\nb", "a\x00b"])
def test_an_id_that_is_too_long_or_unprintable_is_refused(value):
    with pytest.raises(InvalidRequestError) as refused:
        key(ClaimedIds(None, None, value))
    assert refused.value.field == "prompt_cache_key"
