"""Grammars are compiled once, kept up to a number, and schemas that cannot be followed are told by their field."""

from typing import Any

import pytest

from holdfast.replicas.constraints import library
from holdfast.replicas.constraints.compiler import Compiler
from holdfast.replicas.constraints.rules import ReplyRule, Schema, ToolRule, declared_rule, reply_rule
from holdfast.replicas.constraints.vocabulary import Vocabulary
from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt, JsonOutput
from holdfast.replicas.text.formats import ToolFormat

USER = [{"role": "user", "content": "hi"}]
GOOD = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
NEVER = {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]}
UNKNOWN = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}}
REMOTE = {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema"}}, "required": ["a"]}


def tool(name: str, parameters: Any = GOOD, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def asks(**fields: Any) -> ReplyRule | None:
    return reply_rule(ChatPrompt(USER, **fields))


@pytest.fixture
def hermes(qwen_like: Any) -> Compiler:
    return Compiler(lambda: Vocabulary(qwen_like, frozenset({0, 1, 2}), frozenset({2})), ToolFormat.HERMES, 2)


def refused(compiler: Compiler, **fields: Any) -> InvalidRequestError:
    rule = asks(**fields)
    assert rule is not None
    with pytest.raises(InvalidRequestError) as caught:
        compiler.matcher(rule)
    return caught.value


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


def test_grammars_are_compiled_once_and_the_oldest_is_forgotten(hermes: Compiler) -> None:
    rules = [asks(tools=[tool(name)], tool_choice="required") for name in "fgh"]
    for rule in (rules[0], rules[1], rules[0], rules[2], rules[0], asks(tools=[tool("f")], tool_choice="required")):
        assert rule is not None
        hermes.matcher(rule)
    assert hermes.compiled == 3
    assert rules[1] is not None
    hermes.matcher(rules[1])
    assert hermes.compiled == 4


def test_matchers_of_one_grammar_are_independent(hermes: Compiler) -> None:
    rule = asks(tools=[tool("f")], tool_choice="required")
    assert rule is not None
    one, other = hermes.matcher(rule), hermes.matcher(rule)
    first = other.forced()
    one.advance(first[0])
    assert one.forced() == first[1:]
    assert other.forced() == first


@pytest.mark.parametrize("schema", [NEVER, UNKNOWN, REMOTE, {"type": "object", "properties": {"a": {"type": "x"}}}])
def test_a_strict_schema_that_cannot_be_followed_names_its_field(hermes: Compiler, schema: Any) -> None:
    strict = refused(hermes, output=JsonOutput(schema, strict=True))
    assert strict.field == "response_format.json_schema.schema"
    tools = [tool("f"), tool("g"), tool("h", schema, strict=True)]
    assert refused(hermes, tools=tools).field == "tools.2.function.parameters"
    assert refused(hermes, tools=tools, tool_choice="required").field == "tools.2.function.parameters"


def test_where_it_is_not_strict_what_is_unknown_is_left_out(hermes: Compiler) -> None:
    rule = asks(output=JsonOutput(UNKNOWN))
    assert rule is not None
    assert not hermes.matcher(rule).failed
    loose = asks(tools=[tool("f", REMOTE), tool("g", NEVER)], tool_choice="required")
    assert loose is not None
    assert not hermes.matcher(loose).failed
    assert refused(hermes, output=JsonOutput(NEVER)).field == "response_format.json_schema.schema"


def test_a_model_without_calls_cannot_be_required_to_make_one(qwen_like: Any) -> None:
    plain = Compiler(lambda: Vocabulary(qwen_like, frozenset(), frozenset({2})), ToolFormat.NONE, 2)
    assert refused(plain, tools=[tool("f")], tool_choice="required").field == "tool_choice"


def test_python_calls_need_properties_that_are_names(qwen_like: Any) -> None:
    pythonic = Compiler(lambda: Vocabulary(qwen_like, frozenset(), frozenset({2})), ToolFormat.PYTHONIC, 2)
    dashed = {"type": "object", "properties": {"a-b": {"type": "string"}}, "required": ["a-b"]}
    assert refused(pythonic, tools=[tool("f", dashed, strict=True)]).field == "tools.0.function.parameters"
    optional = asks(tools=[tool("f", {**dashed, "required": []}, strict=True)])
    assert optional is not None
    assert not pythonic.matcher(optional).failed


def test_without_the_library_only_requests_that_need_it_fail(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "AVAILABLE", False)
    assert refused(hermes, output=JsonOutput(GOOD)).field == "response_format"
    assert refused(hermes, tools=[tool("f")], tool_choice="required").field == "tool_choice"
    assert refused(hermes, tools=[tool("f", strict=True)]).field == "tools.0.function.strict"
    assert "llguidance" in refused(hermes, output=JsonOutput(GOOD)).message


def test_equal_rules_have_equal_keys() -> None:
    schema = Schema(GOOD, True, "a")
    same = (
        ReplyRule((ToolRule("f", schema),), "auto").key
        == ReplyRule((ToolRule("f", Schema(dict(GOOD), True, "b")),), "auto").key
    )
    assert same
    assert ReplyRule((ToolRule("f", schema),), "auto").key != ReplyRule((ToolRule("f", schema),), "required").key
