"""Messages of agents' logs, reduced to what an OpenAI client sends: frameworks keep notes of their own in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from holdfast.loadgen.traces.entries import Entry, function_of, required
from holdfast.loadgen.traces.model import Json, Messages, Output, Turn

ROLES = ("system", "developer", "user", "assistant", "tool")


def clean(entry: Entry) -> Json:
    """The message with only OpenAI's fields; what else it has counts as unread. Raises ConfigError."""
    role = entry.text("role")
    if role not in ROLES:
        raise entry.error("role", f"must be one of {', '.join(ROLES)}")
    message: Json = {"role": role, "content": _content(entry)}
    calls = [_call(call) for call in entry.inners("tool_calls") or ()] if role == "assistant" else []
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = required(entry, "tool_call_id")
    if message["content"] is None and not calls:
        raise entry.error("content", "must be there where there is no tool call")
    for name in ("name", "reasoning_content"):
        value = entry.text(name)
        if value is not None:
            message[name] = value
    return message


def turns_of(messages: Sequence[Json], tools: tuple[Json, ...], ask_last: bool = False) -> tuple[list[Turn], Messages]:
    """One turn for each message of the assistant, and what follows the last; with ``ask_last`` that is a turn too."""
    turns: list[Turn] = []
    start = 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            turns.append(Turn(tuple(messages[start:place]), tools=tools, output=Output(answer=message)))
            start = place + 1
    rest = tuple(messages[start:])
    if ask_last and rest:
        return [*turns, Turn(rest, tools=tools)], ()
    return turns, rest


def _content(entry: Entry) -> str | list[Json] | None:
    content: Any = entry.given("content")
    if content is None or isinstance(content, str):
        return content
    parts = entry.inners("content") or []
    for part in parts:
        if part.text("type") != "text":
            raise part.error("type", "must be 'text': only text can be replayed")
    return [{"type": "text", "text": required(part, "text")} for part in parts]


def _call(entry: Entry) -> Json:
    function = function_of(entry)
    arguments = function.given("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise function.error("arguments", "must be JSON in a string, or an object")
    name, call_id = required(function, "name"), required(entry, "id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
