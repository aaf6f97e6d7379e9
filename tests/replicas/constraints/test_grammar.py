"""What a request asks for, and that whatever its grammar lets through is read back as what it was to be.

In every format, with several tokenizers, by random walks.
"""

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from holdfast.replicas.constraints.compiler import Compiler
from holdfast.replicas.constraints.grammar import ReplyRule, Schema, ToolRule, declared_rule, reply_rule
from holdfast.replicas.constraints.guidance import Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.requests import ChatPrompt, JsonOutput, TextDelta
from holdfast.replicas.text.calls.formats import MARKERS, ToolFormat
from holdfast.replicas.text.calls.readers import ToolCallParser

USER = [{"role": "user", "content": "hi"}]
GOOD = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def tool(name: str, parameters: Any = GOOD, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def asks(**fields: Any) -> ReplyRule | None:
    return reply_rule(ChatPrompt(USER, **fields))


def test_what_a_request_asks_for() -> None:
    tools = [tool("f"), tool("g", strict=True)]
    assert asks() is None
    assert asks(tools=tools[:1]) is None
    assert asks(tools=tools, tool_choice="none") is None
    required = asks(tools=tools, tool_choice="required")
    assert required is not None
    assert ([t.name for t in required.tools], required.calls, required.parallel) == (["f", "g"], "required", True)
    named = asks(tools=tools, tool_choice="required", forced_tool="g")
    assert named is not None
    assert ([t.name for t in named.tools], named.parallel) == (["g"], False)
    strict = asks(tools=tools, parallel_tool_calls=False)
    assert strict is not None
    assert (len(strict.tools), strict.calls, strict.parallel) == (2, "auto", False)
    both = asks(tools=tools, output=JsonOutput(GOOD))
    assert both is not None
    assert (both.calls, both.json and both.json.content) == ("auto", GOOD)
    alone = asks(tools=tools, tool_choice="none", output=JsonOutput(GOOD))
    assert alone is not None
    assert (alone.calls, alone.tools) == ("none", ())


def test_parameters_that_list_their_properties_are_closed() -> None:
    rule = declared_rule(ChatPrompt(USER, [tool("f"), tool("g", None), tool("h", {"type": "object"})]))
    assert [t.arguments.content.get("additionalProperties") for t in rule.tools] == [False, False, None]


def test_equal_rules_have_equal_keys() -> None:
    schema = Schema(GOOD, True, "a")
    same = (
        ReplyRule((ToolRule("f", schema),), "auto").key
        == ReplyRule((ToolRule("f", Schema(dict(GOOD), True, "b")),), "auto").key
    )
    assert same
    assert ReplyRule((ToolRule("f", schema),), "auto").key != ReplyRule((ToolRule("f", schema),), "required").key


FORMATS = [format for format in ToolFormat if format is not ToolFormat.NONE]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "unit": {"enum": ["°C", "°F", '"', "<tool_call>"]},
        "deep": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "from": {"type": "number"},
        "class": {"type": "string", "maxLength": 2},
        "ﬁle": {"const": None},
    },
    "$defs": {"day": {"type": "integer", "minimum": -20, "maximum": 31}},
    "required": ["unit", "city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get-time": NOTHING, "f": {**WEATHER, "required": ["days"]}}


def rule(**options: Any) -> ReplyRule:
    tools = tuple(ToolRule(name, Schema(schema, True, name)) for name, schema in SCHEMAS.items())
    return ReplyRule(tools, **options)


def compiler(tokenizer: Any, format: ToolFormat) -> Compiler:
    markers = {token for text, token in tokenizer.get_vocab().items() if text in MARKERS[format]}
    control = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special) - markers
    return Compiler(lambda: Vocabulary(tokenizer, control, frozenset({tokenizer.eos_token_id})), format, 8)


def vocabulary(made: Compiler) -> Vocabulary:
    return made._vocabulary


def allowed(matcher: Matcher) -> list[int]:
    bits = np.empty((1, matcher.words), np.int32)
    matcher.fill((), bits)
    found: list[int] = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def walk(matcher: Matcher, tokens: list[bytes], seed: int, limit: int = 300) -> bytes:
    """Random allowed tokens up to the end, those that may close something rather than others."""
    rng = random.Random(seed)
    text = b""
    for _ in range(limit):
        choices = allowed(matcher)
        assert choices, text
        closers = [token for token in choices if set(tokens[token]) & set(b"\"'}])>,")]
        forced = matcher.forced()
        assert not forced or choices == forced[:1]
        token = rng.choice(closers if closers and rng.random() < 0.5 else choices)
        if not tokens[token] or not matcher.accepts([token]):
            return text  # the end
        matcher.advance(token)
        assert not matcher.failed, text
        text += tokens[token]
        if matcher.finished:
            return text
    return text


def read(format: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(format, frozenset(SCHEMAS), True, str)
    deltas = [*parser.feed(text), *parser.finish()]
    prose = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return prose, [(call.name, call.arguments) for call in parser.calls]


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(SCHEMAS[name])


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_required_calls_are_read_back_and_follow_their_schemas(
    format: ToolFormat, parallel: bool, tokenizers: list[Any]
) -> None:
    finished = 0
    for tokenizer in tokenizers:
        made = compiler(tokenizer, format)
        for seed in range(12):
            matcher = made.matcher(rule(calls="required", parallel=parallel))
            text = walk(matcher, vocabulary(made).tokens, seed).decode(errors="replace")
            if vocabulary(made).eos[0] not in allowed(matcher):
                continue  # cut off: some lists have no end
            finished += 1
            prose, calls = read(format, text)
            assert prose == "", text
            assert calls, text
            assert parallel or len(calls) == 1
            for name, arguments in calls:
                validator(name).validate(json.loads(arguments))
    assert finished > 20


@pytest.mark.parametrize("strict", [True, False])
def test_json_replies_follow_their_schema(strict: bool, tokenizers: list[Any]) -> None:
    body = ReplyRule(json=Schema(WEATHER, strict, "response_format"))
    for tokenizer in tokenizers:
        made = compiler(tokenizer, ToolFormat.NONE)
        for seed in range(20):
            matcher = made.matcher(body)
            text = walk(matcher, vocabulary(made).tokens, seed).decode()
            assert matcher.finished, text
            Draft202012Validator(WEATHER).validate(json.loads(text))


def written(format: ToolFormat, arguments: dict[str, Any], name: str = "f") -> str:
    """A call as the format's chat template writes it."""
    body = json.dumps(arguments, ensure_ascii=False)
    match format:
        case ToolFormat.HERMES:
            return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'
        case ToolFormat.LLAMA3:
            return f'<|python_tag|>{{"name": "{name}", "parameters": {body}}}'
        case ToolFormat.LLAMA3_FUNCTION:
            return f"<function={name}>{body}</function>"
        case ToolFormat.MISTRAL:
            return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {body}}}]'
        case _:
            keywords = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
            return f"<|python_start|>[{name}({keywords})]<|python_end|>"


def accepted(made: Compiler, text: str) -> bool:
    """Whether the whole of `text` may be a reply."""
    matcher = made.matcher(rule(calls="auto"))
    for token in vocabulary(made).encode(text):
        if token not in allowed(matcher):
            return False
        matcher.advance(token)
    return matcher.finished or vocabulary(made).eos[0] in allowed(matcher)


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
            assert not accepted(made, prose + written(format, {"days": []}) + " and so on")


def test_bare_calls_are_calls(llama3_like: Any) -> None:
    made = compiler(llama3_like, ToolFormat.LLAMA3)
    encode = vocabulary(made).encode
    matcher = made.matcher(rule(calls="auto"))
    good = encode('{"name": "f", "parameters": {"days": [1]}}; {"name": "get-time", "parameters": {}}')
    assert matcher.accepts(good) == len(good)
    other = encode('{"answer": 1}')
    assert matcher.accepts(other) < len(other)


@pytest.mark.parametrize("format", [ToolFormat.LLAMA3, ToolFormat.LLAMA3_FUNCTION, ToolFormat.PYTHONIC])
def test_white_space_may_stand_before_bare_calls_as_before_text(format: ToolFormat, tokenizers: list[Any]) -> None:
    """A model that has thought begins its answer with it."""
    if format is ToolFormat.PYTHONIC:
        call, broken = "[f(days=[1])]", ('[f(days="1")]', "[rm()]", "[")
    else:
        call, broken = '{"name": "f", "parameters": {"days": [1]}}', ('{"name": "rm", "parameters": {}}', "{")
    for tokenizer in tokenizers:
        made = compiler(tokenizer, format)
        for space in ("", "\n", "\n\n", " ", "\r\n \t\n", "\n" * 40):
            assert accepted(made, space + call), space
            assert read(format, space + call)[1] == [("f", '{"days": [1]}')]
            assert accepted(made, space)
            assert accepted(made, space + "Hello, wörld.\n[1] {2}")
            assert accepted(made, space + written(format, {"days": []}))
            assert not any(accepted(made, space + wrong) for wrong in broken), space
            assert not accepted(made, space + call + " and so on")


def test_json_or_calls_where_both_are_asked_for(qwen_like: Any) -> None:
    made = compiler(qwen_like, ToolFormat.HERMES)
    both = rule(calls="auto", json=Schema({"type": "object"}, True, "response_format"))
    encode = vocabulary(made).encode
    for text, right in (('{"a": 1}', True), (written(ToolFormat.HERMES, {"days": []}), True), ("Hello", False)):
        ids = encode(text)
        assert (made.matcher(both).accepts(ids) == len(ids)) is right, text
