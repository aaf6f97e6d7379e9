"""The shipped model with chat templates of other models, over HTTP: templates without tools, and those that go over
the arguments of calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_templates import TEMPLATES
from service_backend import SMALL, ServiceBackend, engine_served

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = "What is the weather in Paris?"
ASK = {"role": "user", "content": QUESTION}
FUNCTION = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": FUNCTION}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@contextmanager
def client_of(file: Path, template: str, **options: Any) -> Iterator[httpx.Client]:
    file.write_text(template)
    backend = ServiceBackend(replace(SMALL, chat_template=str(file), **options))
    with engine_served(backend) as address, httpx.Client(base_url=address, timeout=120) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    return client.post(path, json={"model": "pocket", "temperature": 0, **body})


@pytest.fixture(scope="module")
def without_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with client_of(tmp_path_factory.mktemp("a") / "chatml.jinja", CHATML) as client:
        yield client


@pytest.fixture(scope="module")
def mapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A template that goes over the members of arguments."""
    with client_of(tmp_path_factory.mktemp("a") / "coder.jinja", TEMPLATES["Qwen3-Coder"][1]) as client:
        yield client


def test_tools_reach_a_model_whose_template_takes_none(without_tools: httpx.Client) -> None:
    without, with_ = (
        post(without_tools, CHAT, messages=[ASK], max_tokens=1, **({"tools": tools} if tools else {}))
        for tools in ([], [TOOL])
    )
    assert with_.json()["usage"]["prompt_tokens"] > without.json()["usage"]["prompt_tokens"] + 50
    assert with_.headers["x-holdfast-tools"] == "system-prompt"
    assert "x-holdfast-tools" not in without.headers


def test_a_required_call_is_made_and_its_result_is_read(without_tools: httpx.Client) -> None:
    """The next turn has the whole of the first in its prompt, so it is found in the cache."""
    asked = {"tools": [TOOL], "max_tokens": 64}
    first = post(without_tools, CHAT, messages=[ASK], tool_choice="required", **asked).json()
    (choice,) = first["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    second = post(without_tools, CHAT, messages=[ASK, choice["message"], result], **asked).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 3


def test_a_required_call_names_the_settings_where_calls_are_turned_off(tmp_path: Path) -> None:
    with client_of(tmp_path / "chatml.jinja", CHATML, tool_format="none") as client:
        refused = post(client, CHAT, messages=[ASK], tools=[TOOL], tool_choice="required")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice"
    assert "engine.chat_template" in refused.json()["error"]["message"]


@pytest.mark.parametrize("length", [6, 18, 26])
def test_a_response_that_was_cut_inside_of_a_call_is_gone_on_with(mapping: httpx.Client, length: int) -> None:
    asked: Any = {"tools": [{"type": "function", **FUNCTION}]}
    cut = post(mapping, RESPONSES, input=QUESTION, tool_choice="required", max_output_tokens=length, **asked)
    asked["previous_response_id"] = cut.json()["id"]
    second = post(mapping, RESPONSES, input="go on", max_output_tokens=4, **asked)
    assert second.status_code == 200, second.text


@pytest.mark.parametrize("arguments", ['{"value": ', "[1]", "", '{"city": "\\ud83d"}'])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_call_whose_arguments_are_no_object_poisons_no_session(
    mapping: httpx.Client, path: str, arguments: str
) -> None:
    function = {"name": "get_weather", "arguments": arguments}
    if path == CHAT:
        calls = [{"id": "c", "type": "function", "function": function}]
        call: Any = {"role": "assistant", "content": None, "tool_calls": calls}
        said = [ASK, call, {"role": "tool", "tool_call_id": "c", "content": "error"}, ASK]
        answer = post(mapping, path, messages=said, tools=[TOOL], max_tokens=4)
    else:
        call = {"type": "function_call", "call_id": "c", **function}
        said = [ASK, call, {"type": "function_call_output", "call_id": "c", "output": "error"}, ASK]
        answer = post(mapping, path, input=said, tools=[{"type": "function", **FUNCTION}], max_output_tokens=4)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_half_a_surrogate_pair_poisons_no_session(mapping: httpx.Client, path: str) -> None:
    field, most = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    body = f'{{"model": "pocket", "{most}": 4, "{field}": [{{"role": "user", "content": "cut \\ud83d"}}]}}'
    answer = mapping.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


TURNS = (
    "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role == 'user' %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}{{ m.role + ': ' + m.content + '|' }}{% endfor %}"
)


def test_what_a_template_still_refuses_is_named_as_the_client_wrote_it(tmp_path: Path) -> None:
    """The system prompt is a message to the template and none to Anthropic's or the Responses API."""
    reply = {"role": "assistant", "content": "yes"}
    talk = [ASK, reply, ASK, ASK]
    with client_of(tmp_path / "turns.jinja", TURNS) as client:
        chat = post(client, CHAT, messages=[{"role": "system", "content": "s"}, *talk])
        response = post(client, RESPONSES, instructions="s", input=talk)
        message = post(client, MESSAGES, system="s", messages=talk, max_tokens=4)
    assert [answer.status_code for answer in (chat, response, message)] == [400] * 3
    assert (chat.json()["error"]["param"], response.json()["error"]["param"]) == ("messages.4", "input.3")
    told = [answer.json()["error"]["message"] for answer in (chat, response, message)]
    for text, field in zip(told, ("messages.4", "input.3", "messages.3"), strict=True):
        assert text == f"'{field}': the chat template refuses the messages: roles must take turns"
