"""Conversations as clients and servers leave them, rendered with the templates of many models."""

import json
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from chat_templates import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import assistant, call, result, system, user

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.render import Renderer, normalised

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LATER_SYSTEM = (  # as Qwen 3.5 does
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content + '|' }}{% endfor %}"
)
IN_PLACE = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '|' }}{% endfor %}"
HOISTED = (  # as DeepSeek does
    "{% for m in messages if m.role == 'system' %}{{ '[system]' + m.content + '|' }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '[' + m.role + ']' + m.content + '|' }}{% endfor %}"
)
NO_SYSTEM = (  # as Gemma 2 does: roles take turns, and there is no system role
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content + '|' }}{% endfor %}"
)
GEMMA3 = (  # the first system message stands at the head of the first user's; roles take turns
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m.role + ']' + (first if loop.first else '') + m.content + '|' }}{% endfor %}"
)
SILENT = (  # as MiniMax M2 does: it shows the first system message and no other
    "{% if messages[0].role == 'system' %}{{ '[system]' + messages[0].content + '|' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ '[' + m.role + ']' + m.content + '|' }}{% endfor %}"
)


def test_content_becomes_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [user(parts), {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}]
    assert normalised(messages) == [user("a\nb"), {"role": "assistant", "content": ""}]
    assert normalised([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("null", {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ("3", {"invalid_arguments": "3"}),
        ('"Beijing"', {"invalid_arguments": '"Beijing"'}),
        ('{"value": ', {"invalid_arguments": '{"value": '}),
        ("1" * 5000, {"invalid_arguments": "1" * 5000}),
    ],
)
def test_arguments_are_objects(given: Any, parsed: Any) -> None:
    """Text that is no JSON object is the only member of one, so it is rendered the same in every later turn."""
    assert normalised([call(given)])[0]["tool_calls"][0]["function"]["arguments"] == parsed


@pytest.mark.parametrize(
    ("given", "text"), [(None, "{}"), ("", "{}"), ("null", "{}"), ('{"a": 1', '{"a": 1'), ({"a": 1}, '{"a": 1}')]
)
def test_arguments_for_templates_that_put_texts_together(given: Any, text: str) -> None:
    assert normalised([call(given)], False)[0]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([user("x"), user(5)], "messages.1.content"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages.0.content"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls"),
    ],
)
def test_what_cannot_be_rendered_names_its_field(messages: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalised(messages)
    assert caught.value.field == field


@pytest.mark.parametrize("template", [text for _, text in TEMPLATES.values()], ids=TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"value": ', '"Beijing"', "[1]", "3", "null", "", '{"city": "\\ud83d"}'])
def test_every_template_takes_a_call_whose_arguments_are_no_object(
    with_template: Callable[[str], Renderer], template: str, arguments: str
) -> None:
    """The law: the turn after such a call is rendered, and a later turn begins with the same text."""
    renderer = with_template(template)
    said = [user("Rain?"), call(arguments), result("error")]
    one = renderer.render(ChatPrompt([*said, user("go on")], [TOOL])).text
    assert "go on" in one
    later = renderer.render(ChatPrompt([*said, user("go on"), assistant("yes"), user("and?")], [TOOL])).text
    assert later.startswith(one.rpartition("go on")[0]) or "AVAILABLE_TOOLS" in one  # these stand before the last user
    if arguments.strip() not in ("", "null") and "ud83d" not in arguments:
        assert arguments in one or json.dumps(arguments)[1:-1] in one, "the model sees what it wrote"


@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 4))
def test_results_stand_in_the_order_of_their_calls(ids: list[str], n: int) -> None:
    told = [user("?"), call("{}", "a", "b", "c", "d"), *(result(f"of {each}", each) for each in ids[:n]), user("!")]
    found = [message["content"] for message in normalised(told)[2:-1]]
    assert found == sorted(found)
    assert len(found) == n


def test_results_with_the_same_id_or_an_unknown_one_keep_their_order() -> None:
    calls = call("{}", "000000001", "2", "2")
    told = [calls, result("x", "9"), result("b", "2"), result("c", "2"), result("a"), user("!"), result("d", "2")]
    assert [message["content"] for message in normalised(told)[1:]] == ["a", "b", "c", "x", "!", "d"]


MIDDLE = [system("Be brief."), user("one"), assistant("two"), system("Now German."), user("three")]


LATER = "|[user]one|[assistant]two|[user]Now German.\n\nthree|"


@pytest.mark.parametrize(
    ("template", "later", "first"),
    [
        (
            IN_PLACE,
            "[system]Be brief.|[user]one|[assistant]two|[system]Now German.|[user]three|",
            "[system]a|[system]b|[user]one|",
        ),
        (LATER_SYSTEM, "[system]Be brief." + LATER, "[system]a\n\nb|[user]one|"),
        (HOISTED, "[system]Be brief." + LATER, "[system]a|[system]b|[user]one|"),
        (SILENT, "[system]Be brief." + LATER, "[system]a\n\nb|[user]one|"),
        (GEMMA3, LATER.replace("|[user]", "[user]Be brief.\n\n", 1), "[user]a\n\nb\n\none|"),
        (NO_SYSTEM, LATER.replace("|[user]", "[user]Be brief.\n\n", 1), "[user]a\n\nb\n\none|"),
    ],
)
def test_a_later_system_message_stands_where_it_was_said_and_those_at_the_beginning_are_one(
    with_template: Callable[[str], Renderer], template: str, later: str, first: str
) -> None:
    """In place, or as the user's text: never at the beginning, where it would change every cached prompt."""
    renderer = with_template(template)
    for role in ("developer", "system"):
        told = [{**message, "role": role} if message["role"] == "system" else message for message in MIDDLE]
        assert renderer.render(ChatPrompt(told)).text == later
    assert renderer.render(ChatPrompt([system("a"), system("b"), user("one")])).text == first


@pytest.mark.parametrize("template", [IN_PLACE, LATER_SYSTEM, HOISTED, SILENT, GEMMA3, NO_SYSTEM])
@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_conversation_that_goes_on_keeps_its_beginning(qwen_like: Any, template: str, told: list[bool]) -> None:
    """Turns of a user and an assistant, some with a system message before them."""
    tokenizer = copy(qwen_like)
    tokenizer.chat_template = template
    renderer, messages, known = Renderer(tokenizer), list[dict[str, Any]](), ""
    for place, has_system in enumerate(told):
        messages += [system(f"s{place}")] if has_system else []
        text = renderer.render(ChatPrompt([*messages, user(f"u{place}")])).text
        assert text.startswith(known)
        messages += [user(f"u{place}"), assistant(f"a{place}")]
        known = renderer.render(ChatPrompt(messages)).text
        assert known.startswith(text)


CHATML = (  # as SmolLM2 has it: no tools, and no role is refused
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
WORKED = [
    system("Be brief."),
    user("Rain?"),
    {**call('{"city": "Malmö"}', "000000001", "2"), "content": "I look."},
    result("no", "2"),
    result("yes"),
    user("Sure?"),
]
CALLED = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"city": "Malmö"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"city": "Malmö"}}\n</tool_call>'
)
ANSWERED = (
    "<tool_response>\nyes\n</tool_response>\n\n<tool_response>\nno\n</tool_response>\n\nSure?"  # in the calls' order
)


@pytest.mark.parametrize("template", [CHATML, GEMMA3, NO_SYSTEM])
def test_tools_are_told_in_the_system_prompt_where_the_template_takes_none(
    with_template: Callable[[str], Renderer], template: str
) -> None:
    renderer = with_template(template)
    assert renderer.tools_as_text
    assert renderer.tool_format is ToolFormat.HERMES
    text = renderer.render(ChatPrompt(WORKED, [WEATHER, TOOL])).text
    assert f"<tools>\n{json.dumps(WEATHER)}\n{json.dumps(TOOL)}\n</tools>" in text
    places = [text.find(part) for part in ("Be brief.\n\n# Tools", "<tools>", "Rain?", CALLED, ANSWERED)]
    assert -1 not in places
    assert places == sorted(places)
    without = renderer.render(ChatPrompt(WORKED)).text
    assert "# Tools" not in without
    assert CALLED in without
    assert ANSWERED in without
    alone = renderer.render(ChatPrompt([user("Rain?")], [TOOL])).text
    assert 0 < alone.find("# Tools") < alone.find("Rain?")


@pytest.mark.parametrize("template", [CHATML, GEMMA3, NO_SYSTEM])
def test_turns_with_tools_told_as_text_keep_their_beginning(
    with_template: Callable[[str], Renderer], template: str
) -> None:
    renderer = with_template(template)
    known = ""
    for end in (2, 3, 5):
        text = renderer.render(ChatPrompt(WORKED[:end], [TOOL])).text
        assert text.startswith(known)
        known = text.removesuffix("<|im_start|>assistant\n")
        known = known.removesuffix("<|im_end|>\n").removesuffix("|")  # what comes may be joined with the last message


def test_an_operator_who_says_how_calls_are_written_is_believed(
    qwen_like: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen_like, "chat_template", CHATML)
    assert not Renderer(qwen_like, "none").tools_as_text
    assert not Renderer(qwen_like, "pythonic").tools_as_text
    assert Renderer(qwen_like, "hermes").tools_as_text
