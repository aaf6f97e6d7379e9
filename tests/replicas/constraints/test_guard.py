"""A text in which calls are whole: free until a call begins, and what a call has no place for is drawn again."""

import json
import random
from typing import Any

import numpy as np
import pytest
from call_grammars import FORMATS, allowed, compiler, read, rule, validator, vocabulary

from holdfast.replicas.constraints.grammar import forms_of
from holdfast.replicas.constraints.guard import CallGuard, beginning, begins
from holdfast.replicas.text.calls.formats import ToolFormat

PROSE = "Use < or <tool to begin. "


def guard_of(tokenizer: Any, format: ToolFormat) -> tuple[CallGuard, Any]:
    made = compiler(tokenizer, format)
    guard = made.matcher(rule(calls="auto"))
    assert isinstance(guard, CallGuard)
    return guard, vocabulary(made)


def begun(format: ToolFormat, knows: Any) -> str:
    """A reply up to the arguments of a call of "f"."""
    forms = forms_of(format, knows)
    assert forms is not None
    return forms.all[0].until_arguments("f")


def drawn(guard: CallGuard, tokens: list[bytes], prefix: list[int], seed: int, limit: int = 400) -> tuple[str, int]:
    """A reply that begins with `prefix`, of tokens drawn as an engine draws them by a model that says anything; and how
    many were drawn again."""
    rng, text, again = random.Random(seed), b"", 0
    waiting = list(prefix)
    for _ in range(limit):
        token = waiting.pop(0) if waiting else rng.randrange(len(tokens))
        if not guard.advance(token):
            assert guard.binding
            again += 1
            choices = allowed(guard)
            closers = [each for each in choices if set(tokens[each]) & set(b"\"'}])>,<")]
            token = rng.choice(closers or choices)
            assert guard.advance(token), tokens[token]
        while guard.binding:  # what follows is drawn under masks until the call has closed
            choices = allowed(guard)
            assert choices, text
            text += tokens[token]
            closers = [each for each in choices if set(tokens[each]) & set(b"\"'}])>,<")]
            token = rng.choice(closers if closers and rng.random() < 0.7 else choices)
            assert guard.advance(token), tokens[token]
        text += tokens[token]
    return text.decode(errors="replace"), again


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_is_drawn_the_calls_that_are_read_are_whole(format: ToolFormat, tokenizers: list[Any]) -> None:
    calls = 0
    for number, tokenizer in enumerate(tokenizers):
        guard, words = guard_of(tokenizer, format)
        for seed in range(4):
            prefix = list(words.encode(begun(format, words.knows)))
            text, again = drawn(guard.copy(), words.tokens, prefix, seed + 10 * number)
            assert again
            _, found = read(format, text)
            calls += len(found)
            for name, arguments in found:
                validator(name).validate(json.loads(arguments))
    assert calls >= 6


@pytest.mark.parametrize("format", FORMATS)
def test_it_asks_nothing_until_a_call_begins(format: ToolFormat, tokenizers: list[Any]) -> None:
    for tokenizer in tokenizers:
        guard, words = guard_of(tokenizer, format)
        for token in words.encode(PROSE):
            assert guard.accepts([token]) == 1
            assert guard.advance(token)
            assert (guard.binding, guard.finished, guard.failed, guard.forced()) == (False, False, False, [])
        assert (allowed_bits(guard) == -1).all()


def test_masks_and_drafts_are_those_of_the_tokens_one_by_one(qwen_like: Any) -> None:
    guard, words = guard_of(qwen_like, ToolFormat.HERMES)
    good = list(words.encode('Hi <tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call> and'))
    bad = list(words.encode('Hi <tool_call>\n{"name": "rm'))
    assert guard.accepts(good) == len(good), "behind the call the text goes on"
    stands = guard.accepts(bad)
    assert len(words.encode('Hi <tool_call>\n{"name": "')) - 1 <= stands < len(bad)
    for token in bad[:stands]:
        assert guard.advance(token)
    assert not guard.advance(bad[stands])
    assert guard.binding
    rest = list(words.encode('get-time", "arguments": {}}\n</tool_call>\n'))
    rows = np.zeros((len(rest) + 1, guard.words), np.int32)
    guard.copy().fill(rest, rows)
    for row, token in zip(rows, rest, strict=False):
        assert (row == allowed_bits(guard)).all()
        assert guard.advance(token)
    assert not guard.binding, "the next call is drawn freely again"
    assert (rows[-1] == -1).all()


def allowed_bits(guard: CallGuard) -> Any:
    bits = np.zeros((1, guard.words), np.int32)
    guard.fill((), bits)
    return bits[0]


def test_a_token_that_the_vocabulary_lacks_is_text_and_no_part_of_a_call(qwen_like: Any) -> None:
    """Models have rows of output without a token."""
    guard, words = guard_of(qwen_like, ToolFormat.HERMES)
    beyond = len(words.tokens) + 3
    assert guard.advance(beyond)
    for token in words.encode("<tool_call>"):
        assert guard.advance(token)
    assert not guard.advance(beyond)


def test_openers_are_found_wherever_they_are_cut() -> None:
    openers = (b"<tool_call>", b"<function=")
    assert [beginning(text, openers) for text in (b"a <", b"<tool", b"<function", b"<tool_call>", b"< ", b"")] == [
        b"<", b"<tool", b"<function", b"", b"", b""
    ]  # fmt: skip
    assert [begins(text, openers) for text in (b"x<function=y", b"<fun", b"fun")] == [True, True, False]
