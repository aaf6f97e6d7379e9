"""From tokens to pieces: text cut at a stop string, calls that end a reply, and replies that are written again."""

from dataclasses import replace
from typing import Any

import pytest
from call_texts import mutated, valid
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import ids_of, told

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest
from holdfast.replicas.text.conversation import FREE, TextSide
from holdfast.replicas.text.reply import StopStrings

TEXT = st.text("ab\nc", max_size=30)
STOPS = st.lists(st.text("ab\nc", min_size=1, max_size=4), max_size=3)


def cut_naively(text: str, stops: list[str]) -> str:
    """Character by character: the first end of a stop string decides, the longest one ending there is cut."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(st.lists(TEXT, max_size=8), STOPS)
def test_any_chunking_equals_the_naive_cut(chunks: list[str], stops: list[str]) -> None:
    stopping = StopStrings(stops)
    sent = ""
    for chunk in chunks:
        sent += stopping.feed(chunk)
        assert not any(stop in sent for stop in stops)
    whole = "".join(chunks)
    assert sent + stopping.flush() == cut_naively(whole, stops)
    assert stopping.stopped == any(stop in whole for stop in stops)
    if stopping.stopped:
        assert stopping.reached in stops
        assert whole.startswith(sent + stopping.reached)
    else:
        assert stopping.reached == ""


def test_holds_back_only_what_may_begin_a_stop_string() -> None:
    stopping = StopStrings(["\n\nUser:"])
    assert stopping.feed("Hello.\n") == "Hello."
    assert stopping.feed("World\n\n") == "\nWorld"
    assert not stopping.stopped
    assert stopping.feed("User:x") == ""
    assert stopping.stopped
    assert stopping.feed("more") == stopping.flush() == ""


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "sum")]
PROMPT = ChatPrompt([{"role": "user", "content": "hi"}], TOOLS)
REQUEST = GenerateRequest("r", PROMPT, Sampling())
CALL = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'


def ended(tokenizer: Any, text: str, reason: Any, early_stop: bool = True) -> tuple[str, list[list[str]], str]:
    """The text, the calls and why it ended, of a reply that the engine ended for `reason` after `text`."""
    side = TextSide(tokenizer, EngineConfig(early_stop=early_stop), "hermes")
    found = told(side, REQUEST, text, (), reason=reason, limits=side.constraints(PROMPT))
    return found.text, found.calls, found.ended


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_reply_that_ends_for_its_calls_has_arguments_in_json(qwen_like: Any, data: st.DataObject) -> None:
    arguments = data.draw(st.sampled_from(['{"a": True}', '{"a": [None, "x"],}', '{"a": "\n\\d"}', "{}", '{"a": 1.5}']))
    block = "\n".join(CALL.replace("NAME", name).replace("{}", arguments) for name in ("sum", "search"))
    text = mutated(block, data)
    text = text[: data.draw(st.integers(0, len(text)))]
    _, calls, told = ended(qwen_like, text, "stop", data.draw(st.booleans()))
    assert told in ("stop", "tool_calls")
    if told == "tool_calls":
        assert calls
        for _, sent in calls:
            valid(sent)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    ("after", "reason"), [("", "length"), ("\n", "length"), (" Then", "length"), (" Then", "stop")]
)
def test_a_closed_call_is_why_a_reply_has_ended_whatever_ended_its_text(
    qwen_like: Any, after: str, reason: Any, early_stop: bool
) -> None:
    text = CALL.replace("NAME", "sum") + after
    assert ended(qwen_like, text, reason, early_stop)[1:] == ([["sum", "{}"]], "tool_calls")


def test_a_call_that_is_cut_behind_a_closed_one_is_why_a_reply_has_not_ended_for_them(qwen_like: Any) -> None:
    text = CALL.replace("NAME", "sum") + "\n" + CALL.replace("NAME", "search").partition("}")[0]
    assert ended(qwen_like, text, "length")[1:] == ([["sum", "{}"], ["search", "{"]], "length")


CONFIG = EngineConfig()


def read(tokenizer: Any, tool_format: str, text: str) -> tuple[str, str | None]:
    """The text sent, and what is kept of the tokens; None: nothing is written again."""
    side = TextSide(tokenizer, CONFIG, tool_format)
    found = told(side, REQUEST, text, limits=side.constraints(PROMPT))
    return found.text, found.reply.rewrite and side.detokenize(found.reply.rewrite.tokens)


def nearly(kept: str, got: str | None) -> bool:
    """Whether at most one token less is kept."""
    return got is not None and kept.startswith(got) and len(kept) - len(got) < 8


CASES = [
    ("llama3", '{"name": "rm", "parameters": {}}', "", '{"name": "'),
    ("llama3", '\n\n{"name": "rm", "parameters": {}}', "", '\n\n{"name": "'),
    ("llama3", '{"name": "sum", "parameters": {}}; {"name": "rm", "parameters": {}}', "", None),
    ("pythonic", "[sum(), rm(b=2)]", "", "[sum(), "),
]


@pytest.mark.parametrize(("tool_format", "text", "sent", "kept"), CASES)
def test_a_reply_goes_on_from_the_last_token_a_declared_call_could_have(
    tool_format: str, text: str, sent: str, kept: str | None, qwen_like: Any
) -> None:
    kept = text[: text.rindex("rm")] if kept is None else kept
    said, got = read(qwen_like, tool_format, text)
    assert said == sent
    assert nearly(kept, got), got


def test_what_was_sent_is_not_taken_back(qwen_like: Any) -> None:
    """A list that no declared call could have begun cannot be gone on with: its call is text."""
    call, other = ('{"name": "sum", "parameters": ARGS}'.replace("ARGS", args) for args in ("{}", '{"n": 1}'))
    text = f'{call}, {other}; {{"name": "rm", "parameters": {{}}}}'
    assert read(qwen_like, "llama3", text) == ('; {"name": "rm", "parameters": {}}', None)


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("tool_format", ["llama3", "llama4"])
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"parameters": {"n": 1}, "name": "sum"}', None),
        ('{"type": "function", "parameters": {"n": 1}, "name": "sum"}', None),
        ('{"parameters": {"n": "1"}, "name": "sum"}', '{"parameters": {"n": '),
        ('{"parameters": {}, "name": "sum"}', '{"parameters": {'),
        ('{"parameters": "{\\"n\\": 1}", "name": "sum"}', '{"parameters": '),
        ('{"id": "1", "name": "sum", "parameters": {"n": 1}}', '{"'),
        ('{"name": "sum", "id": "1", "parameters": {"n": "1"}}', '{"name": "sum", "'),
        ('{"name": "sum", "id": "1", "parameters": null}', '{"name": "sum", "'),
        ('{"parameters": {"n": "1"}, "name": "Bob"}', '{"parameters": {"n": '),
        ('{"parameters": {"n": "1"}, "title": "sum"}', None),
        ('{"parameters": {"n": "1"}}', None),
        ('{"name": "sum", "parameters": {"n": 1}}, {"name": "sum", "parameters": {"n": 2}}', None),
    ],
)
def test_a_bare_call_whose_keys_stand_otherwise_is_held_to_its_schema(
    text: str, kept: str | None, tool_format: str, qwen_like: Any
) -> None:
    """Nobody has followed it as it was drawn, so what no declared call could be is drawn again. Whole ones are sent."""
    prompt = replace(PROMPT, tools=[{"type": "function", "function": {"name": "sum", "parameters": NUMBER}}])
    side = TextSide(qwen_like, CONFIG, tool_format)
    for limits in (side.constraints(prompt), FREE):
        found = told(side, replace(REQUEST, prompt=prompt), text, limits=limits)
        rewrite = found.reply.rewrite
        if kept is None or limits is FREE:
            assert rewrite is None
            assert [name for name, _ in found.calls] == ["sum"] * text.count('"name": "sum"')
        else:
            assert rewrite is not None
            assert found.pieces == []
            assert nearly(kept, side.detokenize(rewrite.tokens))


def test_declared_calls_and_other_text_are_left_alone(qwen_like: Any) -> None:
    for text in ('{"name": "sum", "parameters": {}}', 'A {"name": "rm"}', '{"name": "rm"}'):
        assert read(qwen_like, "llama3", text)[1] is None
    side = TextSide(qwen_like, CONFIG, "hermes")
    reply = side.reply(REQUEST, side.encode(PROMPT), side.constraints(PROMPT))
    assert reply._declared is None, "nothing is written again where calls have an opener: the guard is in time"


def test_log_probabilities_of_what_is_kept_come_along(qwen_like: Any) -> None:
    side = TextSide(qwen_like, CONFIG, "llama3")
    ids = ids_of(side, '{"name": "rm", "parameters": {}}')
    logprobs = [TokenLogprobs(token, -0.5) for token in ids]
    rewrite = told(side, REQUEST, ids, limits=side.constraints(PROMPT), logprobs=logprobs).reply.rewrite
    assert rewrite is not None
    assert list(rewrite.tokens) == ids[: len(rewrite.tokens)]
    assert list(rewrite.logprobs) == logprobs[: len(rewrite.tokens)]
