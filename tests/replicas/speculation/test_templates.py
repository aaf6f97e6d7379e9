"""From a schema to the text of a call, and from tokens to the skeleton."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.speculation.skeletons import CallFormat, call_template, compile_tools, value_endings

PLAIN = CallFormat('{"name": "', '", "arguments": ', "}")


def characters(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """A tokenizer of one token a character."""
    return [ord(character) for character in text], [(i, i + 1) for i in range(len(text))]


def with_holes(parameters: dict[str, Any]) -> list[str]:
    template = call_template("f", parameters, PLAIN)
    return ["".join(map(chr, segment)) for segment in template.cut(*characters(template.text)).segments]


def test_values_of_all_types_are_holes() -> None:
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "stops": {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "string"}}}},
        "any": {},
    }
    assert with_holes({"type": "object", "properties": properties}) == [
        '{"name": "f", "arguments": {"city": "',
        '", "days": ',
        ', "stops": [{"at": "',
        '"}, {"at": "',
        '"}], "any": ',
        "}}",
    ]


def test_a_call_without_arguments() -> None:
    assert with_holes({}) == ['{"name": "f", "arguments": {}}']
    assert call_template("f", None, PLAIN).text == '{"name": "f", "arguments": {}}'


def test_the_default_is_hermes() -> None:
    assert call_template("f", None).text == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def test_a_token_across_a_border_belongs_to_the_value() -> None:
    template = call_template("f", {"properties": {"n": {"type": "integer"}}}, PLAIN)
    assert template.text.endswith('": 7}}')
    end = len(template.text)
    skeleton = template.cut([1, 2, 3, 4], [(0, end - 5), (end - 5, end - 4), (end - 4, end - 2), (end - 2, end)])
    assert skeleton.segments == ((1, 2), (4,))


schemas = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}, {"type": "array"}]),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(
            lambda properties: {"type": "object", "properties": properties},
            st.dictionaries(st.text(max_size=5), inner, max_size=3),
        ),
    ),
    max_leaves=8,
)


@given(schemas, st.text(max_size=8))
def test_the_text_is_a_call_and_its_pieces_are_the_text(schema: dict[str, Any], name: str) -> None:
    template = call_template(name, {"properties": {"a": schema}}, PLAIN)
    assert json.loads(template.text)["name"] == name
    skeleton = template.cut(*characters(template.text))
    assert len(skeleton.segments) == len(template.holes) + 1
    fixed = sum(map(len, skeleton.segments))
    assert fixed + sum(end - start for start, end in template.holes) == len(template.text)


def test_deep_schemas_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    assert len(call_template("f", {"properties": {"a": schema}}).text) < 10_000


@pytest.mark.parametrize("properties", [["a"], "x", 5, None])
def test_malformed_properties_are_left_to_the_model(properties: Any) -> None:
    malformed = {"type": "object", "properties": properties}
    nested = call_template("f", {"properties": {"a": malformed}}, PLAIN)
    assert nested.text == call_template("f", {"properties": {"a": {}}}, PLAIN).text
    assert len(call_template("f", malformed, PLAIN).holes) == 1


def test_what_is_no_function_is_skipped() -> None:
    endings = value_endings([(1, '"'), (2, '",'), (3, ". "), (4, "a"), (5, "<|end|>"), (6, "")])
    assert endings.closers == {1, 2}
    assert endings.breaks == {3, 5}
    tools = compile_tools([{"type": "x"}, {"function": {}}, {"function": {"name": "f"}}], characters, endings)
    assert len(tools.flat) == 1
    assert tools.closers == endings.closers
