"""Tool calls found in a streamed reply: every format, any chunking, and whatever a model may get wrong."""

import json
import re
from typing import Any

import pytest
from call_texts import (
    ARGUMENTS,
    CALLS,
    FORMATS,
    JSON_FORMATS,
    NAMES,
    as_read,
    call_texts,
    chunked,
    collected,
    mutated,
    parser,
    read,
    valid,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.requests import TextDelta, ToolCall, ToolCallDelta
from holdfast.replicas.text.calls.formats import TAGS, ToolFormat
from holdfast.replicas.text.calls.tracker import GRACE

WEATHER = '{"city": "Oslo", "days": [1, {"a": "}]{"}]}'

GOOD = [
    (ToolFormat.HERMES, f'<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>'),
    (ToolFormat.HERMES, f'<tool_call>{{"arguments": {WEATHER}, "name": "f"}}</tool_call>\n'),
    (ToolFormat.HERMES, f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(WEATHER)}}}\n</tool_call>'),
    (ToolFormat.HERMES, f'<tool_call>\n{{"name": "f", "arguments": {WEATHER}'),  # the last brace is missing
    (ToolFormat.LLAMA3, f'{{"name": "f", "parameters": {WEATHER}}}'),
    (ToolFormat.LLAMA3, f'\n{{"type": "function", "name": "f", "parameters": {WEATHER}}}'),
    (ToolFormat.LLAMA3, f'<|python_tag|>{{"name": "f", "parameters": {WEATHER}}}'),
    (ToolFormat.LLAMA3, f"<function=f>{WEATHER}</function>"),
    (ToolFormat.LLAMA3_FUNCTION, f"<function=f>{WEATHER}</function>"),
    (ToolFormat.LLAMA3_FUNCTION, f'{{"name": "f", "parameters": {WEATHER}}}'),
    (ToolFormat.MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {WEATHER}, "id": "abc"}}]'),
    (ToolFormat.MISTRAL, f"[TOOL_CALLS]f{WEATHER}"),
    (ToolFormat.MISTRAL, f"[TOOL_CALLS]f[CALL_ID]x1[ARGS]{WEATHER}"),
    (ToolFormat.PYTHONIC, '[f(city="Oslo", days=[1, {"a": "}]{"}])]'),
    (ToolFormat.PYTHONIC, "<|python_start|>[f(city='Oslo', days=(1, {'a': '}]{'}))]<|python_end|>"),
    (ToolFormat.LLAMA4, f'{{"name": "f", "parameters": {WEATHER}}}'),
    (ToolFormat.LLAMA4, f'<|python_start|>{{"name": "f", "parameters": {WEATHER}}}<|python_end|>'),
    (ToolFormat.HARMONY, f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{WEATHER}<|call|>"),
    (ToolFormat.HARMONY, f" to=functions.f<|channel|>commentary json<|message|>{WEATHER}"),
    (ToolFormat.HARMONY, f"<|start|>assistant<|channel|>analysis to=functions.f code<|message|>{WEATHER}<|call|>"),
    (ToolFormat.HARMONY, f"<|channel|>commentary to=f<|message|>{WEATHER}<|call|>"),
    *(
        (format, call_texts(format, [("f", json.loads(WEATHER))])[0])
        for format in (*TAGS, ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31, ToolFormat.MINIMAX)
    ),
]


@pytest.mark.parametrize(("format", "text"), GOOD)
def test_one_call(format: ToolFormat, text: str) -> None:
    reader = parser(format)
    assert collected([text], reader) == ("", [["f", WEATHER]])
    assert reader.calls == (ToolCall("call_0", "f", WEATHER),)


KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


def test_a_call_of_kimi_has_the_id_that_its_template_shows_again() -> None:
    reader = parser(ToolFormat.KIMI_K2)
    text = KIMI.format(KIMI_CALL.format("f", 3) + KIMI_CALL.format("search", 4) + KIMI_CALL.format("f", 3))
    collected([text], reader)
    assert [(call.call_id, call.name) for call in reader.calls] == [
        ("functions.f:3", "f"), ("functions.search:4", "search"), ("call_2", "f")
    ], "an id that is there already is none"  # fmt: skip


SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "count": {"$ref": "#/$defs/count"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["5", "6"]},
        "any": {},
    },
    "$defs": {"count": {"type": "integer"}},
}


@pytest.mark.parametrize("format", [format for format in TAGS if not TAGS[format].json])
def test_in_tags_the_schema_tells_a_text_from_json(format: ToolFormat) -> None:
    for written, values in (
        ({"text": "5", "count": "5", "maybe": "null", "kind": "5", "any": "5"},
         {"text": "5", "count": 5, "maybe": None, "kind": "5", "any": 5}),
        ({"text": 'a "b" </par\n\n<c', "count": " 7 ", "maybe": "5", "kind": "6", "any": "True"},
         {"text": 'a "b" </par\n\n<c', "count": 7, "maybe": "5", "kind": "6", "any": True}),
        ({"text": "\n", "count": "five", "any": "{a"}, {"text": "\n", "count": "five", "any": "{a"}),
    ):  # fmt: skip
        (text,) = call_texts(format, [("f", written)])
        for size in (1, 7, 1000):
            reader = parser(format, schemas={"f": SCHEMA})
            _, calls = collected([text[at : at + size] for at in range(0, len(text), size)], reader)
            assert [(name, json.loads(sent)) for name, sent in calls] == [("f", values)], size


def test_a_tag_that_calls_its_value_a_text_decides_where_the_schema_does_not() -> None:
    def tag(key: str, text: str, value: str) -> str:
        return f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'

    tags = [
        tag("any", "true", "5"),
        tag("other", "false", "5"),
        tag("maybe", "true", "null"),
        tag("third", "false", "x"),
    ]
    tags += [tag("text", "false", "5"), tag("count", "true", "5"), tag("kind", "false", "5")]
    call = f'<｜DSML｜invoke name="f">\n{"".join(tags)}</｜DSML｜invoke>'
    text = f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"
    ((_, sent),) = collected([text], parser(ToolFormat.DEEPSEEK_V32, schemas={"f": SCHEMA}))[1]
    expected = {"any": "5", "other": 5, "maybe": "null", "third": "x", "text": "5", "count": 5, "kind": "5"}
    assert json.loads(sent) == expected


@pytest.mark.parametrize("format", TAGS)
def test_a_long_text_that_may_also_be_null_goes_out_as_it_is_read(format: ToolFormat) -> None:
    schema = {"properties": {"content": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    words = "\n".join(["words"] * 50)
    text = "".join(call_texts(format, [("f", {"content": words})]))
    reader = parser(format, schemas={"f": schema})
    deltas = [delta for char in text for delta in reader.feed(char) if isinstance(delta, ToolCallDelta)]
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"content": words}
    assert len(deltas) > 200


def test_where_calls_are_guaranteed_one_that_is_cut_is_no_text() -> None:
    for format, text in GOOD:
        begins = text.find("f")
        if text[0] in "<[" and format is not ToolFormat.PYTHONIC and not text.startswith("<function"):
            said, _ = collected(["Hi. " + text[:begins]], parser(format, guaranteed=lambda: True), cut=True)
            assert said == "Hi. ", text
            assert read(format, "Hi. " + text[:begins])[0] != "Hi. "


TWO = [
    (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
     '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'),
    (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "search"}\n</tool_call>'),
    (ToolFormat.LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "search", "parameters": {}}'),
    (ToolFormat.LLAMA3, '<function=f>{"a": 1}</function><function=search>{}</function>'),
    (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "search", "arguments": {}}]'),
    (ToolFormat.MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]search{}'),
    (ToolFormat.MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS][{"name": "search", "arguments": {}}]'),
    (ToolFormat.PYTHONIC, "[f(a=1), search()]"),
    (ToolFormat.HARMONY, '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}<|call|><|start|>'
     "assistant to=functions.search<|channel|>commentary<|message|>{}"),
    (ToolFormat.HARMONY, '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|start|>'
     "assistant<|channel|>commentary to=functions.search<|message|>{}"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text"), TWO)
def test_parallel_calls_and_only_the_first_where_not_allowed(format: ToolFormat, text: str) -> None:
    assert read(format, text) == ("", [["f", '{"a": 1}'], ["search", "{}"]])
    reader = parser(format, parallel=False)
    assert collected([text], reader) == ("", [["f", '{"a": 1}']])
    assert reader.stopped


PLAIN = [
    (ToolFormat.HERMES, "Use <tool_call> to call a tool, </tool_call> to end."),
    (ToolFormat.HERMES, '<tool_call>\n{"name": "rm", "arguments": {"x": "<tool_call>"}}\n</tool_call>\n'),
    (ToolFormat.HERMES, '<tool_call>{"name": "f" "arguments": 1}'[:20]),
    (ToolFormat.HERMES, "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    (ToolFormat.HERMES, "ends in <tool_ca"),
    (ToolFormat.HERMES, " \n "),
    (ToolFormat.LLAMA3, '{"answer": {"name": "f", "parameters": {}}}'),
    (ToolFormat.LLAMA3, '{"name": "rm", "parameters": {}}; {"name": "mv", "parameters": {}}'),
    (ToolFormat.LLAMA3, "<|python_tag|>print(1)"),
    (ToolFormat.LLAMA3_FUNCTION, "<function=f>[1]</function>"),
    (ToolFormat.LLAMA3_FUNCTION, "a <function=rm>{}</function> b"),
    (ToolFormat.MISTRAL, "[TOOL_CALLS]rm{}"),
    (ToolFormat.MISTRAL, "[TOOL_CALLS][1, 2]"),
    (ToolFormat.PYTHONIC, "[a link](http://localhost) and f(a=1)"),
    (ToolFormat.PYTHONIC, "[f(a=open('x'))]"),
    (ToolFormat.PYTHONIC, "[f(1)] and []"),
]


@pytest.mark.parametrize(("format", "text"), PLAIN)
def test_what_is_no_call_comes_out_as_it_was(format: ToolFormat, text: str) -> None:
    assert read(format, text) == (text, [])


def test_prose_after_a_call_asks_for_the_end_and_is_dropped() -> None:
    reader = parser(ToolFormat.HERMES)
    reader.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert not reader.stopped
    assert reader.feed("\nI hope") == []
    assert reader.stopped
    assert reader.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>') == reader.finish() == []
    kept = '<tool_call>{"name": "f", "arguments": {}}</tool_call> I hope'
    assert read(ToolFormat.HERMES, kept, early_stop=False) == (" I hope", [["f", "{}"]])


def test_white_space_beyond_the_grace_asks_for_the_end() -> None:
    reader = parser(ToolFormat.HERMES)
    reader.feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>' + "\n" * GRACE)
    assert not reader.stopped
    reader.feed("\n")
    assert reader.stopped


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    reader = parser(ToolFormat.HERMES)
    assert reader.feed('<tool_call>{"name": "f') == []
    assert reader.feed('", "arguments": ') == []
    assert reader.feed("{") == [ToolCallDelta(0, "call_0", "f", "{")]
    assert reader.feed('"ci') == [ToolCallDelta(0, arguments='"ci')]
    assert reader.feed('ty": 1}') == [ToolCallDelta(0, arguments='ty": 1}')]
    assert reader.calls == ()
    assert reader.feed("}") == [ToolCallDelta(0, closed=True)]
    assert reader.calls == (ToolCall("call_0", "f", '{"city": 1}'),)


def test_a_broken_call_stays_unfinished_and_the_next_one_is_its_own() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>\n<tool_call>{"name": "search"}</tool_call>'
    reader = parser(ToolFormat.HERMES)
    assert collected([text], reader) == ("</tool_call>", [["f", '{"a": 1'], ["search", "{}"]])
    assert reader.calls == (ToolCall("call_1", "search", "{}"),)


@pytest.mark.parametrize("member", ['"argumens": {"a": 1}', '"name": "g"', '"id": {"arguments": {"a": 1}}'])
def test_a_member_that_calls_do_not_have_is_not_passed_over(member: str) -> None:
    """Or a misspelled key would make it a call without arguments, and its text would be lost."""
    text = f'<tool_call>{{"name": "f", {member}}}</tool_call>'
    assert read(ToolFormat.HERMES, text) == (text, [])
    closed = f'<tool_call>{{"name": "f", "arguments": {{"b": 2}}, {member}}}</tool_call>'
    text, calls = read(ToolFormat.HERMES, closed, early_stop=False)
    assert calls == [["f", '{"b": 2}']]
    assert member.partition(": ")[2] in text


@pytest.mark.parametrize("arguments", ["1", "[1]", "none", "'{}'", '"{"', '"x"'])
def test_arguments_are_an_object_the_text_of_one_or_none(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(ToolFormat.HERMES, text) == (text, [])
    for none in ("null", "None", "[]", "[ ]", '""'):
        assert read(ToolFormat.HERMES, text.replace(arguments, none)) == ("", [["f", "{}"]])


def test_an_undeclared_call_may_be_asked_for_again() -> None:
    asked: list[tuple[int, int]] = []

    def ask(opened: int, begun: int) -> bool:
        asked.append((opened, begun))
        return True

    text = 'I look.\n<tool_call>\n{"name": "rm", "arguments": {}}'
    for cut in range(len(text)):
        reader = parser(ToolFormat.HERMES)
        reader.on_unguarded = ask
        sent = [*reader.feed(text[:cut]), *reader.feed(text[cut:])]
        assert "".join(delta.text for delta in sent if isinstance(delta, TextDelta)) == "I look."
        assert reader.stopped
    assert set(asked) == {(8, 8)}
    for answer in ('{"name": "Bob", "age": 3}', '{"name": "Bob"}', '{"type": "x", "name": "Bob", "id": 1}'):
        reader = parser(ToolFormat.LLAMA3)
        reader.on_unguarded = ask
        assert collected([answer], reader) == (answer, []), "without arguments it may be an answer in JSON"
    assert set(asked) == {(8, 8)}
    for format, text, at in [
        (ToolFormat.LLAMA3, '{"name": "rm", "parameters": {}}', (0, 0)),
        (ToolFormat.LLAMA3, '{"parameters": {}, "name": "rm"}', (0, 0)),
        (ToolFormat.LLAMA3, '<|python_tag|>{"name": "rm"}', (0, 0)),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "f"}, {"name": "rm"}]', (0, 26)),
        (ToolFormat.PYTHONIC, "[f(a=1), rm(b=2)]", (0, 7)),
        (ToolFormat.LLAMA3, 'x <function=rm>{"a": 1}</function>', (2, 2)),
    ]:
        reader = parser(format)
        reader.on_unguarded = ask
        collected([text], reader)
        assert asked[-1] == at


@pytest.mark.parametrize(("format", "text"), [*GOOD, *((each, GOOD[0][1]) for each in (*FORMATS, ToolFormat.NONE))])
def test_without_declared_tools_everything_is_text(format: ToolFormat, text: str) -> None:
    assert read(format, text, declared_names=frozenset()) == (text, [])


SECTIONS = {
    ToolFormat.DEEPSEEK_V3: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ToolFormat.DEEPSEEK_V31: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ToolFormat.DEEPSEEK_V32: ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    ToolFormat.KIMI_K2: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ToolFormat.MINIMAX_M2: ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ToolFormat.MUSE: ("<atem:function_calls>\n", "\n</atem:function_calls>"),
    ToolFormat.QWEN3_CODER: ("<tool_call>\n", "\n</tool_call>"),
}


@pytest.mark.parametrize("format", SECTIONS)
@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3), st.booleans(), st.data())
def test_calls_are_read_without_the_markers_of_their_section(
    format: ToolFormat, calls: list[Any], closed: bool, data: st.DataObject
) -> None:
    opener, closer = SECTIONS[format]
    text = "".join(call_texts(format, calls))
    whole = read(format, f"I look.\n{text}", early_stop=False)
    bare = text.removeprefix(opener) if closed else text.replace(opener, "\n").replace(closer, "").strip()
    said, found = collected(chunked(f"I look.\n{bare}", data), parser(format, early_stop=False))
    assert (said, found) == whole
    assert [name for name, _ in found] == [name for name, _ in calls]


@pytest.mark.parametrize("guaranteed", [True, False])
def test_markers_of_calls_in_prose_are_prose_without_their_section(guaranteed: bool) -> None:
    for text in ('I write <invoke name="rm">', 'I write <invoke name="rm"> or so', "So <invoke name=x", "<invoke>"):
        assert read(ToolFormat.MINIMAX_M2, text, guaranteed=lambda: guaranteed) == (text, [])


# ---- laws ----

WORDS = st.sampled_from(
    ["Hello", "so,", "<tool", "<tool_call>", "[TOOL_CALLS]", "{", "[f(", "<|python_tag|>", "é日", "\n"]
)


def core(text: str) -> str:
    """`text` without what is put right in arguments: escapes, white space, commas, Python's words for JSON's."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = re.sub("True|False|None", lambda found: words[found[0]], text.replace("\n", "\\n"))
    return re.sub(r"[\\,\s]+", "", text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(CALLS, min_size=1, max_size=3), st.data())
def test_declared_calls_come_back_as_written(format: ToolFormat, calls: list[Any], data: st.DataObject) -> None:
    reader = parser(format, early_stop=False)
    _, found = collected(chunked("".join(call_texts(format, calls)), data), reader)
    expected = [(name, as_read(format, arguments)) for name, arguments in calls if name in NAMES]
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected
    assert [[call.name, call.arguments] for call in reader.calls] == found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(CALLS, min_size=1, max_size=3), st.data())
def test_what_closes_a_call_is_foreseen(format: ToolFormat, calls: list[Any], data: st.DataObject) -> None:
    """Where the call has begun in an earlier chunk. No text but that of calls is taken for it."""
    reader = parser(format, early_stop=False)
    assert not reader.may_close(b"f(x) <b> {}")
    begun = False
    for chunk in chunked("".join(call_texts(format, calls)), data):
        foreseen, before = reader.may_close(chunk.encode()), len(reader.calls)
        reader.feed(chunk)
        assert foreseen or not begun or len(reader.calls) == before
        begun = reader.may_close(b"})>")


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(CALLS, max_size=2), st.lists(WORDS, max_size=4), st.booleans(), st.data())
def test_any_chunking_of_any_output_gives_the_same(
    format: ToolFormat, calls: list[Any], words: list[str], first: bool, data: st.DataObject
) -> None:
    block = "".join(call_texts(format, calls)) if calls else ""
    text = mutated(block + " ".join(words) if first else " ".join(words) + block, data)
    options = {"early_stop": data.draw(st.booleans()), "parallel": data.draw(st.booleans())}
    whole, cut = parser(format, **options), parser(format, **options)
    assert collected([text], whole) == collected(chunked(text, data), cut)
    assert (whole.calls, whole.stopped) == (cut.calls, cut.stopped)


def is_json(text: str) -> bool:
    try:
        valid(text)
    except ValueError:
        return False
    return True


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(CALLS, min_size=1, max_size=3), st.lists(WORDS, max_size=3), st.data())
def test_nothing_is_lost_and_no_two_calls_are_one(
    format: ToolFormat, calls: list[Any], words: list[str], data: st.DataObject
) -> None:
    """Whatever is changed in the output, its parts come out in order: text and arguments, less markup of calls."""
    raw = mutated("".join(call_texts(format, calls)), data) + " " + " ".join([*words, "zq"])
    reader = parser(format, early_stop=False)
    text, found = collected([raw], reader)
    if not found:
        assert text == raw
        return
    rest = iter(raw)
    assert all(char in rest for char in text), "text came out changed or out of order"
    # In tags a value that is no text is sent once it is whole: where the output ends inside of one, that is not.
    broken = format in TAGS and not is_json(found[-1][1])
    assert text.endswith("zq") or any("zq" in arguments for _, arguments in found) or broken
    if format in JSON_FORMATS:
        at = 0
        for name, arguments in found:
            assert name in raw
            if arguments != "{}":
                at = core(raw).index(core(arguments), at) + len(core(arguments))
    for call in reader.calls if format not in TAGS else ():
        assert '"name": "' not in call.arguments or core(call.arguments) in core(raw)
