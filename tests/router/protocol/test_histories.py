"""Conversations as clients and other servers write them, in all three APIs: what the chat template is given."""

from dataclasses import replace

import pytest
from fake_backend import CARD, World

from holdfast.replicas.requests import ChatPrompt

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = {"role": "user", "content": "hello"}
PNG = "data:image/png;base64,iVBORw0KGgo="


def sent(path, cards=(CARD,), **body):
    """The answer to a request, and the prompt that the replica was given; None where the request was refused."""
    world = World()
    world.backend.cards = cards
    body = {"model": "pocket", **({"max_tokens": 8} if path == MESSAGES else {}), **body}
    answer = world.call("POST", path, json=body)
    prompt = world.backend.requests[-1].prompt if answer.status_code == 200 else None
    assert prompt is None or isinstance(prompt, ChatPrompt)
    return answer, prompt


def messages_of(path, **body):
    answer, prompt = sent(path, **body)
    assert answer.status_code == 200, answer.text
    return prompt.messages


def history(path, messages):
    return {"input" if path == RESPONSES else "messages": messages}


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        ({"reasoning_content": "R"}, "R"),
        ({"reasoning": "R"}, "R"),
        ({"reasoning_content": "", "reasoning": "R"}, "R"),
        ({"reasoning_content": "own", "reasoning": "R"}, "own"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "R", "format": "unknown", "index": 0}]}, "R"),
        ({"reasoning_details": [{"type": "reasoning.summary", "summary": "R"}, {"type": "x", "data": "="}]}, "R"),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "R", "signature": "s"}]}, "R"),
        ({"reasoning": {"effort": "low"}, "reasoning_details": "x", "thinking_blocks": [None, {"thinking": 1}]}, None),
    ],
)
def test_reasoning_under_the_names_of_other_servers(fields, thoughts):
    answer, prompt = sent(CHAT, messages=[ASK, {"role": "assistant", "content": "A", **fields}, ASK])
    assert prompt.messages[1].get("reasoning_content") == thoughts
    assert "x-holdfast-skipped" not in answer.headers


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "absent"])
def test_an_assistant_message_without_content_is_empty(path, content):
    messages = messages_of(path, **history(path, [ASK, {"role": "assistant", **content}, ASK]))
    assert messages[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_user_message_without_content_is_refused_by_name(path):
    answer, _ = sent(path, **history(path, [{"role": "user", "content": None}]))
    assert answer.status_code == 400
    assert "0.content" in answer.json()["error"]["message"]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def result(path, parts):
    """A conversation in which the call c1 had these parts for a result."""
    if path == CHAT:
        calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        return [ASK, calls, {"role": "tool", "tool_call_id": "c1", "content": parts}]
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
        return [ASK, call, {"type": "function_call_output", "call_id": "c1", "output": parts}]
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    told = {"type": "tool_result", "tool_use_id": "c1", "content": parts}
    return [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]


IMAGES = {
    CHAT: ({"type": "image_url", "image_url": {"url": PNG}}, "messages.content.image_url"),
    RESPONSES: ({"type": "input_image", "image_url": PNG}, "input_image"),
    MESSAGES: ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}, "image"),
}
TEXT = {CHAT: "text", RESPONSES: "input_text", MESSAGES: "text"}


@pytest.mark.parametrize("path", IMAGES)
def test_a_note_stands_for_an_image_in_a_tools_result(path):
    image, skipped = IMAGES[path]
    parts = [{"type": TEXT[path], "text": "see"}, image]
    answer, prompt = sent(path, **history(path, result(path, parts)))
    assert answer.status_code == 200, answer.text
    assert prompt.messages[-1]["content"] == "see\n[image left out: this model reads only text]"
    assert skipped in answer.headers["x-holdfast-skipped"].split(", ")


def test_a_note_stands_for_a_scan_in_a_tools_result():
    scan = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}}
    messages = messages_of(MESSAGES, messages=result(MESSAGES, [scan, text]))
    assert messages[-1]["content"] == "[document left out: this model reads only text]\nplain"


@pytest.mark.parametrize("path", IMAGES)
def test_an_image_from_the_user_is_refused_by_name(path):
    answer, _ = sent(path, **history(path, [{"role": "user", "content": [IMAGES[path][0]]}]))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "0.content.0" in message
    assert f"'{IMAGES[path][0]['type']}'" in message


def billing(path, role, nonce):
    """A request with Claude Code's billing line at the beginning of its system prompt."""
    line = f"x-anthropic-billing-header: cc_version=2.1.37.{nonce}; cc_entrypoint=cli; cch={nonce};"
    text = f"{line}\nThe user wrote cch=1."
    if role:
        return history(path, [{"role": role, "content": [{"type": TEXT[path], "text": text}]}, ASK])
    return {**history(path, [ASK]), "instructions" if path == RESPONSES else "system": text}


ROLES = {CHAT: ("system", "developer"), RESPONSES: ("", "system", "developer"), MESSAGES: ("", "system")}


@pytest.mark.parametrize(("path", "role"), [(path, role) for path, roles in ROLES.items() for role in roles])
def test_a_billing_line_leaves_the_prompt_as_it_was(path, role):
    one, other = (messages_of(path, **billing(path, role, nonce)) for nonce in ("fa6", "01a"))
    assert one == other
    line = "x-anthropic-billing-header: cc_version=; cc_entrypoint=cli; cch=;"
    assert one[0] == {"role": "system", "content": f"{line}\nThe user wrote cch=1."}


def test_a_billing_line_that_a_user_wrote_stays():
    text = "x-anthropic-billing-header: cch=1;"
    assert messages_of(CHAT, messages=[{"role": "user", "content": text}])[0]["content"] == text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_header_says_that_tools_are_told_in_the_system_prompt(path, as_text):
    cards = (replace(CARD, tools_as_text=as_text),)
    tool = {
        CHAT: {"type": "function", "function": {"name": "f"}},
        RESPONSES: {"type": "function", "name": "f"},
        MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    }[path]
    for tools in ([tool], []):
        answer, _ = sent(path, cards, **history(path, [ASK]), tools=tools)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-holdfast-tools") == ("system-prompt" if as_text and tools else None)
