"""Pointing: its targets are the prompt's tokens of tools, parameters and values; and its loss."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.loadgen.bench.conversations import Conversation
from holdfast.loadgen.inflate import WEIGHTS
from pocket.batches import Row, collate, tokenized
from pocket.conversations import lexicon, training_conversation
from pocket.drills import drill
from pocket.pointing import HEADS, NOWHERE, Choice, called, pointing_loss
from pocket.tokenizer import load
from pocket.words import Split

TOKENIZER: Tokenizer = load(WEIGHTS)
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array"}
seeds = st.integers(0, 2**60)


def conversation_of(content: str, *calls: dict[str, Any]) -> Conversation:
    """A request and the calls that answer it, of a tool that has all their parameters."""
    properties = {name: {"type": TYPES[type(value)]} for call in calls for name, value in call.items()}
    parameters = {"type": "object", "properties": properties}
    made = [{"type": "function", "function": {"name": "find", "arguments": call}} for call in calls]
    return Conversation(
        ({"role": "user", "content": content}, {"role": "assistant", "content": None, "tool_calls": made}),
        ({"type": "function", "function": {"name": "find", "parameters": parameters}},),
    )


def drawn(seed: int) -> Conversation:
    rng = random.Random(seed)
    return drill(rng, lexicon(Split.TRAIN), 8) if rng.random() < 0.5 else training_conversation(seed)


def row_of(conversation: Conversation, context: int = 8192) -> Row:
    return tokenized(conversation, TOKENIZER, random.Random(3), context)


def text(row: Row, *tokens: int) -> str:
    return TOKENIZER.decode([row.ids[token] for token in tokens], skip_special_tokens=False)


def copied(row: Row, choices: list[Choice]) -> str:
    """What would be written by copying whenever the token looked at is the one that comes next."""
    return "".join(text(row, c.tokens[0]) for c in choices if row.ids[c.at + 1] == row.ids[c.tokens[0]])


def test_a_value_is_copied_from_the_request_and_a_name_from_the_schema() -> None:
    row = row_of(conversation_of("From Lyon to Graz with 7 seats", {"to_city": "Graz", "seats": 7}))
    assert copied(row, row.choices["sources"]) == "Graz7"
    assert copied(row, row.choices["keys"]) == "to_cityseats"


def test_a_part_of_a_word_is_no_source() -> None:
    row = row_of(conversation_of("find 19845 and Lyons", {"year": 1984, "city": "Lyon"}))
    assert {choice.tokens for choice in row.choices["sources"]} == {NOWHERE}


@given(seeds)
@settings(max_examples=60)
def test_no_target_is_a_later_token(seed: int) -> None:
    row = row_of(drawn(seed))
    for choices in row.choices.values():
        assert all(0 <= token <= choice.at < len(row.ids) for choice in choices for token in choice.tokens)
        assert len({choice.at for choice in choices}) == len(choices)


@given(seeds)
@settings(max_examples=60)
def test_a_choice_is_the_tool_of_the_call_that_follows(seed: int) -> None:
    conversation = drawn(seed)
    row = row_of(conversation)
    for choice in row.choices["tools"]:
        following = TOKENIZER.decode(row.ids[choice.at + 1 : choice.at + 60], skip_special_tokens=False)
        if choice.tokens == NOWHERE:
            assert not following.lstrip("\n").startswith("<tool_call>")
            continue
        name = text(row, *choice.tokens).strip('" ')
        assert name in {tool["function"]["name"] for tool in conversation.tools}
        if not following.startswith("Please tell me"):
            start = following.removeprefix("\n").removeprefix('<tool_call>\n{"name": "')
            assert start.startswith(name + '"')
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    if conversation.tools:
        assert len(replies) <= len(row.choices["tools"]) <= sum(len(called(message)) + 1 for message in replies)


def test_the_loss_is_the_attention_on_other_tokens() -> None:
    torch.manual_seed(5)
    drawn_rows = [row_of(drawn(seed)) for seed in range(6)]
    batch = collate(drawn_rows)
    rows, length = batch.ids.shape
    q, k = torch.randn(rows, length, 16), torch.randn(rows, length, 16)
    for which in HEADS:
        right = []
        for row, choices in enumerate(found.choices[which] for found in drawn_rows):
            for choice in choices:
                attention = (k[row, : choice.at + 1] @ q[row, choice.at] / 4).softmax(-1)
                right.append(attention[list(choice.tokens)].sum())
        torch.testing.assert_close(pointing_loss(q, k, batch.pointing[which]), -torch.stack(right).log().mean())
