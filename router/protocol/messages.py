"""Messages and tools of a conversation: their shapes, what must hold between them, and the plain form that a chat
template gets.

Shapes are typed dictionaries, so validation hands back dictionaries and nothing is copied twice. Only text content
is supported. Fields that are not known change nothing: clients send back what they have, and add their own.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, with_config
from typing_extensions import TypedDict  # pydantic takes typing's own only from Python 3.12 on

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.protocol.body import MOST_MESSAGES, MOST_TOOLS, NULL_IS_ABSENT, Unknown, one_or_many, word

CLOSED = ConfigDict(strict=True, extra="forbid")
OPEN = ConfigDict(strict=True, extra="allow")
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Claude Code's first line of a system prompt, and the values in it that differ from one request to the next.
_BILLING = "x-anthropic-billing-header:"
_BILLING_LINE = re.compile(f"^{_BILLING}.*$", re.MULTILINE)
_NONCE = re.compile(r"\b(cch|cc_version)=[^;\s]*")


@with_config(OPEN)
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


@with_config(OPEN)
class RefusalPart(TypedDict):
    """What OpenAI's models say where they refuse; to a template it is text like any other."""

    type: Literal["refusal"]
    refusal: str


@with_config(OPEN)
class OtherPart(TypedDict):
    """A part of a tool's result that is no text, for example an image."""

    type: str


def _result_part(part: object) -> str:
    return "text" if isinstance(part, Mapping) and part.get("type") == "text" else "another"


_MANY = Field(max_length=MOST_MESSAGES)
Content: TypeAlias = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[Annotated[TextPart, NULL_IS_ABSENT]], _MANY, Tag("many")],
    Discriminator(one_or_many),
]
AssistantPart: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type"), NULL_IS_ABSENT]
AssistantContent: TypeAlias = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[AssistantPart], _MANY, Tag("many")], Discriminator(one_or_many)
]

ResultPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("another")],
    Discriminator(_result_part),
    NULL_IS_ABSENT,
]
ResultContent: TypeAlias = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[ResultPart], _MANY, Tag("many")], Discriminator(one_or_many)
]


@with_config(OPEN)
class FunctionCall(TypedDict):
    """`parsed_arguments`, what a client made of our text, is not read."""

    name: str
    arguments: str
    parsed_arguments: NotRequired[Any]


@with_config(OPEN)
class CallMessage(TypedDict):
    """A tool call inside an assistant message; `index` is left over where a client kept streamed deltas."""

    id: Annotated[str, Field(min_length=1)]
    function: Annotated[FunctionCall, NULL_IS_ABSENT]
    type: NotRequired[Literal["function"]]
    index: NotRequired[int]


@with_config(OPEN)
class SystemMessage(TypedDict):
    role: Literal["system", "developer"]
    content: Content
    name: NotRequired[str]


@with_config(OPEN)
class UserMessage(TypedDict):
    role: Literal["user"]
    content: Content
    name: NotRequired[str]


@with_config(OPEN)
class AssistantMessage(TypedDict):
    """What a template uses, and what clients send back with a message of any server.

    `reasoning` and `reasoning_details` (OpenRouter) and `thinking_blocks` (LiteLLM) count as `reasoning_content`.
    """

    role: Literal["assistant"]
    content: NotRequired[AssistantContent]
    tool_calls: NotRequired[list[Annotated[CallMessage, NULL_IS_ABSENT]]]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[Any]
    reasoning_details: NotRequired[Any]
    thinking_blocks: NotRequired[Any]
    refusal: NotRequired[str]
    annotations: NotRequired[list[Any]]
    parsed: NotRequired[Any]


@with_config(OPEN)
class ToolMessage(TypedDict):
    role: Literal["tool"]
    content: ResultContent
    tool_call_id: str
    name: NotRequired[str]


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role"), NULL_IS_ABSENT
]
Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


_OF_ROLE: Mapping[str, frozenset[str]] = {
    "system": frozenset(SystemMessage.__annotations__),
    "developer": frozenset(SystemMessage.__annotations__),
    "user": frozenset(UserMessage.__annotations__),
    "assistant": frozenset(AssistantMessage.__annotations__),
    "tool": frozenset(ToolMessage.__annotations__),
}
_THOUGHTS = ("text", "summary", "thinking")  # where parts of reasoning have their text
_TEXTS = frozenset({"text", "refusal"})
_OF_PART = _TEXTS | {"type"}
_OF_CALL, _OF_FUNCTION = frozenset(CallMessage.__annotations__), frozenset(FunctionCall.__annotations__)


def unknown_fields(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """The fields of messages, parts, calls and tools that are not known, each by its path without numbers."""
    unknown = Unknown()
    look = unknown.look
    for message in messages:
        look(message, _OF_ROLE[message["role"]], "messages")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            for part in content:
                look(part, _OF_PART, "messages.content")
        for call in message.get("tool_calls") or ():
            look(call, _OF_CALL, "messages.tool_calls")
            look(call["function"], _OF_FUNCTION, "messages.tool_calls.function")
    for tool in tools:
        look(tool, _OF_TOOL, "tools")
        look(tool["function"], _OF_TOOL_FUNCTION, "tools.function")
    return unknown.found


def _without_null_keywords(parameters: Any) -> Any:
    """`parameters` without `properties` and `required` that are null; of other keywords null may be the value."""
    if not isinstance(parameters, dict):
        return parameters
    optional = ("properties", "required")
    return {name: value for name, value in parameters.items() if value is not None or name not in optional}


Parameters: TypeAlias = Annotated[
    dict[str, Any],
    BeforeValidator(_without_null_keywords),
    WithJsonSchema(
        {
            "type": "object",
            "description": "A JSON schema of type object",
            "properties": {
                "type": {"const": "object"},
                "properties": {"type": "object"},
                "required": {"type": "array", "items": {"type": "string"}},
            },
        }
    ),
]
ToolName: TypeAlias = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"})]


@with_config(OPEN)
class FunctionTool(TypedDict):
    """A `strict` tool's arguments follow `parameters`."""

    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[Parameters | None]
    strict: NotRequired[bool | None]


@with_config(OPEN)
class Tool(TypedDict):
    type: Literal["function"]
    function: FunctionTool


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]

_OF_TOOL, _OF_TOOL_FUNCTION = frozenset(Tool.__annotations__), frozenset(FunctionTool.__annotations__)


def plain_tools(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """`tools` without fields that are not known: a template would show them to the model."""
    return tuple(_plain_tool(tool) for tool in tools)


def _plain_tool(tool: Tool) -> Mapping[str, Any]:
    function = tool["function"]
    if tool.keys() <= _OF_TOOL and function.keys() <= _OF_TOOL_FUNCTION:
        return tool
    known = {name: value for name, value in function.items() if name in _OF_TOOL_FUNCTION}
    return {"type": "function", "function": known}


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequestError unless names are well formed and unique and parameters describe an object."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = function["name"]
        where = f"tools.{index}.function"
        if not TOOL_NAME.fullmatch(name):
            raise InvalidRequestError(f"Invalid '{where}.name': {name!r} is not [a-zA-Z0-9_-]{{1,64}}", f"{where}.name")
        if name in seen:
            raise InvalidRequestError(f"'{where}.name': there are two tools named {name!r}", f"{where}.name")
        seen.add(name)
        parameters = function.get("parameters") or {}
        if parameters.get("type", "object") != "object":
            field = f"{where}.parameters"
            raise InvalidRequestError(f"'{field}' must be a JSON schema of type 'object'", field)
        _check_parameters(parameters, f"{where}.parameters")


def _check_parameters(parameters: Mapping[str, Any], where: str) -> None:
    """The two keywords that every reader of tools goes through. Deeper faults matter where a reply follows them."""
    if not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequestError(f"'{where}.properties' must be an object of JSON schemas", f"{where}.properties")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"'{where}.required' must be a list of names", f"{where}.required")


def plain_messages(messages: Sequence[Mapping[str, Any]], *, go_on: bool = False) -> list[dict[str, Any]]:
    """`messages` as a template reads them: text content joined, empty and foreign fields left out.

    Raises as `check_results`, unless they `go_on` from others that are not known here.
    """
    plain = [_assistant(message) if message["role"] == "assistant" else _other(message) for message in messages]
    if not go_on:
        check_results((), plain)
    return plain


def check_results(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequestError for a tool message among `messages` that answers no call before it, or in `before`."""
    calls = {call["id"] for message in before for call in message.get("tool_calls") or ()}
    for index, message in enumerate(messages):
        calls.update(call["id"] for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and message["tool_call_id"] not in calls:
            field = f"messages.{index}.tool_call_id"
            given = message["tool_call_id"]
            raise InvalidRequestError(f"'{field}': no earlier assistant message has a tool call {given!r}", field)


def _assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if content is None and not calls:
        content = ""
    plain: dict[str, Any] = {"role": "assistant", "content": None if content is None else _text(content)}
    if calls:
        plain["tool_calls"] = [{"id": call["id"], "type": "function", "function": _function(call)} for call in calls]
    if message.get("name") is not None:
        plain["name"] = message["name"]
    if thoughts := _thoughts(message):
        plain["reasoning_content"] = thoughts
    return plain


def _thoughts(message: Mapping[str, Any]) -> str:
    """The reasoning of an assistant message, under whichever name a server gave it."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := message.get(name), str) and text:
            return text
    for name in ("reasoning_details", "thinking_blocks"):
        parts = message.get(name)
        mappings = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        texts = [part[key] for part in mappings for key in _THOUGHTS if isinstance(part.get(key), str)]
        if any(texts):
            return "".join(texts)
    return ""


def _function(call: Mapping[str, Any]) -> dict[str, str]:
    return {name: call["function"][name] for name in ("name", "arguments")}


def _other(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["role"]
    text = _text(message["content"])
    if role in ("system", "developer"):
        role, text = "system", system_text(text)
    plain = {"role": role, "content": text}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = message[name]
    return plain


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part[part["type"]] if part["type"] in _TEXTS else left_out(part["type"]) for part in content)


def system_text(text: str) -> str:
    """A system prompt without the values of Claude Code's billing line that change with each request.

    With them no two prompts would have a beginning in common.
    """
    return _BILLING_LINE.sub(lambda line: _NONCE.sub(r"\1=", line[0]), text) if _BILLING in text else text


def left_out(kind: object) -> str:
    """The note that stands for a part of a tool's result that is no text. `kind` is the part's type."""
    name = word(kind).removeprefix("input_").removesuffix("_url")
    return f"[{name} left out: this model reads only text]"
