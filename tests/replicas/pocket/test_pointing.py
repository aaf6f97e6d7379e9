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
from holdfast.replicas.pocket.pointing import NOWHERE, called, pointing_loss
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
@settings(max_examples=60, deadline=None)
def test_a_choice_is_the_tool_of_the_call_that_follows(seed: int) -> None:
    conversation = drawn(seed)
    row = row_of(conversation)
    for choice in row.tools:
        following = TOKENIZER.decode(row.ids[choice.at + 1 : choice.at + 60], skip_special_tokens=False)
        if choice.tokens == NOWHERE:
            assert not following.lstrip("\n").startswith("<tool_call>")
            continue
        name = TOKENIZER.decode([row.ids[token] for token in choice.tokens]).strip('" ')
        assert name in {tool["function"]["name"] for tool in conversation.tools}
        if not following.startswith("Please tell me"):
            start = following.removeprefix("\n").removeprefix('<tool_call>\n{"name": "')
            assert start.startswith(name + '"')
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    if conversation.tools:
        assert len(replies) <= len(row.tools) <= sum(len(called(message)) + 1 for message in replies)


def test_a_question_for_arguments_points_at_its_tool() -> None:
    assert called({"role": "assistant", "content": "Please tell me the city.", "asks_for": "find"}) == ["find"]


def test_what_is_cut_off_is_not_chosen() -> None:
    conversation = next(c for c in map(training_conversation, range(9)) if c.tools)
    choices = row_of(conversation).tools
    middle = choices[len(choices) // 2].at
    assert [c for c in choices if c.at < middle] == row_of(conversation, middle).tools


def test_the_loss_is_the_attention_that_looks_elsewhere() -> None:
    torch.manual_seed(5)
    drawn_rows = [row_of(drawn(seed)) for seed in range(6)]
    batch = collate(drawn_rows)
    rows, length = batch.ids.shape
    q, k = torch.randn(rows, length, 16), torch.randn(rows, length, 16)
    for which in ("tools", "sources"):
        right = []
        for row, choices in enumerate(getattr(found, which) for found in drawn_rows):
            for choice in choices:
                attention = (k[row, : choice.at + 1] @ q[row, choice.at] / 4).softmax(-1)
                right.append(attention[list(choice.tokens)].sum())
        torch.testing.assert_close(pointing_loss(q, k, getattr(batch, which)), -torch.stack(right).log().mean())


def test_a_batch_without_tools_has_no_loss() -> None:
    batch = collate([Row([1, 2], [0, 1], [False, True])])
    assert pointing_loss(torch.ones(1, 32, 8), torch.ones(1, 32, 8), batch.tools) == 0
