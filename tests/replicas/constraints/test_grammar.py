"""What a request asks for, and that whatever its grammar lets through is read back as what it was to be.

In every format, with several tokenizers, by random walks.
"""

import json
import math
import random
from functools import partial
from typing import Any

import pytest
from call_grammars import (
    FORMATS,
    GOOD,
    WEATHER,
    allowed,
    asks,
    compiler,
    drawn,
    fits,
    held,
    read,
    rule,
    tool,
    validator,
)
from call_texts import call_texts
from jsonschema import Draft202012Validator

from holdfast.replicas.constraints.compiler import Compiler
from holdfast.replicas.constraints.grammar import ANY_OBJECT, ReplyRule, Schema, ToolRule, forms_of, reply_rule
from holdfast.replicas.constraints.guidance import Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.requests import ChatPrompt, JsonOutput
from holdfast.replicas.text.calls.formats import ToolFormat

USER = [{"role": "user", "content": "hi"}]


def test_what_a_request_asks_for() -> None:
    tools = [tool("f"), tool("g", strict=True)]
    assert reply_rule(ChatPrompt(USER)) is None
    assert reply_rule(ChatPrompt(USER, tools, tool_choice="none")) is None
    assert reply_rule(ChatPrompt(USER, tools[:1]), "off") is None
    assert reply_rule(ChatPrompt(USER, tools), "schema", writes_calls=False) is None
    free = asks(tools=tools[:1])
    assert (free.in_text, free.strict) == (True, False)
    assert free.tools[0].arguments.content["properties"] == GOOD["properties"]
    named = reply_rule(ChatPrompt(USER, tools), "names")
    assert named is not None
    assert [tool.arguments.content == ANY_OBJECT for tool in named.tools] == [True, False], "a strict one is followed"
    required = asks(tools=tools, tool_choice="required")
    assert ([t.name for t in required.tools], required.calls, required.parallel) == (["f", "g"], "required", True)
    forced = asks(tools=tools, tool_choice="required", forced_tool="g")
    assert ([t.name for t in forced.tools], forced.parallel) == (["g"], False)
    strict = asks(tools=tools, parallel_tool_calls=False)
    assert (len(strict.tools), strict.calls, strict.parallel) == (2, "auto", False)
    both = asks(tools=tools, output=JsonOutput(GOOD))
    assert (both.calls, both.json and both.json.content) == ("auto", GOOD)
    alone = asks(tools=tools, tool_choice="none", output=JsonOutput(GOOD))
    assert (alone.calls, alone.tools) == ("none", ())


def walk(matcher: Matcher, words: Vocabulary, seed: int, limit: int = 600) -> bytes:
    """Random allowed tokens up to the end, those that may close something rather than others."""
    rng = random.Random(seed)
    text = b""
    for _ in range(limit):
        choices = allowed(matcher)
        assert choices, text
        forced = matcher.forced()
        assert not forced or choices == forced[:1]
        token = drawn(choices, words, rng, 0.5)
        if not words.tokens[token] or not matcher.accepts([token]):
            return text  # the end
        matcher.advance([token])
        assert not matcher.failed, text
        text += words.tokens[token]
        if matcher.finished:
            return text
    return text


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_required_calls_are_read_back_and_follow_their_schemas(
    format: ToolFormat, parallel: bool, tokenizers: list[Any]
) -> None:
    finished = 0
    for tokenizer in tokenizers:
        made = compiler(tokenizer, format)
        for seed in range(6):
            matcher = made.matcher(rule(calls="required", parallel=parallel))
            text = walk(matcher, made.vocabulary, seed, 500).decode(errors="replace")
            if made.vocabulary.eos[0] not in allowed(matcher):
                continue  # cut off: some lists have no end
            finished += 1
            prose, calls = read(format, text)
            assert prose == "", text
            assert calls, text
            assert parallel or len(calls) == 1
            for name, arguments in calls:
                validator(name).validate(json.loads(arguments))
    assert finished > 8


@pytest.mark.parametrize("strict", [True, False])
def test_json_replies_follow_their_schema(strict: bool, tokenizers: list[Any]) -> None:
    body = ReplyRule(json=Schema(WEATHER, strict, "response_format"))
    for tokenizer in tokenizers:
        made = compiler(tokenizer, ToolFormat.NONE)
        for seed in range(20):
            matcher = made.matcher(body)
            text = walk(matcher, made.vocabulary, seed).decode()
            assert matcher.finished, text
            Draft202012Validator(WEATHER).validate(json.loads(text))


def written(format: ToolFormat, arguments: dict[str, Any], name: str = "f") -> str:
    """A call as the format's chat template writes it."""
    if format is ToolFormat.PYTHONIC:
        keywords = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        return f"<|python_start|>[{name}({keywords})]<|python_end|>"
    marked = format in (ToolFormat.LLAMA3, ToolFormat.LLAMA4)
    (text,) = call_texts(format, [(name, arguments)], partial(json.dumps, ensure_ascii=False), int(marked))
    return text


def accepted(made: Compiler, text: str) -> bool:
    """Whether the whole of `text` may be a reply."""
    matcher = made.matcher(rule(calls="auto"))
    ids = [*made.vocabulary.encode(text), made.vocabulary.eos[0]]
    return matcher.advance(ids) == len(ids)


PROSE = ["", "Hello, wörld.\n\nI look: ", "日本 <tool [TOOL 1 < 2 "]


@pytest.mark.parametrize("format", FORMATS)
def test_text_is_free_until_a_call_begins(format: ToolFormat, tokenizers: list[Any]) -> None:
    for tokenizer in tokenizers:
        made = compiler(tokenizer, format)
        for prose in PROSE:
            assert accepted(made, prose)
            assert accepted(made, prose + written(format, {"city": "Oslo", "days": [1, 2]})), prose
            assert not accepted(made, prose + written(format, {"city": "Oslo"})), "days are missing"
            assert not accepted(made, prose + written(format, {"days": [1, "2"]}))
            assert not accepted(made, prose + written(format, {"days": []}, "rm")), "not declared"
            assert not accepted(made, prose + written(format, {"days": []})[:-3]), "not closed"
            assert accepted(made, prose + written(format, {"days": []}) + " and so on"), "which the reader leaves out"


SECTIONS = [ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31, ToolFormat.DEEPSEEK_V32, ToolFormat.KIMI_K2]
SECTIONS += [ToolFormat.QWEN3_CODER, ToolFormat.MINIMAX_M2, ToolFormat.MUSE]


@pytest.mark.parametrize("format", SECTIONS)
def test_a_call_without_the_marker_of_its_section_is_held_to_its_schema(format: ToolFormat, qwen_like: Any) -> None:
    made = compiler(qwen_like, format)
    forms = forms_of(format, made.vocabulary.knows)
    assert forms is not None
    section, single = forms.triggered
    for days, right in (("[1]", True), ("[true]", False)):
        whole = written(format, {"days": json.loads(days)})
        text = whole[whole.index(single.opener) :].removesuffix(section.tail.strip()).rstrip()
        text = text[: text.rindex(single.after.split("\n")[-1]) + len(single.after.split("\n")[-1])]
        assert read(format, text)[1], text
        assert accepted(made, "Well, " + text) is right, text


BARE = {
    ToolFormat.LLAMA3: ('{"name": "f", "parameters": {"days": [1]}}', '{"name": "f", "parameters": {"days": "1"}}'),
    ToolFormat.PYTHONIC: ("[f(days=[1])]", '[f(days="1")]'),
}
ANSWERS = ["Hello, wörld.\n[1] {2}", '{"name": "Alice", "age": 7}', "[1] says so", '{"answer": 1}', "{", "["]


@pytest.mark.parametrize("format", BARE)
def test_a_bare_call_begins_with_a_declared_name_and_its_arguments(format: ToolFormat, tokenizers: list[Any]) -> None:
    call, broken = BARE[format]
    for tokenizer in tokenizers:
        made = compiler(tokenizer, format)
        for space in ("", "\n\n", "\r\n \t\n", "\n" * 40):
            assert accepted(made, space + call), space
            assert read(format, space + call)[1] == [("f", '{"days": [1]}')]
            assert not accepted(made, space + broken), space
            assert not accepted(made, space + call[:-3]), space
            for text in ANSWERS:
                assert accepted(made, space + text), "an answer"


def test_a_bare_call_in_another_style_and_a_second_one_are_held_to_their_schemas(llama3_like: Any) -> None:
    made = compiler(llama3_like, ToolFormat.LLAMA3)
    for frame in ('{"type": "function", "name": "f", "parameters": ', '{\n"name":"f","arguments": '):
        assert accepted(made, frame + '{"days": [1]}}')
        assert not accepted(made, frame + '{"days": [true]}}')
    first = '{"name": "get-time", "parameters": {}}'
    assert accepted(made, first + BARE[ToolFormat.LLAMA3][0])
    assert not accepted(made, first + "\n" + BARE[ToolFormat.LLAMA3][1])
    assert not accepted(made, first + "; " + BARE[ToolFormat.LLAMA3][1])


def test_json_or_calls_where_both_are_asked_for(qwen_like: Any) -> None:
    made = compiler(qwen_like, ToolFormat.HERMES)
    both = rule(calls="auto", json=Schema({"type": "object"}, True, "response_format"))
    for text, right in (('{"a": 1}', True), (written(ToolFormat.HERMES, {"days": []}), True), ("Hello", False)):
        assert fits(made.matcher(both), made, text) is right, text


NUMBERS = ["0", "-7", "9" * 30, "-" + "9" * 40, "9" * 41, "9" * 400, "1.5", "0." + "3" * 20, "0." + "3" * 400]
NUMBERS += ["1e5", "-1.25E-300", "1e259", "1e260", "1e999", "1" * 40 + "e259"]
LIMITED = {
    "n": {"type": "number"},
    "i": {"type": "integer"},
    "low": {"type": "number", "minimum": 0},
    "high": {"type": "number", "exclusiveMaximum": 7},
    "count": {"type": "integer", "minimum": 1},
    "year": {"type": "integer", "minimum": -20, "maximum": 31},
    "third": {"type": "integer", "multipleOf": 3},
    "any": {},
    "one_of": {"oneOf": [{"type": "number"}, {"type": "string"}]},
    "names": {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    "either": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
    "both": {"allOf": [{"type": "number"}, {"minimum": -3}]},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", LIMITED)
def test_numbers_are_finite_and_have_so_many_digits(name: str, strict: bool, qwen_like: Any) -> None:
    """In answers and in calls. Long integers may stand, and limits of the schema are kept."""
    schema = {"type": "object", "properties": {name: LIMITED[name]}, "required": [name], "additionalProperties": False}
    wrapped = '{"x": %s}' if name == "names" else "%s"
    for format in (ToolFormat.NONE, ToolFormat.HERMES):
        made = compiler(qwen_like, format)
        if format is ToolFormat.NONE:
            matcher, frame = made.matcher(ReplyRule(json=Schema(schema, strict, "response_format"))), "%s"
        else:
            matcher = made.matcher(ReplyRule((ToolRule("f", Schema(schema, strict, "tools.0")),), "required"))
            frame = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
        taken = []
        for number in NUMBERS:
            text = json.dumps({name: 0}).replace("0", wrapped % number)
            if fits(matcher, made, frame % text):
                Draft202012Validator(schema).validate(json.loads(text))
                assert json.loads(number) not in (math.inf, -math.inf)
                assert len(number) < 90
                taken.append(number)
        assert "0" in taken or name == "count"
        assert ("9" * 30 in taken) is (name not in ("high", "year", "third", "names"))
        if name in ("n", "any"):
            assert taken == [each for each in NUMBERS if len(each) < 60 and each not in ("9" * 41, "1e260", "1e999")]


@pytest.mark.parametrize("depth", [16, 40, 1100])
def test_values_that_may_be_anything_are_nested_to_some_depth(depth: int, qwen_like: Any) -> None:
    made = compiler(qwen_like, ToolFormat.HERMES)
    text = '{"a": ' * (depth - 1) + "{}" + "}" * (depth - 1)
    for schema in ({"type": "object"}, {}, {"oneOf": [{"type": "object"}]}):
        matcher = made.matcher(ReplyRule(json=Schema(schema, True, "response_format")))
        assert fits(matcher, made, text) is (depth < 20), schema


def test_a_required_name_that_is_not_listed_may_be_anything(qwen_like: Any) -> None:
    """Parameters are closed, and what they require is still there to be written."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "zz"]}
    for format in (ToolFormat.HERMES, ToolFormat.QWEN3_CODER):
        made = compiler(qwen_like, format)
        for calls in ("required", "auto"):
            matcher = held(made.matcher(asks(tools=[tool("f", parameters, True)], tool_choice=calls)))
            for arguments, right in (
                ({"a": 1, "zz": [True]}, True),
                ({"a": 1}, False),
                ({"a": 1, "b": 2}, False),
                ({"a": "x", "zz": 1}, False),  # of a name that is listed the schema counts
            ):
                (text,) = call_texts(format, [("f", arguments)], json.dumps)
                assert fits(matcher, made, text) is right, text
