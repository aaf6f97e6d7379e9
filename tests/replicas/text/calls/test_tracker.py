"""Wherever a reply is cut: what is not whole is text as it was written, or a call in progress, and never both.

Where calls are guaranteed no character of one is text: it is a call in progress, or nothing.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from call_texts import ARGUMENTS, CALLS, FORMATS, NAMES, call_texts, chunked, collected, mutated, parser
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import READERS

DECLARED = st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS)
PROSE = st.sampled_from(["I look.", "I look.\n", "a < b,\n\n", "é日 [1] {x} ", "<tool is\n", "It's \n\n"])


@dataclass(frozen=True)
class Part:
    """A part of a reply: prose, or one call with the markup that belongs to it."""

    text: str
    call: bool


@st.composite
def replies(draw: st.DrawFn) -> tuple[ToolFormat, list[Part]]:
    """Calls in blocks, prose before, between and after them. Bare blocks stand at the start."""
    format, parts = draw(st.sampled_from(FORMATS)), []
    for number in range(draw(st.integers(1, 3))):
        variant = draw(st.integers(0, 1))
        bare = format in (ToolFormat.LLAMA3, ToolFormat.LLAMA4, ToolFormat.PYTHONIC) and not variant
        if not bare and (number or draw(st.booleans())):
            parts.append(Part(draw(PROSE), call=False))
        elif bare and number:
            break
        block = call_texts(format, draw(st.lists(DECLARED, min_size=1, max_size=2)), variant=variant)
        parts += [Part(text, call=True) for text in block]
    if draw(st.booleans()):
        parts.append(Part("\n" * draw(st.integers(0, 1)) + draw(PROSE), call=False))
    return format, parts


def whole_parts(parts: list[Part], cut: int) -> tuple[list[Part], Part]:
    """The parts that end before character `cut`, and as much as there is of the next."""
    whole: list[Part] = []
    for part in parts:
        if cut < len(part.text):
            return whole, Part(part.text[:cut], part.call)
        whole.append(part)
        cut -= len(part.text)
    return whole, Part("", call=False)


# In these a call and the end of them all begin alike.
OPENERS = {
    ToolFormat.DEEPSEEK_V3: "<｜tool▁call▁begin｜>",
    ToolFormat.DEEPSEEK_V31: "<｜tool▁call▁begin｜>",
    ToolFormat.KIMI_K2: "<|tool_call_begin|>",
    ToolFormat.DEEPSEEK_V32: '<｜DSML｜invoke name="',
    ToolFormat.MINIMAX_M2: '<invoke name="',
    ToolFormat.MUSE: '<atem:invoke name="',
}


def separates(format: ToolFormat, text: str, before: str) -> bool:
    """Whether nothing of a call is in `text`, which stands behind the call `before`."""
    text, opener = text.strip(",; \n"), OPENERS.get(format, "")
    if format is ToolFormat.QWEN3_CODER and before.endswith("</function>"):  # its section has not ended
        opener = "<function="
    return opener.startswith(text) and text != opener if opener else not text


def prose_of(parts: list[Part], before_call: bool) -> str:
    """What a client reads of `parts`: all but the calls, one line end before each, and white space behind the last."""
    text = ""
    for part, following in zip(parts, [*parts[1:], Part("", before_call)], strict=False):
        if not part.call:
            text += part.text.removesuffix("\n") if following.call else part.text
    return text


def sure(format: ToolFormat, text: str) -> str:
    """`text` without an end that one of the format's markers may go on from."""
    lengths = [n for marker in READERS[format].marked for n in range(1, len(marker)) if text.endswith(marker[:n])]
    return text[: len(text) - max(lengths, default=0)]


@pytest.mark.parametrize("guaranteed", [False, True])
@settings(max_examples=50, deadline=None)
@given(replies(), st.data())
def test_what_is_not_whole_is_text_or_a_call_in_progress(
    guaranteed: bool, reply: tuple[ToolFormat, list[Part]], data: st.DataObject
) -> None:
    format, parts = reply
    text = "".join(part.text for part in parts)
    everything, calls = collected([text], full := parser(format, early_stop=False))
    assert everything == prose_of(parts, before_call=False)
    assert [[call.name, call.arguments] for call in full.calls] == calls, "all have closed"

    cut = data.draw(st.integers(0, len(text)))
    reader = parser(format, early_stop=False, guaranteed=lambda: guaranteed)
    said, sent = collected(chunked(text[:cut], data), reader, cut=True)
    whole, partial = whole_parts(parts, cut)
    closed = sum(part.call for part in whole)
    assert [call.arguments for call in reader.calls[:closed]] == [arguments for _, arguments in calls[:closed]]
    if not partial.call:
        tail = sure(format, partial.text) if guaranteed else partial.text
        tail = "" if whole and whole[-1].call and tail.isspace() else tail
        assert said == prose_of(whole, before_call=False) + tail
        assert sent == calls[:closed]
    elif len(sent) > closed:
        assert said == prose_of(whole, before_call=True), "a call in progress, and none of its characters is text"
        name, arguments = sent[closed]
        assert name == calls[closed][0]
        assert calls[closed][1].startswith(arguments)
        assert len(sent) == closed + 1
    elif guaranteed:
        assert said == prose_of(whole, before_call=False), "no call, and nothing of it is text"
    elif not (whole and whole[-1].call and separates(format, partial.text, whole[-1].text)):
        assert said == prose_of(whole, before_call=False) + partial.text, "no call, and all of it is text as written"
    else:
        assert said == prose_of(whole, before_call=False), "what separates calls belongs to the closed one"


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(CALLS, min_size=1, max_size=3), PROSE, st.booleans(), st.data())
def test_a_closed_call_stays_one_and_what_was_sent_stays_sent(
    format: ToolFormat, calls: list[Any], words: str, first: bool, data: st.DataObject
) -> None:
    """Of any text, damaged too: a longer one goes on from what a shorter one gave."""
    block = "".join(call_texts(format, calls, variant=data.draw(st.integers(0, 1))))
    text = mutated(words + block if first else block + words, data)
    cut = data.draw(st.integers(0, len(text)))
    options = {"early_stop": data.draw(st.booleans())}
    short, long = parser(format, **options), parser(format, **options)
    _, sent = collected([text[:cut]], short, cut=True)
    _, all_sent = collected([text], long)
    assert long.calls[: len(short.calls)] == short.calls
    assert [name for name, _ in all_sent[: len(sent)]] == [name for name, _ in sent]
    assert all(there[1].startswith(here[1]) for here, there in zip(sent, all_sent, strict=False))


@settings(max_examples=60, deadline=None)
@given(replies(), st.data())
def test_early_stop_only_ends_the_reply_sooner(reply: tuple[ToolFormat, list[Part]], data: st.DataObject) -> None:
    format, parts = reply
    text = "".join(part.text for part in parts)
    text = text[: data.draw(st.integers(0, len(text)))]
    said, sent = collected(chunked(text, data), parser(format))
    all_said, all_sent = collected([text], parser(format, early_stop=False))
    assert all_said.startswith(said)
    assert all_sent[: len(sent)] == sent


@settings(max_examples=12)
@given(st.data())
@pytest.mark.parametrize("format", FORMATS)
def test_a_call_that_says_the_same_as_the_one_before_it_ends_the_reply(format: ToolFormat, data: st.DataObject) -> None:
    said, other = ("f", {"city": "Oslo"}), ("f", {"city": "Rome"})
    for calls, told in (([said] * 4, 2), ([said, other] * 2, 4), ([said, other, other, said], 3)):
        pieces = chunked("".join(call_texts(format, calls, variant=data.draw(st.integers(0, 1)))), data)
        reader, going = parser(format), parser(format, early_stop=False)
        assert len(collected(pieces, reader)[1]) == told
        assert reader.stopped is (told < 4)
        assert len(collected(pieces, going)[1]) == 4
