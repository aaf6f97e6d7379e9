"""The benchmark of guaranteed calls, in short: its law holds, and what it counts would show where it does not."""

import asyncio
import json
from dataclasses import replace

from holdfast.loadgen.bench import calls
from holdfast.loadgen.bench.__main__ import main
from holdfast.loadgen.bench.call_tasks import TASKS
from holdfast.loadgen.bench.calls import FORMATS, LAW_TOOLS, is_whole, law, written
from holdfast.replicas.constraints.grammar import forms_of
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker


def test_the_law_holds_over_pocket_and_a_random_model_and_fails_without_a_guarantee(tmp_path) -> None:
    calls.random_model(tmp_path / "random", 1700)
    pocket, random = (load_runner(replace(calls.CONFIG, model=m)) for m in ("pocket", str(tmp_path / "random")))
    found = [asyncio.run(law(pocket, each, 2)) for each in FORMATS[::3]]
    found += [asyncio.run(law(random, each, 2)) for each in FORMATS[1::5]]
    assert not any(each.broken for each in found), found
    assert sum(each.calls for each in found) > 0
    assert any(asyncio.run(law(pocket, each, 2, "off")).broken for each in FORMATS[:4])


def test_expected_calls_are_whole_and_read_back_in_every_format() -> None:
    for tool_format in FORMATS:
        for task in TASKS:
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
            reader = CallTracker(tool_format, frozenset(schemas), True, str, schemas=schemas)
            text = written(forms_of(tool_format, lambda _: True).first, [task.expected])
            assert [*reader.feed(text), *reader.finish()]
            assert [call.name for call in reader.calls] == [task.expected[0]], tool_format
            assert is_whole(task.expected[0], reader.calls[0].arguments, task.tools)


def test_a_call_that_is_not_whole_is_told() -> None:
    assert is_whole("get_weather", '{"city": "Oslo", "days": 3}', LAW_TOOLS)
    for name, arguments in (
        ("get_whether", '{"city": "Oslo"}'),
        ("get_weather", '{"city": "Oslo", "days": "3"}'),
        ("get_weather", '{"city": 1}'),
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Oslo", "more": 1}'),
        ("get_weather", '{"city": "Oslo"'),
        ("search", '{"query": "a", "kind": "books"}'),
        ("search", '{"query": "a", "deep": 1}'),
        ("plan", '{"steps": ["a", "b", "c"]}'),
    ):
        assert not is_whole(name, arguments, LAW_TOOLS)


def test_the_share_of_grammars_is_measured_for_every_form(tmp_path) -> None:
    out = tmp_path / "calls.json"
    assert main(f"calls --parts time --rounds 1 --formats pythonic --json {out}".split()) == 0
    rows = {row["name"]: row["value"] for row in json.loads(out.read_text())}
    assert {"time, pythonic bare, 4 tools", "time, pythonic bare, 200 tools", "time, median of all"} <= rows.keys()
    assert all(0 < share < 100 for share in rows.values())
    assert main(["calls", "--parts", "lawn"]) == main(["calls", "--formats", "morse"]) == 2


def test_markup_is_seen_in_every_format() -> None:
    names = {"get_weather", "search"}
    for tool_format in FORMATS:
        for form in calls._forms(tool_format):
            text = written(form, [("get_weather", {"city": "Oslo"})])
            assert calls.shows_markup(text, tool_format, names, False), form
            assert calls.shows_markup(text[: len(form.opener) or 9], tool_format, names, True), "cut"
            assert not calls.shows_markup("Use f(a=1), [1], {2} or <tool.", tool_format, names, True)
    assert not calls.shows_markup('{"name": "Alice", "age": 7}', ToolFormat.LLAMA3, names, False)
