"""OpenAI messages as chat templates want them: plain strings, no nulls, tool arguments as objects.

Not here: whether a conversation makes sense (the router's validation, and the template's own complaints).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.replicas.errors import InvalidRequestError

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def normalised(messages: Sequence[Mapping[str, Any]], parse_arguments: bool = True) -> list[dict[str, Any]]:
    """New message dicts: content parts joined by line ends, null content "", other nulls and empty `tool_calls`
    dropped, `developer` renamed `system`; with `parse_arguments`, arguments whose text is a JSON object parsed.

    Raises InvalidRequestError that names the message and the field.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    return [_message(message, f"messages[{index}]", parse_arguments) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str, parse_arguments: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError("a message must be an object with a role", f"{where}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if result["role"] == "developer":
        result["role"] = "system"
    result["content"] = _content(message.get("content"), f"{where}.content")
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls", parse_arguments) for call in calls]
    return result


def _content(content: Any, where: str) -> str:
    """Text as it is; text parts joined; null is no text (templates print None)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError("content must be a string or a list of parts", where)
    return "\n".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"content parts of type {kind!r} are not supported, only text", where)


def _tool_call(call: Any, where: str, parse_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("a tool call needs a function with a name", where)
    arguments = function.get("arguments")
    if parse_arguments:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: Any) -> Any:
    """A JSON object's text as the object, since templates write it with `tojson`; other text as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
