"""The text side as a whole: from request to pieces."""

import json
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import ids_of, told

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.constraints.guidance import CallGuard
from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, RawPrompt, TextDelta, ToolCallDelta
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.conversation import FREE, TextSide

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("get_weather", "search")]
ASK = {"role": "user", "content": "the weather in Paris"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def side(qwen_like: Any) -> TextSide:
    return TextSide(qwen_like, EngineConfig())


def request(**options: Any) -> GenerateRequest:
    prompt = options.pop("prompt", None) or ChatPrompt([ASK], TOOLS)
    return GenerateRequest("req-1", prompt, Sampling(), **options)


def said(deltas: list[Any]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def test_a_tool_call_from_tokens(side: TextSide) -> None:
    first, again = (told(side, request(), f"Let me see.\n{CALL}<|im_end|>", cuts) for cuts in (None, ()))
    assert (first.text, first.ended) == ("Let me see.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in first.calls] == [("get_weather", {"city": "Paris"})]
    one, same = (next(each for each in found.pieces if isinstance(each, ToolCallDelta)) for found in (first, again))
    assert one.call_id == same.call_id
    assert str(one.call_id).startswith("call_")


def test_a_reply_that_is_to_go_on_does_not_end_with_its_calls(side: TextSide) -> None:
    ask = request()
    on = replace(ask, sampling=Sampling(ignore_eos=True))
    ids = ids_of(side, CALL + "<|im_end|>And now for something else entirely, with many words.")
    ended, going = (side.reply(each, side.encode(ask.prompt)) for each in (ask, on))
    for reply in (ended, going):
        for token in ids:
            sent = [d for d in reply.feed([token]) if isinstance(d, ToolCallDelta)]
    assert sent == []
    assert (ended.done, going.done) == (True, False)
    assert ended.completion_tokens < going.completion_tokens == len(ids)
    assert going.finish("length") == ([], "tool_calls")


def test_only_allowed_tools_are_called_and_the_prompt_shows_all(side: TextSide) -> None:
    every = ChatPrompt([ASK], TOOLS)
    some = replace(every, allowed_tools=("search",))
    assert side.encode(some).tokens.tolist() == side.encode(every).tokens.tolist()
    ask = request(prompt=some)
    reply = side.reply(ask, side.encode(ask.prompt))
    assert said(reply.feed(ids_of(side, CALL))) == CALL
    calls = reply.feed(ids_of(side, CALL.replace("get_weather", "search")))
    assert [delta.name for delta in calls if isinstance(delta, ToolCallDelta)] == ["search"]
    matcher = side.constraints(replace(some, tool_choice="required")).matcher
    assert matcher is not None
    other = ids_of(side, CALL.replace("get_weather", "search").replace('"city": "Paris"', ""))
    assert matcher.accepts(other) == len(other)
    assert matcher.accepts(ids_of(side, CALL)) < len(ids_of(side, CALL))
    strict = [
        *TOOLS[:1],
        {"type": "function", "function": {"name": "search", "strict": True, "parameters": {"not": {}}}},
    ]
    with pytest.raises(InvalidRequestError) as caught:
        side.constraints(replace(some, tools=strict))
    assert caught.value.field == "tools.1.function.parameters"


def test_stop_token_ids_leave_no_text(side: TextSide) -> None:
    ids = ids_of(side, "the weather</think>")
    for stops, text in ((frozenset[int](), "the weather</think>"), (frozenset(ids[-1:]), "the weather")):
        ask = GenerateRequest("r", RawPrompt("x"), Sampling(logprobs=0, stop_token_ids=stops))
        found = told(side, ask, ids, logprobs=[TokenLogprobs(token, -1.0) for token in ids])
        assert (found.text, found.ended) == (text, "stop")
        assert [each.token for each in found.logprobs] == [side.detokenize([token]) for token in ids], "all that count"
        assert b"".join(entry.bytes for entry in found.logprobs).decode() == text


def test_a_template_with_tools_in_a_format_that_is_not_read_is_told(
    qwen_like: Any, caplog: pytest.LogCaptureFixture
) -> None:
    coder = copy(qwen_like)
    coder.chat_template = qwen_like.chat_template.replace("tool_call>", "action>")
    TextSide(qwen_like, EngineConfig())
    TextSide(coder, EngineConfig(), "none")
    assert not caplog.records
    assert TextSide(coder, EngineConfig()).tool_format is ToolFormat.NONE
    assert "come as text" in caplog.text


class TooLarge:
    """The grammar of a call that grows beyond its limits as the call begins."""

    finished, failed, complete = True, True, False

    def copy(self) -> "TooLarge":
        return self

    def take(self, tokens: Any) -> int:
        return len(tokens)


@pytest.mark.parametrize("guard", ["none", "followed", "given up"])
def test_a_marker_in_prose_is_text_where_no_grammar_makes_a_call_of_it(side: TextSide, guard: str) -> None:
    ask, text = request(), "Models write <tool_call>"
    limits = side.constraints(ask.prompt) if guard != "none" else FREE
    reply = side.reply(ask, side.encode(ask.prompt), limits)
    if guard == "given up":
        assert isinstance(limits.matcher, CallGuard)
        limits.matcher.calls = TooLarge()  # type: ignore[assignment]
        assert limits.matcher.advance(ids := ids_of(side, text)) == len(ids)
    deltas = reply.feed(ids_of(side, text + "<|im_end|>"))
    tail, reason = reply.finish("stop")
    assert (said([*deltas, *tail]), reason) == ("Models write " if guard == "followed" else text, "stop")


def test_tool_choice_none_leaves_calls_as_text(side: TextSide) -> None:
    found = told(side, request(prompt=ChatPrompt([ASK], TOOLS, tool_choice="none")), CALL)
    assert (found.text, found.ended) == (CALL, "stop")


def test_a_single_call_ends_the_reply_where_parallel_calls_are_off(side: TextSide) -> None:
    ids = ids_of(side, f"{CALL}\n{CALL}")
    found = told(side, request(prompt=ChatPrompt([ASK], TOOLS, parallel_tool_calls=False)), ids, ())
    assert found.reply.done
    assert found.reply.completion_tokens < len(ids) // 2
    assert (len(found.calls), found.ended) == (1, "tool_calls")


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    "stops", [("weather",), ("n the w",), ("ather", "wea"), ("been",), ("is",), ("zz",), ("nn", "n i")]
)
def test_log_probabilities_are_those_of_tokens_that_begin_before_the_stop(
    side: TextSide, stops: tuple[str, ...], size: int
) -> None:
    ids = ids_of(side, "ben in the weather 日本 and is")
    ask = request(prompt=RawPrompt("the"), stop=stops)
    reply = side.reply(ask, side.encode(ask.prompt))
    entries = [TokenLogprobs(token, -float(number)) for number, token in enumerate(ids)]
    deltas: list[Any] = []
    for at in range(0, len(ids), size):
        deltas += reply.feed(ids[at : at + size], entries[at : at + size])
        sent = sum(len(entry.bytes) for delta in deltas for entry in delta.logprobs)
        assert sent >= len(said(deltas).encode()), "a text comes with those of its tokens"
    deltas += reply.finish("stop")[0]
    text = said(deltas)
    begins = [len(side.pieces.text(ids[:number]).rstrip("\ufffd")) for number in range(len(ids))]
    expected = [number for number, begin in enumerate(begins) if begin < len(text)]
    assert [-entry.logprob for delta in deltas for entry in delta.logprobs] == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_add_up_whatever_the_steps_bring(qwen_like: Any, data: st.DataObject) -> None:
    side = TextSide(qwen_like, EngineConfig())
    text = data.draw(st.sampled_from([CALL, f"the 日本 wörld\n{CALL}", "👩‍👩 <tool_call> the STOP", "in\n\nParis \n"]))
    ids = [*ids_of(side, text), *data.draw(st.lists(st.integers(3, len(qwen_like) - 1), max_size=5))]
    ask = request(stop=("STOP",))
    results = []
    for cuts in ([], sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=20)))):
        found = told(side, ask, ids, cuts, logprobs=[TokenLogprobs(token, -float(token)) for token in ids])
        logprobs, tokens = [-entry.logprob for entry in found.logprobs], found.reply.completion_tokens
        results.append((found.text, found.calls, found.ended, logprobs, tokens))
        counted = ids[:tokens]
        shown = [token for token in counted if token not in side.cache.added.special_ids]
        stopped = "STOP" in side.pieces.text(shown)
        assert logprobs == (counted[: len(logprobs)] if stopped else counted)
    assert results[0] == results[1]


def test_log_probabilities_carry_the_bytes_of_a_split_character(side: TextSide) -> None:
    ids = ids_of(side, "👩")
    assert len(ids) > 1
    ask = request(prompt=RawPrompt("the"))
    reply = side.reply(ask, side.encode(ask.prompt))
    deltas = reply.feed(ids, [TokenLogprobs(token, -1.0, ((token, -1.0), (5, -2.0))) for token in ids])
    assert len(deltas) == 1
    assert b"".join(entry.bytes for entry in deltas[0].logprobs) == "👩".encode()
    assert [len(entry.top) for entry in deltas[0].logprobs] == [2] * len(ids)
    assert "".join(entry.token for entry in deltas[0].logprobs) == r"\xf0\x9f\x91\xa9"


@pytest.mark.parametrize("text", ["Oslo 👩", " the weather", "the<|im_end|>日", "a"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt_has_the_bytes_of_its_text(tokenizers: list[Any], text: str, as_ids: bool) -> None:
    """Also where the tokenizer puts a mark or a space before the prompt."""
    for tokenizer in tokenizers:
        side = TextSide(tokenizer, EngineConfig())
        ids = side.encode(RawPrompt(text)).tokens
        prompt = RawPrompt(ids.tolist() if as_ids else text, echo=True)
        scores = [TokenLogprobs(int(token), -1.0) for token in ids[1:]]
        echo = side.echoed(prompt, side.encode(prompt), scores)
        assert len(echo.logprobs) == len(ids)
        assert b"".join(entry.bytes for entry in echo.logprobs).decode() == echo.text


@settings(max_examples=60, deadline=None)
@given(st.text("a👩é日", min_size=1, max_size=5), st.data())
def test_of_a_character_that_is_cut_nothing_is_shown(tokenizers: list[Any], text: str, data: st.DataObject) -> None:
    side = TextSide(data.draw(st.sampled_from(tokenizers)), EngineConfig())
    ids = ids_of(side, text)
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    ask, results = request(prompt=ChatPrompt([ASK])), []
    for step in (1, 3, len(ids)):
        found = told(side, ask, ids, range(step, len(ids), step), reason="length")
        results.append((found.text, found.ended))
    assert results == [results[0]] * 3
    (shown, reason) = results[0]
    assert reason == "length"
    assert text.startswith(shown)
    assert len(side.pieces.text(ids).strip()) - len(shown) in (0, 1)


@pytest.mark.parametrize("named", [True, False])
def test_programs_that_come_in_turn_tokenize_what_is_new_and_keep_their_ids(qwen_like: Any, named: bool) -> None:
    """As many as the cells hold: the cache has room for all of them, whether requests name their program or not."""
    count = 70
    config = EngineConfig(cells=512 * count)
    side = TextSide(qwen_like, config)
    spelled = [qwen_like.convert_tokens_to_ids(char) for char in "been"]  # not how the tokenizer would cut it
    eos = qwen_like.convert_tokens_to_ids("<|im_end|>")
    system = {"role": "system", "content": "the weather in Paris " * 30}
    talks = [[system, {"role": "user", "content": f"task {i} is in Paris"}] for i in range(count)]
    ids: list[list[int]] = [[] for _ in range(count)]
    for turn in range(3):
        before, new = side.stats.characters_tokenized, 0
        for i, messages in enumerate(talks):
            ask = request(prompt=ChatPrompt(list(messages)), scope="tenant", program_id=f"p{i}" if named else "")
            encoded = side.encode(ask.prompt, ask.scope, *([ask.program_id] if named else []))
            assert encoded.tokens[: len(ids[i])].tolist() == ids[i]
            new += len(encoded.text or "") - (encoded.text or "").rfind("been<|im_end|>") - len("been")
            reply = side.reply(ask, encoded)
            reply.feed([*spelled, eos])
            reply.finish("stop")
            reply.remember()
            ids[i] = [*encoded.tokens.tolist(), *spelled, eos]
            messages += [{"role": "assistant", "content": "been"}, {"role": "user", "content": f"and {turn}?"}]
        assert turn == 0 or side.stats.characters_tokenized - before == new
    assert sum(map(len, ids)) < config.cells


def test_plain_prompts(llama3_like: Any) -> None:
    side = TextSide(llama3_like, EngineConfig())
    begin = llama3_like.bos_token_id
    assert side.encode(RawPrompt("the weather")).tokens.tolist() == llama3_like.encode("the weather")
    assert side.encode(RawPrompt("")).tokens.tolist() == [begin]
    assert side.encode(RawPrompt([5, 6])).tokens.tolist() == [5, 6]
    assert side.encode(RawPrompt("x")).text is None
    assert side.encode(ChatPrompt([ASK])).tokens.tolist().count(begin) == 1
    assert side.detokenize([begin, *ids_of(side, "日本")]) == "<|begin_of_text|>日本"
    assert side.encode(ChatPrompt([ASK])).tokens.dtype == np.int32


@pytest.mark.parametrize("content", [[], [-1], [10**6], [2**70], ["x"], [1.5], "\ud800", ""])
def test_a_bad_plain_prompt_names_the_prompt(side: TextSide, content: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        side.encode(RawPrompt(content))
    assert caught.value.field == "prompt"


def test_a_tokenizer_without_its_fast_file_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        TextSide(object(), EngineConfig())
    assert caught.value.field == "model"


def test_grammars_are_each_tenants_own(side: TextSide) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    prompt = ChatPrompt([{"role": "user", "content": "x"}], tools, tool_choice="required")
    compiled = side._compiler.compiled
    for tenant in ("a", "b", "a", "b"):
        side.constraints(prompt, tenant)
    assert side._compiler.compiled == compiled + 2
