"""Which format a model's calls have."""

import pytest

from holdfast.replicas.constraints.grammar import forms_of
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.text.calls.formats import MARKERS, ToolFormat, detect_format
from holdfast.replicas.text.calls.readers import READERS

TEMPLATES = [
    ("<tools></tools> <tool_call>\n", ToolFormat.HERMES),
    ("{{ '<|python_tag|>' }}", ToolFormat.LLAMA3),
    ('Respond in the format {"name": function name, "parameters": ...}', ToolFormat.LLAMA3),
    ("{{ '[TOOL_CALLS]' + name }}", ToolFormat.MISTRAL),
    ("[func_name1(params_name1=params_value1)]", ToolFormat.PYTHONIC),
    ("<tool_call>\n<function=", ToolFormat.QWEN3_CODER),
    ("<function=name>\n<parameter=a>", ToolFormat.QWEN3_CODER),
    ("{{ '<tool_call>' + name }}{{ '<arg_key>' }}", ToolFormat.GLM),
    ("{{ '<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>' }}", ToolFormat.DEEPSEEK_V31),
    ("'<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'", ToolFormat.DEEPSEEK_V3),
    ("<|tool_calls_section_begin|>{{ call['id'] }}", ToolFormat.KIMI_K2),
    ("<minimax:tool_call><invoke name=", ToolFormat.MINIMAX_M2),
    ("<tool_calls>\n", ToolFormat.MINIMAX),
    ('<|python_start|> Respond in the format {"name": function name, "parameters": ...}', ToolFormat.LLAMA4),
    ("<|python_start|>[", ToolFormat.PYTHONIC),
    ("<|channel|>commentary", ToolFormat.NONE),
    ("answer with <function=name>{...}</function>", ToolFormat.LLAMA3_FUNCTION),
    ("{{ message.content }}", ToolFormat.NONE),
    (None, ToolFormat.NONE),
]


@pytest.mark.parametrize(("template", "format"), TEMPLATES)
def test_the_template_shows_the_format(template: str | None, format: ToolFormat) -> None:
    assert detect_format(template) is format
    assert detect_format(template, "mistral") is ToolFormat.MISTRAL


def test_an_unknown_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="known: hermes") as caught:
        detect_format("", "xml")
    assert caught.value.field == "tool_format"


@pytest.mark.parametrize("format", [format for format in ToolFormat if format is not ToolFormat.NONE])
def test_a_format_is_found_read_and_forced(format: ToolFormat) -> None:
    assert format in {found for _, found in TEMPLATES}
    assert format in MARKERS
    assert forms_of(format, lambda _: True) is not None
    for marker in READERS[format].marked:
        assert marker.count(marker[0]) == 1, "or its reader would pass over a marker in what looked like one"
