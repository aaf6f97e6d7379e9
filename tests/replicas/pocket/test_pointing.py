"""Pointing: names and choices stand where the text has them, and only a row's own tools can be chosen."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.replicas.pocket.batches import Row, collate, tokenized
from holdfast.replicas.pocket.conversations import Conversation, lexicon, training_conversation
from holdfast.replicas.pocket.drills import drill
from holdfast.replicas.pocket.export import WEIGHTS
from holdfast.replicas.pocket.pointing import NO_CHOICE, Pointer, called
from holdfast.replicas.pocket.tokenizer import load
from holdfast.replicas.pocket.words import Split

TOKENIZER: Tokenizer = load(WEIGHTS)
seeds = st.integers(0, 2**60)


def drawn(seed: int) -> Conversation:
    rng = random.Random(seed)
    return drill(rng, lexicon(Split.TRAIN), 8) if rng.random() < 0.5 else training_conversation(seed)


def row_of(conversation: Conversation, context: int = 8192) -> Row:
    return tokenized(conversation, TOKENIZER, random.Random(3), context)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_names_stand_where_they_are_said_to(seed: int) -> None:
    conversation = drawn(seed)
    row = row_of(conversation)
    said = [TOKENIZER.decode(row.ids[a:b]).strip('" ') for a, b in row.pointing.names]
    assert said == [tool["function"]["name"] for tool in conversation.tools]


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_a_choice_is_the_tool_of_the_call_that_follows(seed: int) -> None:
    conversation = drawn(seed)
    row = row_of(conversation)
    names = [tool["function"]["name"] for tool in conversation.tools]
    for choice in row.pointing.choices:
        following = TOKENIZER.decode(row.ids[choice.at + 1 : choice.at + 60], skip_special_tokens=False)
        if choice.tool != NO_CHOICE and not following.startswith("Please tell me"):
            start = following.removeprefix("\n").removeprefix('<tool_call>\n{"name": "')
            assert start.startswith(names[choice.tool] + '"')
        assert choice.tool != NO_CHOICE or not following.lstrip("\n").startswith("<tool_call>")
    if conversation.tools:
        replies = [message for message in conversation.messages if message["role"] == "assistant"]
        most = sum(len(called(message)) + 1 for message in replies)
        assert len(replies) <= len(row.pointing.choices) <= most


def test_a_question_for_arguments_points_at_its_tool() -> None:
    assert called({"role": "assistant", "content": "Please tell me the city.", "asks_for": "find"}) == ["find"]


def test_what_is_cut_off_is_not_chosen() -> None:
    conversation = next(c for c in map(training_conversation, range(9)) if c.tools)
    whole = row_of(conversation)
    middle = whole.pointing.choices[len(whole.pointing.choices) // 2].at
    assert all(choice.at < middle for choice in row_of(conversation, middle).pointing.choices)
    assert row_of(conversation, 8).pointing.names == ()


def test_only_a_rows_own_tools_and_none_can_be_chosen() -> None:
    rows = [row_of(drawn(seed)) for seed in range(6)]
    batch = collate(rows)
    torch.manual_seed(5)
    scores = Pointer(32, 7)(torch.randn(batch.ids.numel(), 32), batch.pointing)
    own = torch.tensor([len(rows[row].pointing.names) for row in batch.pointing.rows.tolist()])
    assert torch.equal(scores.isfinite().sum(-1), own + 1)
    chosen = scores.gather(1, batch.pointing.chosen[:, None])
    assert bool(chosen.isfinite().all())


def test_a_pointer_learns_from_hidden_states_that_tell() -> None:
    rows = [row for row in map(row_of, map(drawn, range(12))) if row.pointing.names]
    batch = collate(rows)
    pointing = batch.pointing
    marks = torch.randn(len(pointing.tool_rows) + 1, 48, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(batch.ids.numel(), 48)
    x[pointing.name_tokens] = marks[pointing.name_tools]
    x[pointing.at] = marks[pointing.chosen]
    pointer = Pointer(48, 1)
    optimizer = torch.optim.Adam(pointer.parameters(), lr=2e-2)
    first = pointer.loss(x, pointing).item()
    for _ in range(60):
        optimizer.zero_grad()
        pointer.loss(x, pointing).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert pointer.loss(x, pointing).item() < 0.1 * first
