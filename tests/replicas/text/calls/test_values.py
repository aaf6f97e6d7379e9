"""Arguments that are not written in JSON.

In Python: names that Python itself would refuse, and numbers that it cannot hold. In tags: what a schema says they are.
"""

import json
from typing import Any

import pytest
from call_texts import chunked
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import DEEPEST, CallTracker, TagValue, as_json
from holdfast.replicas.text.calls.values import ANYTHING, TEXT, Kinds, alternatives, kinds_of

NAMES = frozenset({"f", "get-weather", "2fa-send_1"})


def read(text: str) -> list[tuple[str, str]]:
    reader = CallTracker(ToolFormat.PYTHONIC, NAMES, True, str)
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


@settings(max_examples=100)
@given(VALUES, KINDS, st.data())
def test_a_value_in_a_tag_is_the_same_however_it_is_cut(text: str, kinds: Kinds, data: st.DataObject) -> None:
    value = TagValue(kinds)
    told = "".join([value.feed(piece) for piece in chunked(text, data)]) + value.end()
    assert told == as_json(text, kinds)
    json.loads(told)


@pytest.mark.parametrize(
    "arguments",
    ["a==1", "a<=1", "a:=1", "a=b=1", "1", "in", "a-b=1", "*a", "**{'a': 1}", "a=1j",
     "a=b''", "a=...", "a=1_0e400", "a=in", "a=not 1", "=1", "a="],
)  # fmt: skip
def test_what_is_no_keyword_with_a_literal_is_no_call(arguments: str) -> None:
    assert read(f"[f({arguments})]") == []


ROOT = {
    "$defs": {
        "a/b": {"type": "string"},
        "c~d": {"type": "null"},
        "e f": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
    },
    "list": [{"type": "boolean"}],
}
NUMBERS = {"number", "integer"}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"$ref": "#/$defs/a~1b"}, {"string"}),
        ({"$ref": "#/$defs/c~0d"}, {"null"}),
        ({"$ref": "#/$defs/e%20f"}, {"integer"}),
        ({"$ref": "#/list/0"}, {"boolean"}),
        ({"$ref": "#/$defs/nowhere"}, ANYTHING),
        ({"$ref": "#/$defs/loop"}, ANYTHING),
        ({"$ref": "#/$defs/nowhere", "type": "null"}, {"null"}),
        ({"allOf": [{"$ref": "#/$defs/e%20f"}]}, {"integer"}),
        ({"allOf": [{"type": ["string", "number"]}, {"type": ["integer", "null"]}]}, {"integer"}),
        ({"type": "string", "anyOf": [{"format": "date"}, {"type": "null"}]}, {"string"}),
        ({"type": ["string", "null"], "enum": ["a", None, 1]}, {"string", "null"}),
        ({"enum": [1, "a"]}, {"integer", "string"}),
        ({"allOf": [{"enum": [1, "a", True, None]}, {"enum": [1.0, "b", None, 0]}]}, {"integer", "null"}),
        ({"enum": [1.5]}, NUMBERS),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}, {"const": True}]}, NUMBERS | {"boolean"}),
        ({"maxLength": 3}, ANYTHING),
        (True, ANYTHING),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ANYTHING),
    ],
)
def test_kinds_are_those_that_every_part_of_a_schema_allows(schema: Any, kinds: Any) -> None:
    assert kinds_of(schema, ROOT) == kinds


def test_keywords_that_speak_of_each_other_stay_with_their_own_schema() -> None:
    """No other properties than those of the same schema: together these two allow none."""
    parts = [{"type": "object", "properties": {"a": {}}}, {"type": "object", "additionalProperties": False}]
    kept = [{key: part[key] for key in part if key != "type"} for part in parts]
    assert list(alternatives({"allOf": parts}, {})) == [{"type": "object", "allOf": kept}]


def test_an_alternative_has_what_matters_to_its_type() -> None:
    schema = {"maxLength": 3, "minimum": 1, "anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}
    assert list(alternatives(schema, {})) == [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 1}]


@pytest.mark.parametrize(
    "node",
    [
        {"allOf": [{"anyOf": [{"type": "string", "minLength": i} for i in range(20)]} for _ in range(5)]},
        {"anyOf": [{"$ref": "#/$defs/node"} for _ in range(20)]},
        {"anyOf": [{"type": "string"}, {"allOf": [{"$ref": "#/$defs/node"} for _ in range(20)]}]},
    ],
)
def test_a_small_schema_with_very_many_alternatives_may_be_anything(node: Any) -> None:
    root = {"$defs": {"node": node}}
    assert alternatives(node, root) == ()
    assert kinds_of({"anyOf": [{"type": "null"}, node]}, root) == ANYTHING


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", TEXT, "5"),
        ("5", {"string", "integer"}, 5),
        ("1.5", {"string", "integer"}, "1.5"),
        ("1.5", {"integer"}, 1.5),
        ("2.0", {"string", "integer"}, 2.0),
        ("1e999", {"string", "number", "integer"}, "1e999"),
        ("9" * 30, ANYTHING, int("9" * 30)),
        ("9" * 5000, ANYTHING, "9" * 5000),
        ("[" * 1100 + "]" * 1100, ANYTHING, "[" * 1100 + "]" * 1100),
        ("[[[[" + "[], " * 40 + '"[[[[["]]]]', ANYTHING, json.loads("[[[[" + "[], " * 40 + '"[[[[["]]]]')),
        (" True ", {"boolean"}, True),
        ("None", {"string", "null"}, None),
        ('"a"', {"string", "null"}, '"a"'),
        ('"a"', {"null"}, "a"),
        ('{"a": 1,}', {"string", "object"}, {"a": 1}),
        ("{a}", {"string", "object"}, "{a}"),
    ],
)
def test_a_value_without_quotes_is_read_as_one_of_its_kinds(text: str, kinds: Any, value: Any) -> None:
    found = json.loads(as_json(text, frozenset(kinds)))
    assert (found, type(found)) == (value, type(value))
