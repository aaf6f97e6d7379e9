"""Tools of `/v1/responses` that are no plain functions: namespaces and custom tools, and their calls."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fake_backend import DONE, USAGE, FakeBackend, World, called
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from service_backend import engine_served

from holdfast.replicas.requests import Completed, ToolCallDelta
from holdfast.router.protocol.declared_tools import LONGEST, CustomInput, DeclaredTools
from holdfast.router.protocol.shapes import ResponseEvent, ResponseReply

PATH = "/v1/responses"
READ = {"type": "function", "name": "read_file", "parameters": {"type": "object", "properties": {"path": {}}}}
FILES = {"type": "namespace", "name": "mcp__files", "description": "The user's files.", "tools": [READ]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
EVENT, OURS = TypeAdapter(ResponseStreamEvent), TypeAdapter(ResponseEvent)
TEXT = '*** Begin\n+ "x"\\n\té\U0001f600\x7f\n*** End'


def post(world: World, **body: Any) -> httpx.Response:
    return world.call("POST", PATH, json={"model": "pocket", "input": "hello", **body})


def whole(world: World, **body: Any) -> Any:
    answer = post(world, **body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    TypeAdapter(ResponseReply).validate_python(answer.json())
    return answer.json()


def streamed(world: World, **body: Any) -> list[Any]:
    text = post(world, stream=True, **body).text
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    for event in found:
        EVENT.validate_python(event)
        OURS.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def shown(world: World) -> list[str]:
    return [tool["function"]["name"] for tool in world.backend.requests[-1].prompt.tools]


def calls(world: World) -> list[Any]:
    return [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for message in world.backend.requests[-1].prompt.messages
        for call in message.get("tool_calls") or ()
    ]


# ---- namespaces ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_names_the_function_as_it_was_declared_and_is_read_back(stream: bool) -> None:
    world = World(FakeBackend(called(ToolCallDelta(0, "call_1", "mcp__files__read_file", '{"path":"a"}', closed=True))))
    if stream:
        found = {event["type"].removeprefix("response."): event for event in streamed(world, tools=[FILES])}
        added = found["output_item.added"]["item"]
        assert (added["name"], added["namespace"]) == ("read_file", "mcp__files")
        assert found["function_call_arguments.done"]["name"] == "read_file"
        response = found["completed"]["response"]
    else:
        response = whole(world, tools=[FILES])
    assert response["tools"] == [{**FILES, "tools": [READ]}]
    assert shown(world) == ["mcp__files__read_file"]
    [call] = response["output"]
    assert call["id"].startswith("fc_")
    del call["id"]
    assert call == {
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "read_file",
        "namespace": "mcp__files",
        "arguments": '{"path":"a"}',
    }
    output = {"type": "function_call_output", "call_id": "call_1", "output": "text"}
    asks = {"role": "user", "content": "x"}
    for asked in (
        {"tools": [FILES], "input": [output], "previous_response_id": response["id"]},
        {"tools": [FILES], "input": [asks, call, output]},
        {"tools": [FILES], "input": [asks, {**call, "namespace": None}, output], "seed": 1},  # as some drop it
        {"input": [asks, call, output], "seed": 2},  # its tool is no longer declared
    ):
        assert post(world, **asked).status_code == 200
        assert calls(world) == [("call_1", "mcp__files__read_file", '{"path":"a"}')]


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": list(tools)}


@pytest.mark.parametrize(
    ("choice", "forced", "among"),
    [
        ({"type": "function", "name": "read_file"}, "mcp__files__read_file", ()),
        ({"type": "function", "name": "read_file", "namespace": "mcp__files"}, "mcp__files__read_file", ()),
        ({"type": "function", "name": "mcp__files__read_file"}, "mcp__files__read_file", ()),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch", ()),
        (allowed({"type": "function", "name": "read_file"}), "", ("mcp__files__read_file",)),
        (allowed({"type": "namespace", "name": "mcp__files"}), "", ("mcp__files__read_file",)),
        (allowed({"type": "custom", "name": "apply_patch"}, {"type": "web_search"}), "", ("apply_patch",)),
    ],
)
def test_a_choice_may_name_them(choice: Any, forced: str, among: Any) -> None:
    world = World()
    assert post(world, tools=[FILES, PATCH], tool_choice=choice).json()["tool_choice"] == choice
    prompt = world.backend.requests[0].prompt
    assert (prompt.forced_tool, prompt.allowed_tools) == (forced, among)


OTHER = {"type": "namespace", "name": "mcp__other", "tools": [READ, {"type": "web_search"}]}


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "function", "name": "read_file"}, "tool_choice.namespace"),
        ({"type": "function", "name": "write_file"}, "tool_choice.name"),
        ({"type": "function", "name": "read_file", "namespace": "n"}, "tool_choice.name"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "custom", "name": "read_file"}, "tool_choice.name"),
        ({"type": "web_search"}, "tool_choice.type"),
        (allowed({"type": "function", "name": "x"}), "tool_choice.tools.0.name"),
        (allowed({"type": "namespace", "name": "x"}), "tool_choice.tools.0.name"),
    ],
)
def test_a_choice_that_is_wrong_is_named(choice: Any, field: str) -> None:
    answer = post(World(), tools=[FILES, OTHER], tool_choice=choice)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


MANY = [{**FILES, "name": f"n{k}", "tools": [{**READ, "name": f"f{n}"} for n in range(513)]} for k in range(2)]


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{**FILES, "tools": [READ, READ]}], "tools.0.tools.1.name"),
        ([FILES, {**FILES, "description": "again"}], "tools.1.tools.0.name"),
        ([PATCH, {"type": "function", "name": "apply_patch"}], "tools.1.name"),
        ([{**FILES, "tools": [{**READ, "name": "a b"}]}], "tools.0.tools.0.name"),
        ([{**FILES, "tools": [{**READ, "parameters": {"type": "string"}}]}], "tools.0.tools.0.parameters"),
        ([{**FILES, "tools": "all"}], "tools.0.tools"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}], "tools.0.format.syntax"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}], "tools.0.format.definition"),
        pytest.param(MANY, "tools", id="more functions in all namespaces than may be plain ones"),
    ],
)
def test_a_declaration_that_is_wrong_is_named(tools: Any, field: str) -> None:
    answer = post(World(), tools=tools)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_what_is_skipped_in_a_namespace_is_told() -> None:
    world = World()
    answer = post(world, tools=[OTHER, {**FILES, "more": 1, "tools": [{**READ, "defer_loading": True}]}])
    assert answer.headers["x-holdfast-skipped"] == "web_search, tools.more, tools.tools.defer_loading"
    assert shown(world) == ["mcp__other__read_file", "mcp__files__read_file"]
    first = world.backend.requests[0].prompt.tools[1]["function"]
    assert first["description"] == "The user's files."


NAMES = st.text("ab_.é", min_size=1, max_size=70)
FUNCTIONS = st.text("ab_", min_size=1, max_size=64)


@given(st.lists(st.tuples(NAMES | st.just(""), FUNCTIONS), unique=True, max_size=8), st.randoms())
def test_names_to_the_model_are_unique_and_do_not_depend_on_order(pairs: Any, random: Any) -> None:
    def declared(order: Any) -> dict[Any, str]:
        tools: list[Any] = []
        for namespace, name in order:
            function = {"type": "function", "name": name}
            tools.append({"type": "namespace", "name": namespace, "tools": [function]} if namespace else function)
        return {(each.namespace, each.name): each.shown for each in DeclaredTools(tools).tools}

    names = declared(pairs)
    assert len(set(names.values())) == len(pairs)
    assert all(len(name) <= LONGEST and name.isascii() and "." not in name for name in names.values())
    assert all(names[pair] == pair[1] for pair in pairs if not pair[0])
    mixed = list(pairs)
    random.shuffle(mixed)
    assert declared(mixed) == names


def test_tools_that_come_later_change_no_name() -> None:
    alone, together = DeclaredTools([FILES]), DeclaredTools([READ, OTHER, FILES])
    assert alone.tools[0].shown == together.tools[2].shown == "mcp__files__read_file"
    clash = [{"type": "function", "name": "mcp__files__read_file"}, FILES]
    [plain, other] = DeclaredTools(clash).tools
    assert plain.shown == "mcp__files__read_file"
    assert other.shown.startswith("mcp__files__read_file_")
    assert DeclaredTools(clash).called(other.shown) is not None


# ---- custom tools ----


def letters(arguments: str, *, closed: bool = True) -> Any:
    """A call whose arguments come one character at a time."""
    parts = [ToolCallDelta(0, "call_1", "apply_patch"), *(ToolCallDelta(0, arguments=each) for each in arguments)]
    end = [ToolCallDelta(0, closed=True)] if closed else []
    return [[each] for each in (*parts, *end, Completed("tool_calls" if closed else "length", USAGE, DONE.timing))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_call_has_text_for_input_and_is_read_back(stream: bool) -> None:
    world = World(FakeBackend(letters(json.dumps({"input": TEXT}))))
    if stream:
        found = streamed(world, tools=[PATCH])
        response = found[-1]["response"]
        deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
        [done] = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == done["input"] == TEXT
        assert len(deltas) == len(TEXT)
        assert not [event for event in found if "function_call" in event["type"]]
    else:
        response = whole(world, tools=[PATCH])
    [call] = response["output"]
    assert call["id"].startswith("ctc_")
    assert {name: value for name, value in call.items() if name != "id"} == {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "apply_patch",
        "input": TEXT,
    }
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    for asked in (
        {"input": [output], "previous_response_id": response["id"]},
        {"input": [{"role": "user", "content": "x"}, call, output]},
    ):
        assert post(world, tools=[PATCH], **asked).status_code == 200
        [(call_id, name, arguments)] = calls(world)
        assert (call_id, name, json.loads(arguments)) == ("call_1", "apply_patch", {"input": TEXT})


def test_a_custom_call_that_is_cut_is_incomplete() -> None:
    world = World(FakeBackend(letters('{"input": "half \\ud83d', closed=False)))
    [call] = whole(world, tools=[PATCH])["output"]
    assert (call["input"], call["status"]) == ("half ", "incomplete")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": ""}', ""),
        ('{ "input":"a","more":1}', "a"),
        ('{"more":1,"input":"a"}', "a"),
        ('{"path": "a"}', '{"path": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ("plain text", "plain text"),
        ('{"input": "\\ud83d\\ud83d\\ude00 \\udc00"}', "�\U0001f600 �"),
        ('{"input": "\\ud83dx"}', "�x"),
    ],
)
def test_arguments_of_any_form_are_text(arguments: str, text: str) -> None:
    for script in (called(ToolCallDelta(0, "call_1", "apply_patch", arguments, closed=True)), letters(arguments)):
        world = World(FakeBackend(script))
        found = streamed(world, tools=[PATCH])
        assert found[-1]["response"]["output"][0]["input"] == text
        deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == text


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60), max_size=6))
def test_the_text_does_not_depend_on_how_arguments_come(text: str, ascii_: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_)
    reader = CustomInput()
    edges = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    parts = [reader.feed(arguments[begin:end]) for begin, end in pairwise(edges)]
    assert "".join(parts) + reader.end() == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_the_model_is_told_of_a_grammar_and_held_to_a_regex() -> None:
    world = World()
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
    regex = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"}
    tools = [{**PATCH, "format": lark}, {"type": "custom", "name": "number", "format": regex}]
    tools.append({"type": "custom", "name": "any", "format": {"type": "text"}})
    assert post(world, tools=tools).status_code == 200
    told, number, other = (tool["function"] for tool in world.backend.requests[0].prompt.tools)
    assert 'start: "a"+' in told["description"]
    assert told["description"].startswith("Edit files.")
    assert number["parameters"]["properties"]["input"] == {"type": "string", "pattern": "^(?:[0-9]+|x)$"}
    assert number["strict"]
    for function in (told, other):
        assert function["parameters"] == {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        }


# ---- with the shipped model ----


def test_a_model_calls_them() -> None:
    with engine_served() as address, httpx.Client(base_url=address, timeout=60) as client:
        asked = {"model": "pocket", "input": "Read a.txt", "max_output_tokens": 60, "temperature": 0}
        choice = {"type": "function", "name": "read_file"}
        answer = client.post(PATH, json={**asked, "tools": [FILES], "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        call = answer.json()["output"][-1]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__files", "read_file")
        number = {"type": "custom", "name": "pick", "format": {"type": "grammar", "syntax": "regex"}}
        number["format"]["definition"] = "[0-9]{2}"  # type: ignore[index]
        answer = client.post(PATH, json={**asked, "tools": [number], "tool_choice": "required"})
        assert answer.status_code == 200, answer.text
        call = answer.json()["output"][-1]
        assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "pick", "completed")
        assert len(call["input"]) == 2
        assert call["input"].isdigit()
        number["format"]["definition"] = "["  # type: ignore[index]
        answer = client.post(PATH, json={**asked, "tools": [FILES, {**OTHER, "tools": [number]}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.1.tools.0.format.definition")
        answer = client.post(PATH, json={**asked, "tools": [PATCH], "tool_choice": "required"})
        assert answer.json()["output"][-1]["type"] == "custom_tool_call"
