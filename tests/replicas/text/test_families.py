"""The families that agents run: what each writes is told apart, given back by its template, and held to its tools."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from call_grammars import allowed
from chat_templates import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    AnswerBuilder,
    ChatPrompt,
    Completed,
    GenerateRequest,
    JsonOutput,
    Timing,
    Usage,
)
from holdfast.replicas.text.conversation import TextSide

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "exact": {"type": "boolean"},
        "near": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        "unit": {"enum": ["C", "F", None]},
    },
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "get.time")]
ASK = [{"role": "user", "content": "the weather in Paris"}]
ARGUMENTS = {"city": 'Malmö "}\n</x>', "days": [1, -2], "exact": True, "near": {"lat": 1.5}, "unit": None}


@dataclass(frozen=True)
class Family:
    """A family's special tokens, the one that ends a reply last, and others; and what its models write.

    `thought`: around a thought behind the prompt. `call`: how one is written, `between` two and `around` all. `answer`
    begins the message of an answer. `off`: what a prompt ends with where thinking is switched off; None where it cannot
    be.
    """

    special: str
    added: str
    thought: tuple[str, str]
    call: Callable[[str, dict[str, Any]], str]
    between: str = ""
    around: tuple[str, str] = ("", "")
    answer: str = ""
    off: str | None = None

    def calls(self, *calls: dict[str, Any]) -> str:
        return self.around[0] + self.between.join(self.call("f", each) for each in calls) + self.around[1]


raw = partial(json.dumps, ensure_ascii=False)


def value(given: Any) -> str:
    return given if isinstance(given, str) else raw(given)


def qwen(name: str, arguments: dict[str, Any]) -> str:
    tags = "".join(f"<parameter={key}>\n{value(each)}\n</parameter>\n" for key, each in arguments.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any], line: str = "") -> str:
    tags = (f"<arg_key>{k}</arg_key>{line}<arg_value>{value(v)}</arg_value>{line}" for k, v in arguments.items())
    return f"<tool_call>{name}{line}{''.join(tags)}</tool_call>"


def gemma(name: str, arguments: dict[str, Any]) -> str:
    def put(given: Any) -> str:
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{put(given[key])}" for key in sorted(given)) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(put, given)) + "]"
        return f'<|"|>{given}<|"|>' if isinstance(given, str) else json.dumps(given)

    return f"<|tool_call>call:{name}{put(arguments)}<tool_call|>"


def xml(name: str, arguments: dict[str, Any], of: str = "") -> str:
    tags = (f'<{of}parameter name="{key}">{value(each)}</{of}parameter>\n' for key, each in arguments.items())
    return f'<{of}invoke name="{name}">\n{"".join(tags)}</{of}invoke>\n'


def muse(name: str, arguments: dict[str, Any]) -> str:
    block = f"<atem:function_calls>\n{xml(name, arguments, 'atem:')}</atem:function_calls>"
    return f"<|start|>assistant to={name}<|message|>{block}"


def harmony(name: str, arguments: dict[str, Any]) -> str:
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{raw(arguments)}"


CHATML = "<|im_start|> <|im_end|>"
TAGS = "<tool_call> </tool_call> <think> </think>"
ARGS = f"{TAGS} <arg_key> </arg_key> <arg_value> </arg_value>"
FAMILIES = {
    "Gemma 4": Family(
        "<bos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>"
        ' <|"|> <tool_response|> <|tool_response>',
        "",
        ("<|channel>thought\n", "\n<channel|>"),
        gemma,
        off="<|channel>thought\n<channel|>",
    ),
    "gpt-oss": Family(
        "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
        "",
        ("<|channel|>analysis<|message|>", "<|end|>"),
        harmony,
        answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    "Muse Glimmer": Family(
        "<|start|> <|message|> <|eom|> <|eot|>",
        "",
        (" to=self<|message|>", "<|eom|>"),
        muse,
        between="<|eom|>",
        answer="<|start|>assistant to=user<|message|>",
    ),
    "GLM 4.5": Family(
        "[gMASK] <sop> <|system|> <|assistant|> <|user|> <|observation|>",
        ARGS,
        ("\n<think>", "</think>\n"),
        partial(glm, line="\n"),
        between="\n",
        off="<|assistant|>\n<think></think>",
    ),
    "GLM 4.7": Family(
        "[gMASK] <sop> <|system|> <|assistant|> <|user|> <|observation|>", ARGS, ("", "</think>"), glm, off="</think>"
    ),
    "Laguna": Family("〈|EOS|〉 <system> <user> <assistant> </assistant>", ARGS, ("", "</think>"), glm, off="</think>"),
    "Nemotron 3": Family(CHATML, TAGS, ("", "\n</think>\n"), qwen, between="\n", off="<think></think>"),
    "Qwen3-Coder": Family(CHATML, TAGS, ("<think>\n", "\n</think>\n\n"), qwen, "\n", off="<think>\n\n</think>\n\n"),
    "Qwen 3.8": Family(CHATML, TAGS, ("", "\n</think>\n\n"), qwen, "\n", off="<think>\n\n</think>\n\n"),
    "MiniMax M2": Family(
        "]~b] [e~[",
        "<think> </think> <minimax:tool_call> </minimax:tool_call>",
        ("", "\n</think>\n\n\n"),
        xml,
        around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    ),
}
THINKS = {"enable_thinking": True}
THOUGHT = "I look <it> up."
START = "<|start|>assistant"  # what begins a message that is not the first one


@pytest.fixture(scope="module")
def sides(family: Any) -> dict[str, TextSide]:
    return {
        name: TextSide(family(each.special, each.added, TEMPLATES[name][1]), EngineConfig())
        for name, each in FAMILIES.items()
    }


def request(**options: Any) -> GenerateRequest:
    return GenerateRequest("r", ChatPrompt(ASK, **{"tools": TOOLS, "template_kwargs": THINKS, **options}), Sampling())


def ids_of(side: TextSide, text: str) -> list[int]:
    return side.tokenizer.encode(text, add_special_tokens=False)


def told(side: TextSide, ask: GenerateRequest, ids: list[int], cuts: list[int]) -> Any:
    """The answer that a client adds up of a reply whose tokens come in pieces."""
    reply = side.reply(ask, side.encode(ask.prompt), side.constraints(ask.prompt))
    built = AnswerBuilder()
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        built.add(reply.feed(ids[begin:end]))
    tail, ended = reply.finish("stop")
    built.add((*tail, Completed(ended, Usage(0, 0, reply.completion_tokens, reply.reasoning_tokens), Timing(0.0))))
    return built.answer()


def written(family: Family, *calls: dict[str, Any]) -> str:
    """A reply with a thought and calls."""
    return family.thought[0] + THOUGHT + family.thought[1] + family.calls(*calls)


def calls_of(name: str) -> list[dict[str, Any]]:
    """Those of one reply: gpt-oss writes one."""
    return [ARGUMENTS, {"city": "Oslo"}][: 1 if name == "gpt-oss" else 2]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_thought_text_and_calls_are_told_apart_however_the_reply_is_cut(
    sides: dict[str, TextSide], name: str, data: st.DataObject
) -> None:
    side, family = sides[name], FAMILIES[name]
    calls, ids = calls_of(name), ids_of(side, written(family, *calls_of(name)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    answer = told(side, request(), ids, cuts)
    assert (answer.reasoning, answer.text or "") == (THOUGHT, "")
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("f", each) for each in calls]
    assert all(call.closed for call in answer.tool_calls)
    ids = ids_of(side, written(family).removesuffix("".join(family.around)) + family.answer + "It <rains>.")
    answer = told(side, request(), ids, [each for each in cuts if each <= len(ids)])
    assert (answer.reasoning, answer.text, answer.tool_calls) == (THOUGHT, "It <rains>.", ())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.off is not None])
def test_a_switched_off_thinking_leaves_a_prompt_behind_which_all_is_content(
    sides: dict[str, TextSide], name: str
) -> None:
    side, off = sides[name], FAMILIES[name].off
    for kwargs in ({"enable_thinking": False}, {"enable_thinking": False, "reasoning_effort": "none"}):
        ask = request(template_kwargs=kwargs)
        text = side.renderer.render(ask.prompt).text
        assert text.endswith(str(off))
        assert told(side, ask, ids_of(side, "So <it> is."), []).text == "So <it> is."


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_with_thoughts_calls_and_results_goes_on_from_the_tokens_of_the_model(
    sides: dict[str, TextSide], name: str
) -> None:
    side, family = sides[name], FAMILIES[name]
    ask = replace(request(), program_id="p")
    begun = side.encode(ask.prompt, program="p")
    behind = "\n" if name == "Nemotron 3" else ""
    ids = ids_of(side, written(family, *calls_of(name)) + behind + side.tokenizer.eos_token)
    reply = side.reply(ask, begun, side.constraints(ask.prompt))
    built = AnswerBuilder()
    built.add(reply.feed(ids))
    tail, ended = reply.finish("stop")
    built.add((*tail, Completed(ended, Usage(0, 0, 0, 0), Timing(0.0))))
    reply.remember()
    answer = built.answer()
    made = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    turn = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning, "tool_calls": made}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "rain"} for each in made]
    after = side.encode(replace(ask.prompt, messages=[*ASK, turn, *results]), program="p")
    known = [*begun.tokens.tolist(), *ids]
    assert after.tokens.tolist()[: len(known)] == known


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forced_call_and_json_may_be_thought_about_and_are_held_to_their_schemas(
    sides: dict[str, TextSide], name: str
) -> None:
    side, family = sides[name], FAMILIES[name]
    required = request(tool_choice="required", parallel_tool_calls=False)
    named = request(tool_choice="required", forced_tool="f")
    answer = request(
        tools=[], output=JsonOutput({"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)
    )
    wrong = [{**ARGUMENTS, "days": ["x"]}, {**ARGUMENTS, "near": {}}, {**ARGUMENTS, "more": 1}, {"exact": True}]
    other = family.around[0] + family.call("get.time", {"city": "Oslo"}) + family.around[1]
    for ask, good, bad in (
        (required, [family.calls(ARGUMENTS)], [family.calls(each) for each in wrong]),
        (named, [family.calls({"city": "Oslo"})], [other]),
        (answer, [family.answer.removeprefix(START) + '{"a": 1}'], [family.answer + '{"a": "x"}', "It rains."]),
    ):
        thought = family.thought[0].lstrip("\n") + THOUGHT + family.thought[1]
        begun = START * (START in family.call("f", {}))
        for before in ["", thought + begun] if family.thought[0] else [thought + begun]:
            for text, fits in [*((each, True) for each in good), *((each, False) for each in bad)]:
                matcher = side.after_thinking(ask, side.encode(ask.prompt), side.constraints(ask.prompt).matcher)
                assert matcher is not None
                ids = ids_of(side, before + text.removeprefix(START))
                assert (matcher.accepts(ids) == len(ids)) is fits, before + text
                if fits:
                    matcher.advance(ids)
                    assert set(allowed(matcher)) & side.eos


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].answer == ""])
@pytest.mark.parametrize("held", [False, True])
def test_a_block_of_thinking_ends_with_its_budget(sides: dict[str, TextSide], name: str, held: bool) -> None:
    """Drawn one by one or proposed together; what comes behind is as free, or as held, as without."""
    side, family = sides[name], FAMILIES[name]
    ask = request(tool_choice="required" if held else "auto", thinking_budget=4, parallel_tool_calls=False)
    matcher = side.after_thinking(ask, side.encode(ask.prompt), side.constraints(ask.prompt).matcher)
    assert matcher is not None
    opener = ids_of(side, family.thought[0].strip("\n").removesuffix("thought"))
    closer = ids_of(side, family.thought[1].strip("\n"))
    thought = ids_of(side, "abcdefgh")
    drafts = [*opener, *thought]
    assert matcher.accepts(drafts) == len(opener) + 4
    masks = np.empty((len(drafts) + 1, matcher.words), np.int32)
    matcher.fill(drafts, masks)
    stands = matcher.advance(drafts)
    assert stands == len(opener) + 4
    assert matcher.binding
    assert matcher.forced() == closer
    assert allowed(matcher) == closer
    alone = np.empty((1, matcher.words), np.int32)
    matcher.fill((), alone)
    assert (masks[stands] == alone[0]).all()
    assert (masks[stands + 1 :] == -1).all()
    assert matcher.advance(closer) == 1
    call = ids_of(side, family.thought[1].rpartition("\n")[1] + family.calls({"city": "Oslo"}))
    assert matcher.accepts(call) == len(call)
    assert (matcher.accepts(ids_of(side, "It rains.")) == 0) is held


@pytest.mark.parametrize("name", ["Gemma 4", "Qwen 3.8"])
def test_a_template_that_opens_the_block_behind_results_is_read_on(sides: dict[str, TextSide], name: str) -> None:
    side = sides[name]
    made = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": made},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    ask = request()
    ask = replace(ask, prompt=replace(ask.prompt, messages=[*ASK, *turns]))
    answer = told(side, ask, ids_of(side, f"Dry.{FAMILIES[name].thought[1]}No rain."), [])
    assert (answer.reasoning, answer.text) == ("Dry.", "No rain.")
