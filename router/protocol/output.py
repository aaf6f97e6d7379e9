"""What a client may ask of a reply's form, `response_format` and `tool_choice`: from the body to the engine's terms."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Field, with_config
from typing_extensions import TypedDict  # pydantic takes typing's own only from Python 3.12 on

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import JsonOutput
from holdfast.router.protocol.messages import CLOSED, TOOL_NAME

ToolChoice: TypeAlias = Literal["auto", "none", "required"]

_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "none": "none", "required": "required"}


@with_config(CLOSED)
class TextFormat(TypedDict):
    type: Literal["text"]


@with_config(CLOSED)
class JsonObjectFormat(TypedDict):
    type: Literal["json_object"]


@with_config(CLOSED)
class JsonSchema(TypedDict):
    """`name` and `description` change nothing here: no template shows them to the model."""

    name: Annotated[str, Field(pattern=re.compile(f"^{TOOL_NAME.pattern}$"))]
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(CLOSED)
class JsonSchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def json_output(given: ResponseFormat) -> JsonOutput | None:
    """The JSON that a reply must be; None for text. A format without a schema means any object."""
    if given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return JsonOutput({"type": "object"})
    body = given["json_schema"]
    return JsonOutput(body.get("schema") or {"type": "object"}, bool(body.get("strict")))


def tool_choice(given: str | Mapping[str, Any], declared: Sequence[str]) -> tuple[ToolChoice, str]:
    """How the tools named `declared` may be called, and the one that must be, or "".

    Raises InvalidRequestError for a choice that is unknown, and for one that the tools do not offer.
    """
    if isinstance(given, str):
        choice = _CHOICES.get(given)
        if choice is None:
            message = f"'tool_choice': {given!r} is not 'auto', 'none', 'required' or a function"
            raise InvalidRequestError(message, "tool_choice")
        if choice == "required" and not declared:
            raise InvalidRequestError("'tool_choice': 'required' is only allowed with 'tools'", "tool_choice")
        return choice, ""
    name = _function_name(given)
    if name not in declared:
        field = "tool_choice.function.name"
        raise InvalidRequestError(f"'{field}': no tool is named {name!r}", field)
    return "required", name


def _function_name(given: Mapping[str, Any]) -> str:
    kind, function = given.get("type"), given.get("function")
    if kind != "function":
        raise InvalidRequestError(f"'tool_choice.type': {kind!r} is not 'function'", "tool_choice.type")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        field = "tool_choice.function.name"
        raise InvalidRequestError(f"Missing required parameter: '{field}'", field)
    name: str = function["name"]
    return name
