"""`/v1/messages` as clients see it: the official package over a real server, and what its blocks become."""

import json
from typing import get_args

import anthropic
import orjson
import pytest
from anthropic.types import Message
from anthropic.types.beta import BetaMemoryTool20250818Command
from fake_backend import CALL, DONE, HELLO, USAGE, FakeBackend, World, keyed
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.errors import ContextLengthError, OverloadedError, UnavailableError
from holdfast.replicas.requests import (
    AnswerBuilder,
    Completed,
    JsonOutput,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker
from holdfast.router.protocol.anthropic import AnthropicEncoder, message_object

PATH = "/v1/messages"
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BOTH = (
    (ReasoningDelta("Let me "), ReasoningDelta("see."), TextDelta("Both.")),
    (
        ToolCallDelta(0, "call_1", "get_weather", "{}", closed=True),
        ToolCallDelta(1, "call_2", "get_weather", '{"city":'),
    ),
    (ToolCallDelta(1, arguments='"Oslo"}', closed=True), Completed("tool_calls", USAGE, DONE.timing)),
)


def body(**changes):
    default = {"model": "pocket", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
    return {name: value for name, value in {**default, **changes}.items() if value is not None}


def post(world, **changes):
    return world.call("POST", PATH, json=body(**changes))


def refused(world, **changes):
    """The message of a request that is refused as one that makes no sense."""
    answer = post(world, **changes)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    return told["error"]["message"]


def requested(world, **changes):
    """What the replica was asked."""
    answer = post(world, **changes)
    assert answer.status_code == 200, answer.text
    return world.backend.requests[-1]


def prompted(world, **changes):
    return requested(world, **changes).prompt


def read(raw):
    """The events in `raw`, as names and data."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def official(world, key="none", **options):
    """The official client, on a real server, with a new connection each time."""
    return anthropic.Anthropic(base_url=world, api_key=key, max_retries=0, **options)


# ---- the official package ----


def test_the_official_client_streams_the_same_message():
    with World(FakeBackend(BOTH)).served() as url:
        with official(url).messages.stream(**body(tools=[TOOL])) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        whole = official(url).messages.create(**body(tools=[TOOL]), extra_headers={"cache-control": "no-cache"})
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    for block, same in zip(streamed.content, whole.content, strict=True):
        assert {name: block.to_dict().get(name) for name in same.to_dict()} == same.to_dict()
    assert (streamed.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    thinking, text, first, second = whole.content
    assert (thinking.thinking, text.text) == ("Let me see.", "Both.")
    assert (first.input, second.input) == ({}, {"city": "Oslo"})


def test_a_tool_loop_of_the_official_client():
    world = World(FakeBackend(CALL))
    with world.served() as url:
        client = official(url)
        messages = [{"role": "user", "content": "Weather in Oslo?"}]
        reply = client.messages.create(**body(messages=messages, tools=[TOOL]))
        (call,) = reply.content
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        world.backend.script = HELLO
        assert client.messages.create(**body(messages=messages, tools=[TOOL])).content[0].text == "Hello!"
    function = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    assert world.backend.requests[-1].prompt.messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    # The second turn goes on with the conversation of the first, which nobody has named.
    assert len({request.program_id for request in world.backend.requests}) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UnavailableError("No replica"), anthropic.ServiceUnavailableError),
        (OverloadedError("full"), anthropic.RateLimitError),
        (ContextLengthError("9 tokens; the context has room for 8", "prompt"), anthropic.BadRequestError),
    ],
)
def test_the_official_client_knows_errors_by_their_class(error, expected):
    with World(FakeBackend([error])).served() as url, pytest.raises(expected) as raised:
        official(url).messages.create(**body())
    assert raised.value.request_id.startswith("req-")
    if isinstance(error, ContextLengthError):
        assert "prompt is too long" in str(raised.value)


@pytest.mark.parametrize("headers", [{"x-api-key": "acme"}, {"authorization": "Bearer acme"}])
def test_a_key_comes_in_either_header(headers):
    world = World(tenants=keyed("acme"))
    version = {"anthropic-version": "2023-06-01"}
    assert world.call("POST", PATH, json=body(), headers={**version, **headers}).status_code == 200
    assert world.backend.requests[-1].scope == "acme"
    wrong = world.call("POST", PATH, json=body(), headers={**version, "x-api-key": "guessed"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


def test_tokens_are_counted_as_a_message_with_them_would_have():
    world = World()
    with world.served() as url:
        counted = official(url).messages.count_tokens(
            model="pocket", system="Be short.", messages=[{"role": "user", "content": "hello"}], tools=[TOOL]
        )
    assert counted.input_tokens == 2  # the fake one counts messages
    refused_ = world.call("POST", f"{PATH}/count_tokens", json={"model": "none", "messages": body()["messages"]})
    assert (refused_.status_code, refused_.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("GET", PATH, 405, "invalid_request_error"),
        ("DELETE", f"{PATH}/count_tokens", 405, "invalid_request_error"),
    ],
)
def test_what_is_not_served_below_its_path_is_refused_in_anthropics_shape(method, path, status, kind):
    answer = World().call(method, path)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert path in told["error"]["message"]
    assert World().call("GET", f"{PATH}s").json()["error"]["code"] == "not_found"


# ---- what a request becomes ----


def test_blocks_become_messages_in_their_order():
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "b", "name": "get_weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "Be brief from now on."},
        {"role": "user", "content": "go on"},
    ]
    system = [{"type": "text", "text": "You help."}, {"type": "text", "text": "Politely."}]
    world = World()
    answer = post(world, messages=conversation, system=system, tools=[TOOL])
    assert answer.headers["x-holdfast-skipped"] == "redacted_thinking"
    messages = world.backend.requests[-1].prompt.messages
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "You help.\nPolitely."),
        ("user", "one"),
        ("assistant", "calling"),
        ("tool", "rain"),
        ("tool", "Error: "),  # a template has no field for it
        ("user", "and?"),
        ("system", "Be brief from now on."),
        ("user", "go on"),
    ]
    assert messages[2]["reasoning_content"] == "hm"
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", "", True)),
        ({"type": "any"}, ("required", "", True)),
        ({"type": "none"}, ("none", "", True)),
        ({"type": "tool", "name": "get_weather"}, ("required", "get_weather", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", "", False)),
    ],
)
def test_how_tools_may_be_called(choice, expected):
    prompt = prompted(World(), tools=[TOOL], tool_choice=choice)
    assert (prompt.tool_choice, prompt.forced_tool, prompt.parallel_tool_calls) == expected
    (tool,) = prompt.tools
    function = {"name": "get_weather", "description": "Weather of a city", "parameters": TOOL["input_schema"]}
    assert tool == {"type": "function", "function": function}


def test_tools_of_anthropics_types_that_a_client_runs_are_declared():
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
    ]
    world = World()
    answer = post(world, tools=tools, tool_choice={"type": "tool", "name": "bash"})
    assert (answer.status_code, answer.headers["x-holdfast-skipped"]) == (200, "web_search_20250305")
    prompt = world.backend.requests[-1].prompt
    assert prompt.forced_tool == "bash"
    told = {tool["function"]["name"]: tool["function"]["parameters"] for tool in prompt.tools}
    assert list(told) == ["bash", "str_replace_editor", "str_replace_based_edit_tool", "memory"]
    older, newer = (told[name]["properties"] for name in ("str_replace_editor", "str_replace_based_edit_tool"))
    assert ("undo_edit" in older["command"]["enum"], "insert_text" in older) == (True, False)
    assert ("undo_edit" in newer["command"]["enum"], "insert_text" in newer) == (False, True)
    commands = get_args(get_args(BetaMemoryTool20250818Command)[0])
    memory = told["memory"]["properties"]
    assert memory.keys() == {name for command in commands for name in command.model_fields}
    names = [get_args(command.model_fields["command"].annotation)[0] for command in commands]
    assert sorted(memory["command"]["enum"]) == sorted(names)


def test_fields_nobody_knows_further_in_are_told_and_counted():
    inner = [{"type": "text", "text": "x", "inner": 1}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": inner}
    document = {"type": "document", "source": {"type": "text", "data": "x"}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}, "mood": 1}], "an odd one": 2},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"any": 1}, "new": 1}]},
        {"role": "user", "content": [result | {"took_s": 1}, document | {"title": "t"}]},
    ]
    world = World()
    given = {
        "messages": said,
        "system": [{"type": "text", "text": "s", "old": 1}],
        "tools": [{**TOOL, "input_examples": [], "cache_control": {}}],
        "tool_choice": {"type": "auto", "why": 1},
        "output_config": {"effort": "low", "depth": 1},
    }
    told = post(world, **given).headers["x-holdfast-skipped"].split(", ")
    in_content = [f"messages.content.{name}" for name in ("content.inner", "mood", "new", "title", "took_s")]
    others = ["messages.unknown", "output_config.depth", "system.old", "tool_choice.why", "tools.input_examples"]
    assert told == [*in_content, *others]
    labels = {"tenant": "default", "endpoint": "messages"}
    assert world.registry.get_sample_value("holdfast_request_fields_skipped_total", labels) == len(told)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
OWN, HIGH = {"enable_thinking": True, "a": 1}, {"reasoning_effort": "high"}


def thinking(kind, expected):
    given = {"thinking": {"type": kind, "budget_tokens": 1024}}
    return given, {"template_kwargs": {"enable_thinking": expected}, "thinking_budget": 1024}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"template_kwargs": {"enable_thinking": False}, "thinking_budget": None}),
        thinking("disabled", False),
        thinking("enabled", True),
        thinking("adaptive", True),
        ({"output_config": {"effort": "high"}, "chat_template_kwargs": OWN}, {"template_kwargs": OWN | HIGH}),
        ({"output_config": {"format": FORMAT, "effort": "low"}}, {"output": JsonOutput(SCHEMA, strict=True)}),
    ],
)
def test_what_a_field_becomes(given, expected):
    prompt = prompted(World(), **given)
    assert {name: getattr(prompt, name) for name in expected} == expected


def test_more_of_sampling_than_anthropic_has():
    given = {"seed": 5, "min_p": 0.1, "presence_penalty": 1.0, "repetition_penalty": 1.1, "stop_token_ids": [7]}
    sampling = requested(World(), **given).sampling
    assert {name: getattr(sampling, name) for name in given} == {**given, "stop_token_ids": {7}}


@pytest.mark.parametrize(
    "name", ["stop", "logprobs", "max_completion_tokens", "prefill_id", "parallel_tool_calls", "truncation"]
)
def test_what_changes_an_answer_elsewhere_is_refused_by_name(name):
    assert f"'{name}'" in refused(World(), **{name: 1})
    answer = World().call("POST", f"{PATH}/count_tokens", json={**body(max_tokens=None), name: 1})
    assert answer.status_code == 200, "no count depends on it"


@pytest.mark.parametrize("name", ["context_management", "container", "prompt_cache_key", "speed"])
def test_what_anthropics_clients_may_send_at_the_top_is_taken_and_told(name):
    answer = post(World(), **{name: {}})
    assert (answer.status_code, answer.headers["x-holdfast-skipped"]) == (200, name)


def one(role, content):
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (one("tool", ""), "messages.0.role"),
        (one("user", [{"type": "image", "source": {}}]), "messages.0.content.0.type"),
        (one("user", [{"type": "text"}]), "messages.0.content.0.text"),
        (one("user", [{"type": "tool_result", "tool_use_id": "x"}]), "messages.0.content.0.tool_use_id"),
        (one("user", [{"type": "tool_result", "tool_use_id": []}]), "messages.0.content.0.tool_use_id"),
        (one("user", {}), "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages.1"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"type": "bash_20250124", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"seed": "x"}, "seed"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(changes, field):
    assert f"'{field}'" in refused(World(), **changes)


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "text", "content", "role", "input", "id", "name", "source"]), inner, max_size=4
            )
        ),
        max_leaves=8,
    ),
    st.sampled_from(["messages", "system", "tools", "tool_choice", "thinking", "output_config", "metadata"]),
)
def test_no_body_ends_in_a_bug(value, field):
    assert post(World(), **{field: value}).status_code in (200, 400)


# ---- how a message ends ----


HEL, WHOLE = TextDelta("Hel"), ToolCallDelta(0, "a", "get_weather", "{}", closed=True)


@pytest.mark.parametrize(
    ("piece", "end", "expected"),
    [
        (HEL, Completed("stop", USAGE, DONE.timing), ("end_turn", None)),
        (HEL, Completed("stop", USAGE, DONE.timing, stop="END"), ("stop_sequence", "END")),
        (HEL, Completed("length", Usage(9, 0, 64), DONE.timing), ("max_tokens", None)),
        (HEL, Completed("length", Usage(9, 0, 63), DONE.timing), ("model_context_window_exceeded", None)),
        (HEL, Completed("tool_calls", Usage(9, 0, 64), DONE.timing, stop="</tool_call>"), ("tool_use", None)),
        pytest.param(WHOLE, Completed("stop", USAGE, DONE.timing), ("tool_use", None), id="a forced call"),
    ],
)
def test_why_a_message_has_ended(piece, end, expected):
    for stream in (False, True):
        answer = post(World(FakeBackend(((piece,), (end,)))), stream=stream, tools=[TOOL])
        told = next(event for event in read(answer.content) if event["type"] == "message_delta") if stream else None
        why = told["delta"] if told else answer.json()
        assert (why["stop_reason"], why["stop_sequence"]) == expected


def test_a_call_that_was_cut_is_no_part_of_a_whole_message():
    cut = ((ToolCallDelta(0, "a", "get_weather", '{"ci'),), (Completed("length", USAGE, DONE.timing),))
    assert post(World(FakeBackend(cut)), tools=[TOOL]).json()["content"] == []


NUMBER = "2" * 30  # beyond 64 bits


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (NUMBER, NUMBER),
        ("-1e5", "-1e5"),
        ("1e999", '"1e999"'),
        ("2" * 400, f'"{"2" * 400}"'),
        (r'"\ud83d"', r'"\ufffd"'),
        ('{"b": ' * 1100 + "1" + "}" * 1100, None),
    ],
)
def test_a_call_is_the_same_in_all_apis_whole_and_streamed(written, told):
    """Also one that no parser of JSON could hold as the model has written it: no answer fails, and none is kept that
    does."""
    parser = CallTracker(ToolFormat.HERMES, frozenset({"f"}), True, lambda index: f"call_{index}")
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {written}}}}}</tool_call>'
    pieces = (*parser.feed(text), *parser.finish(), Completed("tool_calls", USAGE, DONE.timing))
    world = World(FakeBackend([[piece] for piece in pieces]))
    function = {"name": "f", "parameters": {"type": "object"}}
    hi = [{"role": "user", "content": "hi"}]
    messages = {"max_tokens": 64, "messages": hi, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    chat = {"messages": hi, "tools": [{"type": "function", "function": function}]}
    response = {"input": "hi", "tools": [{"type": "function", **function}]}

    def asked(path, fields):
        answer = world.call("POST", path, json={"model": "pocket", "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer

    events = read(asked(PATH, {**messages, "stream": True}).content)
    streamed = [event["delta"] for event in events if event["type"].endswith("_delta")]
    arguments = "".join(delta.get("partial_json", "") for delta in streamed)
    if told is not None:
        assert arguments == f'{{"a": {told}}}'
    orjson.loads(arguments)  # refuses what other parsers refuse
    for _ in range(2):  # also from the cache
        whole = asked(PATH, messages).content
        assert f'"input":{arguments}'.encode() in whole
        orjson.loads(whole)
    (call,) = asked("/v1/chat/completions", chat).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    lines = asked("/v1/chat/completions", {**chat, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == arguments
    items = asked("/v1/responses", response).json()["output"]
    assert [item["arguments"] for item in items] == [arguments]


def test_integers_of_a_call_come_back_exactly():
    given = {"n": int(NUMBER), "m": 2**63, "deep": [-(10**40), 1.5, "é"]}
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": given}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [use]}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    messages = [*history, {"role": "user", "content": [result]}]
    (call,) = prompted(World(), messages=messages, tools=[TOOL]).messages[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == given


TEXT = st.text(max_size=6)
PIECES = st.lists(
    st.builds(TextDelta, TEXT) | st.builds(ReasoningDelta, TEXT) | st.just("call") | st.just("cut"), max_size=8
)


@given(PIECES, st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_reply_streams_to_the_message_that_is_sent_whole(pieces, reason):
    """Blocks begin and end one after the other, and the official client's reading of them is the whole message."""
    made, calls = [], 0
    for piece in pieces:
        if isinstance(piece, str):
            made.append(ToolCallDelta(calls, f"call_{calls}", "f", '{"a":'))
            made.append(ToolCallDelta(calls, arguments="1}", closed=piece == "call"))
            calls += 1
        else:
            made.append(piece)
    made.append(Completed(reason, USAGE, DONE.timing))
    encoder = AnthropicEncoder("msg_1", "m", 64)
    found = read(encoder.opening() + encoder.encode(made))
    opened = None
    content = []
    for event in found[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert (opened, event["index"]) == (None, len(content))
            opened = event["index"]
            content.append(dict(event["content_block"]))
        elif kind == "content_block_stop":
            assert event["index"] == opened
            opened = None
        else:
            assert (kind, event["index"]) == ("content_block_delta", opened)
            delta = dict(event["delta"])
            delta.pop("type")
            for name, value in delta.items():
                content[-1][name] = content[-1].get(name, "") + value
    assert opened is None
    built = AnswerBuilder()
    built.add(made)
    whole = json.loads(orjson.dumps(message_object("msg_1", "m", built.answer(), 64)))
    Message.model_validate(whole)
    joined = {
        kind: "".join(block.get(field, "") for block in content if block["type"] == kind)
        for kind, field in (("text", "text"), ("thinking", "thinking"))
    }
    assert joined == {"text": built.answer().text or "", "thinking": built.answer().reasoning}
    calls = {block["id"]: block["input"] for block in whole["content"] if block["type"] == "tool_use"}
    closed = [block for block in content if block.get("id") in calls]
    assert [json.loads(block["partial_json"]) for block in closed] == list(calls.values())
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert found[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_that_say_nothing_are_refused(path):
    body = {"model": "pocket", "messages": [{"role": "user", "content": []}], "max_tokens": 5}
    answer = World().call("POST", path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert World().call("POST", path, json={**body, "system": "Be brief."}).status_code == 200
