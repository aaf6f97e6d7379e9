from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    Completed,
    Errored,
    LogprobText,
    TextDelta,
    Timing,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from holdfast.router.records.answers import pieces_of
from holdfast.router.records.response_cache import STORED, CacheEntry

TIMING = Timing(arrived=0.0)
WORDS = st.text(st.characters(codec="utf-8"), max_size=8)
LOGPROBS = st.builds(LogprobText, WORDS, st.binary(max_size=4), st.floats(max_value=0.0, allow_nan=False), st.just(()))
TOKENS = st.builds(
    LogprobText,
    WORDS,
    st.binary(max_size=4),
    st.floats(max_value=0.0, allow_nan=False),
    st.lists(LOGPROBS, max_size=2).map(tuple),
)
CALLS = st.lists(st.builds(ToolCall, WORDS, WORDS, WORDS, st.booleans()), max_size=3).map(tuple)


@st.composite
def answers(draw):
    calls = draw(CALLS)
    text = draw(WORDS)
    return Answer(
        text=None if calls and not text else text,
        tool_calls=calls,
        logprobs=draw(st.lists(TOKENS, max_size=3).map(tuple)),
        reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
        usage=draw(st.builds(Usage, *[st.integers(0, 99)] * 4)),
        timing=TIMING,
        reasoning=draw(WORDS),
    )


@given(answers())
def test_an_answer_survives_its_pieces_and_the_store(answer):
    built = AnswerBuilder()
    built.add(pieces_of(answer))
    assert built.answer() == answer
    entry = CacheEntry(answer, 1.5)
    assert STORED.validate_json(STORED.dump_json(entry, exclude_defaults=True)) == entry


def test_interleaved_deltas_fold_by_call():
    built = AnswerBuilder()
    built.add([TextDelta("a"), ToolCallDelta(1, "c1", "g", "{"), ToolCallDelta(0, "c0", "f")])
    assert built.answer() is None
    built.add([ToolCallDelta(1, arguments="}", closed=True), ToolCallDelta(0, arguments="{"), TextDelta("b")])
    built.add([Completed("tool_calls", Usage(), TIMING)])
    assert built.answer() == Answer(
        "ab", (ToolCall("c0", "f", "{", closed=False), ToolCall("c1", "g", "{}")), (), "tool_calls", Usage(), TIMING
    )


def test_an_error_is_no_answer():
    built = AnswerBuilder()
    error = Errored(ErrorInfo(ErrorKind.INTERNAL, "bug"))
    built.add([TextDelta("half"), error])
    assert (built.answer(), built.terminal) == (None, error)
