"""What the shipped model makes of choices, least lengths, penalties and prompts to score, over HTTP."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from service_backend import engine_served

PROMPT = "What is the weather in Oslo? The weather in Oslo is"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with engine_served() as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_prompt_is_scored_as_lm_eval_asks(http: httpx.Client) -> None:
    """By token ids, several at once. Each score is what a reply forced to that token would have had there."""
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    told = complete(http, prompt=[ids, ids[:5]], max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, prompt in zip(told["choices"], (ids, ids[:5]), strict=True):
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is None
        assert len(scores["token_logprobs"]) == len(prompt) + 1
        for value, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True):
            assert value <= max(top.values())
    assert told["usage"]["prompt_tokens"] == len(ids) + 5
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first = told["choices"][0]["logprobs"]["token_logprobs"]
    for at in (3, len(ids) - 1):  # the same, asked for one by one: the token's place among the likeliest
        one = complete(http, prompt=ids[:at], max_tokens=1, logprobs=20)["choices"][0]["logprobs"]
        text = told["choices"][0]["logprobs"]["tokens"][at]
        if text in one["top_logprobs"][0]:
            assert one["top_logprobs"][0][text] == pytest.approx(first[at], abs=1e-3)
        else:
            assert first[at] <= min(one["top_logprobs"][0].values()) + 1e-3
    assert all(math.isfinite(value) for value in first[1:])


def test_an_echo_is_the_prompt_and_then_the_reply_that_it_always_has(http: httpx.Client) -> None:
    plain = complete(http)["choices"][0]["text"]
    assert complete(http, echo=True)["choices"][0]["text"] == PROMPT + plain
    scored = complete(http, echo=True, logprobs=2)["choices"][0]
    assert scored["text"] == PROMPT + plain
    alone = complete(http, echo=True, logprobs=2, max_tokens=0)
    assert alone["choices"][0]["text"] == PROMPT
    assert alone["usage"]["completion_tokens"] == 0
    assert len(scored["logprobs"]["tokens"]) == len(alone["choices"][0]["logprobs"]["tokens"]) + 6
    again = complete(http, echo=True, logprobs=2)["choices"][0]  # from the cache, the missing first score too
    assert again == scored


def test_each_counted_token_has_an_entry_whatever_it_is(http: httpx.Client) -> None:
    """A prompt of one token, parts of characters, and tokens that leave no text, drawn where the reply is to go on."""
    ids = http.post("/tokenize", json={"prompt": "👩"}).json()["tokens"]
    for prompt in (ids, ids[:1]):
        told = complete(http, prompt=prompt, echo=True, logprobs=1)
        (choice,), usage = told["choices"], told["usage"]
        scores = choice["logprobs"]
        counted = usage["prompt_tokens"] + usage["completion_tokens"]
        assert {len(each) for each in scores.values()} == {counted}
        if len(ids) > 1:
            assert all(name.startswith("bytes:") for name in scores["tokens"][: len(prompt)])
    chat = {"model": "pocket", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "logprobs": True}
    for fields in ({"max_tokens": 200}, {"max_tokens": 40, "ignore_eos": True}):
        told = http.post("/v1/chat/completions", json={**chat, **fields}).json()
        (choice,) = told["choices"]
        entries = choice["logprobs"]["content"]
        assert len(entries) == told["usage"]["completion_tokens"]
        assert bytes(byte for each in entries for byte in each["bytes"]).decode() == choice["message"]["content"]
        assert any(not each["bytes"] for each in entries), "an end of sequence"


def test_choices_differ_and_are_the_same_each_time(http: httpx.Client) -> None:
    def texts(**fields: Any) -> list[str]:
        told = complete(http, temperature=1.5, max_tokens=12, **fields)
        return [choice["text"] for choice in told["choices"]]

    four = texts(n=4)
    assert len(set(four)) > 1
    assert texts(n=4) == four
    assert texts(n=2) == four[:2]
    assert texts() == four[:1]
    assert texts(n=4, seed=9) != four


def test_a_reply_has_its_least_length(http: httpx.Client) -> None:
    stop = complete(http, max_tokens=20)["choices"][0]["text"].split()[1]
    short = complete(http, stop=[stop], max_tokens=40)
    n = short["usage"]["completion_tokens"]
    assert short["choices"][0]["finish_reason"] == "stop"
    longer = complete(http, stop=[stop], max_tokens=n + 30, min_tokens=n + 5)
    assert longer["usage"]["completion_tokens"] >= n + 5
    assert longer["choices"][0]["text"].startswith(short["choices"][0]["text"] + stop)
    # The model's own end: an answer in a chat has one soon.
    body: dict[str, Any] = {"model": "pocket", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 300}
    asked = ({**body, "temperature": 0, "min_tokens": n} for n in (0, 300))
    counts = [http.post("/v1/chat/completions", json=each).json()["usage"] for each in asked]
    assert counts[0]["completion_tokens"] < counts[1]["completion_tokens"] == 300


def test_an_overlong_prompt_says_so_in_the_words_that_clients_look_for(http: httpx.Client) -> None:
    # Of texts the router cannot say how many tokens they have: this is told by the replica.
    context = http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"model": "pocket", "messages": [{"role": "user", "content": "word " * context}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert f"maximum context length is {context} tokens" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "context_length_exceeded"
