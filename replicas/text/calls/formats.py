"""The ways models write tool calls: their names, their markers, and which one a chat template asks for.

A further format has its name, markers and sign here, its reader in `readers.READERS`, and the text that a grammar
forces in `constraints.grammar.forms_of`.
"""

from collections.abc import Mapping
from enum import StrEnum

from holdfast.replicas.errors import ConfigError


class ToolFormat(StrEnum):
    """How a model writes a tool call."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>: Hermes, Qwen 2.5, Qwen 3
    LLAMA3 = "llama3"  # {"name": ..., "parameters": ...}; {...}: Llama 3.x. The other style is read as well
    LLAMA3_FUNCTION = "llama3_function"  # <function=name>{...}</function>: Llama 3.x prompted so
    MISTRAL = "mistral"  # [TOOL_CALLS][{...}, ...] or [TOOL_CALLS]name[ARGS]{...}
    PYTHONIC = "pythonic"  # [f(a=1), g(b="x")]: Llama 4, Llama 3.2 small, ToolACE
    NONE = "none"  # the model has no tool calls: everything is text


MARKERS: Mapping[ToolFormat, frozenset[str]] = {
    ToolFormat.HERMES: frozenset({"<tool_call>", "</tool_call>"}),
    ToolFormat.LLAMA3: frozenset({"<|python_tag|>"}),
    ToolFormat.LLAMA3_FUNCTION: frozenset({"<|python_tag|>"}),
    ToolFormat.MISTRAL: frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
    ToolFormat.PYTHONIC: frozenset({"<|python_start|>", "<|python_end|>"}),
    ToolFormat.NONE: frozenset(),
}
"""Tokens that the reader of a format has to see even where the vocabulary calls them special."""

# First match wins. A template may name several markers: Hermes templates never name the others.
_SIGNS = (
    ("[TOOL_CALLS]", ToolFormat.MISTRAL),
    ("<|python_start|>", ToolFormat.PYTHONIC),
    ("func_name1(params_name1", ToolFormat.PYTHONIC),
    ("<|python_tag|>", ToolFormat.LLAMA3),
    ("<parameter=", ToolFormat.NONE),  # calls in XML, also inside <tool_call>: not read
    ("<tool_call>\n<function=", ToolFormat.NONE),
    ("<arg_key>", ToolFormat.NONE),
    ("<tool_call>", ToolFormat.HERMES),
    ("<function=", ToolFormat.LLAMA3_FUNCTION),
    ('{"name": function name, "parameters"', ToolFormat.LLAMA3),
)


def detect_format(chat_template: str | None, override: str = "") -> ToolFormat:
    """The format that `chat_template` teaches the model; `override` names one and wins.

    Raises ConfigError for an override that is no format.
    """
    if override:
        try:
            return ToolFormat(override)
        except ValueError:
            known = ", ".join(ToolFormat)
            raise ConfigError(f"unknown tool call format {override!r}; known: {known}", "tool_format") from None
    template = chat_template or ""
    return next((found for sign, found in _SIGNS if sign in template), ToolFormat.NONE)
