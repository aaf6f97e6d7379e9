"""What a model thinks before its answer: told apart from content and calls, however the reply is cut."""

from copy import copy
from typing import Any

import orjson
import pytest
from call_grammars import masks
from call_texts import FORMATS, call_texts, mutated
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import ids_of, told

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    ChatPrompt,
    GenerateRequest,
    JsonOutput,
    RawPrompt,
    ReasoningDelta,
)
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import READERS
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.text.reasoning import CHANNELS, ThinkingReader

STRICT = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ASK = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THOUGHT = f"Should I {CALL} STOP? No </thing>."


def thinking(tokenizer: Any) -> Any:
    """`tokenizer` with a template that names the end of thinking, as Qwen3's does."""
    other = copy(tokenizer)
    other.chat_template = tokenizer.chat_template + (
        "{%- if add_generation_prompt and start is defined -%}{{- start -}}{%- endif -%}{#- </think> -#}"
    )
    return other


@pytest.fixture
def side(qwen_like: Any) -> TextSide:
    return TextSide(thinking(qwen_like), EngineConfig())


def request(start: str = "", **options: Any) -> GenerateRequest:
    stop = options.pop("stop", ())
    kwargs = {"start": start} if start else {}
    prompt = options.pop("prompt", None) or ChatPrompt(ASK, TOOLS, template_kwargs=kwargs, **options)
    return GenerateRequest("r", prompt, Sampling(), stop)


def read(side: TextSide, ask: GenerateRequest, text: str, step: int = 1) -> tuple[str, str, list[str], str, int]:
    """Reasoning, content, calls, why it ended, and tokens that were thinking."""
    ids = ids_of(side, text)
    found = told(side, ask, ids, range(step, len(ids), step))
    thoughts = [isinstance(piece, ReasoningDelta) for piece in found.pieces]
    assert thoughts == sorted(thoughts, reverse=True), "they come first"
    assert all(piece.text for piece in found.pieces if isinstance(piece, ReasoningDelta))
    return found.reasoning, found.text, [name for name, _ in found.calls], found.ended, found.reply.reasoning_tokens


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("start", "begin"),
    [("", "<think>\n"), ("", "\n<think>"), ("", " \n\n<think>\n"), ("<think>\n", ""), ("<think>\n", "\n<think>")],
)
def test_thinking_is_neither_content_nor_calls_nor_stopped(side: TextSide, start: str, begin: str, step: int) -> None:
    ask = request(start, stop=("STOP",))
    thought = f"{begin}{THOUGHT}\n</think>"
    length = len(ids_of(side, thought))
    assert read(side, ask, f"{thought}\n\nHello.<|im_end|>", step) == (THOUGHT, "Hello.", [], "stop", length)
    assert read(side, ask, f"{thought}\n\nHello. STOP it", step) == (THOUGHT, "Hello. ", [], "stop", length)
    assert read(side, ask, f"{thought}\n\n{CALL}<|im_end|>", step) == (THOUGHT, "", ["f"], "tool_calls", length)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("format", [format for format in READERS if format not in CHANNELS])
def test_calls_that_the_thinking_ends_with_are_calls_where_nothing_follows(
    qwen_like: Any, format: ToolFormat, step: int
) -> None:
    side = TextSide(thinking(qwen_like), EngineConfig(), format)
    one, two = ("".join(call_texts(format, [("f", {"a": 1})] * count, variant=1)) for count in (1, 2))
    for calls, text in ((1, one), (1, f"{one}\n</think>\n"), (2, two)):
        told = read(side, request(), f"<think>\nI <reason>.\n\n{text}", step)
        assert told[:4] == ("I <reason>.", "", ["f"] * calls, "tool_calls")
    for after in ("x", "</think>\nHello", f" No. {one} Yes"):
        thought, _, content = after.partition("</think>\n")
        told = read(side, request(), f"<think>{one}{after}", step)
        assert told[:4] == (one + thought, content, [], "stop")


def test_calls_in_the_thinking_stay_thoughts_where_they_are_not_all_that_ends_the_reply(side: TextSide) -> None:
    thought = f"<think>So {CALL}"
    assert read(side, request(), f"{thought}</think>{CALL}")[:4] == (f"So {CALL}", "", ["f"], "tool_calls")
    unknown, cut = CALL.replace('"f"', '"rm"'), CALL.partition("}")[0]
    for calls in (unknown, cut, f"{CALL}\n<tool_call>", f"{CALL}\n{cut[:-3]}"):
        assert read(side, request(), f"<think>So {calls}")[:4] == (f"So {calls}", "", [], "stop")
    for reason, stop in (("length", ()), ("stop", ("END",))):
        found = told(side, request(stop=stop), f"{thought}</think>END" if stop else thought, (), reason=reason)
        assert {type(piece) for piece in found.pieces} == {ReasoningDelta}
        assert (found.ended, found.reply.empty) == (reason, True)
    assert not told(side, request(), thought, ()).reply.empty


def test_without_thinking_everything_is_as_before(side: TextSide, qwen_like: Any) -> None:
    text = "<think>\nHm.\n</think>\n\nHello. <think>"
    plain = ("", text, [], "stop", 0)
    off = request("<think>\n\n</think>\n\n")
    completion = request(prompt=RawPrompt("x <think>"))
    for ask in (off, completion):
        assert read(side, ask, text) == plain
    assert read(TextSide(qwen_like, EngineConfig()), request(), text) == plain
    assert read(side, request(), "So <think> is\n a word") == ("", "So <think> is\n a word", [], "stop", 0)
    assert read(side, request(), "\n <thi") == ("", "\n <thi", [], "stop", 0)


def test_markers_that_the_vocabulary_calls_special_are_seen(qwen_like: Any) -> None:
    tokenizer = thinking(qwen_like)
    tokenizer._tokenizer = type(qwen_like.backend_tokenizer).from_str(qwen_like.backend_tokenizer.to_str())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    side = TextSide(tokenizer, EngineConfig())
    assert read(side, request(), "<think>Hm.</think>Hello.")[:2] == ("Hm.", "Hello.")


def test_an_undeclared_bare_call_after_thinking_is_written_again_from_its_place(qwen_like: Any) -> None:
    side = TextSide(thinking(qwen_like), EngineConfig(), "llama3")
    ask = request()
    before = f"<think>\n{THOUGHT}</think>\n\n"
    text = before + '{"name": "rm", "parameters": {}}'
    rewrite = told(side, ask, text, limits=side.constraints(ask.prompt)).reply.rewrite
    assert rewrite is not None
    kept = side.detokenize(rewrite.tokens)
    assert (before + '{"name": "').startswith(kept)
    assert kept.startswith(before + "{")


# ---- laws ----

TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</thi", "nk>", "<", " ", "\n", "so", "é日", CALL, "STOP", "\n\n"]),
    max_size=7,
).map("".join)


def split(pieces: list[str], inside: bool) -> tuple[str, str, int]:
    reader = ThinkingReader(inside)
    read = [reader.feed(piece) for piece in pieces if piece]
    skipped = reader.skipped
    read.append(reader.flush())
    reasoning, content = ("".join(parts) for parts in zip(*read, strict=True))
    assert skipped + len(content) <= len("".join(pieces))
    if reader.over and content:
        assert "".join(pieces)[skipped:] == content
    return reasoning, content, reader.skipped


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.booleans())
def test_a_cut_at_any_character_gives_the_same_split(text: str, inside: bool) -> None:
    whole = split([text], inside)
    assert split(list(text), inside) == whole
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]], inside) == whole
    reasoning, content, _ = whole
    begun = inside or text.lstrip().startswith("<think>")
    body = text.lstrip().removeprefix("<think>") if begun else ""
    assert reasoning == body.partition("</think>")[0].strip()
    assert content == (body.partition("</think>")[2].lstrip() if begun else text)


PARTS = ["<think>", "</think>", "\n", " ", "so", "é日👩", "STOP", "<tool_call>", "<", '{"a": 1e999}', '"\\\\ud83d"']


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(PARTS) | st.just(""), max_size=6), st.booleans(), st.data())
def test_a_streamed_reply_adds_up_to_the_whole_in_every_format(
    qwen_like: Any, format: ToolFormat, parts: list[str], inside: bool, data: st.DataObject
) -> None:
    """Wherever calls stand, whatever is cut out of the text, and whatever ended it."""
    calls = [("f", {"a": data.draw(st.sampled_from(['x"', 1, None, [1.5, {}], "é👩\n"]))})] * data.draw(
        st.integers(1, 2)
    )
    block = "".join(call_texts(format, calls, variant=data.draw(st.integers(0, 1))))
    text = mutated("".join(part or block for part in parts), data)
    side = TextSide(thinking(qwen_like), EngineConfig(), format)
    ask = request("<think>" if inside else "", stop=("STOP",) if data.draw(st.booleans()) else ())
    ids, reason = ids_of(side, text), data.draw(st.sampled_from(["stop", "length"]))
    answers = []
    for step in (1, 2, 5, max(1, len(ids))):
        found = told(side, ask, ids, range(step, len(ids), step), reason=reason)
        answers.append(found.answer)
        assert all(orjson.loads(call.arguments) is not None for call in found.answer.tool_calls if call.closed)
        assert found.reply.empty == (not found.calls and not found.text.strip())
    assert answers == [answers[0]] * 4


# ---- grammars ----


def matcher_of(side: TextSide, ask: GenerateRequest) -> Any:
    return side.after_thinking(ask, side.encode(ask.prompt), side.constraints(ask.prompt).matcher)


def grammar(side: TextSide, start: str) -> Any:
    kwargs = {"start": start} if start else {}
    prompt = ChatPrompt(ASK, [STRICT], parallel_tool_calls=False, template_kwargs=kwargs)
    return matcher_of(side, request(prompt=prompt))


CONTENT: list[dict[str, Any]] = [
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"output": JsonOutput({"type": "object", "properties": {"a": {"type": "integer"}}})},
]


@pytest.mark.parametrize("start", ["", "<think>"])
@pytest.mark.parametrize("options", CONTENT)
def test_the_reply_does_not_end_inside_the_thinking_where_content_is_asked_for(
    side: TextSide, options: dict[str, Any], start: str
) -> None:
    tools = [] if "output" in options else TOOLS
    ask = request(prompt=ChatPrompt(ASK, tools, template_kwargs={"start": start} if start else {}, **options))
    eos = ids_of(side, "<|im_end|>")
    inside = ids_of(side, "Or so" if start else "<think>Or so")
    for drafts in (inside, inside + eos, inside + eos + inside, inside + ids_of(side, "</think>") + eos):
        matcher = matcher_of(side, ask)
        rows = masks(matcher, drafts)
        allowed = [bool(row[eos[0] // 32] >> eos[0] % 32 & 1) for row in rows]
        ended = len(drafts) if drafts == inside else drafts.index(eos[0])
        assert allowed == [False] * (ended + 1) + [True] * (len(drafts) - ended)
        assert (rows[ended + 1 :] == -1).all()
        assert matcher.accepts(drafts) == ended
    free = grammar(side, start)
    assert free.accepts(inside + eos) == len(inside + eos)


def test_where_no_token_ends_the_thinking_what_is_asked_for_comes_first(llama3_like: Any) -> None:
    side = TextSide(thinking(llama3_like), EngineConfig())
    ask = request(prompt=ChatPrompt(ASK, template_kwargs={"start": "<think>"}, output=JsonOutput({"type": "object"})))
    assert matcher_of(side, ask).accepts(ids_of(side, '{"a": 1}')) == len(ids_of(side, '{"a": 1}'))
    assert read(side, ask, '{"a": 1}')[:2] == ("", '{"a": 1}')


@pytest.mark.parametrize(
    ("start", "begin"), [("", "<think>"), ("<think>", ""), ("", "\n<think>"), ("", "\n\n\n<think>")]
)
def test_a_grammar_says_nothing_until_the_thinking_is_over(side: TextSide, start: str, begin: str) -> None:
    """What is thought is not held to a form, also behind white space, and no call in it begins one."""
    unknown = CALL.replace('"f"', '"rm"')
    thought, good, bad = ids_of(side, f"{begin}Or {unknown} it?</think>"), ids_of(side, CALL), ids_of(side, unknown)
    kwargs = {"start": start} if start else {}
    several = matcher_of(side, request(prompt=ChatPrompt(ASK, [STRICT], template_kwargs=kwargs)))
    for matcher in (grammar(side, start), several):
        assert matcher.accepts(thought + good) == len(thought + good)
        assert len(thought) < matcher.accepts(thought + bad) < len(thought + bad)
        for token in [*thought, *good]:
            assert matcher.advance([token])
            assert (matcher.binding, matcher.finished, matcher.failed) == (False, False, False)
    off = grammar(side, "<think>\n\n</think>\n\n")
    ids = ids_of(side, "Or <tool_call> it?")
    assert len(ids_of(side, "Or <tool_call>")) <= off.accepts(ids) < len(ids)


@pytest.mark.parametrize("start", ["", "<think>"])
@pytest.mark.parametrize(
    "text",
    [
        "<think>Or</think>\n\n" + CALL,
        "\n\n<think>Or</think>" + CALL,
        "\n \n" + CALL,
        f"Or</think>{CALL}",
        f"Or {CALL}",
        "<think>Or so",
        "\n<think>Or so",
        "\n",
        "</think><think>",
    ],
)
def test_masks_of_drafts_are_those_after_the_tokens_were_drawn(side: TextSide, start: str, text: str) -> None:
    matcher = grammar(side, start)
    ids = ids_of(side, text)
    fitting = ids[: matcher.accepts(ids)]
    for begin in range(len(fitting)):
        rows, ahead = masks(matcher, fitting[begin:]), matcher.copy()
        for row, token in zip(rows, [*fitting[begin:], 0], strict=True):
            assert (row == masks(ahead)).all()
            assert all(row[forced // 32] >> forced % 32 & 1 for forced in ahead.forced()[:1])
            ahead.advance([token])
        assert rows[0][fitting[begin] // 32] >> fitting[begin] % 32 & 1
        matcher.advance([fitting[begin]])
