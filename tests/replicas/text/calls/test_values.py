"""Calls as Python writes them: names that Python itself would refuse, and numbers that it cannot hold."""

import json
from typing import Any

import pytest

from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.readers import ToolCallParser
from holdfast.replicas.text.calls.scan import DEEPEST

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
