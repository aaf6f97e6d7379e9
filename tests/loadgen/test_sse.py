"""Streams put together from pieces: any cutting gives the same answer, and what is no stream is said to be none."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_server import DONE, call, chunk, usage

from holdfast.loadgen.conversation import Said, WrittenCall
from holdfast.loadgen.sse import EventLines, Gathered, MalformedError, ReportedError, ServerTiming

STREAM = (
    b": hello\r\n\r\n"
    + chunk({"role": "assistant", "content": ""})
    + chunk({"content": "Grüße, "}).replace(b"\n", b"\r\n")
    + chunk({"content": "then"})
    + chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]})
    + chunk({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]})
    + chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]})
    + chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]})
    + usage(30, 20, 9)
    + DONE
)


def gather(pieces: list[bytes]) -> Gathered:
    lines, gathered = EventLines(), Gathered()
    for piece in pieces:
        for data in lines.feed(piece):
            gathered.take(data)
    return gathered


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_cutting_gives_the_same_answer(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    gathered = gather([STREAM[a:b] for a, b in pairwise(ends)])
    assert gathered.done
    assert gathered.said == Said("Grüße, then", (WrittenCall("a", "f", '{"x": 1}'), WrittenCall("b", "g", "{}")))
    assert (gathered.prompt_tokens, gathered.cached_tokens, gathered.output_tokens) == (30, 20, 9)


def test_only_text_and_calls_are_pieces_of_the_answer() -> None:
    gathered = Gathered()
    events = (chunk({"role": "assistant"}), chunk({"content": ""}), chunk({"content": "x"}), call("f", {}), DONE)
    told = [gathered.take(event.decode().removeprefix("data: ").strip()) for event in events]
    assert told == [False, False, True, True, False]


def test_a_server_that_does_not_tell_what_it_had_cached_is_not_taken_to_have_cached_nothing() -> None:
    assert gather([usage(30, None, 9)]).cached_tokens is None
    assert gather([usage(30, 0, 9)]).cached_tokens == 0


def test_the_stages_that_a_server_tells_are_read_from_its_last_chunk() -> None:
    told = chunk(None, timing={"queue_ms": 1.5, "prefill_ms": 20, "decode_ms": 300})
    assert gather([told]).timing == ServerTiming(0.0015, 0.02, 0.3)
    assert gather([usage(30, 0, 9)]).timing == ServerTiming()


@pytest.mark.parametrize(
    "stream",
    [b"data: {\n\n", b"data: 7\n\n", b"data: [1]\n\n", b"<html>\n\n", b"data: \xff\n\n", b'data: {"choices": 3}\n\n'],
)
def test_what_is_no_stream_of_chunks_is_malformed(stream: bytes) -> None:
    with pytest.raises(MalformedError):
        gather([stream])


def test_an_error_in_the_stream_is_the_servers_word() -> None:
    with pytest.raises(ReportedError, match="out of cells"):
        gather([b"data: " + json.dumps({"error": {"message": "out of cells"}}).encode() + b"\n\n"])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(noise: bytes) -> None:
    try:
        gather([noise])
    except (MalformedError, ReportedError):
        return


CALLS = [("f", '{"x": 1}'), ("g", "{}"), ("h", '{"y": "}"}')]


def events_of(calls: list[tuple[str, str]], cut: int, reason: str, *, marks: bool = False) -> list[bytes]:
    """Calls one after the other, arguments in two pieces, and how the answer ends."""
    told = []
    for index, (name, arguments) in enumerate(calls):
        told.append(chunk({"tool_calls": [{"index": index, "id": name, "function": {"name": name}}]}))
        pieces = (arguments[:cut], arguments[cut:])
        told += [chunk({"tool_calls": [{"index": index, "function": {"arguments": each}}]}) for each in pieces]
        if marks:
            told[-1] = told[-1].replace(b"data: {", b'data: {"holdfast": {"tool_call_closed": %d}, ' % index)
    end = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}).encode()
    return [*told, b"data: " + end + b"\n\n", DONE]


def closed_after(events: list[bytes], *, marked: bool) -> list[int]:
    """How many calls have closed after each event."""
    gathered, counts = Gathered(marked=marked), []
    for event in events:
        gathered.take(event.decode().removeprefix("data: ").strip())
        counts.append(len(gathered.closed))
    assert gathered.closed == sorted(gathered.closed)
    return counts


@given(st.integers(1, 6), st.integers(1, 3))
def test_where_a_server_does_not_say_so_a_call_has_closed_when_the_next_one_begins(cut: int, n: int) -> None:
    counts = closed_after(events_of(CALLS[:n], cut, "tool_calls"), marked=False)
    assert counts == [index for index in range(n) for _ in range(3)] + [n, n]


@given(st.integers(1, 6), st.integers(1, 3))
def test_where_a_server_says_so_a_call_has_closed_with_its_last_piece(cut: int, n: int) -> None:
    counts = closed_after(events_of(CALLS[:n], cut, "tool_calls", marks=True), marked=True)
    assert counts == [index + (piece == 2) for index in range(n) for piece in range(3)] + [n, n]


def test_a_call_that_is_cut_has_not_closed() -> None:
    for reason in ("length", "content_filter"):
        assert closed_after(events_of(CALLS, 1, reason), marked=False)[-1] == 2


def test_only_calls_that_the_server_says_have_closed_have() -> None:
    broken = [*events_of(CALLS[:1], 1, "stop")[:-2], *events_of(CALLS, 1, "stop", marks=True)[3:]]
    assert closed_after(broken, marked=True)[-1] == 2


def test_a_call_that_reads_as_none_when_the_next_begins_may_go_on() -> None:
    gathered = gather([STREAM])
    assert gathered.closed == []  # it has no reason
    one, two = events_of(CALLS[:2], 4, "tool_calls")[:3], events_of(CALLS[:2], 4, "tool_calls")[3:]
    late = one.pop()
    assert closed_after([*one, two[0], late, *two[1:]], marked=False) == [0, 0, 0, 0, 0, 0, 2, 2]


def test_what_a_model_thought_is_kept() -> None:
    assert gather([chunk({"reasoning_content": "hm"}), chunk({"content": "x"}), DONE]).reasoning == ["hm"]
