"""Grammars are compiled once, kept up to a number, and schemas that cannot be followed are told by their field.

One that takes long holds up its own tenant and nobody else, and no one for ever.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from call_grammars import GOOD, asks, fits, held, tool
from waiting import PATIENCE_S, until_async

from holdfast.replicas.constraints import compiler as compiling
from holdfast.replicas.constraints.compiler import Compiler, CompilerThreads, NotCompiledError
from holdfast.replicas.constraints.grammar import ReplyRule, Schema
from holdfast.replicas.constraints.guidance import LIMITS, CallGuard, GrammarError, Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import InvalidRequestError, OverloadedError, UnavailableError
from holdfast.replicas.requests import JsonOutput
from holdfast.replicas.text.calls.formats import ToolFormat

NEVER = {"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["a"]}
UNKNOWN = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}}}
REMOTE = {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema"}}, "required": ["a"]}


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.fixture
def hermes(qwen_like: Any) -> Compiler:
    return Compiler(lambda: Vocabulary(qwen_like, frozenset({0, 1, 2}), frozenset({2})), ToolFormat.HERMES, 2)


def refused(compiler: Compiler, **fields: Any) -> InvalidRequestError:
    rule = asks(**fields)
    with pytest.raises(InvalidRequestError) as caught:
        compiler.matcher(rule)
    return caught.value


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
        matcher = hermes.matcher(asks(tools=[tool("f", parameters, strict)], tool_choice="required"))
        for arguments, right in (('{"a": "x"}', True), ("5", False), ("[1]", False), ('"a"', False)):
            assert fits(matcher, hermes, CALL % ("f", arguments)) is right, arguments


def test_grammars_are_compiled_once_and_the_oldest_is_forgotten(hermes: Compiler) -> None:
    rules = [asks(tools=[tool(name)], tool_choice="required") for name in "fgh"]
    for rule in (rules[0], rules[1], rules[0], rules[2], rules[0], asks(tools=[tool("f")], tool_choice="required")):
        hermes.matcher(rule)
    assert hermes.compiled == 3
    hermes.matcher(rules[1])
    assert hermes.compiled == 4


def test_a_refusal_is_remembered_and_names_the_field_of_each_request(hermes: Compiler) -> None:
    tools = [tool("f", NEVER, strict=True), tool("g", NEVER, strict=True)]
    errors = [refused(hermes, tools=tools, tool_choice="required", forced_tool=name) for name in "fgf"]
    assert [error.field for error in errors] == [f"tools.{index}.function.parameters" for index in (0, 1, 0)]
    assert errors[0].message == errors[2].message
    assert errors[0] is not errors[2], "each is raised on its own"
    assert hermes.compiled == 2


class Blocked:
    """Compiling a grammar with `word` in it begins, and goes on once it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, word: str = "") -> None:
        self.begun, self.release = threading.Semaphore(0), threading.Event()
        compile = Vocabulary.compile

        def blocked(library: Vocabulary, lark: str) -> Any:
            if word in lark:
                self.begun.release()
                assert self.release.wait(PATIENCE_S)
            return compile(library, lark)

        monkeypatch.setattr(Vocabulary, "compile", blocked)


def test_a_known_grammar_never_waits_and_a_new_one_is_compiled_once(
    hermes: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, new = asks(output=JsonOutput(GOOD)), asks(output=JsonOutput(UNKNOWN))
    hermes.matcher(known)
    blocked = Blocked(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        making = threads.submit(hermes.matcher, new)
        blocked.begun.acquire()
        try:
            assert not hermes.matcher(known).failed
            told = threads.submit(hermes.matcher, new).exception(timeout=60)
            assert isinstance(told, NotCompiledError)
            assert (told.field, making.done()) == ("response_format", False)
        finally:
            blocked.release.set()
        assert told.making is not None
        assert told.making.result() is not making.result(), "each is a copy"
    assert not hermes.matcher(new).failed
    assert hermes.compiled == 2


def test_an_event_loop_neither_compiles_nor_waits(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = asks(output=JsonOutput(GOOD))

    async def on_loop() -> bool:
        return hermes.matcher(rule).failed

    with pytest.raises(NotCompiledError):
        asyncio.run(on_loop())
    assert hermes.compiled == 0
    blocked = Blocked(monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(hermes.matcher, rule)
        blocked.begun.acquire()
        try:
            with pytest.raises(NotCompiledError):
                asyncio.run(on_loop())
        finally:
            blocked.release.set()
        making.result()
    assert asyncio.run(on_loop()) is False


def test_rules_that_are_too_long_name_what_is(hermes: Compiler) -> None:
    long = {**GOOD, "properties": {"a": {"const": "x" * 300_000}}}
    assert refused(hermes, output=JsonOutput(long)).field == "response_format.json_schema.schema"
    tools = [tool("f"), tool("g", long)]
    assert refused(hermes, tools=tools, tool_choice="required").field == "tools.1.function.parameters"
    many = [tool(f"f{index}", {**GOOD, "properties": {"a": {"const": "x" * 1000}}}) for index in range(300)]
    assert refused(hermes, tools=many, tool_choice="required").field == "tools"
    assert hermes.compiled == 0


def test_what_only_people_read_is_no_part_of_a_grammar(hermes: Compiler) -> None:
    """200 tools with a page of descriptions each are followed, and one grammar serves whatever is said of them."""

    def described(text: str) -> Any:
        said = {"description": text, "title": text, "default": text, "examples": [text], "$comment": text}
        inner = {"type": "object", "properties": {"title": {"type": "string", **said}}, "required": ["title"], **said}
        properties = {f"p{index}": {"type": "array", "items": inner, **said} for index in range(6)}
        return {"type": "object", "properties": properties, "required": ["p0"], **said}

    for choice in ("required", "auto"):
        for text in ("x" * 160, "y" * 160):
            rule = asks(tools=[tool(f"f{index}", described(text)) for index in range(200)], tool_choice=choice)
            matcher = held(hermes.matcher(rule))
            assert fits(matcher, hermes, CALL % ("f199", '{"p0": [{"title": "a"}]}'))
            assert not fits(matcher, hermes, CALL % ("f199", '{"p0": [{"title": 1}]}'))
    assert hermes.compiled == 2


def test_a_grammar_whose_lexer_is_used_up_is_compiled_again(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies share a lexer, which grows with them. One that has reached its limit fails no later request."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 120)
    text = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 300}}}
    for fields in ({"output": JsonOutput(text, strict=True)}, {"tools": [tool("f", text, strict=True)]}):
        rule = asks(**fields)
        begins = CALL.partition("%s}")[0] % "f" if "tools" in fields else ""
        ids = hermes.vocabulary.encode(begins + '{"a": "')
        first = held(hermes.matcher(rule))
        assert first.copy().accepts(ids) == len(ids)
        assert first.copy().accepts([*ids, *hermes.vocabulary.encode("xy" * 150)]) < len(ids) + 150
        assert held(hermes.matcher(rule)).accepts(ids) == len(ids)
    assert hermes.compiled == 4


MALFORMED = [{"type": "x"}, {"type": []}, {"enum": "abc"}, {"anyOf": 5}, {"allOf": {}}, {"anyOf": []}]
MALFORMED += [{"minLength": "x"}]


@pytest.mark.parametrize(
    "schema", [NEVER, UNKNOWN, REMOTE, *({"type": "object", "properties": {"a": each}} for each in MALFORMED)]
)
def test_a_strict_schema_that_cannot_be_followed_names_its_field(hermes: Compiler, schema: Any) -> None:
    strict = refused(hermes, output=JsonOutput(schema, strict=True))
    assert strict.field == "response_format.json_schema.schema"
    tools = [tool("f"), tool("g"), tool("h", schema, strict=True)]
    assert refused(hermes, tools=tools).field == "tools.2.function.parameters"
    assert refused(hermes, tools=tools, tool_choice="required").field == "tools.2.function.parameters"


LOOKAHEAD = {"type": "string", "pattern": "^(?=.*x).+$", "maxLength": 3}
PARTLY = {
    "type": "object",
    "properties": {"a": LOOKAHEAD, "b": {"type": "array", "items": {"anyOf": [LOOKAHEAD, {"type": "integer"}]}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_one_rule_leaves_out_of_answers_and_calls_what_cannot_be_followed(hermes: Compiler) -> None:
    """The keyword alone: what else a loose schema says is kept."""
    for fields in (
        {"output": JsonOutput(PARTLY)},
        {"tools": [tool("f", PARTLY)], "tool_choice": "required"},
        {"tools": [tool("f", PARTLY)]},
    ):
        matcher = held(hermes.matcher(asks(**fields)))
        for text, right in (
            ('{"a": "b", "b": ["c", 1]}', True),
            ('{"a": 1, "b": []}', False),
            ('{"a": "abcd", "b": []}', False),
            ('{"a": "b", "b": [null]}', False),
            ('{"a": "b"}', False),
        ):
            assert fits(matcher, hermes, CALL % ("f", text) if "tools" in fields else text) is right, (fields, text)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?<=x)y", "look-around, including look-ahead and look-behind, is not supported"),
        ("a(", "unclosed group"),
        (r"(a)\1", "backreferences are not supported"),
    ],
)
def test_an_error_says_where_a_strict_pattern_is_and_what_is_wrong_with_it(
    hermes: Compiler, pattern: str, why: str
) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": inner}}}
    place = "at 'properties.list.items.properties.a'"
    field = "response_format.json_schema.schema"
    error = refused(hermes, output=JsonOutput(schema, strict=True))
    assert error.message == f"Invalid schema in '{field}' {place}: the pattern {pattern!r} cannot be read: {why}"
    field = "tools.0.function.parameters"
    error = refused(hermes, tools=[tool("f", schema, strict=True)])
    assert error.message.startswith(f"Invalid schema for function 'f' in '{field}' {place}: the pattern")
    assert (error.field, error.message.rpartition(": ")[2]) == (field, why)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": "ab"}, "'required' must be a list of names"),
        ({"type": "object", "patternProperties": {"^x": {}}, "required": "x"}, "'required' must be a list of names"),
        ({"const": "a", "enum": ["b", 1]}, "'const' is none of the values of 'enum'"),
        ({"const": {"a": 1}, "enum": [{"a": 2}], "title": "x"}, "'const' is none of the values of 'enum'"),
    ],
)
def test_a_malformed_schema_is_refused_at_its_place_by_whoever_asks_for_it(
    hermes: Compiler, part: Any, why: str
) -> None:
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": part}}}
    for strict in (True, False):
        message = refused(hermes, output=JsonOutput(schema, strict=strict)).message
        assert message.endswith(f"at 'properties.list.items': {why}"), message
        error = refused(hermes, tools=[tool("f", schema, strict)], tool_choice="required")
        assert (error.field, error.message.rpartition(": ")[2]) == ("tools.0.function.parameters", why)
        either = refused(hermes, output=JsonOutput({"anyOf": [{"type": "object", "required": "ab"}]}, strict=strict))
        assert "at 'anyOf.0': 'required' must be a list of names" in either.message
        for format in (ToolFormat.PYTHONIC, ToolFormat.QWEN3_CODER):
            other = Compiler(lambda: hermes.vocabulary, format, 2)
            letters = tool("f", {"type": "object", "properties": {"a": {}}, "required": "a"}, strict)
            message = refused(other, tools=[letters], tool_choice="required").message
            assert message.endswith("'required' must be a list of names"), message
    matcher = hermes.matcher(asks(tools=[tool("f", schema), tool("g")]))
    assert isinstance(matcher, CallGuard)
    assert matcher.loose, "nobody has asked for it"


def test_tools_that_are_too_large_together_name_a_field(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of them could not be followed anyway, and any object was taken for it."""
    compile = Vocabulary.compile

    def limited(library: Vocabulary, lark: str) -> Any:
        if "<tool_call>" in lark:
            raise GrammarError("too large")
        return compile(library, lark)

    monkeypatch.setattr(Vocabulary, "compile", limited)
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
    optional = tool("f", {**dashed, "required": []}, strict=True)
    assert not pythonic.matcher(asks(tools=[optional])).failed


def test_without_the_library_only_requests_that_need_it_fail(hermes: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "AVAILABLE", False)
    assert refused(hermes, output=JsonOutput(GOOD)).field == "response_format"
    assert refused(hermes, tools=[tool("f")], tool_choice="required").field == "tool_choice"
    assert refused(hermes, tools=[tool("f", strict=True)]).field == "tools.0.function.strict"
    assert "llguidance" in refused(hermes, output=JsonOutput(GOOD)).message


# ---- threads ----


def about(name: str) -> ReplyRule:
    return ReplyRule(json=Schema({"const": name}, True, "response_format"))


class Slow(Blocked):
    """A compiler whose grammars with "slow" in them are not ready before `release`."""

    def __init__(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, "slow")
        self.compiler = Compiler(lambda: Vocabulary(tokenizer, frozenset(), frozenset({2})), ToolFormat.HERMES, 16)

    def run(self, threads: CompilerThreads, name: str, scope: str | None) -> Coroutine[Any, Any, Matcher]:
        return threads.run(partial(self.compiler.matcher, about(name)), scope)

    async def has_begun(self, times: int = 1) -> None:
        for _ in range(times):
            assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE_S)


@pytest.fixture
def slow(qwen_like: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(qwen_like, monkeypatch)
    yield slow
    slow.release.set()


async def test_those_who_ask_for_one_grammar_take_one_thread(slow: Slow) -> None:
    threads = CompilerThreads()
    making = [asyncio.create_task(slow.run(threads, "slow", scope)) for scope in "abcd"]
    await slow.has_begun()
    making += [asyncio.create_task(slow.run(threads, "slow", scope)) for scope in "aa"]
    assert not (await slow.run(threads, "other", "e")).failed
    assert not (await slow.run(threads, "another", "b")).failed
    assert not any(task.done() for task in making)
    slow.release.set()
    assert len({id(matcher) for matcher in await asyncio.gather(*making)}) == 6
    assert slow.compiler.compiled == 3


async def test_tenants_with_grammars_that_are_never_ready_hold_up_no_others(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_SLOW_S", 0.01)
    threads = CompilerThreads()
    hostile = [asyncio.create_task(slow.run(threads, f"slow {i} {scope}", scope)) for i in "12" for scope in "abcde"]
    await slow.has_begun(len(hostile))
    await until_async(lambda: threads._n_slow == len(hostile))
    compilers = [each for each in threading.enumerate() if each.name == compiling._NAME]
    assert max(os.getpriority(os.PRIO_PROCESS, each.native_id or 0) for each in compilers) == 19
    again = [asyncio.create_task(slow.run(threads, f"slow {scope}, again", scope)) for scope in "abcde"]
    for scope in "fgh":
        assert not (await slow.run(threads, f"other {scope}", scope)).failed
    assert not slow.begun.acquire(blocking=False), "two slow ones of a tenant"
    slow.release.set()
    await asyncio.gather(*hostile, *again)
    await until_async(lambda: not threads._n_slow)


HOSTILE = {
    "type": "object",
    "properties": {
        "a": {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuv"]}
    },
    "required": ["a"],
}


@pytest.mark.parametrize("strict", [True, False])
async def test_a_grammar_that_would_take_minutes_is_ended_and_holds_up_no_other(
    hermes: Compiler, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    monkeypatch.setattr(compiling, "LONGEST_S", 1)
    monkeypatch.setattr(compiling, "_PART_S", 1)
    monkeypatch.setattr(compiling, "_SLOW_S", 0.1)
    tried, answered = compiling._TRIALS.complaint, threading.Event()

    def waits(lark: str, seconds: int) -> str:
        if ".*v.*" in lark:  # goes on until the other one has its answer
            assert answered.wait(PATIENCE_S)
        return tried(lark, seconds)

    monkeypatch.setattr(compiling._TRIALS, "complaint", waits)
    threads = CompilerThreads(PATIENCE_S)
    hostile, other = (
        asyncio.create_task(threads.run(partial(hermes.matcher, asks(output=JsonOutput(schema, strict=strict))), "t"))
        for schema in (HOSTILE, GOOD)
    )
    try:
        assert not (await other).failed, "the tenant's next one does not wait for its end"
    finally:
        answered.set()
    if strict:
        with pytest.raises(InvalidRequestError, match=r"at 'properties\.a': it takes too long to compile") as caught:
            await hostile
        assert caught.value.field == "response_format.json_schema.schema"
    else:
        assert fits(await hostile, hermes, '{"a": "x')
    assert len(compiling._TRIALS._idle) <= compiling._IDLE
    assert all(process.poll() is None for process in compiling._TRIALS._idle), "those that are kept answer again"


async def test_nobody_waits_for_ever_for_a_thread_or_a_grammar(slow: Slow) -> None:
    threads = CompilerThreads(0.05)
    names = [("slow", "a"), ("slow too", "a"), ("behind them", "a"), ("slow b", "b"), ("slow b, too", "b")]
    asked = [*names, ("no place", "c"), ("slow", "d")]
    tasks = [asyncio.create_task(slow.run(threads, *each)) for each in asked]
    await asyncio.wait(tasks)
    for task in tasks:
        error = task.exception()
        assert isinstance(error, OverloadedError)
        assert error.field == "response_format"
        assert "too long to compile" in error.message
    await slow.has_begun(4)
    waits = asyncio.create_task(slow.run(CompilerThreads(), "slow", "a"))
    slow.release.set()
    assert not (await waits).failed, "what was begun has gone on"
    assert slow.compiler.compiled == 4


async def test_who_goes_leaves_the_queue_and_a_thread_that_is_done_its_place(slow: Slow) -> None:
    threads = CompilerThreads()
    gone = [asyncio.create_task(slow.run(threads, f"slow {i} {scope}", scope)) for scope in "ab" for i in "12"]
    await slow.has_begun(len(gone))
    gone += [asyncio.create_task(slow.run(threads, f"slow {scope}, later", scope)) for scope in "abc"]
    waits = asyncio.create_task(slow.run(threads, "other", "a"))
    await asyncio.sleep(0)  # each is in its queue
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    assert all(task.cancelled() for task in gone)
    assert not waits.done()
    slow.release.set()
    assert not (await waits).failed
    await asyncio.gather(*(slow.run(threads, f"other {scope}", scope) for scope in "abcde"))
    assert slow.compiler.compiled == 10


async def test_what_waits_for_a_place_when_it_closes_is_refused(slow: Slow) -> None:
    threads = CompilerThreads()
    running = [asyncio.create_task(slow.run(threads, name, "a")) for name in ("slow", "slow too")]
    await slow.has_begun(len(running))
    waits = asyncio.create_task(slow.run(threads, "other", "a"))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(UnavailableError):
        await slow.run(threads, "another", "b")
    slow.release.set()
    assert not any(matcher.failed for matcher in await asyncio.gather(*running))
    with pytest.raises(UnavailableError):
        await waits


def test_the_process_ends_beside_a_grammar_that_is_never_ready() -> None:
    script = """
import asyncio, threading
from holdfast.replicas.constraints import compiler as threads
from holdfast.replicas.constraints.compiler import NotCompiledError
threads._GRACE_S = 0.01
begun = threading.Event()
def ask():
    if threading.current_thread() is threading.main_thread():
        raise NotCompiledError("tools", None)
    begun.set()
    threading.Event().wait()
async def main():
    task = asyncio.create_task(threads.CompilerThreads().run(ask, "a"))
    await asyncio.to_thread(begun.wait)
    task.cancel()
asyncio.run(main())
print("over")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("over\n", "")
