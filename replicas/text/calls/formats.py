"""The ways models write tool calls: their names, their markers, and which one a chat template asks for.

A new format needs its name, markers and sign here. If its arguments stand in tags, a row of `TAGS` is all else that it
needs: reader and grammar follow from it. Other formats need a reader in `tracker.READERS`, and the text that a grammar
forces in `constraints.grammar.forms_of`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.replicas.errors import ConfigError

_LLAMA_JSON = '{"name": function name, "parameters"'


class ToolFormat(StrEnum):
    """How a model writes a tool call."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>: Hermes, Qwen 2.5, Qwen 3
    LLAMA3 = "llama3"  # {"name": ..., "parameters": ...}; {...}: Llama 3.x. The other style is read as well
    LLAMA3_FUNCTION = "llama3_function"  # <function=name>{...}</function>: Llama 3.x prompted so
    MISTRAL = "mistral"  # [TOOL_CALLS][{...}, ...] or [TOOL_CALLS]name[ARGS]{...}
    PYTHONIC = "pythonic"  # [f(a=1), g(b="x")]: Llama 4 prompted so, Llama 3.2 small, ToolACE
    LLAMA4 = "llama4"  # the JSON of Llama 3, bare or in <|python_start|>...<|python_end|>: Llama 4
    DEEPSEEK_V3 = "deepseek_v3"  # a name and a JSON block in a section: DeepSeek V3, R1
    DEEPSEEK_V31 = "deepseek_v31"  # a name and JSON in a section: DeepSeek V3.1
    DEEPSEEK_V32 = "deepseek_v32"  # <｜DSML｜invoke> and a <｜DSML｜parameter> for each argument: DeepSeek V3.2
    KIMI_K2 = "kimi_k2"  # an id with the name in it and JSON in a section: Kimi K2
    QWEN3_CODER = "qwen3_coder"  # <function=name> and a <parameter=key> for each argument, in <tool_call>: Qwen3-Coder
    GLM = "glm"  # a name, then <arg_key> and <arg_value>, in <tool_call>: GLM 4.5 to 4.7
    MINIMAX = "minimax"  # {"name": ..., "arguments": ...}, one a line, in <tool_calls>: MiniMax M1
    MINIMAX_M2 = "minimax_m2"  # <invoke name=...> and a <parameter name=...> for each argument: MiniMax M2
    HARMONY = "harmony"  # messages in channels, a call one to functions.name: gpt-oss
    GEMMA4 = "gemma4"  # call:name{key:value}, strings between quotes of its own, in <|tool_call>: Gemma 4
    MUSE = "muse"  # messages to recipients, a call has <atem:invoke name=...> and tags for arguments: Muse Glimmer
    NONE = "none"  # the model has no tool calls: everything is text


QUOTE = '<|"|>'
"""Stands on both sides of a string of `ToolFormat.GEMMA4`, which has no escapes."""

_DEEPSEEK = "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>"

MARKERS: Mapping[ToolFormat, frozenset[str]] = {
    format: frozenset(tokens.split())
    for format, tokens in {
        ToolFormat.HERMES: "<tool_call> </tool_call>",
        ToolFormat.LLAMA3: "<|python_tag|>",
        ToolFormat.LLAMA3_FUNCTION: "<|python_tag|>",
        ToolFormat.MISTRAL: "[TOOL_CALLS] [ARGS] [CALL_ID]",
        ToolFormat.PYTHONIC: "<|python_start|> <|python_end|>",
        ToolFormat.LLAMA4: "<|python_start|> <|python_end|>",
        ToolFormat.DEEPSEEK_V3: _DEEPSEEK,
        ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
        ToolFormat.DEEPSEEK_V32: "｜DSML｜",
        ToolFormat.KIMI_K2: "<|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|>"
        " <|tool_call_end|> <|tool_calls_section_end|>",
        ToolFormat.QWEN3_CODER: "<tool_call> </tool_call>",
        ToolFormat.GLM: "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        ToolFormat.MINIMAX: "<tool_calls> </tool_calls>",
        ToolFormat.MINIMAX_M2: "<minimax:tool_call> </minimax:tool_call>",
        ToolFormat.HARMONY: "<|start|> <|end|> <|channel|> <|message|> <|constrain|>",
        ToolFormat.GEMMA4: f"<|tool_call> <tool_call|> {QUOTE}",
        ToolFormat.MUSE: "<|start|> <|message|> <|eom|>",
        ToolFormat.NONE: "",
    }.items()
}
"""Tokens that the tracker needs even if the vocabulary marks them as special."""

ENDS: Mapping[ToolFormat, frozenset[str]] = {
    ToolFormat.HARMONY: frozenset({"<|call|>", "<|return|>"}),
    ToolFormat.GEMMA4: frozenset({"<turn|>", "<|tool_response>"}),
    ToolFormat.MUSE: frozenset({"<|eot|>"}),
}
"""Tokens that end a reply in a format, in addition to the model's own."""


@dataclass(frozen=True, slots=True)
class TagForm:
    """Calls whose arguments have tags of their own, strings as they are and all else as JSON.

    A call is `open` name `named`, then for each argument `key` its name `value`, its value and `end`; then `close`.
    White space between these means nothing. `begin` and `finish` stand around each call, or around all of them
    `together`. `line`: a value has a line end before and behind it that is not its own. `json` replaces `value` before
    a value that is not a string.
    """

    begin: str
    finish: str
    key: str
    value: str
    end: str
    open: str = ""
    named: str = ""
    close: str = ""
    together: bool = False
    line: bool = False
    json: str = ""


_TOOL_CALL = ("<tool_call>", "</tool_call>")


def _invocations(section: str, prefix: str = "", text: str = "", other: str = "") -> TagForm:
    """Calls in a `section`, whose tags begin with `prefix`; `text` and `other` stand in those of such values."""
    parameter, invoke = f"{prefix}parameter", f"{prefix}invoke"
    return TagForm(
        *(f"<{section}>", f"</{section}>"),
        *(f'<{parameter} name="', f'"{text}>', f"</{parameter}>"),
        *(f'<{invoke} name="', '">', f"</{invoke}>"),
        together=True,
        json=other and f'"{other}>',
    )


TAGS: Mapping[ToolFormat, TagForm] = {
    ToolFormat.QWEN3_CODER: TagForm(
        *_TOOL_CALL, "<parameter=", ">", "</parameter>", "<function=", ">", "</function>", line=True
    ),
    ToolFormat.GLM: TagForm(*_TOOL_CALL, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ToolFormat.MINIMAX_M2: _invocations("minimax:tool_call"),
    ToolFormat.MUSE: _invocations("atem:function_calls", "atem:"),
    ToolFormat.DEEPSEEK_V32: _invocations("｜DSML｜function_calls", "｜DSML｜", ' string="true"', ' string="false"'),
}

# First match wins. A template may name several markers: Hermes templates never name the others.
_SIGNS = (
    ("<|tool_call>call:", ToolFormat.GEMMA4),
    ("<atem:function_calls>", ToolFormat.MUSE),
    ("｜DSML｜", ToolFormat.DEEPSEEK_V32),
    ("<｜tool▁sep｜>", ToolFormat.DEEPSEEK_V31),
    ("<|tool_calls_section_begin|>", ToolFormat.KIMI_K2),
    ("<minimax:tool_call>", ToolFormat.MINIMAX_M2),
    ("<|channel|>", ToolFormat.HARMONY),
    ("[TOOL_CALLS]", ToolFormat.MISTRAL),
    ("<|python_start|>", ToolFormat.PYTHONIC),
    ("func_name1(params_name1", ToolFormat.PYTHONIC),
    ("<|python_tag|>", ToolFormat.LLAMA3),
    ("<parameter=", ToolFormat.QWEN3_CODER),
    ("<tool_call>\n<function=", ToolFormat.QWEN3_CODER),
    ("<arg_key>", ToolFormat.GLM),
    ("<tool_calls>", ToolFormat.MINIMAX),
    ("<tool_call>", ToolFormat.HERMES),
    ("<function=", ToolFormat.LLAMA3_FUNCTION),
    (_LLAMA_JSON, ToolFormat.LLAMA3),
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
    format = next((format for sign, format in _SIGNS if sign in template), ToolFormat.NONE)
    if format is ToolFormat.DEEPSEEK_V31 and "```json" in template:
        return ToolFormat.DEEPSEEK_V3
    if format is ToolFormat.PYTHONIC and _LLAMA_JSON in template:
        return ToolFormat.LLAMA4
    return format


def hermes_may_be_told(template: str, override: str = "") -> bool:
    """Whether the prompt may ask for calls in Hermes' format: neither template nor `override` names another one."""
    format = detect_format(template, override)
    return format is ToolFormat.HERMES or (format is ToolFormat.NONE and not override)
