"""`/v1/responses` as clients see it: the official package, the Open Responses cases, and what is kept between turns."""

import itertools
import json
from typing import get_args, get_type_hints

import open_responses
import openai
import pytest
from fake_backend import CALL, DONE, HELLO, USAGE, FakeBackend, World, bearer, keyed
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent
from pydantic import TypeAdapter
from redis_server import key_file, shared_records, shared_server

from holdfast.replicas.errors import ContextLengthError, ErrorInfo, ErrorKind
from holdfast.replicas.requests import Completed, Errored, LogprobText, ReasoningDelta, TextDelta, ToolCallDelta
from holdfast.router.config import RouterConfig
from holdfast.router.protocol.body import validate
from holdfast.router.protocol.responses import ITEM_TYPES, ResponseEncoder, ResponsesBody, response_object

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
THOUGHT = ((ReasoningDelta("Let me "), ReasoningDelta("see.")), *HELLO)
PARALLEL = (
    (TextDelta("Both."), ToolCallDelta(0, "call_1", "get_weather", "{}", closed=True)),
    (ToolCallDelta(1, "call_2", "get_weather"), ToolCallDelta(1, arguments="{}", closed=True)),
    (Completed("tool_calls", USAGE, DONE.timing),),
)
LOST = Errored(ErrorInfo(ErrorKind.INTERNAL, "lost"))
CUT = ((TextDelta("Hel"),), (Completed("length", USAGE, DONE.timing),))
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
STREAM_EVENT = TypeAdapter(ResponseStreamEvent)  # as the official package reads it


def post(world, **body):
    return world.call("POST", PATH, json={"model": "pocket", "input": "hello", **body})


def events(text):
    """The data of each event, after a look at the form of all: names, numbers, one end."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] in TERMINAL for event in found] == [False] * (len(found) - 1) + [True]
    for event in found:
        open_responses.check_event(event)
        STREAM_EVENT.validate_python(event)
    return found


def conforms(response):
    """It has what the specification requires, and is what the official package reads."""
    open_responses.check(open_responses.RESPONSE, response)
    Response.model_validate(response, strict=True)


def whole(world, **body):
    answer = post(world, **body)
    assert answer.status_code == 200, answer.text
    conforms(answer.json())
    return answer.json()


def streamed(world, **body):
    found = events(post(world, stream=True, **body).text)
    conforms(found[-1]["response"])
    return found


# The cases of the Open Responses specification, in our words: what is sent, and what must come back.


def said(*pairs):
    return {"input": [{"type": "message", "role": role, "content": text} for role, text in pairs]}


@pytest.mark.parametrize(
    ("body", "roles"),
    [
        (said(("user", "Say hello in exactly 3 words.")), ["user"]),
        (said(("system", "You are a pirate."), ("user", "Say hello.")), ["system", "user"]),
        (said(("user", "I am Alice."), ("assistant", "Hello Alice!"), ("user", "Who?")), ["user", "assistant", "user"]),
    ],
)
def test_case_texts(body, roles):
    world = World()
    response = whole(world, **body)
    assert (response["status"], response["output"][0]["content"][0]["text"]) == ("completed", "Hello!")
    assert [message["role"] for message in world.backend.requests[0].prompt.messages] == roles


def test_case_a_streamed_text():
    found = streamed(World(), **said(("user", "Count from 1 to 5.")))
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == [*begins, *["output_text.delta"] * 3, *ends]
    assert "".join(event["delta"] for event in found if "delta" in event) == "Hello!"
    assert found[-1]["response"]["output"] == [found[-2]["item"]]


def test_a_call_is_done_while_the_reply_goes_on():
    """Its client can run it before the next call has begun."""
    encoder = ResponseEncoder({}, "1")
    *_, done, item, _ = encoder.encode(PARALLEL[0]).decode().split("\n\n")
    assert done.startswith("event: response.function_call_arguments.done\n")
    assert item.startswith("event: response.output_item.done\n")


def test_case_phases_of_an_assistant():
    world = World()
    phases = [("commentary", "I should say it."), ("final_answer", "It is four.")]
    items = [{"type": "message", "role": "assistant", "phase": phase, "content": text} for phase, text in phases]
    made = whole(world, input=[*items, {"type": "message", "role": "user", "content": "Repeat."}])
    listed = world.call("GET", f"{PATH}/{made['id']}/input_items?order=asc").json()["data"]
    assert [item.get("phase") for item in listed] == ["commentary", "final_answer", None]


# The official package.


@pytest.fixture
def world():
    return World()


@pytest.fixture
def client(world):
    with world.served() as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_creates_reads_lists_and_deletes(world, client):
    made = client.responses.create(model="pocket", input="hello", instructions="Be kind.", metadata={"a": "b"})
    assert made.output_text == "Hello!"
    assert (made.usage.total_tokens, made.usage.input_tokens_details.cached_tokens) == (13, 4)
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    [item] = client.responses.input_items.list(made.id)
    assert (item.role, item.content[0].text) == ("user", "hello")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as missing:
            gone(made.id)
        assert missing.value.code == "response_not_found"
    assert world.backend.requests[0].prompt.messages[0] == {"role": "system", "content": "Be kind."}


def test_openai_streams_a_tool_loop(world, client):
    world.backend.script = PARALLEL
    with client.responses.stream(model="pocket", input="weather?", tools=[TOOL]) as stream:
        first = stream.get_final_response()
    text, *calls = first.output
    assert text.content[0].text == "Both."
    assert [call.call_id for call in calls] == ["call_1", "call_2"]
    world.backend.script = HELLO
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"} for call in calls]
    second = client.responses.create(model="pocket", input=outputs, previous_response_id=first.id, tools=[TOOL])
    stateless = client.responses.create(
        model="pocket", input=[{"role": "user", "content": "weather?"}, *first.output, *outputs], tools=[TOOL]
    )
    assert second.output_text == stateless.output_text == "Hello!"
    one, two = world.backend.requests[0], world.backend.requests[1]
    assert [message["role"] for message in two.prompt.messages] == ["user", "assistant", "tool", "tool"]
    assert len(two.prompt.messages[1]["tool_calls"]) == 2
    assert two.program_id == one.program_id, "the response before names the program"
    assert len(world.backend.requests) == 2, "the stateless form is the same prompt: a repeat"


def test_openai_parses_a_form(world, client):
    world.backend.script = ((TextDelta('{"a": 1}'),), (DONE,))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "form", "schema": schema, "strict": True}
    made = client.responses.create(model="pocket", input="a?", text={"format": form})
    assert json.loads(made.output_text) == {"a": 1}
    output = world.backend.requests[0].prompt.output
    assert (output.schema, output.strict) == (schema, True)
    assert made.text.format.name == "form"


def test_openai_compacts(world, client):
    first = client.responses.create(model="pocket", input="remember 7")
    world.backend.script = ((TextDelta("It is 7."),), (DONE,))
    compacted = client.responses.compact(model="pocket", previous_response_id=first.id, input="go on")
    *users, summary = [item.model_dump(exclude_none=True) for item in compacted.output]
    assert [item["content"][0]["text"] for item in users] == ["remember 7", "go on"]
    assert (summary["type"], compacted.object) == ("compaction", "response.compaction")
    assert world.backend.requests[-1].prompt.tool_choice == "none"
    client.responses.create(model="pocket", input=[*users, summary, {"role": "user", "content": "which?"}])
    texts = [message["content"] for message in world.backend.requests[-1].prompt.messages]
    assert texts[:2] == ["remember 7", "go on"]
    assert texts[2].endswith("It is 7.")


# What a response is made of.


@pytest.mark.parametrize("script", [HELLO, CALL, THOUGHT, PARALLEL, CUT])
@pytest.mark.parametrize("options", [{}, {"include": ["reasoning.encrypted_content"]}])
def test_a_stream_adds_up_to_what_is_stored(script, options):
    world = World(FakeBackend(script))
    last = streamed(world, tools=[TOOL], **options)[-1]["response"]
    assert world.call("GET", f"{PATH}/{last['id']}").json() == last
    again = whole(world, tools=[TOOL], **options)  # from the cache
    assert len(world.backend.requests) == 1
    own = ("id", "call_id", "encrypted_content")  # of each answer
    strip = [[{k: v for k, v in item.items() if k not in own} for item in each["output"]] for each in (last, again)]
    assert strip[0] == strip[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_response_is_incomplete(stream):
    world = World(FakeBackend(CUT))
    last = streamed(world, max_output_tokens=1)[-1] if stream else None
    assert last is None or last["type"] == "response.incomplete"
    response = last["response"] if last else whole(world, max_output_tokens=1)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert world.backend.requests[0].sampling.max_tokens == 1


def test_thoughts_come_back_open_or_concealed():
    world = World(FakeBackend(THOUGHT))
    open_, told = whole(world)["output"], whole(world, include=["reasoning.encrypted_content"], store=False)["output"]
    assert open_[0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert "encrypted_content" not in open_[0]
    concealed = {name: value for name, value in told[0].items() if name != "content"}
    for thoughts in (open_[0], concealed, {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}):
        items = [{"role": "user", "content": "hello"}, thoughts, open_[1], {"role": "user", "content": "so?"}]
        whole(world, input=items, seed=1)
    answers = [request.prompt.messages[1].get("reasoning_content") for request in world.backend.requests[1:]]
    assert answers == ["Let me see.", None], "the concealed one is the same prompt, a foreign one is left out"


def test_logprobs_where_they_are_asked_for():
    token = LogprobText("Hi", b"Hi", -0.5)
    world = World(FakeBackend(((TextDelta("Hi", (token,)),), (DONE,))))
    response = whole(world, include=["message.output_text.logprobs"])
    assert response["output"][0]["content"][0]["logprobs"][0]["logprob"] == -0.5
    assert world.backend.requests[0].sampling.logprobs == 0
    assert streamed(world, top_logprobs=2)[4]["logprobs"][0]["token"] == "Hi"


def test_an_empty_reply_has_an_empty_message():
    found = streamed(World(FakeBackend(((DONE,),))))
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_tools_that_are_no_functions_are_skipped_and_told():
    world = World()
    tools = [{"type": "web_search"}, TOOL, {"type": "custom", "name": "patch"}, {"type": "namespace", "name": "n"}]
    answer = post(world, tools=tools)
    assert answer.headers["x-holdfast-skipped"] == "web_search, namespace", "one without tools is none"
    assert [tool["type"] for tool in answer.json()["tools"]] == [tool["type"] for tool in tools]
    assert [tool["function"]["name"] for tool in world.backend.requests[0].prompt.tools] == ["get_weather", "patch"]
    refused = post(world, tools=tools, tool_choice={"type": "web_search"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice.type")
    some = [{"type": "web_search"}, {"type": "function", "name": "get_weather"}]
    chosen = post(world, tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": some})
    assert chosen.status_code == 200, "it can live with the functions among them"
    assert world.backend.requests[-1].prompt.allowed_tools == ("get_weather",)
    nothing = {"type": "allowed_tools", "mode": "auto", "tools": some[:1]}
    assert post(world, tools=tools, tool_choice=nothing).status_code == 400
    bad = post(world, tools=[{"type": "web_search"}, {**TOOL, "name": "a b"}])
    assert bad.json()["error"]["param"] == "tools.1.name"


def test_fields_nobody_knows_further_in_are_told_and_counted():
    world = World()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x", "mood": 1}], "an odd one": 1, "status": "x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t", "of": 1}], "deep": 1},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc", "namespace": "n"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o", "x": 1}]},
        {"type": "something_new", "any": 1},
    ]
    body = {
        "input": items,
        "tools": [{**TOOL, "defer_loading": True}, {"type": "web_search", "user_location": {}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "title": "t"}},
        "reasoning": {"effort": "low", "depth": 1},
    }
    answer = post(world, **body)
    assert answer.headers["x-holdfast-skipped"] == (
        "web_search, something_new, input.content.mood, input.content.of, input.deep, input.output.x, input.unknown, "
        "reasoning.depth, text.format.title, tools.defer_loading"
    )
    labels = {"tenant": "default", "endpoint": "responses"}
    assert world.registry.get_sample_value("holdfast_request_fields_skipped_total", labels) == 10
    listed = world.call("GET", f"{PATH}/{answer.json()['id']}/input_items?order=asc").json()["data"]
    assert listed[1]["deep"] == 1, "they are kept"
    messages = world.backend.requests[0].prompt.messages
    assert messages[0] == {"role": "user", "content": "x"}, "and not shown to the model"
    again = post(world, input="next", previous_response_id=answer.json()["id"])
    assert again.headers["x-holdfast-skipped"] == "something_new", "of earlier turns only what the prompt lacks is told"


def test_what_was_skipped_is_told_in_words_only():
    world = World()
    tools = [{"type": "a\r\nset-cookie: b"}, {"type": ["list"]}, {}, {"type": "ä" * 100}]
    items = [{"role": "user", "content": "x"}, {"type": "x\n"}, {"any": "thing"}]
    assert post(world, input=items, tools=tools).headers["x-holdfast-skipped"] == "unknown"
    many = post(world, tools=[{"type": f"t{n}"} for n in range(100)])
    assert len(many.headers["x-holdfast-skipped"].split(", ")) == 32


ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}], "status": "completed"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": None}},
    {"type": "something_new", "any": [1, {"thing": None}]},
]


def test_every_kind_of_item_survives_the_round_trip():
    world = World()
    made = post(world, input=ITEMS)
    assert made.headers["x-holdfast-skipped"] == "web_search_call, something_new"
    listed = world.call("GET", f"{PATH}/{made.json()['id']}/input_items?order=asc").json()["data"]
    for item, sent in zip(listed, ITEMS, strict=True):
        without_nulls = {name: value for name, value in sent.items() if value is not None}
        assert {name: value for name, value in item.items() if name in sent} == without_nulls
    assert len({item["id"] for item in listed}) == len(ITEMS)
    messages = world.backend.requests[0].prompt.messages
    assert [message["role"] for message in messages] == ["system", "assistant", "tool", "assistant", "tool"]
    assert (messages[1]["reasoning_content"], messages[2]["content"]) == ("t", "o")
    assert messages[3]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input":"x"}'}


def official_kinds():
    """The types of items that the official package may send."""
    found = set()
    for item in get_args(ResponseInputItemParam):
        for kind in get_args(get_type_hints(item)["type"]):  # Literal, or one that may be None
            found |= set(get_args(kind) or (kind,))
    return {kind for kind in found if isinstance(kind, str)}


def test_every_kind_that_the_official_package_knows_is_kept():
    """Those that a model is shown are among the items above, or have a test of their own."""
    own = {"compaction", "compaction_trigger", "item_reference"}
    assert official_kinds() & ITEM_TYPES.keys() == {item["type"] for item in ITEMS} & ITEM_TYPES.keys() | own
    others = sorted(official_kinds() - ITEM_TYPES.keys())
    items = [{"type": kind, "id": f"x_{n}", "any": [{"thing": n}]} for n, kind in enumerate(others)]
    world = World()
    made = post(world, input=[*items, {"role": "user", "content": "go on"}])
    assert made.headers["x-holdfast-skipped"].split(", ") == others
    listed = world.call("GET", f"{PATH}/{made.json()['id']}/input_items?order=asc&limit=100").json()["data"]
    assert listed[:-1] == items
    again = post(world, input="more", previous_response_id=made.json()["id"])
    assert again.headers["x-holdfast-skipped"].split(", ") == others
    assert [message["content"] for message in world.backend.requests[-1].prompt.messages] == ["go on", "Hello!", "more"]


def test_a_compacted_conversation_goes_on_as_codex_sends_it():
    """A compaction in `input` beside items that are kept, built-in tools, nulls at the top, then a chain of it all."""
    world = World(FakeBackend(((TextDelta("It is 7."),), (DONE,))))
    tools = [TOOL, {"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "apply_patch"}]
    nulls = dict.fromkeys(("instructions", "previous_response_id", "prompt_cache_key", "text", "reasoning", "include"))
    history = [
        {"role": "user", "content": "remember 7"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}, "status": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    unnamed = world.call("POST", f"{PATH}/compact", json={"input": history})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    asked = {"model": "pocket", "input": history, "tools": tools, **nulls}
    compacted = world.call("POST", f"{PATH}/compact", json=asked)
    assert compacted.status_code == 200, compacted.text
    assert "local_shell_call" in compacted.headers["x-holdfast-skipped"]
    open_responses.check(open_responses.COMPACTION, compacted.json())
    kept, summary = compacted.json()["output"]
    assert (kept["content"][0]["text"], summary["type"]) == ("remember 7", "compaction")

    again = {"role": "user", "content": "which?"}
    first = post(world, input=[kept, summary, again], tools=tools, store=True, **nulls)
    assert first.status_code == 200, first.text
    messages = world.backend.requests[-1].prompt.messages
    assert [message["role"] for message in messages] == ["user", "user", "user"]
    assert messages[1]["content"].endswith("It is 7.")
    listed = world.call("GET", f"{PATH}/{first.json()['id']}/input_items?order=asc").json()["data"]
    assert listed[1] == summary
    assert listed[0] == kept

    reply = first.json()["output"][0]["id"]
    named = [{"type": "item_reference", "id": reply}, {"id": listed[2]["id"]}, {"role": "user", "content": "sure?"}]
    second = post(world, input=named, previous_response_id=first.json()["id"], tools=tools)
    assert second.status_code == 200, second.text
    before, after = messages, world.backend.requests[-1].prompt.messages
    assert after[: len(before)] == before
    assert [message["content"] for message in after[len(before) :]] == ["It is 7.", "It is 7.", "which?", "sure?"]

    chained = {"model": "pocket", "input": None, "previous_response_id": second.json()["id"]}
    again_compacted = world.call("POST", f"{PATH}/compact", json=chained).json()["output"]
    assert [item["type"] for item in again_compacted][-1] == "compaction"
    assert all(item["type"] != "compaction" for item in again_compacted[:-1]), "one summary, of all before it"


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_compaction_is_asked_for_in_the_input_too(stream, store):
    """As Codex CLI asks for it since 2026: the last item of a usual request is a trigger."""
    world = World(FakeBackend(((ReasoningDelta("Hm."), TextDelta("It is")), (TextDelta(" 7."), DONE))))
    said = [{"role": "user", "content": "remember 7"}, {"role": "assistant", "content": "Yes."}]
    asked = {"input": [*said, {"type": "compaction_trigger"}], "tools": [TOOL], "store": store, "stream": stream}
    answer = post(world, **asked)
    assert "x-holdfast-skipped" not in answer.headers
    if stream:
        told = events(answer.text)
        kinds = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
        assert [event["type"] for event in told] == [f"response.{kind}" for kind in kinds]
    response = told[-1]["response"] if stream else answer.json()
    conforms(response)
    [summary] = response["output"]
    assert summary["type"] == "compaction"
    prompt = world.backend.requests[-1].prompt
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user"]
    assert (prompt.tool_choice, len(prompt.tools)) == ("none", 1), "the conversation's prompt, as far as it goes"

    more = {"role": "user", "content": "which?"}
    if store:
        whole(world, input=[more], previous_response_id=response["id"])
    else:
        whole(world, input=[said[0], summary, more])
    texts = [message["content"] for message in world.backend.requests[-1].prompt.messages]
    assert (texts[0], texts[2]) == ("remember 7", "which?")
    assert texts[1].endswith("It is 7.")

    refused = post(world, input=[{"type": "compaction_trigger"}, more])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.0")


def test_pages_of_input_items():
    world = World()
    made = whole(world, input=[{"role": "user", "content": str(n)} for n in range(5)])
    path = f"{PATH}/{made['id']}/input_items"
    first = world.call("GET", f"{path}?limit=2").json()
    assert ([item["content"][0]["text"] for item in first["data"]], first["has_more"]) == (["4", "3"], True)
    rest = world.call("GET", f"{path}?after={first['last_id']}").json()
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (["2", "1", "0"], False)
    for query in ("limit=0", "limit=x", "order=up", "after=nobody"):
        answer = world.call("GET", f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])


def test_a_reference_to_an_item_of_the_chain():
    world = World(FakeBackend(CALL))
    made = whole(world, tools=[TOOL])
    items = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    assert post(world, input=items).json()["error"]["param"] == "input.0.id"
    assert post(world, input=items, previous_response_id=made["id"]).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": ["list"]}]}, "input.0.type"),
        ({"input": [{"type": "new", "id": {}}]}, "input.0.id"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"temprature": 1}, "temprature"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_what_is_wrong_is_named(body, field):
    answer = post(World(), **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_truncation_drops_the_oldest_exchanges():
    class Narrow(FakeBackend):
        """A prompt has a thousand tokens a message, and more than it holds is refused as an engine does."""

        async def tokenize(self, prompt, scope):
            if len(prompt.messages) > 4:
                raise ContextLengthError("too long", "messages")
            return [0] * (1000 * len(prompt.messages))

    items = said(*[("user", str(n)) if n % 2 == 0 else ("assistant", str(n)) for n in range(7)])["input"]
    world = World(Narrow())
    whole(world, input=items, instructions="Be kind.", truncation="auto")
    texts = [message["content"] for message in world.backend.requests[0].prompt.messages]
    assert texts == ["Be kind.", "4", "5", "6"]


# Exactly one end, whatever happens.

WORDS = st.text(max_size=6)
PIECE = st.builds(TextDelta, WORDS) | st.builds(ReasoningDelta, WORDS) | st.sampled_from(["call", "cut"])
ENDS = (*(Completed(reason, USAGE, DONE.timing) for reason in ("stop", "length", "tool_calls")), LOST)


@settings(max_examples=30)
@given(st.lists(PIECE, max_size=7), st.sampled_from(ENDS))
def test_any_reply_streams_to_the_response_that_is_sent_whole(pieces, end):
    """Items begin and end one after the other, are what their deltas make, and only a call that closed is complete."""
    made, calls = [], []
    for piece in pieces:
        if isinstance(piece, str):
            calls.append("completed" if piece == "call" else "incomplete")
            made.append(ToolCallDelta(len(calls), f"call_{len(calls)}", "f", '{"a":'))
            made.append(ToolCallDelta(len(calls), arguments="1}", closed=piece == "call"))
        else:
            made.append(piece)
    body = validate(ResponsesBody, {"model": "m", "input": "x"})
    encoder, other = (ResponseEncoder(response_object(body, "resp_1", 0), "1") for _ in range(2))
    found = events((encoder.opening() + b"".join([encoder.encode([piece]) for piece in (*made, end)])).decode())
    opened, deltas, done = None, {}, []
    for event in found[2:-1]:
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert (opened, index) == (None, len(done))
            opened = event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            assert (opened, index) == (event["item"]["id"], len(done))
            done.append(event["item"])
            opened = None
        else:
            assert (opened, index) == (event["item_id"], len(done))
            deltas[index] = deltas.get(index, "") + event.get("delta", "")
    last = found[-1]["response"]
    conforms(last)
    assert last["output"] == done
    told = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in done]
    assert told == [deltas[index] for index in range(len(done))]
    if end is LOST:
        return
    assert [item["status"] for item in done if item["type"] == "function_call"] == calls
    whole = json.loads(other.whole((*made, end)))
    assert {**whole, "completed_at": None} == {**last, "completed_at": None}


def test_a_stream_that_fails_ends_with_a_failed_response():
    world = World(FakeBackend([(TextDelta("half"),), (LOST,)]))
    found = streamed(world)
    assert (found[-1]["type"], found[-1]["response"]["status"]) == ("response.failed", "failed")
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert world.call("GET", f"{PATH}/{found[-1]['response']['id']}").status_code == 404


# What is kept.


def test_what_is_not_stored_is_not_found():
    world = World()
    made = whole(world, store=False)
    assert world.call("GET", f"{PATH}/{made['id']}").status_code == 404
    answer = post(world, previous_response_id=made["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert (error["type"], error["code"]) == ("invalid_request_error", "previous_response_not_found")


def test_a_tenant_finds_its_own_responses_only():
    world = World(tenants=keyed("1", "2"))

    def call(key, method, path, **arguments):
        return world.call(method, path, headers=bearer(key), **arguments)

    made = call("1", "POST", PATH, json={"model": "pocket", "input": "x"}).json()
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert call("2", method, f"{PATH}/{made['id']}{path}").status_code == 404
    follow = {"model": "pocket", "input": "y", "previous_response_id": made["id"]}
    assert call("2", "POST", PATH, json=follow).json()["error"]["code"] == "previous_response_not_found"
    assert call("1", "GET", f"{PATH}/{made['id']}").json()["id"] == made["id"]
    assert world.call("GET", f"{PATH}/{made['id']}").status_code == 401


def test_a_continued_chain_lives_on_and_another_ends():
    world = World(config=RouterConfig(response_ttl_s=1000.0))
    idle, first = whole(world), whole(world)

    def left(response):
        with shared_server().client() as redis:
            return redis.pttl(f"{world.records.namespace}/records/responses/default/{response['id']}")

    with shared_server().client() as redis:
        for key in redis.keys(f"{world.records.namespace}/records/responses/*"):
            redis.pexpire(key, 100_000)
    second = whole(world, previous_response_id=first["id"])
    third = whole(world, previous_response_id=second["id"])
    assert [left(each) > 900_000 for each in (idle, first, second, third)] == [False, True, True, True]
    assert world.call("DELETE", f"{PATH}/{first['id']}").status_code == 200
    broken = post(world, previous_response_id=second["id"])
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_response_that_found_no_room_says_that_it_is_not_stored(stream, cached):
    """As it is answered anew, and as it comes from the response cache; one that is stored says so."""
    world = World(FakeBackend(THOUGHT), config=RouterConfig(response_tenant_bytes=3000))
    for said, room in (("hello", True), ("x" * 3000, False)):
        for _ in range(1 + cached):
            last = streamed(world, input=said)[-1]["response"] if stream else whole(world, input=said)
        assert last["store"] is room
        assert world.call("GET", f"{PATH}/{last['id']}").status_code == (200 if room else 404)
        assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
    assert len(world.backend.requests) == 2


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_long_chain_survives_a_restart_of_everything_but_redis(tmp_path, encrypted):
    """Each turn comes to a router that has just begun, with a Redis that has not."""
    config = RouterConfig(cache_key_file=key_file(tmp_path) if encrypted else "")
    first, previous, programs = shared_records(), None, set()
    for n in range(12):
        world = World(records=shared_records(first, key_file=config.cache_key_file))
        previous = whole(world, input=f"word {n}", previous_response_id=previous)["id"]
        (request,) = world.backend.requests
        programs.add(request.program_id)
    with shared_server().client() as redis:
        (value,) = redis.lrange(f"{first.namespace}/records/responses/default/{previous}", 0, -1)
        assert (b"word" in value) is not encrypted
    texts = [message["content"] for message in request.prompt.messages]
    told = itertools.chain.from_iterable((f"word {n}", "Hello!") for n in range(12))
    assert texts == list(told)[:-1]
    assert len(programs) == 1


def test_instructions_are_of_one_response_only():
    world = World()
    first = whole(world, instructions="Be kind.")
    whole(world, previous_response_id=first["id"], instructions="Be brief.")
    texts = [message["content"] for message in world.backend.requests[-1].prompt.messages]
    assert texts == ["Be brief.", "hello", "Hello!", "hello"]


def test_who_names_its_program_keeps_it():
    world = World()
    first = whole(world, program_id="mine")
    whole(world, previous_response_id=first["id"])
    whole(world, previous_response_id=first["id"], program_id="other", seed=1)
    programs = [request.program_id for request in world.backend.requests]
    assert programs == ["default/mine", "default/mine", "default/other"]
