"""Files that others wrote: what every format says, and what is wrong with a file, by line and field."""

import json
from pathlib import Path

import pytest
from trace_samples import TOOL, result, says, user

from holdfast.loadgen.program import Json, Output, Program, Sized, Turn, from_zero
from holdfast.loadgen.traces import mooncake
from holdfast.loadgen.traces.formats import Format, read
from holdfast.loadgen.traces.logs import BASH, read_tools
from holdfast.replicas.errors import ConfigError

SAMPLES = Path(__file__).parent / "samples"
SHARED = Path(__file__).parents[4] / "shared" / "traces"
WEIGH: Json = {"type": "function", "function": {"name": "weigh"}}

needs_traces = pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces are not at hand")


def test_mooncake_lines_of_every_kind() -> None:
    reading = read(SAMPLES / "requests.jsonl", Format.MOONCAKE)
    programs = {program.id: program for program in reading.programs}
    assert list(programs) == ["requests-1", "requests-2", "s", "requests-6", "requests-7", "l"]
    sized = Turn(Sized(600, (0, 3)), at_ms=1200, output=Output(tokens=7))
    assert programs["requests-2"].turns == (sized,)
    assert programs["s"].turns == (
        Turn((user("One?"),), at_ms=2000, output=Output(says("1"), tokens=3)),
        Turn((user("Two?"),), sampling={"temperature": 0}, delay_ms=40),
        Turn((user("Anew."),), whole=True, delay_ms=50),
    )
    assert programs["requests-6"].turns == (Turn((user("Say hello."),), output=Output(tokens=4)),)
    assert programs["requests-7"].turns == (Turn((user("Hello"),), sampling={"temperature": 0.5}, at_ms=9000),)
    assert programs["l"].turns == (
        Turn((user("Weigh A."),), tools=(WEIGH,)),
        Turn((result("c1"),), tools=(WEIGH,), delay_ms=290),
    )
    assert dict(reading.left_out) == {"priority": 1, "payload.model": 1, "payload.stream": 1}
    assert reading.summary == (
        "9 records: 6 programs, 9 turns, 1 answers; left out: payload.model (1), payload.stream (1), priority (1)"
    )


def test_a_log_of_messages() -> None:
    reading = read(SAMPLES / "log.jsonl", Format.OPENAI, tools=(TOOL,))
    desk, hello = reading.programs
    call = {"id": "t1", "type": "function", "function": {"name": "open_ticket", "arguments": '{"room": 7}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert [turn.output.answer for turn in desk.turns] == [called, says("Ticket 11 is open.")]
    assert [len(turn.prompt) for turn in desk.turns if not isinstance(turn.prompt, Sized)] == [2, 1]
    assert [message["role"] for message in desk.closing] == ["user"]
    assert [tool["function"]["name"] for tool in desk.turns[1].tools] == ["open_ticket"]
    assert hello.turns == (Turn((user("Hi.\u2028Anyone there?"),), tools=(TOOL,), output=Output(says("Yes."))),)
    assert dict(reading.left_out) == {"score": 1, "messages.cost": 1}


def test_a_trajectory_with_calls() -> None:
    reading = read(SAMPLES / "calls.traj.json", Format.MINI_SWE)
    (program,) = reading.programs
    first, second, third = program.turns
    assert (program.id, program.closing) == ("shop__shop-17", ())
    assert all(turn.tools == (BASH,) for turn in program.turns)
    assert (first.output.prompt_tokens, first.output.cached_tokens, first.output.tokens) == (90, 64, 14)
    assert (first.delay_ms, first.output.latency_ms, first.output.reason) == (None, None, "tool_calls")
    # Another request lies between the result and this reply, so its latency is not known.
    assert (second.delay_ms, second.output.latency_ms, second.output.tokens) == (250.0, None, 20)
    assert isinstance(second.prompt, tuple)
    assert [message["role"] for message in second.prompt] == ["tool", "user"]
    assert (third.delay_ms, third.output.latency_ms) == (500.0, 1500.0)
    names = ("messages.provider_specific_fields", "messages.exit", "replies that broke the format")
    assert dict(reading.left_out) == dict.fromkeys(names, 1)


def test_trajectories_of_a_folder(tmp_path: Path) -> None:
    for name in ("calls", "blocks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.traj.json").write_bytes((SAMPLES / f"{name}.traj.json").read_bytes())
    reading = read(tmp_path, Format.MINI_SWE)
    assert [program.id for program in reading.programs] == ["blocks", "shop__shop-17"]
    blocks = reading.programs[0]
    assert [turn.tools for turn in blocks.turns] == [(), ()]
    assert [message["role"] for message in blocks.closing] == ["user"]


CALLED = '{"messages":[{"role":"assistant","tool_calls":[%s]}]}'
WRONG = [
    (Format.MOONCAKE, "{", "line 2: not JSON"),
    (Format.MOONCAKE, "[]", "line 2: must be an object"),
    (Format.MOONCAKE, "{}", "line 2: must have exactly one of messages"),
    (Format.MOONCAKE, '{"messages":[{"content":"a"}]}', "line 2, field 'messages.0.role'"),
    (Format.MOONCAKE, '{"messages":[]}', "line 2, field 'messages'"),
    (Format.MOONCAKE, '{"messages":[{"role":"user","content":{}}]}', "field 'messages.0.content'"),
    (Format.MOONCAKE, '{"messages":[{"role":"tool","content":"3"}]}', "field 'messages.0.tool_call_id'"),
    (Format.MOONCAKE, CALLED % '{"id":"a","function":{"name":"f"}}', "'messages.0.tool_calls.0.function.arguments'"),
    (Format.MOONCAKE, CALLED % '{"function":{"name":"f","arguments":"{}"}}', "'messages.0.tool_calls.0.id'"),
    (Format.MOONCAKE, CALLED % '{"id":"a"}', "'messages.0.tool_calls.0.function'"),
    (Format.MOONCAKE, '{"input_length":-1}', "line 2, field 'input_length'"),
    (Format.MOONCAKE, '{"input_length":3,"hash_ids":[0.5]}', "field 'hash_ids'"),
    (Format.MOONCAKE, '{"text_input":"a","hash_ids":[1]}', "field 'hash_ids': needs input_length"),
    (Format.MOONCAKE, '{"text_input":"a","tools":[{}]}', "field 'tools'"),
    (Format.MOONCAKE, '{"text_input":"a","delay":NaN}', "field 'delay'"),
    (Format.MOONCAKE, '{"text_input":"a","timestamp":true}', "field 'timestamp'"),
    (Format.MOONCAKE, '{"text_input":"a","extra":{"messages":[]}}', "field 'extra.messages'"),
    (Format.MOONCAKE, '{"text_input":"a","assistant_responses":"live"}', "field 'assistant_responses'"),
    (Format.MOONCAKE, '{"text_input":"a","message_mode":"both"}', "field 'assistant_responses'"),
    (Format.MOONCAKE, '{"payload":{"prompt":"a"}}', "field 'payload.messages'"),
    (Format.MOONCAKE, '{"session_id":"s","text_input":"a"}', "of another kind"),
    (Format.MOONCAKE, '{"text_input":"a","holdfast":{"output":{"tokens":"9"}}}', "field 'holdfast.output.tokens'"),
    (Format.MOONCAKE, '{"text_input":"a","holdfast":{"output":{"answer":{"role":"a"}}}}', "'holdfast.output.answer'"),
    (Format.OPENAI, '{"messages":[{"role":"user","content":"a"}]}', "field 'messages': the assistant says nothing"),
    (Format.OPENAI, '{"messages":[]}', "line 2, field 'messages'"),
    (Format.OPENAI, '{"id":"bad-1","messages":[{"role":"assistant","content":"a"}]}', "line 2, field 'id'"),
    (Format.OPENAI, '{"messages":[{"role":"bot","content":"a"}]}', "field 'messages.0.role'"),
    (Format.OPENAI, '{"messages":[{"role":"assistant"}]}', "field 'messages.0.content'"),
    (Format.OPENAI, '{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', "'messages.0.content.0.type'"),
    (Format.OPENAI, CALLED % '{"id":"a","function":{"name":"f","arguments":1}}', "0.function.arguments'"),
]
GOOD = {
    Format.MOONCAKE: '{"session_id":"s","messages":[{"role":"user","content":"a"}]}',
    Format.OPENAI: '{"messages":[{"role":"assistant","content":"a"}]}',
}


@pytest.mark.parametrize(("form", "line", "why"), WRONG)
def test_errors_name_file_line_and_field(tmp_path: Path, form: Format, line: str, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD[form]}\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read(path, form)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)


DOCUMENTS = [
    (Format.MINI_SWE, {"messages": [{"role": "user", "content": "a"}]}, "the assistant says nothing"),
    (Format.MINI_SWE, "text", "must be an object"),
]


@pytest.mark.parametrize(("form", "content", "why"), DOCUMENTS)
def test_errors_in_whole_documents(tmp_path: Path, form: Format, content: object, why: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        read(path, form)


@pytest.mark.parametrize("form", list(Format))
def test_missing_and_empty_files_are_errors(tmp_path: Path, form: Format) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "none", form)
    (tmp_path / "empty").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError):
        read(tmp_path / "empty", form)


def test_tools_are_for_logs_only() -> None:
    with pytest.raises(ConfigError, match="tools go with"):
        read(SAMPLES / "requests.jsonl", Format.MOONCAKE, tools=(TOOL,))


def test_a_trace_can_begin_at_zero() -> None:
    late = Program("late", (Turn((user("a"),), at_ms=700), Turn((user("b"),), delay_ms=3)))
    later = Program("later", (Turn((user("a"),), at_ms=900.5),))
    assert [program.arrival_ms for program in from_zero((later, late))] == [200.5, 0]
    assert from_zero((late,))[0].turns[1] == late.turns[1]


@needs_traces
def test_real_conversations_survive_the_way_through_mooncake(tmp_path: Path) -> None:
    log, tools = SHARED / "airline_agent.jsonl", SHARED / "airline_tools.json"
    reading = read(log, Format.OPENAI, read_tools(tools))
    mooncake.write(reading.programs, tmp_path / "t.jsonl")
    assert (reading.records, reading.turns) == (50, 702)
    assert sum(len(program.closing) for program in reading.programs) == 50
    assert not reading.left_out
    assert read(tmp_path / "t.jsonl", Format.MOONCAKE).programs == reading.programs


@needs_traces
def test_the_production_trace(tmp_path: Path) -> None:
    reading = read(SHARED / "mooncake_conversation.jsonl", Format.MOONCAKE)
    mooncake.write(reading.programs, tmp_path / "t.jsonl")
    assert (len(reading.programs), reading.turns) == (12031, 12031)
    assert not reading.left_out
    assert read(tmp_path / "t.jsonl", Format.MOONCAKE).programs == reading.programs
