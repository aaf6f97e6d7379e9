"""Calls as Python writes them: names that Python itself would refuse, and numbers that it cannot hold."""

import json
from typing import Any

import pytest
from call_texts import chunked
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.readers import ToolCallParser
from holdfast.replicas.text.calls.scan import DEEPEST
from holdfast.replicas.text.calls.values import ANYTHING, Kinds, TagValue, as_json

NAMES = frozenset({"f", "get-weather", "2fa-send_1"})


def read(text: str) -> list[tuple[str, str]]:
    reader = ToolCallParser(ToolFormat.PYTHONIC, NAMES, True, str)
    reader.feed(text)
    reader.finish()
    return [(call.name, call.arguments) for call in reader.calls]


def told_deep(levels: int) -> Any:
    """What is told of so many lists, the innermost empty, that are an argument: beyond the deepest level a text."""
    inside = levels + 1 - DEEPEST
    value: Any = "[" * inside + "]" * inside
    for _ in range(levels - inside):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('[get-weather(city="Rome")]', "get-weather", {"city": "Rome"}),
        ("[2fa-send_1()]", "2fa-send_1", {}),
        ('[f(from="Rome", in=[1, 2], class={"if": None})]', "f", {"from": "Rome", "in": [1, 2], "class": {"if": None}}),
        ("[f(None=1, True = 2,\n  lambda\t=3,)]", "f", {"None": 1, "True": 2, "lambda": 3}),
        ("[f(ﬁle=1, _1=2, _0=3)]", "f", {"ﬁle": 1, "_1": 2, "_0": 3}),
        ('[f(a="b=1, from=2", from="(c=[")]', "f", {"a": "b=1, from=2", "from": "(c=["}),
        ("[f(a=1, a=2, in=3, in=4)]", "f", {"a": 2, "in": 4}),
        ("[f(a=1, # and\n b=2)]", "f", {"a": 1, "b": 2}),
        (f"[f(a=-{10**300})]", "f", {"a": -(10**300)}),
        (r'[f(a="\ud83d\ude00", b="\ud83d", c="\ude00!")]', "f", {"a": "😀", "b": "\ufffd", "c": "\ufffd!"}),
        (f"[f(a={'[' * 150}{']' * 150})]", "f", {"a": told_deep(150)}),
        ("[f(a=0x10, b=1_000, c=-0, d=.5)]", "f", {"a": 16, "b": 1000, "c": 0, "d": 0.5}),
    ],
)
def test_names_and_values_are_those_that_were_written(text: str, name: str, arguments: dict[str, Any]) -> None:
    ((called, found),) = read(text)
    assert (called, json.loads(found)) == (name, arguments)


VALUES = st.one_of(
    st.text(st.sampled_from('"{}[]:, \n\\1-e.tTruneéx'), max_size=8),
    st.sampled_from(["null", " True ", "12", "-1.5e3", '{"a": [1]}', '["x", null]', '"quoted"', "nullx", "12 o'clock"]),
)
KINDS = st.sets(st.sampled_from(sorted(ANYTHING)), min_size=1).map(
    lambda kinds: frozenset(kinds | ({"integer"} if "number" in kinds else set()))
)


@settings(max_examples=300)
@given(VALUES, KINDS, st.data())
def test_a_value_in_a_tag_is_the_same_however_it_is_cut(text: str, kinds: Kinds, data: st.DataObject) -> None:
    value = TagValue(kinds)
    told = "".join([value.feed(piece) for piece in chunked(text, data)]) + value.end()
    assert told == as_json(text, kinds)
    json.loads(told)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ({"string", "null"}, "words and words"),
        ({"string", "null"}, "no words and words"),
        ({"string", "null"}, '{"a": 1}'),
        ({"string", "null"}, '"quoted" words'),
        ({"string", "integer", "null"}, "12 words and words"),
        ({"string", "object"}, "{words and words}"),
        ({"string", "array", "boolean"}, "\n [1, words and words"),
    ],
)
def test_a_text_goes_out_from_the_first_character_on_that_no_other_value_has(kinds: set[str], text: str) -> None:
    value = TagValue(frozenset(kinds))
    told = [value.feed(char) for char in text]
    sent = [at for at, piece in enumerate(told) if piece]
    assert sent == list(range(sent[0], len(text)))
    assert sent[0] <= max(text.find("w"), text.find('"') + 1, 3)
    assert value.end() == '"'


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1.5E+999", "7" * 400])
def test_a_number_beyond_a_double_is_told_as_text(number: str) -> None:
    assert read(f"[f(n={number}, deep=[{{'é': {number}}}])]") == [
        ("f", f'{{"n": "{number}", "deep": [{{"é": "{number}"}}]}}'),
    ]


@pytest.mark.parametrize(
    "arguments",
    ["a==1", "a<=1", "a:=1", "a=b=1", "1", "in", "a-b=1", "*a", "**{'a': 1}", "a=1j",
     "a=b''", "a=...", "a=1_0e400", "a=in", "a=not 1", "=1", "a="],
)  # fmt: skip
def test_what_is_no_keyword_with_a_literal_is_no_call(arguments: str) -> None:
    assert read(f"[f({arguments})]") == []
