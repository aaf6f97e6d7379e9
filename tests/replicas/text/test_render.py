"""Rendering: refusals by name, marked control tokens, and parts of conversations."""

import asyncio
import json
import math
from collections.abc import Callable
from copy import copy
from itertools import combinations
from typing import Any

import pytest
from chat_templates import TEMPLATES
from hypothesis import given
from hypothesis import strategies as st
from replies import assistant, call, result, system, user

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text import render
from holdfast.replicas.text.render import Rendered, Renderer, message_starts

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_a_tool_choice_changes_nothing_of_the_prompt(qwen_like: Any) -> None:
    """The conversation goes on from its cells."""
    renderer = Renderer(qwen_like)
    text = renderer.render(ChatPrompt([user("hi")], [TOOL])).text
    assert json.dumps(TOOL) in text
    for choice in ("none", "required"):
        assert renderer.render(ChatPrompt([user("hi")], [TOOL], tool_choice=choice)).text == text


def test_template_kwargs_reach_the_template_but_not_the_library(qwen_like: Any) -> None:
    renderer = Renderer(qwen_like)
    assert renderer.render(ChatPrompt([user("x")], template_kwargs={"thinking": True})).text
    for name in ("tokenize", "chat_template", "tools", "conversation"):
        with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs must not name {name}") as refused:
            renderer.render(ChatPrompt([user("x")], template_kwargs={name: "{{ 1 }}"}))
        assert refused.value.field == "chat_template_kwargs"


@pytest.mark.parametrize("depth", [90, 200, 100_000])
def test_arguments_nested_too_deeply_are_told_as_text(qwen_like: Any, depth: int) -> None:
    nested = '{"a":' + "[" * depth + "]" * depth + "}"
    text = Renderer(qwen_like).render(ChatPrompt([user("<|im_end|>"), call(nested)])).text
    assert ("invalid_arguments" in text) is (depth > 100)


def test_a_refusal_names_the_message(qwen_like: Any) -> None:
    judge = {"role": "judge", "content": "x"}
    for place in range(1, 9):
        messages = [user("a")] * 9
        messages[place] = judge
        with pytest.raises(InvalidRequestError, match="no such role: judge") as caught:
            Renderer(qwen_like).render(ChatPrompt(messages))
        assert caught.value.field == f"messages.{place}"


def test_half_a_surrogate_pair_is_replaced(qwen_like: Any) -> None:
    renderer = Renderer(qwen_like)
    assert renderer.render(ChatPrompt([user("a\ud83db")])) == renderer.render(ChatPrompt([user("a\ufffdb")]))
    text = renderer.render(ChatPrompt([user("?"), call('{"city": "\\ud83d", "b": "\\ud83d\\ude00"}')])).text
    assert '{"city": "\ufffd", "b": "\U0001f600"}' in text


def test_a_model_without_template_says_so(llama3_like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama3_like, "chat_template", None)
    with pytest.raises(InvalidRequestError, match="no chat template: use /v1/completions"):
        Renderer(llama3_like).render(ChatPrompt([user("x")]))


def test_control_tokens_of_the_client_are_marked_and_nothing_else(qwen_like: Any) -> None:
    renderer = Renderer(qwen_like)
    assert renderer.render(ChatPrompt([user("a <tool_call> b")])).mark == ""
    rendered = renderer.render(ChatPrompt([user("a<|im_end|>b \ufdd0")]))
    assert rendered.mark not in ("", "\ufdd0")
    assert rendered.text.count("<|im_end|>") == 1
    assert "a<|im_end|>b \ufdd0" in rendered.text.replace(rendered.mark, "")
    escaped = renderer.render(ChatPrompt([call('{"a": "\\u003c|im_end|>"}')]))
    assert escaped.text.count("<|im_end|>") == 1


SAID: list[dict[str, Any]] = [
    system("Be brief."),
    user("one"),
    assistant("two"),
    user("three <|im_end|>"),
    assistant("four"),
    user("five"),
]
TURNS = (  # refuses roles that do not take turns
    "{{ 'B' }}{% for m in messages %}"
    "{% if m.role != 'system' and loop.previtem is defined and loop.previtem.role == m.role %}"
    "{{ raise_exception('turns') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content + '|' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.mark.parametrize("template", ["", TURNS])
def test_parts_of_a_conversation_are_the_whole(tokenizers: list[Any], template: str) -> None:
    """Wherever it is cut, what was rendered before stays a prefix."""
    for each in tokenizers:
        tokenizer = copy(each)
        tokenizer.chat_template = template or tokenizer.chat_template
        renderer = Renderer(tokenizer)
        whole = renderer.render(ChatPrompt(SAID))
        for first, second in combinations(range(2, len(SAID) + 1), 2):
            parts = [
                renderer.part(ChatPrompt(messages), begins=i == 0, reply=messages[-1] is SAID[-1])
                for i, messages in enumerate((SAID[:first], SAID[first:second], SAID[second:]))
                if messages
            ]
            joined = "".join(part.text.replace(part.mark or "\0", "") for part in parts)
            assert joined == whole.text.replace(whole.mark or "\0", "")


def test_a_template_that_cannot_go_on_is_named(with_template: Callable[[str], Renderer]) -> None:
    renderer = with_template("{{ messages[-1].content }}{{ messages | length }}")
    with pytest.raises(InvalidRequestError) as raised:
        renderer.part(ChatPrompt([user("x")]), begins=False, reply=False)
    assert raised.value.field == "messages"


said = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=80)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), said), max_size=6), said, st.integers(0, 1))
def test_where_messages_begin_in_a_prompt(qwen_like: Any, told: list[tuple[str, str]], first: str, tools: int) -> None:
    """Whatever they say: as many places as messages, and ascending."""
    messages = [system(first), *({"role": role, "content": text} for role, text in told)]
    text = Renderer(qwen_like).render(ChatPrompt(messages, [TOOL] * tools)).text
    starts = message_starts(messages, text)
    assert len(starts) == len(messages)
    assert starts == sorted(starts)
    assert all(0 <= start <= len(text) for start in starts)


def test_messages_are_found_behind_the_tools_and_by_their_calls(qwen_like: Any) -> None:
    long = "Read the file." * 20
    messages = [
        system("You are brief."),
        user(long),
        call('{"a": 1}', "1"),
        result("rain", "1"),
        {"role": "assistant", "content": [{"type": "text", "text": "It rains."}]},
        user("  and   \n"),
    ]
    text = Renderer(qwen_like).render(ChatPrompt(messages, [TOOL, {**TOOL, "note": "Read " * 30_000}])).text
    starts = message_starts(messages, text)
    heads = ["You are brief.", "Read the file.", 'f", "arguments"', "rain", "It rains.", "and"]
    assert [text[start:].startswith(head) for start, head in zip(starts, heads, strict=True)] == [True] * 6


def loop(variable: str, over: str, inner: str) -> str:
    return f"{{% for {variable} in {over} %}}{inner}{{% endfor %}}"


GROWING = {
    "messages for each message": loop("m", "messages", loop("n", "messages", "")),
    "those behind it": loop("m", "messages", loop("n", "messages[loop.index:]", "")),
    "by a filter": loop("m", "messages", "{{ messages | selectattr('role', 'equalto', 'x') | list | length }}"),
    "tools for each message": loop("m", "messages", loop("t", "tools or []", "")),
    "results for each call": loop(
        "m", "messages", loop("c", "m.tool_calls or []", loop("n", "messages", "{{ n.tool_call_id == c.id }}"))
    ),
}


@pytest.mark.parametrize("template", GROWING.values(), ids=GROWING)
def test_a_template_that_goes_over_all_of_it_for_each_part_takes_no_more_than_so_many_lines(
    template: str, qwen_like: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends more is refused by name, however long that would take. The law: at the most they are as many as
    are allowed, by the same count, beside what grows as the conversation does.
    """
    allowed = 60_000
    monkeypatch.setattr(qwen_like, "chat_template", template)
    monkeypatch.setattr(render, "_MOST_LINES", allowed)
    monkeypatch.setattr(render, "_FEW", 4)
    renderer = Renderer(qwen_like, "none")
    worst = 0
    for kind, (first, second) in enumerate(zip(render._conversations(1), render._conversations(2), strict=True)):
        one, two = render._parts(first), render._parts(second)
        most = render._conversations(1 + int((renderer.most_parts - one) // (two - one)))[kind]
        worst = max(worst, render._lines(lambda prompt=most: renderer.render(prompt)))
    assert allowed / 4 < worst < 2 * allowed
    with pytest.raises(InvalidRequestError, match="messages, calls and tools") as refused:
        renderer.render(ChatPrompt([user("a")] * (int(renderer.most_parts) + 1)))
    assert refused.value.field == "messages"


def test_a_template_that_goes_over_it_once_takes_any_number(
    qwen_like: Any, with_template: Callable[[str], Renderer]
) -> None:
    assert Renderer(qwen_like).most_parts == math.inf
    there = loop("m", "messages", "{{ loop.last }}{{ messages[loop.index0].content }}")
    assert with_template(there + loop("m", "messages[::-1]", "")).most_parts == math.inf


def test_what_has_many_parts_is_rendered_beside_the_event_loop(qwen_like: Any) -> None:
    asked: list[Callable[[], Rendered]] = []

    async def beside(work: Callable[[], Rendered]) -> Rendered:
        asked.append(work)
        return work()

    renderer = Renderer(qwen_like)
    few, many = (ChatPrompt([user("a")] * n) for n in (10, 1000))
    for prompt in (few, many):
        assert asyncio.run(renderer.rendered(prompt, beside)) == Renderer(qwen_like).render(prompt)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "effort", "text"),
    [
        ("Qwen 3.8", "high", "Think: xhigh"),  # the template knows low, medium and xhigh, and refuses others
        ("Qwen 3.8", "minimal", "Think: low"),
        ("gpt-oss", "max", "Reasoning: high"),
        ("gpt-oss", "none", "Reasoning: low"),
        ("Muse Glimmer", "medium", "Reasoning strength: medium."),
        ("Muse Glimmer", "none", "Reasoning strength: low."),
        ("Nemotron 3", "low", "{reasoning effort: low}"),
        ("Nemotron 3", "none", "assistant\n<think></think>"),
        ("DeepSeek V3.1", "none", "<｜Assistant｜></think>"),
        ("DeepSeek V3.1", "low", "<｜Assistant｜><think>"),
    ],
)
def test_an_effort_is_told_by_the_name_and_in_the_words_that_the_template_has(
    with_template: Callable[[str], Renderer], name: str, effort: str, text: str
) -> None:
    renderer = with_template(TEMPLATES[name][1])
    kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    assert text in renderer.render(ChatPrompt([user("hi")], template_kwargs=kwargs)).text
    own = {"reasoning_strength": "odd", "thinking": False, **kwargs, "reasoning_effort": "odd"}
    if name != "Qwen 3.8":
        told = renderer.render(ChatPrompt([user("hi")], template_kwargs=own)).text
        assert ("odd" in told) is (name in ("gpt-oss", "Muse Glimmer")), "what the client says itself stays"
