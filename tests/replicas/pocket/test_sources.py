"""Sources: what a call copies is found where the prompt says it, token by token."""

import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.replicas.pocket.batches import Row, tokenized
from holdfast.replicas.pocket.conversations import Conversation, lexicon, training_conversation
from holdfast.replicas.pocket.drills import drill
from holdfast.replicas.pocket.export import WEIGHTS
from holdfast.replicas.pocket.pointing import NOWHERE
from holdfast.replicas.pocket.tokenizer import load
from holdfast.replicas.pocket.words import Split

TOKENIZER: Tokenizer = load(WEIGHTS)
SCHEMA = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def asked(content: str, *arguments: dict[str, Any]) -> Conversation:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "find", "arguments": a}}
        for i, a in enumerate(arguments)
    ]
    return Conversation(
        ({"role": "user", "content": content}, {"role": "assistant", "content": None, "tool_calls": calls}), (SCHEMA,)
    )


def row_of(conversation: Conversation, context: int = 8192) -> Row:
    return tokenized(conversation, TOKENIZER, random.Random(3), context)


def text(row: Row, tokens: list[int]) -> str:
    return TOKENIZER.decode([row.ids[token] for token in tokens], skip_special_tokens=False)


def looks(row: Row) -> list[tuple[str, list[str]]]:
    """Per choice: the token it stands on and the places it may look at, each with the two tokens behind it."""
    return [(text(row, [c.at]), [text(row, [*range(t, t + 3)]) if t else "" for t in c.tokens]) for c in row.sources]


def test_each_token_of_the_arguments_looks_at_what_is_copied_next() -> None:
    row = row_of(asked("From Lyon to Graz with 7 seats", {"to": "Graz", "seats": 7}))
    found = looks(row)
    assert found[0][1][0].startswith("G")
    copied = "".join(text(row, [c.tokens[0]]) for c in row.sources if row.ids[c.at + 1] == row.ids[c.tokens[0]])
    assert copied == "Graz7"
    assert row.sources[-1].tokens == NOWHERE


def test_a_switch_looks_at_the_words_of_its_parameter() -> None:
    row = row_of(asked("send it, dry run enabled", {"dry_run": True}))
    assert looks(row)[0][1][0].startswith("dry")
    assert row.sources[-1].tokens == NOWHERE


def test_a_part_of_a_word_is_no_source() -> None:
    row = row_of(asked("find 19845 and Lyons", {"year": 1984, "city": "Lyon"}))
    assert {choice.tokens for choice in row.sources} == {NOWHERE}


def test_all_places_in_the_latest_message_that_says_it_are_right() -> None:
    row = row_of(asked("Graz or Graz", {"city": "Graz"}, {"city": "Graz"}))
    assert {len(choice.tokens) for choice in row.sources if choice.tokens != NOWHERE} == {2}


def test_what_is_cut_off_has_no_choices() -> None:
    conversation = next(c for c in map(training_conversation, range(40)) if row_of(c).sources)
    choices = row_of(conversation).sources
    middle = choices[len(choices) // 2].at
    assert [c for c in choices if c.at < middle] == row_of(conversation, middle).sources


@given(st.integers(0, 2**60))
@settings(max_examples=60, deadline=None)
def test_most_of_what_training_writes_in_arguments_has_a_source(seed: int) -> None:
    conversation = drill(random.Random(seed), lexicon(Split.TRAIN), 8)
    row = row_of(conversation)
    assert all(
        token <= choice.at < len(row.ids) and row.learned[choice.at]
        for choice in row.sources
        for token in choice.tokens
    )
    values = [
        json.dumps(value)
        for message in conversation.messages
        for call in message.get("tool_calls") or ()
        for value in call["function"]["arguments"].values()
    ]
    if values:
        found = [c for c in row.sources if c.tokens != NOWHERE]
        assert len(found) >= len(values) / 2
