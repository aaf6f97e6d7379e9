"""Constrained replies from the shipped model, over HTTP, as OpenAI's client asks for them and reads them."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from service_backend import engine_served

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("get_weather", "get_forecast")
]
NAMED: Any = {"type": "function", "function": {"name": "get_forecast"}}


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    sure: bool
    word: str = pydantic.Field(max_length=8)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with engine_served() as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def claude(client: openai.OpenAI) -> Iterator[anthropic.Anthropic]:
    address = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as claude:
        yield claude


def arguments_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def is_right(arguments: dict[str, Any]) -> bool:
    return set(arguments) == {"city", "days"} and arguments["days"] in (1, 7) and len(arguments["city"]) <= 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_once(client: openai.OpenAI, stream: bool) -> None:
    fields: Any = {"model": "pocket", "messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "seed": int(stream)}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            (choice,) = events.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**fields).choices
    ((name, arguments),) = arguments_of(choice.message)
    assert name == "get_forecast"
    assert is_right(arguments)
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_call_ends_a_reply_whose_text_a_stop_has_ended(
    client: openai.OpenAI, claude: anthropic.Anthropic, stream: bool
) -> None:
    """In every API: the shipped model writes `</tool_call>` behind a call."""
    fields: Any = {"model": "pocket", "tools": TOOLS, "tool_choice": NAMED, "extra_body": {"stop": ["</tool_call>"]}}
    with client.chat.completions.stream(messages=MESSAGES, **fields) as chunks:
        chat = chunks.get_final_completion()
    assert chat.choices[0].finish_reason == "tool_calls"
    tools: Any = [{"name": "get_forecast", "input_schema": PARAMETERS}]
    ask: Any = {"model": "pocket", "messages": MESSAGES, "tools": tools, "max_tokens": 100}
    ask |= {"tool_choice": {"type": "any"}, "stop_sequences": ["</tool_call>"]}
    if stream:
        with claude.messages.stream(**ask) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**ask)
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert [block.type for block in message.content] == ["tool_use"]
    flat: Any = [{"type": "function", "name": "get_forecast", "parameters": PARAMETERS}]
    response = client.responses.create(
        model="pocket", input="Forecast?", tools=flat, tool_choice="required", extra_body={"stop": ["</tool_call>"]}
    )
    assert (response.status, response.output[-1].status) == ("completed", "completed")


def test_anthropics_client_tools_are_called(claude: anthropic.Anthropic) -> None:
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    ask: Any = {"model": "pocket", "max_tokens": 400, "tools": tools, "messages": MESSAGES}
    for tool in tools:
        message = claude.messages.create(**ask, tool_choice={"type": "tool", "name": tool["name"]})
        (call,) = message.content
        assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", tool["name"])
        assert isinstance(call.input, dict)
    assert {"command", "path"} <= call.input.keys()


def test_a_reply_may_be_asked_to_be_longer_than_the_context(client: openai.OpenAI) -> None:
    most = 128_000
    for name in ("max_tokens", "max_completion_tokens"):
        fields: Any = {name: most, "tools": TOOLS, "tool_choice": NAMED}
        (choice,) = client.chat.completions.create(model="pocket", messages=MESSAGES, **fields).choices
        assert choice.finish_reason == "tool_calls"
    response = client.responses.create(model="pocket", input="Hello", max_output_tokens=most)
    assert (response.status, response.max_output_tokens) == ("completed", most)
    text = client.completions.create(model="pocket", prompt="Hello", max_tokens=most, stop=["."], stream=True)
    next(iter(text))
    text.close()  # the model, which was not asked in its own form, may go on to the end of its context


def test_a_turn_without_calls_goes_on_from_the_cells_of_the_conversation(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    """In every API, and in a compaction: the tools stay in the prompt, and the model that would call one does not."""
    system = "Look it up with a tool. " * 30

    def asked(tools: bool, again: bool) -> Any:
        choice = "auto" if tools else "none"
        messages: Any = [{"role": "system", "content": system}, *MESSAGES]
        if again:
            messages += [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And in Rome?"}]
        return {"model": "pocket", "messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 0}

    first = client.chat.completions.create(**asked(True, False), max_tokens=40)
    assert first.choices[0].message.tool_calls, "the model would call"
    assert first.usage is not None
    for stream in (False, True):
        fields: Any = {"max_tokens": 40 + stream, "stream_options": {"include_usage": True}}
        with client.chat.completions.stream(**asked(False, False), **fields) as chunks:
            again = chunks.get_final_completion()
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
        assert (again.choices[0].message.tool_calls or []) == []
        assert "<tool_call>" not in (again.choices[0].message.content or "")
        assert again.choices[0].finish_reason in ("stop", "length")

    flat: Any = [{"type": "function", "strict": True, **each["function"]} for each in TOOLS]
    fields = {"model": "pocket", "instructions": system, "tools": flat, "temperature": 0, "max_output_tokens": 40}
    response = client.responses.create(input="Weather in Bergen?", **fields)
    assert response.usage is not None
    for more in ({"tool_choice": "none", "input": "And in Rome?"}, {"input": [{"type": "compaction_trigger"}]}):
        after: Any = client.responses.create(**fields | more, previous_response_id=response.id)
        assert after.usage.input_tokens_details.cached_tokens >= response.usage.input_tokens - 1
        assert all(item.type in ("message", "compaction") for item in after.output)

    given: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    said: Any = {"model": "pocket", "system": system, "messages": MESSAGES, "tools": given}
    said["extra_body"] = {"temperature": 0}
    begun = claude.messages.create(**said, max_tokens=40, tool_choice={"type": "auto"})
    held = claude.messages.create(**said, max_tokens=40, tool_choice={"type": "none"})
    assert (begun.usage.cache_read_input_tokens or 0) + begun.usage.input_tokens > 100
    assert held.usage.input_tokens == 1
    assert [block.type for block in held.content] == ["text"]


def test_a_model_of_the_answer_is_parsed(client: openai.OpenAI) -> None:
    """The client sends the class as a strict schema and makes the reply an object of it."""
    for temperature in (0.0, 1.0):
        reply = client.chat.completions.parse(
            model="pocket", messages=MESSAGES, response_format=Answer, temperature=temperature
        )
        assert isinstance(reply.choices[0].message.parsed, Answer)


def test_any_json_object(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="pocket", messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=60
    ).choices
    text = choice.message.content
    assert text is not None
    assert text.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


NO_SCHEMA = {"name": "a", "strict": True, "schema": {"type": "x"}}
NO_FUNCTION = {"name": "f", "strict": True, "parameters": {"not": {}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_schema", "json_schema": NO_SCHEMA}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": NO_FUNCTION}]}, "tools.0.function.parameters"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_names_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="pocket", messages=MESSAGES, stream=stream, **fields)
    assert refused.value.param == param


def test_anthropics_client_asks_for_the_same(claude: anthropic.Anthropic) -> None:
    """Of the model that is served: a forced call, its result, and an answer of a schema."""
    tools: Any = [{"name": tool["function"]["name"], "input_schema": PARAMETERS, "strict": True} for tool in TOOLS]
    options: Any = {"model": "pocket", "max_tokens": 200, "extra_body": {"temperature": 0}, "tools": tools}
    named: Any = {"type": "tool", "name": "get_forecast", "disable_parallel_tool_use": True}
    with claude.messages.stream(messages=MESSAGES, tool_choice=named, **options) as stream:
        reply = stream.get_final_message()
    (call,) = reply.content
    assert (call.type, reply.stop_reason) == ("tool_use", "tool_use")
    assert (call.name, is_right(call.input)) == ("get_forecast", True)  # type: ignore[union-attr,arg-type]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}  # type: ignore[union-attr]
    history: Any = [*MESSAGES, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    wanted: Any = {"format": {"type": "json_schema", "schema": Answer.model_json_schema()}}
    said = claude.messages.create(messages=history, output_config=wanted, **{**options, "tools": []})
    (text,) = (block for block in said.content if block.type == "text")
    Answer.model_validate_json(text.text)
    counted = claude.messages.count_tokens(model="pocket", messages=history)
    assert counted.input_tokens > 0
