"""A text in which calls are whole: free until a call begins, and what a call has no place for is drawn again."""

import json
import random
from functools import partial
from typing import Any

import pytest
from call_grammars import FORMATS, WEATHER, allowed, compiler, drawn, masks, read, rule, validator
from call_texts import Call, call_texts, mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.constraints.grammar import Forms, forms_of
from holdfast.replicas.constraints.guidance import CallBan, CallGuard, Vocabulary
from holdfast.replicas.text.calls.formats import ToolFormat

PROSE = "Use < or <tool to begin. "


def guard_of(tokenizer: Any, format: ToolFormat) -> tuple[CallGuard, Vocabulary]:
    """A guard at the beginning of a reply, and its vocabulary."""
    made = compiler(tokenizer, format)
    guard = made.matcher(rule(calls="auto"))
    assert isinstance(guard, CallGuard)
    return guard, made.vocabulary


def begun(format: ToolFormat, knows: Any) -> str:
    """A reply up to the arguments of a call of "f"."""
    forms = forms_of(format, knows)
    assert forms is not None
    return forms.all[0].until_arguments("f")


def reply(guard: CallGuard, words: Vocabulary, prefix: list[int], seed: int, limit: int = 400) -> tuple[str, int]:
    """A reply that begins with `prefix`, of tokens drawn as an engine draws them by a model that says anything; and how
    many were drawn again."""
    rng, text, again = random.Random(seed), b"", 0
    waiting = list(prefix)
    for _ in range(limit):
        token = waiting.pop(0) if waiting else rng.randrange(len(words.tokens))
        if not guard.advance([token]):
            assert guard.binding
            again += 1
            token = drawn(allowed(guard), words, rng, 1.0)
            assert guard.advance([token]), words.tokens[token]
        while guard.binding:  # what follows is drawn under masks until the call has closed
            text += words.tokens[token]
            token = drawn(allowed(guard), words, rng, 0.7)
            assert guard.advance([token]), words.tokens[token]
        text += words.tokens[token]
    return text.decode(errors="replace"), again


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_is_drawn_the_calls_that_are_read_are_whole(format: ToolFormat, tokenizers: list[Any]) -> None:
    calls = 0
    for number, tokenizer in enumerate(tokenizers):
        for seed in range(4):
            guard, words = guard_of(tokenizer, format)
            prefix = list(words.encode(begun(format, words.knows)))
            text, again = reply(guard, words, prefix, seed + 10 * number)
            assert again
            _, found = read(format, text)
            calls += len(found)
            for name, arguments in found:
                validator(name).validate(json.loads(arguments))
    assert calls >= 3


# ---- the law: what is whole stands as it is written, whatever its style ----

WORDS = st.text(st.sampled_from("ab é日😀\"\\\\/'{<\n"), max_size=6)
TEXTS = WORDS.map(lambda text: text.strip().strip("<"))
ARGUMENTS = st.fixed_dictionaries(
    {
        "days": st.lists(st.integers(-20, 31), max_size=2),
        "unit": st.sampled_from(WEATHER["properties"]["unit"]["enum"]),
    },
    optional={
        "city": TEXTS,
        "deep": st.fixed_dictionaries({"a": st.booleans()}, optional={"b": st.none()}),
        "from": st.floats(-9, 9).map(lambda value: round(value, 2)),
        "class": st.sampled_from(["", "é", "a😀"]),
        "ﬁle": st.none(),
    },
)
STYLES = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 0, 2, 4, "\t"]),
        "separators": st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : "), (",\n", ":\t")]),
    }
)


def turned(value: Any, order: random.Random) -> Any:
    """`value` with the members of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: turned(value[key], order) for key in keys}
    return value


def in_python(call: Call, order: random.Random) -> str:
    name, arguments = call
    equals, comma = order.choice(["=", " = "]), order.choice([", ", ",", ",\n  "])
    # Python's surrogates are none of JSON's: it has one character where JSON has an escape for each half.
    styles = [repr, partial(json.dumps, ensure_ascii=False)]
    return f"{name}({comma.join(f'{key}{equals}{order.choice(styles)(value)}' for key, value in arguments.items())})"


def text_of(format: ToolFormat, call: Call, style: dict[str, Any], order: random.Random) -> str:
    """A call in some style that models of the format write."""
    call = (call[0], turned(call[1], order))
    marked = order.randrange(2)
    if format is ToolFormat.PYTHONIC:
        text = in_python(call, order)
        return f"<|python_start|>[{text}]<|python_end|>" if marked else f"[{text}]"

    def written(value: Any) -> str:
        return json.dumps(value, **style)

    bare = format in (ToolFormat.LLAMA3, ToolFormat.LLAMA4) and not marked
    whole = None if bare else (lambda made: written(turned(made, order)))
    (text,) = call_texts(format, [call], written, marked, whole)
    return text


def stands(guard: CallGuard, ids: Any, order: random.Random) -> bool:
    """Whether every token may stand as it was drawn: alone, with others, and as a draft."""
    alone, together = guard.copy(), guard.copy()
    stand = next((i for i, token in enumerate(ids) if not alone.advance([token])), len(ids))
    assert guard.accepts(ids) == stand
    at = 0
    while at < len(ids):
        piece = ids[at : at + order.randint(1, 9)]
        at += (taken := together.advance(piece))
        if taken < len(piece):
            break
    assert (at, together.binding) == (stand, alone.binding)
    assert (masks(together) == masks(alone)).all()
    return stand == len(ids)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=12)
@given(arguments=ARGUMENTS, style=STYLES, seed=st.integers(0, 99))
def test_a_whole_call_is_what_the_model_wrote_in_any_style(
    format: ToolFormat, tokenizers: list[Any], arguments: dict[str, Any], style: dict[str, Any], seed: int
) -> None:
    order = random.Random(seed)
    guard, words = guard_of(tokenizers[seed % len(tokenizers)], format)
    text = text_of(format, ("f", arguments), style, order)
    assert read(format, text)[1] != [], text
    assert json.loads(read(format, text)[1][0][1]) == arguments
    assert stands(guard, words.encode(text), order), text


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=12)
@given(data=st.data(), arguments=ARGUMENTS, style=STYLES, seed=st.integers(0, 99))
def test_what_stands_as_it_is_written_is_whole(
    format: ToolFormat, tokenizers: list[Any], data: Any, arguments: dict[str, Any], style: dict[str, Any], seed: int
) -> None:
    """Calls with an error in them are refused somewhere before they close."""
    order = random.Random(seed)
    guard, words = guard_of(tokenizers[seed % len(tokenizers)], format)
    wrong = order.choice(
        [
            arguments,
            {**arguments, "days": "1"},
            {**arguments, "days": [32]},
            {**arguments, "unit": "K"},
            {**arguments, "deep": {"b": None}},
            {**arguments, "more": 1},
            {key: value for key, value in arguments.items() if key != "days"},
        ]
    )
    name = order.choice(["f", "f", "get_weather", "rm"])
    text = text_of(format, (name, wrong), style, order)
    text = mutated(text, data) if wrong is arguments else text
    if stands(guard, words.encode(text), order):
        for name, found in read(format, text)[1]:
            assert validator(name).is_valid(json.loads(found)), text


def test_masks_and_drafts_are_those_of_the_tokens_one_by_one(qwen_like: Any) -> None:
    guard, words = guard_of(qwen_like, ToolFormat.HERMES)
    good = list(words.encode('Hi <tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call> and'))
    bad = list(words.encode('Hi <tool_call>\n{"name": "rm'))
    assert guard.accepts(good) == len(good), "behind the call the text goes on"
    stands = guard.accepts(bad)
    assert len(words.encode('Hi <tool_call>\n{"name": "')) - 1 <= stands < len(bad)
    for token in bad[:stands]:
        assert guard.advance([token])
    assert not guard.advance([bad[stands]])
    assert guard.binding
    rest = list(words.encode('get-time", "arguments": {}}\n</tool_call>\n'))
    together = guard.copy()
    assert together.advance(rest) == len(rest)
    assert not together.binding, "drawn together under masks, the next call is free again as well"
    rows = masks(guard.copy(), rest)
    for row, token in zip(rows, rest, strict=False):
        assert (row == masks(guard)).all()
        assert guard.advance([token])
    assert not guard.binding, "the next call is drawn freely again"
    assert (rows[-1] == -1).all()


def test_a_token_that_the_vocabulary_lacks_is_text_and_no_part_of_a_call(qwen_like: Any) -> None:
    """Models have rows of output without a token."""
    guard, words = guard_of(qwen_like, ToolFormat.HERMES)
    beyond = len(words.tokens) + 3
    assert guard.advance([beyond])
    for token in words.encode("<tool_call>"):
        assert guard.advance([token])
    begins = list(words.encode("\n{"))
    assert guard.accepts([*begins, beyond]) == len(begins)
    assert guard.accepts(begins) == len(begins), "and it goes on"
    assert not guard.advance([beyond])


# ---- no calls ----


def ban_of(tokenizer: Any, format: ToolFormat) -> tuple[CallBan, Vocabulary, Forms]:
    made = compiler(tokenizer, format)
    ban = made.without_calls(frozenset({"f", "get_weather"}))
    forms = forms_of(format, made.vocabulary.knows)
    assert isinstance(ban, CallBan)
    assert forms is not None
    return ban, made.vocabulary, forms


@pytest.mark.parametrize("format", FORMATS)
def test_no_call_begins_in_a_text_that_must_have_none(format: ToolFormat, tokenizers: list[Any]) -> None:
    """Whatever is drawn, however its tokens are cut; and all else may be said."""
    for tokenizer in tokenizers:
        ban, words, forms = ban_of(tokenizer, format)
        (call,) = call_texts(format, [("f", {"a": 1})], json.dumps)
        openers = [form.opener for form in forms.triggered]
        texts = [call, *(f"{opener}f" for opener in openers)]
        for text in (*texts, *(PROSE + text for text in texts if any(opener in text for opener in openers))):
            ids = list(words.encode(text))
            ids += [] if len(ids) > 1 else words.encode("x")
            place = ban.copy()
            stands = place.advance(ids)
            assert stands < len(ids), text
            assert place.binding
            assert ids[stands] not in allowed(place)
            assert place.accepts([ids[stands]]) == 0
            free = words.encode("a")
            assert free[0] in allowed(place)
            assert set(words.eos) <= set(allowed(place)), "the reply may end"
            assert place.advance(free) == 1
            assert not place.binding
        for text in (PROSE, '{"name": "Oslo", "parameters": 1}', "[1] f(", '{"answer": 1}', "日本 < <tool [TOOL"):
            ids = list(words.encode(text))
            assert ban.copy().advance(ids) == len(ids), text
            assert not ban.forced()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_drawn_under_a_ban_has_no_opener_in_it(format: ToolFormat, tokenizers: list[Any]) -> None:
    """As an engine draws it, drafts included, by a model that would write calls."""
    for tokenizer in tokenizers:
        ban, words, forms = ban_of(tokenizer, format)
        likely = [token for opener in forms.triggered for token in words.encode(opener.opener)]
        openers = [form.opener.encode() for form in forms.triggered]
        for seed in range(6):
            rng, place, text = random.Random(seed), ban.copy(), forms.begun.encode()
            for _ in range(300):
                token = rng.choice(likely) if rng.random() < 0.8 else rng.randrange(len(words.tokens))
                while not place.advance([token]):
                    choices = [each for each in allowed(place) if each < len(words.tokens)]
                    assert token not in choices
                    token = rng.choice([each for each in likely if each in choices] or choices)
                text += words.tokens[token]
            assert not any(opener in text for opener in openers), text
            drafts = likely[:3]
            stands = place.accepts(drafts)
            assert (masks(place, drafts)[stands + 1 :] == -1).all()
