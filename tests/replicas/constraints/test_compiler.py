"""Grammars are compiled once, kept up to a number, and schemas that cannot be followed are told by their field."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.replicas.constraints import compiler as library
from holdfast.replicas.constraints.compiler import Compiler, NotCompiledError
from holdfast.replicas.constraints.grammar import ReplyRule, Schema, ToolRule, declared_rule, reply_rule
from holdfast.replicas.constraints.guidance import GrammarError, Grammars, Vocabulary
from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt, JsonOutput
from holdfast.replicas.text.calls.formats import ToolFormat

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


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string"}}},
        {"required": ["a"]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}},
        {"description": "whatever"},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_leaves_out(hermes: Compiler, parameters: Any) -> None:
    for strict in (True, False):
        rule = asks(tools=[tool("f", parameters, strict)], tool_choice="required")
        assert rule is not None
        matcher = hermes.matcher(rule)
        encode = hermes._vocabulary.encode
        for arguments, right in (('{"a": "x"}', True), ("5", False), ("[1]", False), ('"a"', False)):
            ids = encode('<tool_call>\n{"name": "f", "arguments": ' + arguments + "}\n</tool_call>")
            assert (matcher.accepts(ids) == len(ids)) is right, arguments


def test_grammars_are_compiled_once_and_the_oldest_is_forgotten(hermes: Compiler) -> None:
    rules = [asks(tools=[tool(name)], tool_choice="required") for name in "fgh"]
    for rule in (rules[0], rules[1], rules[0], rules[2], rules[0], asks(tools=[tool("f")], tool_choice="required")):
        assert rule is not None
        hermes.matcher(rule)
    assert hermes.compiled == 3
    assert rules[1] is not None
    hermes.matcher(rules[1])
    assert hermes.compiled == 4


def test_a_refusal_is_remembered_and_names_the_field_of_each_request(hermes: Compiler) -> None:
    tools = [tool("f", NEVER, strict=True), tool("g", NEVER, strict=True)]
    errors = [refused(hermes, tools=tools, tool_choice="required", forced_tool=name) for name in "fgf"]
    assert [error.field for error in errors] == [f"tools.{index}.function.parameters" for index in (0, 1, 0)]
    assert errors[0].message == errors[2].message
    assert errors[0] is not errors[2], "each is raised on its own"
    assert hermes.compiled == 2


def test_what_fails_by_accident_is_tried_again(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = asks(output=JsonOutput(GOOD))
    assert rule is not None
    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "compile", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hermes.matcher(rule)
    assert not hermes.matcher(rule).failed


class Held:
    """Compiling begins, and goes on once it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.release = threading.Semaphore(0), threading.Event()
        compile = Grammars.compile

        def held(grammars: Grammars, lark: str) -> Any:
            self.begun.release()
            self.release.wait()
            return compile(grammars, lark)

        monkeypatch.setattr(Grammars, "compile", held)


def test_a_known_grammar_never_waits_and_a_new_one_is_compiled_once(
    hermes: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, new = asks(output=JsonOutput(GOOD)), asks(output=JsonOutput(UNKNOWN))
    assert known is not None
    assert new is not None
    hermes.matcher(known)
    held = Held(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        making = threads.submit(hermes.matcher, new)
        held.begun.acquire()
        try:
            assert not hermes.matcher(known).failed
            told = threads.submit(hermes.matcher, new).exception(timeout=20)
            assert isinstance(told, NotCompiledError)
            assert (told.field, making.done()) == ("response_format", False)
        finally:
            held.release.set()
        assert told.making is not None
        assert told.making.result() is not making.result(), "each is a copy"
    assert not hermes.matcher(new).failed
    assert hermes.compiled == 2


def test_an_event_loop_neither_compiles_nor_waits(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = asks(output=JsonOutput(GOOD))
    assert rule is not None

    async def on_loop() -> bool:
        assert rule is not None
        return hermes.matcher(rule).failed

    with pytest.raises(NotCompiledError):
        asyncio.run(on_loop())
    assert hermes.compiled == 0
    held = Held(monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(hermes.matcher, rule)
        held.begun.acquire()
        try:
            with pytest.raises(NotCompiledError):
                asyncio.run(on_loop())
        finally:
            held.release.set()
        making.result()
    assert asyncio.run(on_loop()) is False


def test_rules_that_are_too_long_name_what_is(hermes: Compiler) -> None:
    long = {**GOOD, "description": "x" * 300_000}
    assert refused(hermes, output=JsonOutput(long)).field == "response_format.json_schema.schema"
    tools = [tool("f"), tool("g", long)]
    assert refused(hermes, tools=tools, tool_choice="required").field == "tools.1.function.parameters"
    many = [tool(f"f{index}", {**GOOD, "description": "x" * 1000}) for index in range(300)]
    assert refused(hermes, tools=many, tool_choice="required").field == "tools"
    assert hermes.compiled == 0


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


def test_tools_that_are_too_large_together_name_a_field(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them could not be followed anyway, and any object was taken for it."""
    compile = Grammars.compile

    def limited(grammars: Grammars, lark: str) -> Any:
        if "<tool_call>" in lark:
            raise GrammarError("too large")
        return compile(grammars, lark)

    monkeypatch.setattr(Grammars, "compile", limited)
    for tools in ([tool("f")], [tool("f"), tool("g", NEVER)]):
        error = refused(hermes, tools=tools, tool_choice="required")
        assert (error.field, error.message) == ("tool_choice", "'tool_choice': too large")


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


@pytest.mark.parametrize("part", [{"properties": ["a"]}, {"properties": None}, {"required": 5}, {"required": [["a"]]}])
def test_python_calls_of_a_malformed_schema_are_refused_or_follow_any_object(qwen_like: Any, part: Any) -> None:
    pythonic = Compiler(lambda: Vocabulary(qwen_like, frozenset(), frozenset({2})), ToolFormat.PYTHONIC, 2)
    tools = [tool("f", {"type": "object", **part}, strict=True)]
    assert refused(pythonic, tools=tools).field == "tools.0.function.parameters"
    loose = asks(tools=[tool("f", {"type": "object", **part})], tool_choice="required")
    assert loose is not None
    assert not pythonic.matcher(loose).failed


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
