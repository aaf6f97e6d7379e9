"""Scoring: what counts as a call, as the right call, and as text."""

import json
from typing import Any

import pytest

from pocket.evaluate import Outcome, Task, judge, parse_calls


def block(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def task(*calls: tuple[str, dict[str, Any]], text: str | None = None) -> Task:
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    tools = ({"function": {"name": "f"}}, {"function": {"name": "g"}})
    expected = {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})
    return Task(({"role": "user", "content": "?"},), tools, expected)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Hello.", []),
        (block("f", a=1), [{"name": "f", "arguments": {"a": 1}}]),
        (block("f") + "\n" + block("g"), [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]),
        ("<tool_call>\n{]\n</tool_call>", None),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', None),
        ('<tool_call>\n{"name": "f", "arguments": {}}', None),
        ("<tool_call>\n[1]\n</tool_call>", None),
    ],
)
def test_parse_calls(text: str, calls: list[dict[str, Any]] | None) -> None:
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (block("f", a="x"), Outcome(valid=True, named=True, exact=True, is_text=False)),
        (block("f", a="y"), Outcome(valid=True, named=True, exact=False, is_text=False)),
        (block("h", a="x"), Outcome(valid=True, named=False, exact=False, is_text=False)),
        ("x", Outcome(valid=False, named=False, exact=False, is_text=True)),
        ("<tool_call>\nf\n</tool_call>", Outcome(valid=False, named=False, exact=False, is_text=True)),
    ],
)
def test_judge_a_call(text: str, outcome: Outcome) -> None:
    assert judge(task(("f", {"a": "x"})), text) == outcome


def test_judge_is_strict_about_types_and_free_about_order() -> None:
    both = task(("f", {"a": 1}), ("g", {"b": 2}))
    assert judge(both, block("g", b=2) + "\n" + block("f", a=1)).exact
    assert not judge(both, block("f", a=1)).exact
    assert not judge(task(("f", {"a": 1})), block("f", a=True)).exact
    assert not judge(task(("f", {"a": 1})), block("f", a="1")).exact


def test_judge_text() -> None:
    assert judge(task(text="No."), "No.") == Outcome(valid=True, named=True, exact=True, is_text=True)
    assert judge(task(text="No."), "Not so.").is_text
    assert not judge(task(text="No."), block("f")).is_text
    assert not judge(task(text="No."), "").is_text
