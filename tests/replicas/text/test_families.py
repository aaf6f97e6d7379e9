"""The families that agents run: what each writes is told apart, given back by its template, and held to its tools."""

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from call_grammars import allowed, masks
from call_texts import call_texts
from chat_templates import TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import call, ids_of, result, told

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, JsonOutput
from holdfast.replicas.text.calls.formats import ToolFormat
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

    `thought`: around a thought behind the prompt. `between`: two calls; None: the format has a block for all.
    `variant`: how `call_texts` writes them. `answer` begins the message of an answer. `off`: what a prompt ends with
    where thinking is switched off; None where it cannot be.
    """

    special: str
    added: str
    thought: tuple[str, str]
    between: str | None = ""
    variant: int = 0
    answer: str = ""
    off: str | None = None


START = "<|start|>assistant"  # what begins a message that is not the first one


def calls_of(name: str, *calls: dict[str, Any], tool: str = "f") -> str:
    """Calls as models of a family write them."""
    family, format = FAMILIES[name], TEMPLATES[name][0]
    blocks = [calls] if family.between is None else [(each,) for each in calls]
    style = partial(json.dumps, ensure_ascii=False)
    texts = ["".join(call_texts(format, [(tool, each) for each in block], style, family.variant)) for block in blocks]
    if format is ToolFormat.MUSE:
        texts = [f"{START} to={tool}<|message|>{text}" for text in texts]
    return (family.between or "").join(texts).removesuffix("<|call|>")


CHATML = "<|im_start|> <|im_end|>"
TAGS = "<tool_call> </tool_call> <think> </think>"
ARGS = f"{TAGS} <arg_key> </arg_key> <arg_value> </arg_value>"
FAMILIES = {
    "Gemma 4": Family(
        "<bos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>"
        ' <|"|> <tool_response|> <|tool_response>',
        "",
        ("<|channel>thought\n", "\n<channel|>"),
        off="<|channel>thought\n<channel|>",
    ),
    "gpt-oss": Family(
        "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
        "",
        ("<|channel|>analysis<|message|>", "<|end|>"),
        variant=1,
        answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    "Muse Glimmer": Family(
        "<|start|> <|message|> <|eom|> <|eot|>",
        "",
        (" to=self<|message|>", "<|eom|>"),
        between="<|eom|>",
        answer="<|start|>assistant to=user<|message|>",
    ),
    "GLM 4.5": Family(
        "[gMASK] <sop> <|system|> <|assistant|> <|user|> <|observation|>",
        ARGS,
        ("\n<think>", "</think>\n"),
        between="\n",
        variant=1,
        off="<|assistant|>\n<think></think>",
    ),
    "GLM 4.7": Family(
        "[gMASK] <sop> <|system|> <|assistant|> <|user|> <|observation|>", ARGS, ("", "</think>"), off="</think>"
    ),
    "Laguna": Family("〈|EOS|〉 <system> <user> <assistant> </assistant>", ARGS, ("", "</think>"), off="</think>"),
    "Nemotron 3": Family(CHATML, TAGS, ("", "\n</think>\n"), "\n", off="<think></think>"),
    "Qwen3-Coder": Family(CHATML, TAGS, ("<think>\n", "\n</think>\n\n"), "\n", off="<think>\n\n</think>\n\n"),
    "Qwen 3.8": Family(CHATML, TAGS, ("", "\n</think>\n\n"), "\n", off="<think>\n\n</think>\n\n"),
    "MiniMax M2": Family(
        "]~b] [e~[",
        "<think> </think> <minimax:tool_call> </minimax:tool_call>",
        ("", "\n</think>\n\n\n"),
        between=None,
    ),
}
THINKS = {"enable_thinking": True}
THOUGHT = "I look <it> up."


@pytest.fixture(scope="module")
def sides(family: Any) -> dict[str, TextSide]:
    return {
        name: TextSide(family(each.special, each.added, TEMPLATES[name][1]), EngineConfig())
        for name, each in FAMILIES.items()
    }


def request(**options: Any) -> GenerateRequest:
    return GenerateRequest("r", ChatPrompt(ASK, **{"tools": TOOLS, "template_kwargs": THINKS, **options}), Sampling())


def matcher_of(side: TextSide, ask: GenerateRequest) -> Matcher:
    matcher = side.after_thinking(ask, side.encode(ask.prompt), side.constraints(ask.prompt).matcher)
    assert matcher is not None
    return matcher


def written(name: str, *calls: dict[str, Any]) -> str:
    """A reply with a thought and calls."""
    before, behind = FAMILIES[name].thought
    return before + THOUGHT + behind + (calls_of(name, *calls) if calls else "")


def some_calls(name: str) -> list[dict[str, Any]]:
    """Those of one reply: gpt-oss writes one."""
    return [ARGUMENTS, {"city": "Oslo"}][: 1 if name == "gpt-oss" else 2]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_thought_text_and_calls_are_told_apart_however_the_reply_is_cut(
    sides: dict[str, TextSide], name: str, data: st.DataObject
) -> None:
    side, calls = sides[name], some_calls(name)
    ids = ids_of(side, written(name, *calls))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    limits = side.constraints(request().prompt)
    found = told(side, request(), ids, cuts, limits=limits)
    assert (found.reasoning, found.text, found.ended) == (THOUGHT, "", "tool_calls")
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("f", each) for each in calls]
    ids = ids_of(side, written(name) + FAMILIES[name].answer + "It <rains>.")
    found = told(side, request(), ids, [each for each in cuts if each <= len(ids)], limits=limits)
    assert (found.reasoning, found.text, found.calls) == (THOUGHT, "It <rains>.", [])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.off is not None])
def test_a_switched_off_thinking_leaves_a_prompt_behind_which_all_is_content(
    sides: dict[str, TextSide], name: str
) -> None:
    side, off = sides[name], FAMILIES[name].off
    for kwargs in ({"enable_thinking": False}, {"enable_thinking": False, "reasoning_effort": "none"}):
        ask = request(template_kwargs=kwargs)
        text = side.renderer.render(ask.prompt).text
        assert text.endswith(str(off))
        assert told(side, ask, "So <it> is.", (), limits=side.constraints(ask.prompt)).text == "So <it> is."


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_with_thoughts_calls_and_results_goes_on_from_the_tokens_of_the_model(
    sides: dict[str, TextSide], name: str
) -> None:
    side, ask = sides[name], replace(request(), program_id="p")
    behind = "\n" if name == "Nemotron 3" else ""
    ids = ids_of(side, written(name, *some_calls(name)) + behind + side.tokenizer.eos_token)
    found = told(side, ask, ids, (), limits=side.constraints(ask.prompt))
    found.reply.remember()
    answer = found.answer
    made = [
        {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in answer.tool_calls
    ]
    turn = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning, "tool_calls": made}
    results = [result("rain", each.call_id) for each in answer.tool_calls]
    after = side.encode(replace(ask.prompt, messages=[*ASK, turn, *results]), program="p")
    known = [*side.encode(ask.prompt, program="p").tokens.tolist(), *ids]
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
    for ask, good, bad in (
        (required, [calls_of(name, ARGUMENTS)], [calls_of(name, each) for each in wrong]),
        (named, [calls_of(name, {"city": "Oslo"})], [calls_of(name, {"city": "Oslo"}, tool="get.time")]),
        (answer, [family.answer.removeprefix(START) + '{"a": 1}'], [family.answer + '{"a": "x"}', "It rains."]),
    ):
        thought = family.thought[0].lstrip("\n") + THOUGHT + family.thought[1]
        begun = START * (START in calls_of(name, ARGUMENTS))
        for before in ["", thought + begun] if family.thought[0] else [thought + begun]:
            for text, fits in [*((each, True) for each in good), *((each, False) for each in bad)]:
                matcher = matcher_of(side, ask)
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
    matcher = matcher_of(side, ask)
    opener = ids_of(side, family.thought[0].strip("\n").removesuffix("thought"))
    closer = ids_of(side, family.thought[1].strip("\n"))
    thought = ids_of(side, "abcdefgh")
    drafts = [*opener, *thought]
    assert matcher.accepts(drafts) == len(opener) + 4
    rows = masks(matcher, drafts)
    stands = matcher.advance(drafts)
    assert stands == len(opener) + 4
    assert matcher.binding
    assert matcher.forced() == closer
    assert allowed(matcher) == closer
    assert (rows[stands] == masks(matcher)).all()
    assert (rows[stands + 1 :] == -1).all()
    assert matcher.advance(closer) == 1
    call = ids_of(side, family.thought[1].rpartition("\n")[1] + calls_of(name, {"city": "Oslo"}))
    assert matcher.accepts(call) == len(call)
    assert (matcher.accepts(ids_of(side, "It rains.")) == 0) is held


@pytest.mark.parametrize("name", ["Gemma 4", "Qwen 3.8"])
def test_a_template_that_opens_the_block_behind_results_is_read_on(sides: dict[str, TextSide], name: str) -> None:
    side = sides[name]
    turns = [{**call('{"city": "Oslo"}', "1"), "content": ""}, result("no", "1")]
    ask = request()
    ask = replace(ask, prompt=replace(ask.prompt, messages=[*ASK, *turns]))
    limits = side.constraints(ask.prompt)
    found = told(side, ask, f"Dry.{FAMILIES[name].thought[1]}No rain.", (), limits=limits)
    assert (found.reasoning, found.text) == ("Dry.", "No rain.")
