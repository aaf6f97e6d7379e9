"""Which format a model's calls have."""

import json
from copy import copy
from typing import Any

import pytest
from chat_templates import TEMPLATES as WHOLE
from replies import call, result, system, user

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import ToolFormat, detect_format
from holdfast.replicas.text.calls.tracker import READERS, CallTracker
from holdfast.replicas.text.conversation import TextSide

ID = "functions.f:0"
TEMPLATES = [
    ('Respond in the format {"name": function name, "parameters": ...}', ToolFormat.LLAMA3),
    ("[func_name1(params_name1=params_value1)]", ToolFormat.PYTHONIC),
    ("<function=name>\n<parameter=a>", ToolFormat.QWEN3_CODER),
    ("<|python_start|>[", ToolFormat.PYTHONIC),
    ("answer with <function=name>{...}</function>", ToolFormat.LLAMA3_FUNCTION),
    ("{{ message.content }}", ToolFormat.NONE),
    (None, ToolFormat.NONE),
]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_template_shows_the_format_of_the_calls_that_it_writes(name: str, qwen_like: Any) -> None:
    format, template = WHOLE[name]
    assert detect_format(template) is format
    tokenizer = copy(qwen_like)
    tokenizer.chat_template = template
    side = TextSide(tokenizer, EngineConfig())
    assert side.tool_format is format
    assert side.renderer.most_parts > 1000, "long conversations are rendered"
    assert side.renderer._rules.objects
    assert not side.renderer.tools_as_text, "a template that takes tools is left alone"
    arguments = {"city": "Oslo", "days": [1, 2]}
    messages = [system("Be brief."), user("Rain?"), call(json.dumps(arguments), ID), result("none", ID)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    written = side.renderer.render(ChatPrompt(messages, tools)).text.rpartition("Rain?")[2]
    if format in (ToolFormat.LLAMA3, ToolFormat.LLAMA4, ToolFormat.PYTHONIC):  # whose replies begin with them
        begins = [written.find(marker) for marker in (*READERS[format].marked, *READERS[format].bare)]
        written = written[min(begin for begin in begins if begin >= 0) :]
    reader = CallTracker(format, frozenset({"f"}), True, str)
    reader.feed(written)
    assert [(each.name, json.loads(each.arguments)) for each in reader.calls] == [("f", arguments)]


def test_there_is_a_whole_template_for_every_format() -> None:
    assert {format for format, _ in WHOLE.values()} == set(ToolFormat) - {ToolFormat.NONE}


@pytest.mark.parametrize(("template", "format"), TEMPLATES)
def test_the_template_shows_the_format(template: str | None, format: ToolFormat) -> None:
    assert detect_format(template) is format
    assert detect_format(template, "mistral") is ToolFormat.MISTRAL


def test_an_unknown_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="known: hermes") as caught:
        detect_format("", "xml")
    assert caught.value.field == "tool_format"


def test_the_first_character_of_a_marker_stands_in_it_once() -> None:
    """Or its reader would pass over a marker in what looked like one."""
    assert [each for reader in READERS.values() for each in reader.marked if each.count(each[0]) > 1] == []
