"""What a request asks of its reply, read from the prompt: plain data, hashable through `key`, no grammar yet."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from holdfast.replicas.requests import ChatPrompt

Calls: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A JSON schema and the request's field that holds it. Not `strict`: what the library lacks is left out."""

    content: Mapping[str, Any]
    strict: bool
    field: str


@dataclass(frozen=True, slots=True, eq=False)
class ToolRule:
    """A tool that may be called, and what its arguments look like."""

    name: str
    arguments: Schema


@dataclass(frozen=True, slots=True, eq=False)
class ReplyRule:
    """A reply is calls of `tools`, or `json`, or text.

    `calls` "auto": text or calls as the model likes, where `json` is None; else calls or JSON. `parallel`: several.
    """

    tools: tuple[ToolRule, ...] = ()
    calls: Calls = "none"
    parallel: bool = True
    json: Schema | None = None

    @property
    def key(self) -> str:
        """Equal for rules that mean the same grammar."""
        tools = [(tool.name, tool.arguments.content, tool.arguments.strict) for tool in self.tools]
        body = self.json and (self.json.content, self.json.strict)
        return json.dumps([tools, self.calls, self.parallel, body], default=dict)


def reply_rule(prompt: ChatPrompt) -> ReplyRule | None:
    """What `prompt` asks for; None where the model may write what it likes.

    A strict tool the model may call is enough: from the marker of a call on its name and arguments follow the rule.
    """
    calls: Calls = "none" if not prompt.tools else prompt.tool_choice
    tools = _tools(prompt) if calls != "none" else ()
    form = prompt.output
    if form is not None and calls != "required":
        body = Schema(form.schema, form.strict, "response_format.json_schema.schema")
        return ReplyRule(tools, calls, prompt.parallel_tool_calls, body)
    if calls == "required":
        return ReplyRule(tools, calls, prompt.parallel_tool_calls and not prompt.forced_tool)
    if any(tool.arguments.strict for tool in tools):
        return ReplyRule(tools, "auto", prompt.parallel_tool_calls)
    return None


def declared_rule(prompt: ChatPrompt) -> ReplyRule:
    """Text and calls as the model likes, but calls of declared tools only."""
    return ReplyRule(_tools(prompt), "auto", prompt.parallel_tool_calls)


def _tools(prompt: ChatPrompt) -> tuple[ToolRule, ...]:
    rules = []
    for index, tool in enumerate(prompt.tools):
        function = tool.get("function", tool)
        name = function.get("name")
        if not isinstance(name, str) or (prompt.forced_tool and name != prompt.forced_tool):
            continue
        schema = {"type": "object", **closed(function.get("parameters") or {"properties": {}})}
        rules.append(ToolRule(name, Schema(schema, bool(function.get("strict")), f"tools.{index}.function.parameters")))
    return tuple(rules)


_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "allOf", "oneOf"}
)


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters that list their properties and say nothing of others have no others: none are documented."""
    if "properties" in schema and not _OPEN.intersection(schema):
        return {**schema, "additionalProperties": False}
    return schema
