from dataclasses import replace

import orjson
import pytest
from fake_backend import CARD, USAGE, config_of
from redis_server import records_away, shared_records

from holdfast.replicas.requests import Answer, Timing
from holdfast.router.protocol.body import validate
from holdfast.router.protocol.chat import ChatBody, chat_turn
from holdfast.router.protocol.completions import CompletionBody, completion_turn
from holdfast.router.records.response_cache import STORED, CachedAnswer, CacheEntry, CacheQuery, ResponseCache
from holdfast.router.tenants import Tenant, TenantCache

pytestmark = pytest.mark.anyio

ANSWER = Answer("hello", (), (), "stop", USAGE, Timing(0.0))
REPEAT = replace(ANSWER, usage=replace(USAGE, cached=USAGE.prompt))  # as other requests get it


def tool(*names):
    parameters = {"type": "object", "properties": {name: {} for name in names}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


BASE = {"model": "pocket", "messages": [{"role": "user", "content": "hi"}], "tools": [tool("a", "b")]}
ACME = Tenant("acme")
KEY = "cache/acme/k"


def cache(records=None, fingerprint="weights-1", now=lambda: 1000.0, **settings):
    return ResponseCache(records or shared_records(), config_of(**settings), fingerprint, now=now)


def ask(key, max_age_s=3600.0, tenant=ACME):
    return CacheQuery(key, tenant, max_age_s)


def chat_key(tenant="acme", fingerprint="weights-1", **changes):
    turn = chat_turn(validate(ChatBody, {**BASE, **changes}), CARD)
    return cache(fingerprint=fingerprint).key(tenant, turn)


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"program_id": "p"},
        {"prompt_cache_key": "p"},
        {"user": "u", "metadata": {"a": "b"}, "store": True},
        {"temperature": None, "n": 1, "stop": []},
    ],
)
def test_what_does_not_decide_the_answer_is_not_in_the_key(changes):
    assert chat_key(**changes) == chat_key()


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "other"},
        {"fingerprint": "weights-2"},
        {"messages": [{"role": "user", "content": "hi "}]},
        {"messages": [{"role": "system", "content": "hi"}]},
        {"tools": None},
        {"tools": [tool("b", "a")]},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.1},
        {"seed": 1},
        {"max_tokens": 5},
        {"stop": "x"},
        {"stop_token_ids": [5]},
        {"ignore_eos": True},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"logit_bias": {"5": 1}},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_everything_that_decides_the_answer_is_in_the_key(changes):
    assert chat_key(**changes) != chat_key()


def test_text_and_token_prompts_and_chats_do_not_meet():
    bodies = [{"model": "pocket", "prompt": "1"}, {"model": "pocket", "prompt": [1]}]
    keys = {cache().key("acme", completion_turn(validate(CompletionBody, body), CARD)) for body in bodies}
    assert len(keys | {chat_key()}) == 3


async def test_a_repeat_counts_its_whole_prompt_as_cached():
    records = shared_records()
    one, two = cache(records), cache(records)
    assert await one.find(ask(KEY)) is None
    one.keep(ask(KEY), ANSWER)
    await one.drain()
    assert await one.find(ask(KEY)) == await two.find(ask(KEY)) == CachedAnswer(REPEAT)


TURN = chat_turn(validate(ChatBody, BASE), CARD)


@pytest.mark.parametrize(
    ("header", "max_age_s", "fresh"),
    [
        (None, 3600.0, False),
        ("max-age=60", 60.0, False),
        ('private, Max-Age="7"', 7.0, False),
        ("max-age=9999", 3600.0, False),
        ("max-age=0", 0.0, True),
        ("max-age=soon", 0.0, True),
        ("no-cache", 3600.0, True),
    ],
)
def test_what_cache_control_asks_for(header, max_age_s, fresh):
    asked = cache().query(ACME, TURN, header)
    assert (asked.max_age_s, asked.fresh) == (max_age_s, fresh)


@pytest.mark.parametrize(
    ("header", "tenant", "on"),
    [
        ("private, No-Store", ACME, True),
        (None, ACME, False),
        (None, Tenant("acme", cache=TenantCache(enabled=False)), True),
    ],
)
def test_who_goes_past_the_cache(header, tenant, on):
    assert cache(response_cache=on).query(tenant, TURN, header) is None


async def test_nothing_older_than_the_tenants_age_or_than_a_request_will_have_is_given():
    now = [1000.0]
    records = shared_records()
    one, two = (cache(records, now=lambda: now[0]) for _ in range(2))
    short = Tenant("acme", cache=TenantCache(ttl_s=30.0))
    one.keep(one.query(ACME, TURN, None), ANSWER)
    await one.drain()
    now[0] += 20.0
    for each in (one, two):
        assert (await each.find(each.query(ACME, TURN, "max-age=20"))).age_s == 20.0
        assert await each.find(each.query(ACME, TURN, "max-age=19")) is None
        assert await each.find(each.query(ACME, TURN, "no-cache")) is None
        assert (await each.find(each.query(short, TURN, None))).age_s == 20.0
    now[0] += 11.0
    for each in (one, two):
        assert await each.find(each.query(short, TURN, None)) is None
        assert (await each.find(each.query(ACME, TURN, None))).age_s == 31.0


async def test_a_tenant_keeps_no_more_than_its_size():
    kept = cache()
    key = "cache/small/{}"
    size = len(STORED.dump_json(CacheEntry(REPEAT, 1000.0), exclude_defaults=True))
    small = Tenant("small", cache=TenantCache(bytes=3 * size))
    for i in range(9):
        kept.keep(ask(key.format(i), tenant=small), ANSWER)
        kept.keep(ask(f"cache/acme/{i}"), ANSWER)
        await kept.drain()
    found = [i for i in range(9) if await kept.find(ask(key.format(i), tenant=small))]
    assert found == [0, 1, 2]
    assert all([await kept.find(ask(f"cache/acme/{i}")) for i in range(9)])


async def test_without_redis_nothing_is_found_or_kept():
    kept = cache(records_away())
    kept.keep(ask(KEY), ANSWER)
    await kept.drain()
    assert await kept.find(ask(KEY)) is None


async def test_an_answer_that_is_too_long_is_not_kept():
    kept = cache(cache_answer_bytes=10)
    kept.keep(ask(KEY), ANSWER)
    await kept.drain()
    assert await kept.find(ask(KEY)) is None


async def test_what_is_purged_is_found_nowhere_and_others_keep_theirs():
    records, other = shared_records(), Tenant("other")
    one, two = cache(records), cache(records)
    for each in (one, two):
        each.purged({"acme": "first"})  # from before it began
    for tenant in (ACME, other):
        one.keep(one.query(tenant, TURN, None), ANSWER)
    await one.drain()
    late = two.query(ACME, TURN, None)  # it asks before its router has heard of the purge
    assert await two.find(late)
    one.purged({"acme": "second"})
    await one.drain()
    assert await records.get(late.key) is None
    for each in (one, two):
        each.purged({"acme": "second"})
        assert await each.find(each.query(ACME, TURN, None)) is None
        assert await each.find(each.query(other, TURN, None))
    two.keep(late, ANSWER)
    await two.drain()
    assert await one.find(one.query(ACME, TURN, None)) is None


async def test_what_cannot_be_read_is_as_good_as_absent():
    records, whole = shared_records(), orjson.loads(STORED.dump_json(CacheEntry(ANSWER, 999.0)))
    wrong = [{}, [], {**whole, "answer": {**whole["answer"], "usage": 1}}, {**whole, "made": "soon"}]
    for stored in (b"", b"no answer", *map(orjson.dumps, wrong)):
        await records.put(KEY, stored, 60.0)
        answers = cache(records)
        assert await answers.find(ask(KEY)) is None
    answers.keep(ask(KEY), ANSWER)
    await answers.drain()
    assert (await cache(records).find(ask(KEY))).answer.text == "hello"


async def test_an_answer_that_cannot_be_stored_is_kept_nowhere():
    answers = cache()
    answers.keep(ask(KEY), replace(ANSWER, text="half a pair: \ud83d"))
    await answers.drain()
    assert await answers.find(ask(KEY)) is None
