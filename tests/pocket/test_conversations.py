"""The data generator: determined by its seed, true to its own words, and rendered as the chat template renders."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.bench.conversations import FILE, recorded, spans
from pocket.conversations import lexicon, training_conversation
from pocket.record import COUNT, TURNS, conversations, line
from pocket.tokenizer import packaged, train_tokenizer
from pocket.tools import random_tool
from pocket.utterances import ask, mention
from pocket.words import NOUNS, Split, is_held_out

seeds = st.integers(0, 2**60)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return packaged(train_tokenizer(60, seed=5))


@given(seeds)
@settings(max_examples=60)
def test_calls_are_declared_and_fit_their_schema(seed: int) -> None:
    types: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    conversation = training_conversation(seed)
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
    assert len(declared) == len(conversation.tools)
    for message in conversation.messages:
        for call in message.get("tool_calls", ()):
            parameters = declared[call["function"]["name"]]
            arguments = call["function"]["arguments"]
            assert set(parameters.get("required", ())) <= set(arguments) <= set(parameters["properties"])
            for name, value in arguments.items():
                entry = parameters["properties"][name]
                assert isinstance(value, types[entry["type"]])
                assert value in entry.get("enum", [value])


@given(seeds)
@settings(max_examples=100)
def test_a_request_mentions_every_argument_in_the_order_of_the_call(seed: int) -> None:
    rng, lex = random.Random(seed), lexicon(Split.TRAIN)
    request = ask(random_tool(rng, lex), rng, lex)
    at = 0
    for value in request.arguments.values():
        if not isinstance(value, bool):
            at = request.text.index(mention(value), at)


@given(seeds)
@settings(max_examples=40)
def test_spans_equal_the_rendered_template(tokenizer: Any, seed: int) -> None:
    conversation = training_conversation(seed)
    tools, texts = list(conversation.tools) or None, [span.text for span in spans(conversation)]
    rendered = tokenizer.apply_chat_template(list(conversation.messages), tools=tools, tokenize=False)
    assert "".join(texts) == rendered
    separately = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    assert separately == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.decode(separately) == rendered


def test_template_accepts_the_messages_of_clients(tokenizer: Any) -> None:
    call = {"name": "f", "arguments": {"a": "é", "b": 2}}
    as_object = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
    text = {"name": "f", "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    as_text = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": text}]}
    user = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    expected = (
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": "é", "b": 2}}'
        "\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    for message in (as_object, as_text):
        assert tokenizer.apply_chat_template([user, message, *results], tokenize=False) == expected


def test_a_value_has_the_same_tokens_wherever_it_stands(tokenizer: Any) -> None:
    for value in ("Paris", "ORD-48213", "src/main.py", "2024-05-01", "a.b@c.org"):
        alone = tokenizer.encode(value)
        for text in (f'"city": "{value}"}}', f"in {value}?", f"({value})"):
            tokens = tokenizer.encode(text)
            assert any(tokens[i : i + len(alone)] == alone for i in range(len(tokens)))


def test_held_out_words_stay_out_of_training() -> None:
    train, held = lexicon(Split.TRAIN), lexicon(Split.HELD_OUT)
    assert not set(train.nouns) & set(held.nouns)
    assert set(train.nouns) | set(held.nouns) == set(NOUNS)
    assert all(is_held_out(city) for city in held.cities)


def test_the_generator_writes_the_recorded_conversations() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert len(lines) == COUNT
    assert lines[:2] == [line(each) for each in conversations(2)]
    assert recorded()[0].turns >= TURNS
