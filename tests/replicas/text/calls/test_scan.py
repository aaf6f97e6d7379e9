"""JSON as models write it comes out as JSON, at any cut, and no sooner held back than it has to be."""

import json
import math
import random
from contextlib import suppress
from typing import Any

import orjson
import pytest
from call_texts import (
    ARGUMENTS,
    FORMATS,
    JSON,
    JSON_FORMATS,
    NAMES,
    call_texts,
    chunked,
    collected,
    mutated,
    parser,
    read,
    valid,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.requests import ToolCallDelta
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import DEEPEST, MismatchError, Text, json_value, whole_object


class Loose:
    """Writes values as models do: Python's constants among JSON's, commas too many, white space, control characters."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, value: Any) -> str:
        match value:
            case None | True | False:
                return self._random.choice([repr(value), json.dumps(value)])
            case str():
                text = json.dumps(value, ensure_ascii=self._random.random() < 0.5)
                return text.replace("\\n", "\n") if self._random.random() < 0.5 and "\\\\n" not in text else text
            case list():
                return self._closed("[", [self(one) for one in value], "]")
            case dict():
                return self._closed("{", [f"{self(key)}:{self._space()}{self(one)}" for key, one in value.items()], "}")
            case _:
                return json.dumps(value)

    def _closed(self, opener: str, parts: list[str], closer: str) -> str:
        comma = "," if parts and self._random.random() < 0.3 else ""
        between = f",{self._space()}"
        return opener + self._space() + between.join(parts) + self._space() + comma + self._space() + closer

    def _space(self) -> str:
        return self._random.choice(["", "", " ", "\n  "])


def scanned(text: str) -> tuple[str, str, str, str | None]:
    """What was handed over as written and as valid, what was undecided, and the rest; None: it is one value."""
    written, sent = "", ""

    def put(piece: str, as_valid: str) -> None:
        nonlocal written, sent
        written += piece
        sent += as_valid

    source, undecided, whole = Text(text, over=True), "", True
    try:
        for _ in json_value(source, put):
            raise AssertionError("a scan ends with its text")
    except MismatchError as found:
        undecided, whole = found.undecided, False
    rest = source.text[source.at :]
    return written, sent, undecided, None if whole and not rest else rest


@given(JSON.filter(lambda value: isinstance(value, list | dict)), st.integers(0, 2**32), st.data())
def test_a_value_written_loosely_is_the_value(value: Any, seed: int, data: st.DataObject) -> None:
    text = Loose(seed)(value)
    written, sent, undecided, rest = scanned(text)
    assert (written, undecided, rest) == (text, "", None)
    assert json.loads(sent) == value
    exact = json.dumps(value, indent=data.draw(st.none() | st.just(2)), ensure_ascii=data.draw(st.booleans()))
    assert scanned(exact)[1] == exact, "what is JSON stays as it is"


@settings(max_examples=100, deadline=None)
@given(JSON, st.data())
def test_whatever_comes_nothing_of_it_is_lost_and_what_is_whole_is_json(value: Any, data: st.DataObject) -> None:
    text = mutated(Loose(data.draw(st.integers(0, 99)))({"a": value}), data)
    if not text:
        return
    written, sent, undecided, rest = scanned(text)
    assert written + undecided + (rest or "") == text
    if rest is None:
        json.loads(sent)


@given(st.sampled_from(JSON_FORMATS), ARGUMENTS, st.integers(0, 2**32), st.integers(0, 1), st.data())
def test_literals_of_python_leave_as_json(
    format: ToolFormat, arguments: dict[str, Any], seed: int, variant: int, data: st.DataObject
) -> None:
    (text,) = call_texts(format, [("f", arguments)], Loose(seed), variant)
    reader = parser(format)
    said, [(name, sent)] = collected(chunked(text, data), reader)
    assert (said, name, valid(sent)) == ("", "f", arguments)
    assert [call.arguments for call in reader.calls] == [sent]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=2),
    st.data(),
)
def test_a_call_that_has_closed_has_arguments_in_json(
    format: ToolFormat, calls: list[Any], data: st.DataObject
) -> None:
    style = Loose(data.draw(st.integers(0, 99)))
    reader = parser(format, early_stop=False)
    text = mutated("".join(call_texts(format, calls, style, data.draw(st.integers(0, 1)))), data)
    collected(chunked(text, data), reader)
    for call in reader.calls:
        valid(call.arguments)


PIECES = st.sampled_from([r"\ud83d", r"\ude00", "\\", "u", "d83d", r"\n", r"\'", "x", "\n", "é"])


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=8))
def test_half_a_surrogate_pair_becomes_a_replacement_character(pieces: list[str]) -> None:
    inside = "".join(pieces)
    written, sent, undecided, rest = scanned(f'"{inside}"')
    assert written + undecided + (rest or "") == f'"{inside}"'
    if rest is None:
        orjson.loads(sent)  # refuses half a pair
        with suppress(ValueError):
            exact = json.loads(f'"{inside}"')
            assert json.loads(sent) == exact.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,400})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)


@settings(max_examples=40)
@given(NUMBERS | st.sampled_from(["1e999", "-1e999", "1e308", "1.7976931348623159e308", "9" * 308, "9" * 309]))
def test_a_number_is_as_it_was_written_and_one_that_no_double_holds_is_a_text(number: str) -> None:
    written, sent, undecided, rest = scanned(f'{{"n": {number}}}')
    assert (undecided, rest) == ("", None)
    assert sent == (written if math.isfinite(float(number)) else f'{{"n": "{number}"}}')
    orjson.loads(sent)  # refuses a number that no double holds


@settings(max_examples=40)
@given(
    st.integers(1, 1200),
    st.sampled_from([('{"a": [', "]}"), ('[ {"\\n\\ud83d": ', "}\n]")]),
    st.sampled_from(["", "1", '"x"']),
)
def test_a_value_below_the_deepest_level_is_a_text(levels: int, ends: tuple[str, str], inside: str) -> None:
    opener, closer = ends
    if opener.endswith(": "):
        inside = inside or "null"
    text = opener * levels + inside + closer * levels
    written, sent, undecided, rest = scanned(text)
    assert (written, undecided, rest) == (text, "", None)
    value, depth = orjson.loads(sent), 0
    while isinstance(value, list | dict) and value:
        (value,), depth = value.values() if isinstance(value, dict) else value, depth + 1
    assert depth <= DEEPEST
    if levels * 2 <= DEEPEST:
        assert value == json.loads(inside or "[]")
    else:
        within = levels - DEEPEST // 2
        written = opener * within + inside + closer * within
        assert value == written.replace("\\ud83d", "\\ufffd")


def test_only_what_is_undecided_is_held_back() -> None:
    reader = parser(ToolFormat.HERMES)
    reader.feed('<tool_call>{"name": "f", "arguments": {')
    for piece, sent in [
        ('"a": 12', '"a": '), ("3", ""), (", ", "123"), ('"b', ', "b'), ('": T', '": '), ("ru", ""), ("e", "true"),
        (',"c": "x\\', ',"c": "x'), ("u00", ""), ("e9", "\\u00e9"), ("\n", "\\n"), ("\\", ""), ("d", "\\\\d"),
        ("\\ud83d", ""), ("\\", ""), ("ude00", "\\ud83d\\ude00"), ("\\ud83d", ""), ('"', '\\ufffd"'),
        (",\n", ""), ("}", "\n}"),
    ]:  # fmt: skip
        assert "".join(d.arguments for d in reader.feed(piece) if isinstance(d, ToolCallDelta)) == sent
    reader.feed("}</tool_call>")
    assert valid(reader.calls[0].arguments) == {"a": 123, "b": True, "c": "xé\n\\d😀\ufffd"}


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a": Trux}', '{"a": '), ('{"a": Truex}', '{"a": true'), ('{"a": NaN}', '{"a": '), ('{"a": 01}', '{"a": 0'),
        ('{"a": -Infinity}', '{"a": '), ('{"a": 1_000}', '{"a": 1'), ('{"a": .5}', '{"a": '), ("{'a': 1}", "{"),
        ('{"a": 1,, "b": 2}', '{"a": 1'), ("{,}", "{"), ('{"a": 1, b: 2}', '{"a": 1'), ('{"a": TRUE}', '{"a": '),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 1000])
def test_what_cannot_be_json_is_no_call_that_closed(arguments: str, sent: str, size: int) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    reader = parser(ToolFormat.HERMES)
    said, calls = collected([text[at : at + size] for at in range(0, len(text), size)], reader)
    assert reader.calls == ()
    assert calls == [["f", sent]]
    assert said == arguments.removeprefix(sent.replace("true", "True")) + "}</tool_call>", (
        "the rest is text, as written"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (' {"a": True, }\n', {"a": True}), (r'{"a": "\ud800"}', {"a": "\ufffd"}), ("{}", {}),
        ("[]", None), ('"{}"', None), ("{} {}", None), ("", None), ("  ", None), ('{"a": nope}', None), ("{", None),
    ],
)  # fmt: skip
def test_the_text_of_an_object_is_read_as_one(text: str, value: Any) -> None:
    found = whole_object(text)
    assert (found and json.loads(found)) == value
    if found:
        found.encode()
    assert read(ToolFormat.HERMES, f'<tool_call>{{"name": "f", "arguments": {json.dumps(text)}}}</tool_call>')[1] == (
        [["f", found]] if found else [["f", "{}"]] if text == "" else []
    )
