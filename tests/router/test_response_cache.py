import asyncio
from dataclasses import replace

import pytest
from fake_backend import CARD, USAGE

from holdfast.replicas.events import Timing
from holdfast.replicas.requests import Answer
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.body import validate
from holdfast.router.protocol.chat import ChatBody, chat_turn
from holdfast.router.protocol.completions import CompletionBody, completion_turn
from holdfast.router.response_cache import ResponseCache
from holdfast.router.store import MemoryStore

ANSWER = Answer("hello", (), (), "stop", USAGE, Timing(0.0))
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
SWAPPED = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}},
}
BASE = {"model": "pocket", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


def cache(store=None, fingerprint="weights-1", **settings):
    return ResponseCache(store or MemoryStore(100, 2**20), RouterConfig(**settings), fingerprint)


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
        {"tools": [SWAPPED]},
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


def test_a_repeat_counts_its_whole_prompt_as_cached():
    async def scenario():
        store = MemoryStore(100, 2**20)
        one, two = cache(store), cache(store)
        assert await one.find("k") is None
        one.keep("k", ANSWER)
        near = await one.find("k")
        await one.drain()
        assert near == await two.find("k") == replace(ANSWER, usage=replace(USAGE, cached=USAGE.prompt))

    asyncio.run(scenario())


def test_a_long_answer_and_foreign_bytes_are_misses():
    async def scenario():
        store = MemoryStore(100, 2**20)
        small = cache(store, cache_answer_bytes=10)
        small.keep("k", ANSWER)
        await small.drain()
        assert await small.find("k") is None
        await store.set("k", b"not an answer", 60.0)
        assert await small.find("k") is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("header", "on", "bypassed"),
    [
        (None, True, False),
        ("max-age=0", True, False),
        ("no-cache", True, True),
        ("private, No-Store", True, True),
        (None, False, True),
    ],
)
def test_who_goes_past_the_cache(header, on, bypassed):
    assert cache(response_cache=on).bypassed(header) is bypassed


def test_a_tenants_flood_leaves_another_its_answers():
    async def scenario():
        kept = cache(store=MemoryStore(1, 1), cache_entries=16)
        kept.keep("cache/quiet/0", ANSWER)
        for i in range(200):
            kept.keep(f"cache/noisy/{i}", ANSWER)
        await kept.drain()
        assert await kept.find("cache/quiet/0") is not None
        assert await kept.find("cache/noisy/0") is None
        assert await kept.find("cache/noisy/199") is not None

    asyncio.run(scenario())
