"""Replies in channels: reasoning, content and calls are told apart, however the reply is cut, and prose stays prose."""

import json
from typing import Any

import pytest
from call_texts import chunked, collected, parser
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import ids_of, told

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.constraints.guidance import CallGuard
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.conversation import FREE, TextSide
from holdfast.replicas.text.reasoning import CHANNELS, ChannelReader

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
ASK = [{"role": "user", "content": "the weather in Paris"}]
SAID = "We call commentary to=functions.f."
THOUGHT = f"<|channel|>analysis<|message|>{SAID}<|end|>"
NEXT = "<|start|>assistant"
OSLO = '{"city": "Oslo"}'
CALL = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{OSLO}<|call|>"
FINAL = "<|channel|>final<|message|>It rains."


def read(text: str, *pieces: str, format: ToolFormat = ToolFormat.HARMONY) -> tuple[str, str]:
    reader = ChannelReader(CHANNELS[format])
    told = [*map(reader.feed, pieces or (text,)), reader.flush()]
    reasoning, content = ("".join(each[index] for each in told) for index in (0, 1))
    assert reader.skipped == len("".join(pieces) or text) - len(content)
    return reasoning, content


TEXT = st.lists(
    st.sampled_from(["a < b", "it", '"', "\\", "<|", "|>", "<|end|>", "<|x|>", " to=f", "\n", "é日", " "])
).map("".join)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), TEXT), max_size=4), st.data())
def test_messages_are_told_apart_however_they_are_cut(messages: list[tuple[str, str]], data: st.DataObject) -> None:
    """And what looks like markers in them is text: a message ends where another one begins, or the reply does."""
    written = [f"<|channel|>{channel}<|message|>{said}<|end|>" for channel, said in messages]
    thoughts, content = (
        "\n\n".join(said for channel, said in messages if said and (channel == "analysis") is thought)
        for thought in (True, False)
    )
    text = NEXT.join(written)
    assert read(text, *chunked(text, data)) == (thoughts, content)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["self", "commentary", "user"]), TEXT), max_size=4), st.data())
def test_messages_to_recipients_are_told_apart_however_they_are_cut(
    messages: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Of a message to a tool the body alone comes out; where a reply ends in a header, that is markup."""
    call = '<atem:function_calls>\n<atem:invoke name="f">\n5" <|start|></atem:invoke>\n</atem:function_calls>'
    thoughts, content = (
        "\n\n".join(said for recipient, said in messages if said and (recipient == "self") is thought)
        for thought in (True, False)
    )
    text = NEXT.join(f" to={recipient}<|message|>{said}<|eom|>" for recipient, said in [*messages, ("f", call)])
    cut = data.draw(st.integers(0, len(" to=f<|message|>")))
    text += NEXT + " to=user<|message|>"[:cut]
    assert read(text, *chunked(text, data), format=ToolFormat.MUSE) == (thoughts, content + call)


@pytest.mark.parametrize("space", ["\n", " ", " \n "])
def test_white_space_before_the_first_message_is_markup(space: str) -> None:
    addressed = ' to=functions.f<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    for text in (f"{THOUGHT}{NEXT}{FINAL}", FINAL, f"{THOUGHT}{NEXT}{CALL}", CALL, addressed):
        assert read(space + text) == read(space + text, *(space + text)) == read(text)
    assert read(f"{space}Hello") == read("", *space, *"Hello") == ("", f"{space}Hello")


# What others that read this format take as well, in our words: headers as models write them when they forget a part.
ODD = {
    f"<|channel|>commentary to=functions.f<|constrain|>json<|message|>{OSLO}": ("", "", "Oslo"),
    f"{NEXT} to=functions.f<|channel|>commentary<|constrain|>json<|message|>{OSLO}<|end|>": ("", "", "Oslo"),
    f'{THOUGHT}{NEXT}<|channel|>analysis to=f code<|message|>{{\n"city": "Oslo"\n}}': (SAID, "", "Oslo"),
    "<|channel|>commentary to=functions.f json<|message|><|call|>": ("", "", None),
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>": ("", "", None),
    f"<|channel|>commentary to=functions.f json<|message|><|call|>{NEXT}{CALL}": ("", "", "Oslo"),
    f"I look it up.<|end|>{NEXT}{CALL}": ("", "I look it up.", "Oslo"),
    f"<|channel|>analysis It may rain.<|end|>{NEXT}{FINAL}": ("It may rain.", "It rains.", ""),
    f"<|channel|>analysis\nIt may rain<|end|>{NEXT}<|channel|>final It rains.": ("It may rain", "It rains.", ""),
    "<|channel|>commentary It rains<|end|>": ("", "It rains", ""),
    "<|channel|>final It rains": ("", "It rains", ""),
    "<|message|>It rains.<|end|>": ("", "It rains.", ""),
    f"{THOUGHT}{NEXT}<|message|>It rains.": (SAID, "It rains.", ""),
    '<|channel|>final <|constrain|>json<|message|>{"sure": true}': ("", '{"sure": true}', ""),
    "Write <|channel|>analysis for thoughts.": ("", "Write <|channel|>analysis for thoughts.", ""),
}


@settings(max_examples=60)
@given(st.sampled_from(sorted(ODD)), st.data())
def test_headers_that_lack_a_part_are_read_as_what_they_are(text: str, data: st.DataObject) -> None:
    """`ODD`: reasoning, content and the city of the last call: None without arguments, "" without a call."""
    thought, said, city = ODD[text]
    channels, calls = ChannelReader(CHANNELS[ToolFormat.HARMONY]), parser(ToolFormat.HARMONY)
    told = [*map(channels.feed, chunked(text, data)), channels.flush()]
    content, called = collected([content for _, content in told], calls)
    assert ("".join(reasoning for reasoning, _ in told), content) == (thought, said)
    assert (json.loads(called[-1][1]).get("city") if called else "") == city


@pytest.fixture
def side(harmony_like: Any) -> TextSide:
    return TextSide(harmony_like, EngineConfig())


def request(**options: Any) -> GenerateRequest:
    return GenerateRequest("r", ChatPrompt(ASK, TOOLS, **options), Sampling())


def parts(
    side: TextSide, ask: GenerateRequest, text: str, reason: Any = "stop", guarded: bool = True
) -> tuple[str, str, list[list[str]], str]:
    """Reasoning, content, calls and why it ended, of a reply that the engine ended behind `text`."""
    found = told(side, ask, text, reason=reason, limits=side.constraints(ask.prompt) if guarded else FREE)
    return found.reasoning, found.text, found.calls, found.ended


def test_special_tokens_reach_the_readers_and_no_client(side: TextSide) -> None:
    assert side.tool_format is ToolFormat.HARMONY
    ids = {text: ids_of(side, text) for text in ("<|call|>", "<|return|>", "<|end|>")}
    assert side.eos == {*ids["<|call|>"], *ids["<|return|>"]}
    call = [["f", '{"city": "Oslo"}']]
    assert parts(side, request(), f"{THOUGHT}{NEXT}{CALL}") == (SAID, "", call, "tool_calls")
    preamble = f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}"
    assert parts(side, request(), f"{THOUGHT}{NEXT}{preamble}{CALL}") == (SAID, "I look.", call, "tool_calls")
    for ask in (request(), GenerateRequest("r", ChatPrompt(ASK), Sampling()), request(tool_choice="none")):
        assert parts(side, ask, f"{THOUGHT}{NEXT}{FINAL}<|return|>") == (SAID, "It rains.", [], "stop")
    undeclared = CALL.replace("functions.f", "functions.rm").removesuffix("<|call|>")
    assert parts(side, request(), undeclared, guarded=False) == ("", undeclared, [], "stop")


@pytest.mark.parametrize("guarded", [True, False])
def test_a_reply_cut_at_any_token_shows_no_markup_where_calls_are_guarded(side: TextSide, guarded: bool) -> None:
    ids = ids_of(side, f"{THOUGHT}{NEXT}{CALL}")
    for cut in range(len(ids)):
        text = side.detokenize(ids[:cut])
        reasoning, content, calls, reason = parts(side, request(), text, "length", guarded)
        assert SAID.startswith(reasoning)
        assert [name for name, _ in calls] == (["f"] if "{" in text else [])
        assert reason == ("tool_calls" if text.endswith("}") else "length")
        header = text.removeprefix(f"{THOUGHT}{NEXT}")
        begun = header is not text and " to=" in header and not calls and not guarded
        assert content == (NEXT + header if begun else ""), "a call that is cut before it could be sent"


def test_reasoning_counts_as_such_and_has_no_log_probabilities(side: TextSide) -> None:
    before = f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{THOUGHT.removesuffix('<|end|>')}"
    first, rest = ids_of(side, before), ids_of(side, f"<|end|>{NEXT}{FINAL}")
    logprobs = [TokenLogprobs(token, -1.0) for token in first + rest]
    found = told(side, request(), first + rest, [len(first)], logprobs=logprobs)
    assert "".join(entry.token for entry in found.logprobs) == "I look.It rains."
    thought, header = ids_of(side, SAID), ids_of(side, f"<|end|>{NEXT}<|channel|>final<|message|>")
    assert 0 <= found.reply.reasoning_tokens - len(thought) <= len(header)
    assert found.reply.content == "It rains."


@pytest.mark.parametrize("thought", ["", THOUGHT + NEXT])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
    ],
)
def test_a_call_is_guarded_wherever_its_address_stands(side: TextSide, header: str, thought: str) -> None:
    guard = side.constraints(ChatPrompt(ASK, TOOLS)).matcher
    assert isinstance(guard, CallGuard)
    for begins, arguments, fits in (
        (header, '{"city": "Oslo", "days": 3}', True),
        (header, '{"city": "Oslo", "days": "3"}', False),
        (header.replace("functions.f", "functions.rm"), "{}", False),
        (header.replace("functions.f", "f"), '{"city": "Oslo"}', False),
        (header.partition(" to=")[0] + "<|message|>to=functions.rm" if header[0] == "<" else "To=f", "", True),
    ):
        ids = ids_of(side, thought + begins + arguments)
        assert (guard.accepts(ids) == len(ids)) is fits, begins
