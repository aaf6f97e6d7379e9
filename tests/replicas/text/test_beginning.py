"""What every prompt begins with that goes on from a known one: its tokens are those of all of them, whatever comes."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replies import call, result, system, user

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.types import common_prefix

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SYSTEM, ASK, CALLS = system("You are brief."), user("Rain in Oslo and Rome?"), call('{"n": 1}', "a", "b")
CALL = call('{"n": 1}', "a")


def beginning(side: TextSide, messages: list[Any]) -> list[int]:
    tokens: list[int] = asyncio.run(side.beginning(ChatPrompt(messages, [TOOL]))).tokens.tolist()
    return tokens


def whole(side: TextSide, messages: list[Any]) -> list[int]:
    return side.encode(ChatPrompt(messages, [TOOL])).tokens.tolist()


@settings(max_examples=50)
@example(first="0", second="P", which=2)
@example(first="P", second="", which=2)
@given(first=st.text(min_size=1), second=st.text(), which=st.integers(0, 2))
def test_whatever_the_results_are(tokenizers: list[Any], first: str, second: str, which: int) -> None:
    side = TextSide(tokenizers[which], EngineConfig())
    known = [SYSTEM, ASK, CALLS]
    sure = beginning(side, known)
    full = whole(side, [*known, result(first, "a"), result(second, "b")])
    if first.strip() == first:  # some templates drop white space around a result
        assert full[: len(sure)] == sure
        for one in (result(first, "a"), result(second, "b")):  # the second call's may be known first
            sure = beginning(side, [*known, one])
            assert full[: len(sure)] == sure


def test_all_but_the_result_and_what_follows_is_sure(qwen_like: Any) -> None:
    side = TextSide(qwen_like, EngineConfig())
    known = [SYSTEM, ASK, CALLS]
    with_results = [whole(side, [*known, result(text, "a"), result(text, "b")]) for text in ("rain", "42 degrees")]
    shared = common_prefix(*map(np.array, with_results))
    assert shared - 2 <= len(beginning(side, known)) <= shared


@pytest.mark.parametrize("known", [[SYSTEM, ASK], [SYSTEM, ASK, CALL, result("rain", "a")]])
def test_where_the_assistant_is_next_it_is_the_prompt(qwen_like: Any, known: list[Any]) -> None:
    side = TextSide(qwen_like, EngineConfig())
    assert beginning(side, known) == whole(side, known)


def test_the_turn_that_comes_tokenizes_its_end_alone(qwen_like: Any) -> None:
    side = TextSide(qwen_like, EngineConfig())
    known = [SYSTEM, ASK, CALL]
    beginning(side, known)
    before = side.cache.tokenized
    whole(side, [*known, result("rain", "a")])
    assert 3 * (side.cache.tokenized - before) < before


def test_what_the_template_refuses_is_refused(llama3_like: Any) -> None:
    side = TextSide(llama3_like, EngineConfig())
    with pytest.raises(InvalidRequestError) as refused:
        beginning(side, [user(5)])
    assert refused.value.field == "messages.0.content"
