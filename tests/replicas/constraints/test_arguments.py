"""A value in tags: whatever the grammar of its schema lets through is read back as a value that follows the schema."""

import json
from typing import Any

import pytest
from call_grammars import compiler, held
from call_texts import call_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from holdfast.replicas.constraints.compiler import Compiler
from holdfast.replicas.constraints.grammar import ReplyRule, Schema, ToolRule
from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker

DEFINITIONS: dict[str, Any] = {
    "L": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "I": {"type": "integer"},
    "a/b": {"type": "string"},
    "many": {"type": "array", "items": {"$ref": "#/$defs/I"}},
}
TAGGED = [ToolFormat.QWEN3_CODER, ToolFormat.GLM, ToolFormat.MINIMAX_M2, ToolFormat.MUSE, ToolFormat.DEEPSEEK_V32]
VALUES = [
    *("", " ", "zzz", "fast", "slow", "abcd", "Paris", "null", "None", " null ", "true", "True", "false", "truer"),
    *("0", "5", "-3", "12", "100", "1.5", "1.0", "1e2", "1e999", "9" * 30, "9" * 60, "05", "2024-01-01", " 7 ", "\n7"),
    *('"fast"', "{}", '{"foo": 1}', '{"city": "a"}', '{"city": 1}', '{"city": "a", "n": 2}', '{"city": "a", "n": "2"}'),
    *("{foo}", "{", ' {"foo": 1}', "\n[]", "[]", "[1]", "[1, 2]", '["a"]', "[true]"),
    *("[todo] x", "[[1]]", "[", "[null]"),
]


def schema_of(value: Any) -> dict[str, Any]:
    closed = {"type": "object", "properties": {"x": value}, "required": ["x"], "additionalProperties": False}
    return {**closed, "$defs": DEFINITIONS}


def texts_of(format: ToolFormat, values: list[str]) -> list[str]:
    """Calls of "f" with each of these texts in the tag of "x"; where a tag says whether it is a text, both ways."""
    (frame,) = call_texts(format, [("f", {"x": "{}"})], variant=int(format is ToolFormat.GLM))
    frames = dict.fromkeys((frame, frame.replace('string="true"', 'string="false"')))
    return [each.replace("{}", value) for each in frames for value in values]


def taken(
    made: Compiler, format: ToolFormat, parameters: Any, texts: list[str], strict: bool = True
) -> list[tuple[str, Any]]:
    """Those of `texts` that may be a call, forced or in a text, and what is read of each."""
    found, encoded = [], [(text, made.vocabulary.encode(text)) for text in texts]
    for calls in ("required", "auto"):
        rule = ReplyRule((ToolRule("f", Schema(parameters, strict, "tools.0")),), calls)  # type: ignore[arg-type]
        matcher = held(made.matcher(rule))
        for text, ids in encoded:
            if (place := matcher.copy()).take(ids) == len(ids) and place.complete:
                parser = CallTracker(format, frozenset({"f"}), True, str, schemas={"f": parameters})
                parser.feed(text)
                parser.finish()
                (call,) = parser.calls
                found.append((text, json.loads(call.arguments)))
    return found


def followed(tokenizer: Any, format: ToolFormat, value: Any) -> list[Any] | None:
    """The values of "x" that are let through, each of which follows the schema; None where that is refused."""
    parameters = schema_of(value)
    validator = Draft202012Validator(parameters)
    try:
        found = taken(compiler(tokenizer, format), format, parameters, texts_of(format, VALUES))
    except InvalidRequestError:
        return None
    for text, arguments in found:
        assert validator.is_valid(arguments), (text, arguments)
    return [arguments["x"] for _, arguments in found]


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "some", "never"),
    [
        ({"anyOf": [{"type": "string", "enum": ["fast", "slow"]}, {"type": "null"}]}, ["fast", "slow", None], ["zzz"]),
        ({"type": ["string", "null"], "enum": ["fast", None]}, ["fast", None], ["slow"]),
        ({"anyOf": [CITY, {"type": "string", "maxLength": 3}]}, [{"city": "a", "n": 2}, "zzz"], [{"foo": 1}, "abcd"]),
        ({"allOf": [{"$ref": "#/$defs/L"}]}, [{"city": "a"}], ["Paris", {"foo": 1}]),
        ({"allOf": [{"$ref": "#/$defs/I"}]}, [5, -3, int("9" * 30)], ["zzz", 1.5, int("9" * 60)]),
        ({"$ref": "#/$defs/a~1b"}, ["5", "null", "{}", "zzz"], [5, None]),
        ({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/many"}]}, ["[todo] x", [1, 2], "zzz"], [["a"]]),
        ({"type": "string", "anyOf": [{"maxLength": 3}, {"const": "Paris"}]}, ["zzz", "Paris"], ["abcd"]),
        ({"type": ["string", "integer"]}, ["zzz", 5, "1.5", "05"], [1.5]),
        ({"anyOf": [{"type": "string"}, {"enum": [5, 12]}]}, ["zzz", 5, 12, "truer"], [100, -3]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]}, ["zzz", 12, 100], [5, -3]),
        ({"type": ["boolean", "integer"]}, [True, False, 5], ["zzz", 1.5]),
        ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}, ["zzz", 5], ["abcd"]),
        ({}, ["zzz", 5, None, {"foo": 1}, [1]], []),
    ],
)
@pytest.mark.parametrize("format", TAGGED)
def test_a_value_of_several_kinds_follows_its_alternatives(
    qwen_like: Any, format: ToolFormat, value: Any, some: list[Any], never: list[Any]
) -> None:
    found = followed(qwen_like, format, value)
    assert found is not None
    assert [each for each in some if each not in found] == []
    assert [each for each in found if any(each == other and type(each) is type(other) for other in never)] == []


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "anyOf": [{"format": "date"}, {"format": "date-time"}]},
        {"type": "string", "pattern": "^a"},
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
        {"$ref": "#/$defs/nowhere"},
        {"type": "string", "not": {"const": "a"}},
    ],
)
@pytest.mark.parametrize("format", TAGGED)
def test_what_cannot_be_followed_is_refused_where_it_is_strict_and_left_out_elsewhere(
    qwen_like: Any, format: ToolFormat, value: Any
) -> None:
    assert followed(qwen_like, format, value) is None
    assert taken(compiler(qwen_like, format), format, schema_of(value), texts_of(format, ["zzz"]), strict=False)


LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "minLength": 4},
        {"enum": ["fast", "5", "null"]},
        {"const": "slow"},
        {"const": 5},
        {"type": "null"},
        {"type": "boolean"},
        {"const": True},
        {"type": "integer"},
        {"type": "integer", "maximum": 7},
        {"type": "number"},
        {"type": "number", "minimum": 1.25},
        {"type": ["string", "null"]},
        {"type": ["integer", "array"], "items": {"type": "integer"}},
        {"$ref": "#/$defs/L"},
        {"$ref": "#/$defs/many"},
        {"$ref": "#/$defs/a~1b"},
        CITY,
        {"type": "object"},
        {"type": "array"},
        {"type": "array", "items": {"type": "boolean"}},
        {"maxLength": 4},
        {},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda key, parts, beside: {key: parts, **beside},
        st.sampled_from(["anyOf", "allOf", "oneOf"]),
        st.lists(inner, min_size=1, max_size=3),
        st.sampled_from([{}, {}, {"type": "string"}, {"type": ["string", "integer"]}, {"$ref": "#/$defs/I"}]),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(value=SCHEMAS, format=st.sampled_from(TAGGED))
def test_whatever_is_let_through_is_read_back_and_follows_the_schema(
    qwen_like: Any, value: Any, format: ToolFormat
) -> None:
    followed(qwen_like, format, value)


# ---- Gemma 4 ----

SPOKEN = [
    *("", "fast", "5", "null", "slow", 'a"b\n{', "abcd", "日本", 5, -3, 7, 12, 1.5, True, False, None),
    *([], [1, 2], ["a"], [True], [[1]], {}, {"city": "a"}, {"city": 1}, {"city": "a", "n": 2}),
    *({"city": "a", "n": "2"}, {"a": {"b c": []}}),
]
WRITTEN = {call_texts(ToolFormat.GEMMA4, [("f", {"x": value})])[0]: value for value in SPOKEN}


def spoken(tokenizer: Any, value: Any, strict: bool = True) -> list[Any]:
    """Those of `SPOKEN` that may be written for "x" of this schema, forced or in a text; each is read as it was."""
    made = compiler(tokenizer, ToolFormat.GEMMA4)
    found = taken(made, ToolFormat.GEMMA4, schema_of(value), list(WRITTEN), strict)
    assert all(arguments == {"x": WRITTEN[text]} for text, arguments in found)
    return [WRITTEN[text] for text, _ in found]


@settings(max_examples=40, deadline=None)
@given(value=SCHEMAS)
def test_a_value_of_gemma_4_is_let_through_exactly_where_it_follows_its_schema(qwen_like: Any, value: Any) -> None:
    try:
        found = spoken(qwen_like, value)
    except InvalidRequestError:
        return
    validator = Draft202012Validator(schema_of(value))
    valid = [each for each in SPOKEN if validator.is_valid({"x": each})]
    assert sorted(map(repr, found)) == sorted(map(repr, valid * 2))


def test_what_the_notation_of_gemma_4_cannot_follow_is_refused_where_it_is_strict(qwen_like: Any) -> None:
    for value, some, never in (
        ({"type": "string", "pattern": "^a"}, ["abcd", "fast"], [5]),
        ({"type": "object", "minProperties": 1, "required": ["n"], "properties": {"n": {}}}, [SPOKEN[-3]], [{}]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [[1, 2], []], [["a"]]),
        ({"not": {"type": "string"}}, [5, None, [1, 2]], []),
    ):
        with pytest.raises(InvalidRequestError):
            spoken(qwen_like, value)
        found = spoken(qwen_like, value, strict=False)
        assert [each for each in some if each not in found] == []
        assert [each for each in found if each in never] == []
    listed = [{"n": 2, "city": "a"}, ["a"], 5]
    assert spoken(qwen_like, {"enum": listed}) == [5, ["a"], {"city": "a", "n": 2}] * 2
