"""A conversation as a model's chat template can take it.

Clients send back what servers and other clients made: arguments that are no object, results in any order, system
messages anywhere. What a message becomes depends only on the messages around it and on the template, so that a
conversation that goes on is rendered with the same beginning. Not here: rendering (`render`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.replicas.errors import InvalidRequestError

Message = dict[str, Any]

INVALID = "invalid_arguments"
"""The member that holds the text of arguments that are no JSON object.

Templates go over the members of arguments. The text stays as the model wrote it: the model can see its mistake.
"""
_MOST_NESTED = 100  # levels of arguments that templates write; Jinja and `json` give up at some hundreds
_BETWEEN = "\n\n"  # messages that are joined
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """What a chat template takes in place: a `first` system message, a `second` one behind it, a `later` one.

    `objects`: it takes the arguments of calls as objects, else as text. `tools`: it shows tools to the model, or they
    are left out; else they are told in the system prompt, and calls and results as text.
    """

    first: bool = True
    second: bool = True
    later: bool = True
    objects: bool = True
    tools: bool = True


def normalised(messages: Sequence[Mapping[str, Any]], parse_arguments: bool = True) -> list[Message]:
    """OpenAI messages as chat templates want them: plain strings, no nulls, tool arguments as objects.

    In new dicts content parts are joined by line ends, null content is "", other nulls and empty `tool_calls` are
    dropped, `developer` is renamed `system`. The results of an assistant message's calls stand in the order of the
    calls. With `parse_arguments`, arguments are objects (see `INVALID`), else text.
    Raises InvalidRequestError that names the message and the field.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    return _in_order([_message(message, index, parse_arguments) for index, message in enumerate(messages)])


def _in_order(messages: list[Message]) -> list[Message]:
    """Results that follow calls stand in the order of these: most templates show no ids."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            continue
        end = begin = index + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        places = {call.get("id"): place for place, call in reversed([*enumerate(calls)])}
        messages[begin:end] = sorted(
            messages[begin:end], key=lambda result: places.get(result.get("tool_call_id"), len(calls))
        )
    return messages


# In Hermes' format, in the words that Hermes and Qwen are trained with.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def told_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """`messages` for a template without tools: `tools` at the end of the first system message, calls and results as
    text in Hermes' format. Results are messages of role `tool` still; see `adapted`.
    """
    result = list(map(_as_text, messages))
    if tools:
        told = _TOOLS.format("\n".join(_as_json(tool) for tool in tools))
        if result and result[0]["role"] == "system":
            result[0] = {**result[0], "content": result[0]["content"] + _BETWEEN + told}
        else:
            result.insert(0, {"role": "system", "content": told})
    return result


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    functions = (call["function"] for call in message["tool_calls"])
    calls = (
        f"<tool_call>\n{_as_json({'name': f['name'], 'arguments': f['arguments']})}\n</tool_call>" for f in functions
    )
    content = "\n".join([*filter(None, [message["content"]]), *calls])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=dict)


def adapted(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """`messages` without what `rules` say that the template does not take.

    System messages at the beginning are joined. Others, and results of tools, are told as the user's text, joined with
    the user's messages next to them: some templates demand that roles take turns.
    """
    result: list[Message] = []
    begins, joins = True, False  # only system messages so far; the last message has been made here
    for message in messages:
        told, made = message, False
        if message["role"] == "tool" and not rules.tools:
            begins, told, made = False, {**message, "role": "user"}, True
        elif message["role"] == "system" and begins and rules.first:
            made = bool(result) and not rules.second
        else:
            begins = False
            if message["role"] == "system" and not (rules.first and rules.later):
                told, made = {**message, "role": "user"}, True
        if result and result[-1]["role"] == told["role"] in ("system", "user") and (made or joins):
            result[-1] = {**result[-1], "content": result[-1]["content"] + _BETWEEN + told["content"]}
            joins = told["role"] == "user"
        else:
            result.append(told)
            joins = made
    return result


def _message(message: Mapping[str, Any], index: int, parse_arguments: bool) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError("a message must be an object with a role", f"messages.{index}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if result["role"] == "developer":
        result["role"] = "system"
    result["content"] = _content(message.get("content"), index)
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [_tool_call(call, index, parse_arguments) for call in calls]
    return result


def _content(content: Any, index: int) -> str:
    """Text as it is; text parts joined; null is no text (templates print None)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError("content must be a string or a list of parts", f"messages.{index}.content")
    return "\n".join(_part(part, index) for part in content)


def _part(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    why = f"content parts of type {kind!r} are not supported, only text"
    raise InvalidRequestError(why, f"messages.{index}.content")


def _tool_call(call: Any, index: int, parse_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("a tool call needs a function with a name", f"messages.{index}.tool_calls")
    arguments = _arguments(function.get("arguments"), parse_arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: Any, parse: bool) -> Any:
    """Arguments as an object, since templates go over its members; or as text, for templates that put texts together.

    None, an empty text and null are no arguments.
    """
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=dict)
    if text.strip() in ("", "null"):
        text = "{}"
    if not parse:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {INVALID: text}
    return value if isinstance(value, dict) and not _deep(value, text) else {INVALID: text}


def _deep(value: Any, text: str) -> bool:
    """Whether `value`, whose JSON is `text`, has more levels than a template can write."""
    if text.count("{") + text.count("[") <= _MOST_NESTED:
        return False
    level = [value]
    for _ in range(_MOST_NESTED):
        members = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in members if isinstance(item, dict | list)]
        if not level:
            return False
    return True
