import pytest

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.protocol.body import validate
from holdfast.router.protocol.chat import check_tools, plain_messages
from holdfast.router.protocol.completions import TokenizeBody

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "call_1"}


def tool(name, **function):
    return {"type": "function", "function": {"name": name, **function}}


def test_our_own_message_comes_back_with_everything_a_client_library_adds():
    returned = {**ASSISTANT, "refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None}
    returned |= {"parsed": {"a": 1}}
    function = {**CALL["function"], "parsed_arguments": {}}
    returned["tool_calls"] = [{**CALL, "function": function, "index": 0}]
    assert plain_messages([USER, returned, RESULT]) == [USER, ASSISTANT, RESULT]


def test_text_parts_are_joined_and_developers_are_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_messages([{"role": "developer", "content": parts}]) == [{"role": "system", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"refusal": "no"}, "no"),
        ({"content": "yes", "refusal": "no"}, "yes"),
        ({"content": "", "refusal": "no"}, ""),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}, "a\nno"),
    ],
)
def test_what_a_model_said_where_it_refused_is_its_content(returned, content):
    body = validate(TokenizeBody, {"messages": [USER, {"role": "assistant", **returned}, USER]})
    assert plain_messages(body.messages)[1] == {"role": "assistant", "content": content}


def test_a_refusal_beside_calls_is_content_too():
    assert plain_messages([{**ASSISTANT, "refusal": "no"}]) == [{**ASSISTANT, "content": "no"}]


@pytest.mark.parametrize("parameters", [{"properties": None}, {"required": None}])
def test_tools_may_leave_keywords_null(parameters):
    check_tools(validate(TokenizeBody, {"tools": [tool("f", parameters=parameters)]}).tools)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([USER, RESULT], "messages.1.tool_call_id"),
        ([RESULT, ASSISTANT], "messages.0.tool_call_id"),
        ([USER, ASSISTANT, {**RESULT, "tool_call_id": "call_2"}], "messages.2.tool_call_id"),
    ],
)
def test_messages_must_fit_together(messages, field):
    with pytest.raises(InvalidRequestError) as refused:
        plain_messages(messages)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([tool("a b")], "tools.0.function.name"),
        ([tool("")], "tools.0.function.name"),
        ([tool("x" * 65)], "tools.0.function.name"),
        ([tool("f\n")], "tools.0.function.name"),
        ([tool("f"), tool("f")], "tools.1.function.name"),
        ([tool("f", parameters={"type": "array"})], "tools.0.function.parameters"),
        ([tool("f", parameters={"properties": ["a"]})], "tools.0.function.parameters.properties"),
        ([tool("f", parameters={"properties": "x"})], "tools.0.function.parameters.properties"),
        ([tool("f"), tool("g", parameters={"required": 5})], "tools.1.function.parameters.required"),
        ([tool("f", parameters={"required": "a"})], "tools.0.function.parameters.required"),
        ([tool("f", parameters={"required": [["a"]]})], "tools.0.function.parameters.required"),
    ],
)
def test_tools_that_cannot_be_called(tools, field):
    with pytest.raises(InvalidRequestError) as refused:
        check_tools(tools)
    assert refused.value.field == field
