"""Errors name a field of the request as its client wrote it, in every API."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_backend import FakeBackend, World

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.protocol.errors import CHAT_FIELDS, FieldNames, ReplyError

SCHEMA: Any = {"type": "object", "properties": {}}
CHAT: Any = {
    "model": "pocket",
    "messages": [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "y",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stop": ["a"],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "priority": "batch",
    "kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": []},
    "reasoning_effort": "low",
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {},
}
MESSAGES: Any = {
    "model": "pocket",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}]}],
        },
    ],
    "tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["a"],
}
RESPONSES: Any = {
    "model": "pocket",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "r"},
        {"type": "reasoning", "summary": []},
    ],
    "instructions": "i",
    "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "include": [],
}
COMPLETION: Any = {"model": "pocket", "prompt": ["a", "b"], "stop": ["a"], "logprobs": 1, "n": 1}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
WRONG: Any = (5, True, "x", [], {"a": 1}, [5], [{}], [{"type": "text", "text": 5}])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in a body."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in inside:
        yield (*path, step)
        yield from places(inner, (*path, step))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = json.loads(json.dumps(body))
    here = body
    for step in path[:-1]:
        here = here[step]
    here[path[-1]] = value
    return body


def known(body: Any, field: str, *, missing: bool) -> bool:
    """Whether the body has this field, or the one that a `missing` one should be in."""
    *steps, last = field.split(".")
    for step in steps:
        try:
            body = body[int(step) if isinstance(body, list) else step]
        except (LookupError, TypeError, ValueError):
            return False
    if missing:
        return True
    if isinstance(body, list):
        return last.isdigit() and int(last) < len(body)
    return isinstance(body, dict) and last in body


def told(answer: Any) -> str:
    """The field that an error names."""
    error = answer.json()["error"]
    if "param" in error:
        return str(error["param"])
    found = re.search(r"'([a-z_]+(?:\.\w+)*)'", error["message"])
    assert found, error
    return found[1]


@pytest.mark.parametrize("path", BODIES)
def test_an_error_names_a_field_that_the_client_wrote_or_left_out(path: str) -> None:
    asked = [changed(BODIES[path], place, value) for place in places(BODIES[path]) for value in WRONG]
    asked = [body for body in asked if body["model"] == "pocket"]
    answers = World().calls([("POST", path, {"json": body}) for body in asked])
    refused = [(body, answer) for body, answer in zip(asked, answers, strict=True) if answer.status_code != 200]
    assert len(refused) > 30
    for body, answer in refused:
        assert answer.status_code == 400, (body, answer.text)
        message = answer.json()["error"]["message"]
        missing = bool(re.search(r"Missing|must be a|None is not", message))
        assert known(body, told(answer), missing=missing), (body, message)


FOUND = {
    "tools.0.function.parameters": ("tools.0.function.parameters", "tools.1.input_schema", "tools.1.parameters"),
    "response_format.json_schema.schema": (
        "response_format.json_schema.schema",
        "output_config.format.schema",
        "text.format.schema",
    ),
    "messages.2": ("messages.2", "messages.1", "input.1"),
    "messages.3.content": ("messages.3.content", "messages.2", "input.2"),
    "messages": ("messages", "messages", "input"),
    "tool_choice.function.name": ("tool_choice.function.name", "tool_choice.name", "tool_choice.name"),
    "timeout": ("timeout", "timeout", "timeout"),
}


@pytest.mark.parametrize("begun", [None, False, True])
@pytest.mark.parametrize("field", FOUND)
def test_what_a_replica_finds_is_told_by_the_names_of_the_api(field: str, begun: bool | None) -> None:
    """Whole (None), and in streams before and after they have begun."""
    error = Errored(ErrorInfo(ErrorKind.INVALID, f"'{field}' has a fault, and {field}.x too", field))
    script: Any = [(TextDelta("a"),), (error,)] if begun else [(error,)]
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    for path, own in zip(paths, FOUND[field], strict=True):
        world = World(FakeBackend(script))
        answer = world.call("POST", path, json={**BODIES[path], "stream": begun is not None})
        assert answer.status_code == (200 if begun else 400)
        also = f", and {own}.x too" if "." in field else ", and "
        assert f"'{own}' has a fault{also}" in answer.text
        if not begun and path != "/v1/messages":
            assert told(answer) == own


def test_one_message_that_is_a_text_is_the_input() -> None:
    error = Errored(ErrorInfo(ErrorKind.INVALID, "'messages.0' has a fault", "messages.0"))
    answer = World(FakeBackend([(error,)])).call("POST", "/v1/responses", json={"model": "pocket", "input": "hello"})
    assert answer.json()["error"]["param"] == "input"


def test_names_that_are_not_known_stay() -> None:
    names = FieldNames({"stop": "stop_sequences"}, ["tools.4"], ["system"])
    own = ("stop_sequences", "tools.4.name", "tools.9.function.name", "messages.7", "stops", "seed")
    given = ("stop", "tools.0.function.name", "tools.9.function.name", "messages.7", "stops", "seed")
    assert tuple(map(names.of, given)) == own
    error = ReplyError(ErrorInfo(ErrorKind.INVALID, "'stop' is wrong, so stop", "stop"))
    assert names.error(error).info == ErrorInfo(
        ErrorKind.INVALID, "'stop_sequences' is wrong, so stop", "stop_sequences"
    )
    assert CHAT_FIELDS.error(error) is error
