from dataclasses import replace

import pytest

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ModelCard
from holdfast.router.protocol.anthropic import MessagesBody
from holdfast.router.protocol.body import IGNORED, NEUTRAL, decode, validate
from holdfast.router.protocol.chat import ChatBody, chat_turn
from holdfast.router.protocol.completions import CompletionBody, TokenizeBody
from holdfast.router.protocol.responses import ResponsesBody

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refused(body, model=ChatBody):
    with pytest.raises(InvalidRequestError) as error:
        validate(model, body)
    return error.value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1,}', "position 7"),
        (b'{"a":\n nope}', "line 2, column 2"),
        (b"[1]", "JSON object"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'"\\ud800"', "JSON object"),
        (b'{"a": "\\ud83d"', "position 14"),
        (b'{"a": "\\ud83"}', "not valid JSON"),
        (b"[" * 5000, "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object(raw, message):
    with pytest.raises(InvalidRequestError, match=message):
        decode(raw)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb"x\ud83d", "x\ufffd"),
        (rb"\uDE00\uD83D\uDE00\uD83D", "\ufffd\U0001f600\ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
    ],
)
def test_half_a_surrogate_pair_is_replaced(raw, text):
    assert decode(b'{"a": "%b"}' % raw) == {"a": text}


def test_a_field_that_is_nested_too_deeply_is_named():
    deep = b'{"a":' * 251 + b"1" + b"}" * 251
    decode(b'{"a":' * 240 + b"1" + b"}" * 240)
    with pytest.raises(InvalidRequestError) as refused:
        decode(b'{"model": "m", "chat_template_kwargs": %b}' % deep)
    assert refused.value.field == "chat_template_kwargs"


UNARGUED = {"id": "a", "function": {"name": "f"}}


def one(role, **message):
    return {"messages": [{"role": role, **message}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        (one("robot", content="hi"), "messages.0.role"),
        (one("user"), "messages.0.content"),
        (one("user", content=5), "messages.0.content"),
        (one("user", content=None), "messages.0.content"),
        (one(None, content="x"), "messages.0.role"),
        (one("user", content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.type"),
        (one("user", content=[{"type": "text"}]), "messages.0.content.0.text"),
        (one("user", content=[{"type": "text", "text": None}]), "messages.0.content.0.text"),
        (one("user", content=[{"type": "refusal", "refusal": "no"}]), "messages.0.content.0.type"),
        (one("assistant", content=[{"type": "image_url", "image_url": {}}]), "messages.0.content.0.type"),
        (one("tool", content="x"), "messages.0.tool_call_id"),
        (one("assistant", tool_calls=[UNARGUED]), "messages.0.tool_calls.0.function.arguments"),
        (one("assistant", tool_calls=[{"id": "a", "function": None}]), "messages.0.tool_calls.0.function"),
        ({"tools": [{"type": "function", "function": {"nam": "f"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", 1]}, "stop.1"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"program_id": ""}, "program_id"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guided_json": {}}, "guided_json"),
        ({"verbosity": "low"}, "verbosity"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),  # no request brings a template of its own
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}] * 8193}, "messages"),
        (one("user", content=[{"type": "text", "text": "x"}] * 8193), "messages.0.content"),
        ({"tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(1025)]}, "tools"),
    ],
)
def test_the_field_that_is_wrong_is_named_by_its_path(change, field):
    error = refused({**CHAT, **change})
    assert error.field == field
    assert field in error.message


def test_an_unknown_field_is_named_with_its_nearest_relative():
    error = refused({**CHAT, "temprature": 1})
    assert error.message == "Unrecognized request argument supplied: temprature (did you mean 'temperature'?)"
    assert "did you mean" not in refused({**CHAT, "zzz": 1}).message
    assert "'max_output_tokens'" in refused({"model": "m", "max_tokens": 5}, ResponsesBody).message


def test_a_misspelled_required_field_is_reported_as_such():
    assert refused({"modle": "m", "messages": CHAT["messages"]}).field == "modle"


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_fields_that_change_nothing_are_accepted(name):
    assert validate(ChatBody, {**CHAT, name: {"any": "thing"}}) == validate(ChatBody, CHAT)


@pytest.mark.parametrize(
    ("name", "values"), sorted(each for each in NEUTRAL.items() if each[0] not in ChatBody.model_fields)
)
def test_fields_that_are_not_supported_are_accepted_only_where_they_change_nothing(name, values):
    for value in values:
        assert validate(ChatBody, {**CHAT, name: value}) == validate(ChatBody, CHAT)
    error = refused({**CHAT, name: "something else"})
    assert (error.field, name in error.message) == (name, True)


def test_what_is_unknown_inside_a_message_changes_nothing_and_is_told():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    plain = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "tool_calls": [call]}]
    more = {"mood": "?", "an odd name": 1}
    function = {**call["function"], **more}
    written = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], **more},
        {"role": "assistant", "tool_calls": [{**call, "function": function, "provider_specific_fields": {}}]},
    ]
    tools = [{**tool, "cache_control": {}, "function": {**tool["function"], "defer": True}}]
    options = {"include_usage": True, "continuous_usage_stats": True}

    def turn(**body):
        return chat_turn(validate(ChatBody, {**CHAT, "stream": True, **body}), ModelCard("m", 100, 50))

    found = turn(messages=written, tools=tools, stream_options=options)
    same = turn(messages=plain, tools=[tool], stream_options={"include_usage": True})
    assert replace(found, skipped=()) == same
    assert same.skipped == ()
    in_calls = ("function.mood", "function.unknown", "provider_specific_fields")
    in_messages = ("content.cache_control", "mood", *(f"tool_calls.{name}" for name in in_calls), "unknown")
    others = ("stream_options.continuous_usage_stats", "tools.cache_control", "tools.function.defer")
    assert found.skipped == (*(f"messages.{name}" for name in in_messages), *others)


def test_null_counts_as_absent_at_the_top_and_further_in():
    assert validate(ChatBody, {**CHAT, "temperature": None, "n": None, "tools": None}) == validate(ChatBody, CHAT)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]
    foreign = {"name": None, "refusal": None, "audio": None, "function_call": None, "anything": None}
    null_call = {**call, "index": None, "extra": None}
    null_call["function"] = {**call["function"], "parsed_arguments": None, "strict": None}
    written = [{**message, **foreign} for message in conversation]
    for at, part in ((1, {"type": "text", "text": "hi"}), (2, {"type": "refusal", "refusal": "no"})):
        written[at]["content"] = [{**part, "annotations": None, "cache_control": None}]
    written[0]["tool_calls"] = written[1]["tool_call_id"] = written[3]["content"] = None
    written[3]["tool_calls"] = [null_call]
    streamed = {**CHAT, "stream": True, "messages": conversation, "stream_options": {}}
    nulls = {**streamed, "messages": written, "stream_options": {"include_usage": None}}
    assert validate(ChatBody, nulls) == validate(ChatBody, streamed)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_content_that_is_null_is_as_one_that_is_missing(role):
    message = {"role": role, "tool_call_id": "a"} if role == "tool" else {"role": role}
    missing = refused({**CHAT, "messages": [message]})
    assert missing.field == "messages.0.content"
    assert refused({**CHAT, "messages": [{**message, "content": None}]}).message == missing.message


@pytest.mark.parametrize("model", [ChatBody, TokenizeBody])
def test_keywords_of_tools_that_are_null_are_passed_on_to_nobody(model):
    def tools(parameters):
        return {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}

    found = validate(model, tools({"type": "object", "properties": None, "required": None, "default": None}))
    assert found == validate(model, tools({"type": "object", "default": None}))
    assert found.tools[0]["function"]["parameters"] == {"type": "object", "default": None}
    inner = {"properties": {"a": {"enum": [None]}}}
    assert validate(model, tools(inner)).tools[0]["function"]["parameters"] == inner


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"prompt": [-1]}, "prompt.0"),
    ],
)
def test_what_is_wrong_with_the_prompt_of_a_completion_is_named(change, field):
    assert refused({"model": "m", "prompt": "x", **change}, CompletionBody).field == field


def test_a_whole_number_is_an_integer_however_it_is_written():
    whole = {**CHAT, "max_tokens": 5, "n": 2, "temperature": 1}
    assert validate(ChatBody, {**CHAT, "max_tokens": 5.0, "n": 2.0, "temperature": 1.0}) == validate(ChatBody, whole)


SAID = {"role": "user", "content": "hi"}


def parts(kind):
    return {"content": [{"type": kind, "text": "x"}]}


@pytest.mark.parametrize(
    ("model", "change", "most", "field"),
    [
        (MessagesBody, {"messages": [SAID]}, 8192, "messages"),
        (MessagesBody, {"messages": [SAID | parts("text")]}, 8192, "messages.0.content"),
        (MessagesBody, {"tools": [{"name": "f", "input_schema": {}}]}, 1024, "tools"),
        (ResponsesBody, {"input": [SAID]}, 8192, "input"),
        (ResponsesBody, {"input": [SAID | parts("input_text")]}, 8192, "input.0.content"),
        (ResponsesBody, {"tools": [{"type": "function", "name": "f"}]}, 1024, "tools"),
    ],
)
def test_other_formats_have_the_same_bounds(model, change, most, field):
    """So many of whatever stands alone in the list, and no more."""
    (name, value), *_ = change.items()

    def many(n):
        if field.endswith("content"):
            return {name: [{**value[0], "content": value[0]["content"] * n}]}
        return {name: value * n}

    base = {"model": "m", "max_tokens": 9, "messages": [SAID]} if model is MessagesBody else {"model": "m"}
    validate(model, {**base, **many(most)})
    assert refused({**base, **many(most + 1)}, model).field == field
