"""Masks of drafted rows are those of advancing one by one; tokens spell texts exactly."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.constraints.compiler import TOO_LONG, Trials
from holdfast.replicas.constraints.guidance import Vocabulary
from holdfast.replicas.constraints.matcher import Matcher, RowMasks

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
LARK = f'start: "<tool_call>" body "</tool_call>"\nbody: %json {json.dumps(SCHEMA)}\n'
TEXT = '<tool_call>{"city":"Oslo, Paris"}</tool_call>'


@pytest.fixture(scope="module")
def vocabularies(tokenizers: list[Any]) -> list[Vocabulary]:
    return [Vocabulary(t, frozenset(t.all_special_ids), frozenset({t.eos_token_id})) for t in tokenizers]


def rows(matcher: Matcher, drafts: list[int]) -> np.ndarray:
    out = np.full((len(drafts) + 1, matcher.words), 7, np.int32)
    RowMasks(matcher, tuple(drafts)).fill(out)
    return out


def test_masks_of_drafts_are_those_of_advancing_and_change_nothing(vocabularies: list[Vocabulary]) -> None:
    for vocabulary in vocabularies:
        matcher = vocabulary.compile(LARK)
        ids = list(vocabulary.encode(TEXT))
        together = rows(matcher, ids)
        assert np.array_equal(rows(matcher, ids), together), "rolled back"
        stepped = matcher.copy()
        for i, token in enumerate(ids):
            assert np.array_equal(rows(stepped, [])[0], together[i])
            assert together[i, token // 32] >> token % 32 & 1
            assert stepped.accepts(ids[i:]) == len(ids) - i
            stepped.advance([token])
        assert stepped.finished
        assert matcher.accepts(ids) == len(ids)


def test_a_failed_matcher_says_so_and_allows_only_the_end(vocabularies: list[Vocabulary]) -> None:
    vocabulary = vocabularies[0]
    matcher = vocabulary.compile(LARK)
    matcher.advance([vocabulary.encode("z")[0]])
    assert matcher.failed
    assert matcher.finished, "as the guard of calls takes it"
    masks = rows(matcher, [3])
    end = vocabulary.eos[0]
    assert masks[0, end // 32] >> end % 32 & 1
    assert np.unpackbits(masks[0].view(np.uint8)).sum() == 1
    assert matcher.accepts([3]) == 0
    assert matcher.forced() == []


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12) | st.sampled_from(["<|im_end|>", "</s>", "<tool_call>x", " a", "", "日本<s>"]))
def test_tokens_spell_any_text_and_use_no_control_token(vocabularies: list[Vocabulary], text: str) -> None:
    for vocabulary in vocabularies:
        ids = vocabulary.encode(text)
        assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()
        assert not vocabulary.control.intersection(ids)


def test_a_schema_beyond_the_limits_fails_when_it_is_used(vocabularies: list[Vocabulary]) -> None:
    vocabulary = vocabularies[0]
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}
    matcher = vocabulary.compile(f"start: %json {json.dumps(schema)}\n")
    rows(matcher, [])
    matcher.advance([vocabulary.encode("{")[0]])
    rows(matcher, [])
    assert matcher.failed


def test_calls_of_a_grammar_never_use_up_its_lexer(vocabularies: list[Vocabulary]) -> None:
    """Copies share one lexer. They are read without masks, which alone refill its fuel."""
    vocabulary = vocabularies[0]
    words = {"type": "string", "maxLength": 400}
    matcher = vocabulary.compile(f"start: %json {json.dumps({'type': 'object', 'properties': {'a': words}})}\n")
    rng = random.Random(0)
    for length in (1, 5, 17, 60, 170, 350, 399, 400) * 10:
        text = json.dumps({"a": "".join(rng.choice('aé日 \\"x😀') for _ in range(length))}, ensure_ascii=False)
        ids, place = vocabulary.encode(text.replace('": "', '":"')), matcher.copy()
        taken = len(ids) if rng.random() < 0.5 else 1
        stands = sum(place.take(ids[at : at + taken]) for at in range(0, len(ids), taken))
        assert (stands, place.complete, place.failed) == (len(ids), True, False)
        assert matcher.accepts(ids) == len(ids)
    assert not matcher.used_up


def test_tokens_beyond_the_vocabulary_are_refused_as_drafts_and_harm_nothing(vocabularies: list[Vocabulary]) -> None:
    """Another reply of the program may have drawn them: models have rows of output without a token."""
    for vocabulary in vocabularies:
        matcher = vocabulary.compile(LARK)
        ids = list(vocabulary.encode(TEXT))
        assert matcher.accepts([*ids[:2], len(vocabulary.tokens) + 1]) == 2
        assert not matcher.failed
        assert matcher.accepts(ids) == len(ids)


def test_what_is_not_asked_about_again_loses_no_other_forced_token(vocabularies: list[Vocabulary]) -> None:
    """Whatever was asked before, what is forced must follow; of the same place it is the same."""
    for vocabulary in vocabularies:
        matcher = vocabulary.compile(LARK)
        ids, told = list(vocabulary.encode(TEXT)), []
        for _ in range(2):
            place = matcher.copy()
            told.append([])
            for token in ids:
                forced = place.forced()
                assert place.accepts(forced) == len(forced)
                told[-1].append(forced)
                place.advance([token])
        assert told[0] == told[1]
        assert any(told[0])


def test_a_trial_says_what_the_library_says_and_ends_what_takes_too_long() -> None:
    patterns = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuv"]
    trials = Trials({"verbose_errors": False})
    try:
        assert trials.complaint(LARK, 60) == ""
        (process,) = trials._idle
        assert "look-around" in trials.complaint('start: %json {"type": "string", "pattern": "(?=a)"}', 60)
        assert trials._idle == [process], "it is used again"
        assert trials.complaint("start: %json " + json.dumps({"allOf": patterns}), 0) == TOO_LONG
        assert process.poll() is not None
        assert trials.complaint(LARK, 60) == ""
        (process,) = trials._idle
        process.kill()
        process.wait()
        assert trials.complaint(LARK, 60) == "", "of one that has ended nothing is expected"
    finally:
        trials.close()
    assert trials._idle == []
