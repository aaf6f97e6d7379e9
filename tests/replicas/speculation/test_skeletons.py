"""Skeletons of calls: made from schemas, followed as they are drawn, drafted with their values filled in."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.speculation.ngrams import NGramIndex, common_prefix
from holdfast.replicas.speculation.skeletons import (
    HOLE,
    CallFormat,
    Place,
    Skeleton,
    SkeletonCursor,
    SkeletonSet,
    call_template,
    compile_tools,
    value_endings,
)

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


OPEN, NAME, END, QUOTE, STOP = 1, 2, 3, 4, 5
#   two tools: OPEN NAME 10 20 _ QUOTE 21 _ END,  OPEN NAME 11 22 _ END
TOOLS = SkeletonSet(
    [Skeleton(((OPEN, NAME, 10, 20), (QUOTE, 21), (END,))), Skeleton(((OPEN, NAME, 11, 22), (END,)))],
    closers=[QUOTE],
    breaks=[STOP],
)


def place_after(drawn: list[int], tools: SkeletonSet = TOOLS) -> Place | None:
    index = NGramIndex(np.array([7, 8, 9], np.int32))
    cursor = SkeletonCursor(tools, 9)
    for token in drawn:
        cursor.advance([token], index.window)
        index.extend([token])
    return cursor.place


def nothing(so_far: list[int]) -> list[int]:
    return []


def test_a_call_is_followed_through_its_values() -> None:
    assert place_after([30, 31]) is None
    assert place_after([30, OPEN, NAME]) == Place(0, 2)
    assert place_after([30, OPEN, NAME, 11]) == Place(1, 3)
    assert place_after([OPEN, NAME, 10, 20, 40, 41]) == Place(0, 4)
    assert place_after([OPEN, NAME, 10, 20, 40, 41, QUOTE]) == Place(0, 6)
    assert place_after([OPEN, NAME, 10, 20, 40, 41, QUOTE, 21, 40, END]) == Place(0, 9)
    assert place_after([OPEN, NAME, 10, 20, 40, 41, QUOTE, 21, 40, END, 30]) is None


def test_what_looks_like_the_fixed_text_may_be_the_value() -> None:
    assert place_after([OPEN, NAME, 10, 20, 40, QUOTE, 50]) == Place(0, 4)


def test_the_middle_of_a_call_alone_is_no_call() -> None:
    assert place_after([10, 20]) is None


def test_another_call_may_follow() -> None:
    call = [OPEN, NAME, 11, 22, 40, END]
    assert place_after([*call, OPEN, NAME, 10]) == Place(0, 3)


def test_a_list_that_goes_on_leads_back_to_its_items() -> None:
    # {"a": [_, _]} with item separator QUOTE: OPEN 2 _ QUOTE _ END
    tools = SkeletonSet([Skeleton(((OPEN, NAME), (QUOTE,), (END,)))], closers=[QUOTE])
    assert place_after([OPEN, NAME, 40, QUOTE, 41, QUOTE, 42, QUOTE], tools) == Place(0, 4)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=12))
def test_any_text_can_be_followed_at_any_cut(steps: list[list[int]]) -> None:
    index, cursor = NGramIndex(np.zeros(0, np.int32)), SkeletonCursor(TOOLS, 0)
    for drawn in steps:
        cursor.advance(drawn, index.window)
        index.extend(drawn)
        if cursor.place is not None:
            tokens = TOOLS.flat[cursor.place.skeleton]
            draft = TOOLS.compose(cursor.place, cursor.filled, 5, nothing)
            assert 0 <= cursor.place.position <= len(tokens)
            assert len(draft) <= 5
            assert HOLE not in draft
    assert cursor.place == place_after([token for drawn in steps for token in drawn])


segments = st.lists(st.lists(st.integers(1, 3), max_size=4).map(tuple), min_size=1, max_size=3).map(tuple)
toolsets = st.lists(segments.map(Skeleton), min_size=1, max_size=4).map(SkeletonSet).filter(lambda tools: tools.flat)


@settings(deadline=None)
@given(toolsets, st.data())
def test_a_draft_leads_to_the_tool_that_it_goes_on_with_for_longest(tools: SkeletonSet, data: st.DataObject) -> None:
    here = data.draw(st.integers(0, len(tools.flat) - 1))
    before = tools.flat[here][: data.draw(st.integers(0, len(tools.flat[here])))]
    draft = data.draw(st.lists(st.integers(1, 3), max_size=4))
    goes_on = {
        s: common_prefix(draft, tokens[len(before) :])
        for s, tokens in enumerate(tools.flat)
        if tokens[: len(before)] == before and HOLE not in before
    }
    found = tools.towards(Place(here, len(before)), draft)
    assert found.position == len(before)
    if any(goes_on.values()):
        assert goes_on[found.skeleton] == max(goes_on.values())
    else:
        assert found.skeleton == here


@settings(deadline=None)
@given(toolsets, st.integers(0, 9), st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_draft_is_the_text_token_by_token(
    tools: SkeletonSet, limit: int, copied: list[int], data: st.DataObject
) -> None:
    here = data.draw(st.integers(0, len(tools.flat) - 1))
    tokens = tools.flat[here]
    position = data.draw(st.integers(0, len(tokens)))
    wanted: list[int] = []
    for at in range(position, len(tokens)):
        if tokens[at] != HOLE:
            wanted.append(tokens[at])
        elif tokens[at + 1] in copied:  # the value ends where the text after it is found
            wanted += copied[: copied.index(tokens[at + 1])]
        else:
            wanted += copied
            break
    assert tools.compose(Place(here, position), 0, limit, lambda _: copied) == wanted[:limit]


def test_a_draft_alternates_between_fixed_text_and_values() -> None:
    values = {4: [50, 51, QUOTE, 99], 8: [60, STOP, 99]}

    def fill(so_far: list[int]) -> list[int]:
        return values[len(so_far)]

    draft = TOOLS.compose(Place(0, 0), 0, 16, fill)
    assert draft == [OPEN, NAME, 10, 20, 50, 51, QUOTE, 21, 60, END]
    assert TOOLS.compose(Place(0, 0), 0, 7, fill) == draft[:7]


def test_a_draft_ends_where_a_value_is_unknown_or_open() -> None:
    assert TOOLS.compose(Place(0, 2), 0, 16, nothing) == [10, 20]
    assert TOOLS.compose(Place(0, 4), 0, 16, lambda so_far: [50, 51]) == [50, 51]


@pytest.mark.parametrize(("filled", "expected"), [(1, [50, QUOTE, 21]), (30, [50, STOP, 52])])
def test_a_full_stop_ends_a_short_value_only(filled: int, expected: list[int]) -> None:
    draft = TOOLS.compose(Place(0, 4), filled, 3, lambda so_far: [50, STOP, 52, 53] if not so_far else [])
    assert draft == expected


def test_the_draft_says_which_tool() -> None:
    assert TOOLS.towards(Place(0, 2), [11, 22]) == Place(1, 2)
    assert TOOLS.towards(Place(0, 2), [30]) == Place(0, 2)
    assert TOOLS.towards(Place(0, 6), [11, 22]) == Place(0, 6)


def test_empty_skeletons_and_empty_values_do_no_harm() -> None:
    tools = SkeletonSet([Skeleton(()), Skeleton(((),)), Skeleton(((), (1,))), Skeleton(((1, 2), (), (3,), ()))])
    assert tools.flat == ((1, 2, HOLE, 3),)
