"""Pointing: tools, parameters and values are looked for where the prompt has them, token by token; and its loss."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.loadgen.pocket.batches import Row, collate, tokenized
from holdfast.loadgen.pocket.conversations import Conversation, lexicon, training_conversation
from holdfast.loadgen.pocket.drills import drill
from holdfast.loadgen.pocket.pointing import HEADS, NOWHERE, Choice, called, pointing_loss, pointing_losses
from holdfast.loadgen.pocket.tokenizer import WEIGHTS, load
from holdfast.loadgen.pocket.words import Split

TOKENIZER: Tokenizer = load(WEIGHTS)
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array"}
seeds = st.integers(0, 2**60)


def asked(content: str, *calls: dict[str, Any]) -> Conversation:
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
    row = row_of(asked("From Lyon to Graz with 7 seats", {"to_city": "Graz", "seats": 7}))
    assert copied(row, row.choices["sources"]) == "Graz7"
    assert copied(row, row.choices["keys"]) == "to_cityseats"


def test_what_is_said_next_is_looked_at_until_it_begins_and_then_nothing() -> None:
    row = row_of(asked("Graz, dry run enabled", {"city": "Graz", "dry_run": True}))
    starts = [text(row, c.tokens[0]) if c.tokens != NOWHERE else "" for c in row.choices["sources"]]
    assert "".join(starts[:1]) == "G"
    assert starts[-3:] == ["d", "d", ""]  # before the name, behind it, behind the value


def test_behind_a_name_its_type_is_looked_at() -> None:
    row = row_of(asked("Graz 7", {"city": "Graz", "seats": 7}))
    types = [text(row, c.tokens[0]) for c in row.choices["keys"] if row.ids[c.at + 1] != row.ids[c.tokens[0]]]
    assert all(each and TYPES[kind].startswith(each) for each, kind in zip(types, (str, int), strict=True))


def test_a_part_of_a_word_is_no_source() -> None:
    row = row_of(asked("find 19845 and Lyons", {"year": 1984, "city": "Lyon"}))
    assert {choice.tokens for choice in row.choices["sources"]} == {NOWHERE}


def test_all_places_in_the_latest_message_that_says_it_are_right() -> None:
    row = row_of(asked("Graz or Graz", {"city": "Graz"}, {"city": "Graz"}))
    assert {len(choice.tokens) for choice in row.choices["sources"] if choice.tokens != NOWHERE} == {2}


@pytest.mark.parametrize("head", HEADS)
def test_what_is_cut_off_is_not_chosen(head: str) -> None:
    conversation = next(c for c in map(training_conversation, range(40)) if row_of(c).choices["keys"])
    choices = row_of(conversation).choices[head]
    middle = choices[len(choices) // 2].at
    assert [c for c in choices if c.at < middle] == row_of(conversation, middle).choices[head]


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_nothing_is_looked_at_that_is_not_written_yet(seed: int) -> None:
    row = row_of(drawn(seed))
    for choices in row.choices.values():
        assert all(0 <= token <= choice.at < len(row.ids) for choice in choices for token in choice.tokens)
        assert len({choice.at for choice in choices}) == len(choices)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_every_name_of_a_parameter_has_its_source(seed: int) -> None:
    conversation = drawn(seed)
    row = row_of(conversation)
    calls = [call for message in conversation.messages for call in message.get("tool_calls") or ()]
    names = "".join(name for call in calls for name in call["function"]["arguments"])
    assert copied(row, row.choices["keys"]) == names


@given(seeds)
@settings(max_examples=60, deadline=None)
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


def test_a_question_for_arguments_points_at_its_tool() -> None:
    assert called({"role": "assistant", "content": "Please tell me the city.", "asks_for": "find"}) == ["find"]


def test_the_loss_is_the_attention_that_looks_elsewhere() -> None:
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


def test_a_model_of_one_layer_points_with_the_one_it_has() -> None:
    batch = collate([row_of(drawn(4))])
    seen = torch.randn(2, 1, 3, batch.ids.shape[1], 16).unbind(0)
    losses = pointing_losses([seen], batch.pointing)
    expected = [
        pointing_loss(seen[0][:, head], seen[1][:, head], batch.pointing[name]) for name, (_, head) in HEADS.items()
    ]
    torch.testing.assert_close(losses, expected)


def test_a_batch_without_tools_has_no_loss() -> None:
    batch = collate([Row([1, 2], [0, 1], [False, True])])
    assert pointing_loss(torch.ones(1, 32, 8), torch.ones(1, 32, 8), batch.pointing["tools"]) == 0
