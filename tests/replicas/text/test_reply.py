"""From tokens to pieces: text cut at a stop string, calls that end a reply, and replies that are written again."""

from dataclasses import replace
from typing import Any

import pytest
from call_texts import mutated, valid
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, TextDelta, ToolCallDelta
from holdfast.replicas.text.conversation import FREE, TextSide
from holdfast.replicas.text.reply import Reply, StopStrings

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
CALL = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'


def ended(tokenizer: Any, text: str, reason: Any, early_stop: bool = True) -> tuple[str, list[list[str]], str]:
    """The text, the calls and why it ended, of a reply that the engine ended for `reason` after `text`."""
    side = TextSide(tokenizer, EngineConfig(early_stop=early_stop), "hermes")
    reply = side.reply(GenerateRequest("r", PROMPT, Sampling()), side.encode(PROMPT), side.constraints(PROMPT))
    said, calls = "", []
    deltas = reply.feed(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    tail, told = reply.finish(reason)
    for delta in [*deltas, *tail]:
        if isinstance(delta, TextDelta):
            said += delta.text
        elif isinstance(delta, ToolCallDelta) and delta.name is not None:
            calls.append([delta.name, delta.arguments])
        elif isinstance(delta, ToolCallDelta):
            calls[-1][1] += delta.arguments
    return said, calls, told


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


def reader(tokenizer: Any, tool_format: str) -> tuple[TextSide, Reply]:
    side = TextSide(tokenizer, CONFIG, tool_format)
    request = GenerateRequest("r", PROMPT, Sampling())
    return side, side.reply(request, side.encode(PROMPT), side.constraints(PROMPT))


def read(tokenizer: Any, tool_format: str, text: str) -> tuple[str, str | None, list[str]]:
    """The text sent, what is kept of the tokens (None: there was nothing to write again), and what may come next."""
    side, reply = reader(tokenizer, tool_format)
    backend = tokenizer.backend_tokenizer
    sent = ""
    for token in backend.encode(text, add_special_tokens=False).ids:
        if reply.done:
            break
        sent += "".join(delta.text for delta in reply.feed([token]) if isinstance(delta, TextDelta))
    if reply.rewrite is None:
        deltas, _ = reply.finish("stop")
        return sent + "".join(d.text for d in deltas if isinstance(d, TextDelta)), None, []
    kept = side.detokenize(reply.rewrite.tokens)
    forced = side.detokenize(reply.rewrite.matcher.forced())
    return sent, kept, [forced]


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
    said, got, _ = read(qwen_like, tool_format, text)
    assert said == sent
    assert got is not None
    assert kept.startswith(got)
    assert len(kept) - len(got) < 8, "one token at most"


def test_what_was_sent_is_not_taken_back(qwen_like: Any) -> None:
    """A list that no declared call could have begun cannot be gone on with: its call is text."""
    call, other = ('{"name": "sum", "parameters": ARGS}'.replace("ARGS", args) for args in ("{}", '{"n": 1}'))
    text = f'{call}, {other}; {{"name": "rm", "parameters": {{}}}}'
    sent, kept, _ = read(qwen_like, "llama3", text)
    assert kept is None
    assert sent == '; {"name": "rm", "parameters": {}}'


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
    ids = qwen_like.backend_tokenizer.encode(text, add_special_tokens=False).ids
    for limits in (side.constraints(prompt), FREE):
        reply = side.reply(GenerateRequest("r", prompt, Sampling()), side.encode(prompt), limits)
        deltas: list[Any] = []
        for token in ids:
            deltas += reply.feed([token]) if not reply.done else []
        if kept is None or limits is FREE:
            assert reply.rewrite is None
            deltas += reply.finish("stop")[0]
            called = [delta.name for delta in deltas if isinstance(delta, ToolCallDelta) and delta.name]
            assert called == ["sum"] * text.count('"name": "sum"')
        else:
            assert reply.rewrite is not None
            assert deltas == []
            got = side.detokenize(reply.rewrite.tokens)
            assert kept.startswith(got)
            assert len(kept) - len(got) < 8, "one token at most"


def test_declared_calls_and_other_text_are_left_alone(qwen_like: Any) -> None:
    for text in ('{"name": "sum", "parameters": {}}', 'A {"name": "rm"}', '{"name": "rm"}'):
        assert read(qwen_like, "llama3", text)[1] is None
    _, reply = reader(qwen_like, "hermes")
    assert reply._declared is None, "nothing is written again where calls have an opener: the guard is in time"


def test_log_probabilities_of_what_is_kept_come_along(qwen_like: Any) -> None:
    _, reply = reader(qwen_like, "llama3")
    ids = qwen_like.backend_tokenizer.encode('{"name": "rm", "parameters": {}}', add_special_tokens=False).ids
    logprobs = [TokenLogprobs(token, -0.5) for token in ids]
    for token, entry in zip(ids, logprobs, strict=True):
        reply.feed([token], [entry])
    assert reply.rewrite is not None
    assert list(reply.rewrite.tokens) == ids[: len(reply.rewrite.tokens)]
    assert list(reply.rewrite.logprobs) == logprobs[: len(reply.rewrite.tokens)]
