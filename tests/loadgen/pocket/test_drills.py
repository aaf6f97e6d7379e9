"""Drills: decisions alone, true to their tools, many more per character than in whole conversations."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.pocket.conversations import Conversation, lexicon, training_conversation
from holdfast.loadgen.pocket.drills import NO_TOOL, drill
from holdfast.loadgen.pocket.tokenizer import END, spans
from holdfast.loadgen.pocket.words import Split

seeds = st.integers(0, 2**60)


def drilled(seed: int) -> Conversation:
    rng, lex = random.Random(seed), lexicon(Split.TRAIN)
    return drill(rng, lex.narrowed(rng) if seed % 2 else lex, 8)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_what_is_learned_is_a_declared_call_or_a_refusal(seed: int) -> None:
    conversation = drilled(seed)
    assert conversation == drilled(seed)
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
    assert len(declared) == len(conversation.tools)
    for message in conversation.messages:
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls")
        if calls:
            assert {call["function"]["name"] for call in calls} <= set(declared)
            for call in calls:
                parameters = declared[call["function"]["name"]]
                arguments = set(call["function"]["arguments"])
                assert set(parameters.get("required", ())) <= arguments <= set(parameters["properties"])
        elif message["content"] != NO_TOOL:
            assert message["content"].split('"')[3] in declared


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_the_end_of_an_unfinished_turn_is_not_learned(seed: int) -> None:
    conversation = drilled(seed)
    found = spans(conversation)
    unfinished = [m["content"] for m in conversation.messages if m.get("unfinished")]
    cut = [a.text for a, b in pairwise(found) if a.learned and b.text == f"{END}\n"]
    assert cut == unfinished
    assert all(span.text.endswith(END) for span in found if span.learned and span.text not in unfinished)


def test_decisions_are_dense() -> None:
    def density(conversations: list[Conversation]) -> float:
        learned = [span.text for c in conversations for span in spans(c) if span.learned]
        decisions = sum(text.count("<tool_call>") or text.startswith(NO_TOOL) for text in learned)
        return decisions / sum(len(span.text) for c in conversations for span in spans(c))

    whole = density([training_conversation(seed) for seed in range(200)])
    assert density([drilled(seed) for seed in range(200)]) > 1.6 * whole
