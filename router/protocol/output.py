"""What a client may ask of a reply's form and of the thinking before it: from the body to the engine's terms."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, get_args

from pydantic import Field, with_config
from typing_extensions import TypedDict  # pydantic takes typing's own only from Python 3.12 on

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import JsonOutput
from holdfast.router.protocol.messages import CLOSED, TOOL_NAME

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
ToolChoice: TypeAlias = Literal["auto", "none", "required"]

_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "none": "none", "required": "required"}
_MODES: Mapping[str, ToolChoice] = {"auto": "auto", "required": "required"}


@dataclass(frozen=True, slots=True)
class Choice:
    """How tools may be called: in which `mode`, the one that must be, and those that may be, where not all."""

    mode: ToolChoice
    forced: str = ""
    allowed: tuple[str, ...] = ()


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


def tool_choice(given: str | Mapping[str, Any], declared: Sequence[str]) -> Choice:
    """How the tools named `declared` may be called.

    Raises InvalidRequestError for a choice that is unknown, and for one that the tools do not offer.
    """
    if isinstance(given, str):
        choice = _CHOICES.get(given)
        if choice is None:
            message = f"'tool_choice': {given!r} is not 'auto', 'none', 'required' or a function"
            raise InvalidRequestError(message, "tool_choice")
        if choice == "required" and not declared:
            raise InvalidRequestError("'tool_choice': 'required' is only allowed with 'tools'", "tool_choice")
        return Choice(choice)
    if given.get("type") == "allowed_tools":
        return _allowed(given.get("allowed_tools"), declared)
    return Choice("required", forced=_function_name(given, declared, "tool_choice"))


def _allowed(given: object, declared: Sequence[str]) -> Choice:
    where = "tool_choice.allowed_tools"
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"Missing required parameter: '{where}'", where)
    mode, tools = given.get("mode"), given.get("tools")
    if not isinstance(mode, str) or mode not in _MODES:
        raise InvalidRequestError(f"'{where}.mode': {mode!r} is not 'auto' or 'required'", f"{where}.mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(f"'{where}.tools' must be a list of functions", f"{where}.tools")
    names = [_function_name(tool, declared, f"{where}.tools.{index}") for index, tool in enumerate(tools)]
    return Choice(_MODES[mode], allowed=tuple(dict.fromkeys(names)))


def _function_name(given: object, declared: Sequence[str], where: str) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, the value of field `where`."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind != "function" or not isinstance(given, Mapping):
        raise InvalidRequestError(f"'{where}.type': {kind!r} is not 'function'", f"{where}.type")
    field, function = f"{where}.function.name", given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"Missing required parameter: '{field}'", field)
    name: str = function["name"]
    if name not in declared:
        raise InvalidRequestError(f"'{field}': no tool is named {name!r}", field)
    return name


def template_arguments(given: Mapping[str, Any], effort: str | None) -> Mapping[str, Any]:
    """What the chat template is told: `effort` by the two names that templates know, unless the client gives them."""
    if effort is None:
        return given
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}
