"""Replayed programs: what is asked, when, and what becomes of answers that differ from the recorded ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from trace_samples import RECORDED, TOOL, calls, parcel_program, result, says, user

from holdfast.loadgen.conversation import Forcing, Manner, Request, first, following
from holdfast.loadgen.program import Json, Output, Program, Sized, Turn, prompts
from holdfast.loadgen.traces.logs import read_openai, read_tools
from holdfast.loadgen.traces.recording import Observed, recorded
from holdfast.replicas.errors import ConfigError
from holdfast.router.protocol.body import validate
from holdfast.router.protocol.chat import ChatBody, plain_messages

FEW = settings(max_examples=30, suppress_health_check=list(HealthCheck))
SHARED = Path(__file__).parents[4] / "shared" / "traces"
AS_RECORDED = Manner(recorded=True)


def asks(program: Program, manner: Manner, answers: list[Json | None]) -> list[Request]:
    ask: Request | None = first(program, manner)
    made = []
    for answer in answers:
        assert ask is not None
        made.append(ask)
        ask = following(ask, answer)
    assert ask is None
    return made


@FEW
@given(programs=RECORDED)
def test_recorded_answers_give_the_recorded_prompts(programs: tuple[Program, ...]) -> None:
    for program in programs:
        made = asks(program, AS_RECORDED, [says("something else")] * len(program.turns))
        assert [ask.messages for ask in made] == list(prompts(program))


@FEW
@given(programs=RECORDED)
def test_a_recording_of_a_replay_is_the_trace(programs: tuple[Program, ...]) -> None:
    """But for fields that say how a request is transported, and for what a program has after its last answer."""
    transport = {"model": "m", "stream": True, "program_id": "x"}
    for program in programs:
        turns = tuple(replace(turn, at_ms=float(at), delay_ms=None) for at, turn in enumerate(program.turns))
        program = replace(program, turns=turns, closing=())
        made = asks(program, AS_RECORDED, [None] * len(turns))
        limits = [{} if turn.max_tokens is None else {"max_tokens": turn.max_tokens} for turn in turns]
        bodies = [transport | ask.body | limit for ask, limit in zip(made, limits, strict=True)]
        # Fields that transport or limit a request cannot be told from those of a client: none is among these.
        observed = [
            Observed(program.id, at, float(at), body, turn.output, program.tenant)
            for at, (body, turn) in enumerate(zip(bodies, turns, strict=True))
        ]
        (again,) = recorded(observed)
        assert list(prompts(again)) == list(prompts(program))
        for turn, other in zip(again.turns, turns, strict=True):
            assert (turn.tools, turn.sampling, turn.max_tokens) == (other.tools, other.sampling, other.max_tokens)
            assert turn.output == other.output


def test_the_pause_between_turns_is_the_time_of_the_tools() -> None:
    said = Output(says("b"), latency_ms=30.0)
    bodies: list[Json] = [{"messages": [user("a")]}, {"messages": [user("a"), says("b"), user("c")]}]
    one, two = Observed("p", 0, 100.0, bodies[0], said), Observed("p", 1, 150.0, bodies[1], said)
    (program,) = recorded([two, one])
    assert [(turn.at_ms, turn.delay_ms) for turn in program.turns] == [(100.0, None), (150.0, 20.0)]
    assert program.turns[1].prompt == (user("c"),)
    with pytest.raises(ConfigError, match="two requests for turn 1"):
        recorded([one, two, two])


def test_live_answers_go_into_the_history_with_their_own_ids() -> None:
    live = calls("live-9")
    _, second, third = asks(parcel_program(), Manner(), [live, says("Three."), None])
    assert second.messages[-2:] == (live, result("live-9"))
    assert third.messages[-2:] == (says("Three."), user("And B?"))


def test_results_follow_the_place_of_their_call() -> None:
    asked = Turn((user("Both."),), output=Output(calls("a", "b")))
    program = Program("p", (asked, Turn((result("b", "2 kg"), result("a", "1 kg")))))
    _, second = asks(program, Manner(), [calls("x", "y"), None])
    assert second.messages[-2:] == (result("y", "2 kg"), result("x", "1 kg"))


BROKEN: Json = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "weigh", "arguments": "{"}}]}


@pytest.mark.parametrize("answer", [None, says("No calls."), calls("x", "y"), BROKEN, says("")])
def test_an_answer_that_does_not_fit_gives_way_to_the_recorded_one(answer: Json | None) -> None:
    program = parcel_program()
    _, second, _ = asks(program, Manner(), [answer, says("3 kg."), None])
    assert second.messages == list(prompts(program))[1]


@pytest.mark.parametrize("answer", [None, says("No calls."), calls("x"), calls("x", "y", "z"), BROKEN])
def test_without_recorded_answers_a_server_can_still_take_the_history(answer: Json | None) -> None:
    program = Program("p", (Turn((user("Both."),)), Turn((result("a", "1"), result("b", "2"), user("So?")))))
    _, second = asks(program, Manner(), [answer, None])
    plain_messages(second.messages)  # raises for results without calls
    said = [message["content"] for message in second.messages if message["role"] in ("tool", "user")]
    assert said == ["Both.", "1", "2", "So?"]


@pytest.mark.parametrize(
    ("forcing", "fields"),
    [
        (Forcing.HOLDFAST, {"max_tokens": 12, "ignore_eos": True}),
        (Forcing.VLLM, {"max_tokens": 12, "min_tokens": 12, "ignore_eos": True}),
        (Forcing.LIMIT, {"max_tokens": 12}),
    ],
)
def test_lengths_are_forced_by_the_fields_of_the_server(forcing: Forcing, fields: Json) -> None:
    program = parcel_program()
    turn = replace(program.turns[0], sampling={"temperature": 0, "max_completion_tokens": 3, "min_tokens": 1})
    ask = first(replace(program, turns=(turn,)), Manner(forced=True, forcing=forcing))
    assert ask.body == {"messages": list(turn.prompt), "tools": [TOOL], "temperature": 0, **fields}  # type: ignore[arg-type]


@pytest.mark.parametrize("manner", [Manner(), Manner(recorded=True), Manner(forced=True)])
def test_our_server_accepts_every_request(manner: Manner) -> None:
    for ask in asks(parcel_program(), manner, [calls("x"), says("3"), None]):
        validate(ChatBody, json.loads(json.dumps(ask.body | {"model": "m", "stream": True})))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces are not at hand")
def test_our_server_accepts_real_conversations() -> None:
    tools = read_tools(SHARED / "airline_tools.json")
    for program in read_openai(SHARED / "airline_agent.jsonl", tools).programs:
        last = asks(program, AS_RECORDED, [None] * len(program.turns))[-1]
        validate(ChatBody, last.body | {"model": "m"})
        assert len(plain_messages(last.messages)) == len(list(prompts(program))[-1])


def test_limits_of_a_free_replay() -> None:
    program = parcel_program()
    made = asks(program, Manner(recorded=True, max_tokens=99), [None] * 3)
    assert [ask.body["max_tokens"] for ask in made] == [64, 99, 99]
    assert "max_tokens" not in asks(program, AS_RECORDED, [None] * 3)[1].body


def test_when_requests_are_due() -> None:
    started, told, last = asks(parcel_program(), Manner(recorded=True, speed=2), [None] * 3)
    assert (started.due_ms(), told.due_ms(100.0), last.due_ms(200.0)) == (6.25, 245.0, 950.0)
    fixed = Program("p", (Turn((user("a"),)), Turn((user("b"),), at_ms=80)))
    begun, scheduled = asks(fixed, Manner(), [says("x"), None])
    assert (begun.due_ms(), scheduled.due_ms(50.0), scheduled.due_ms(90.0)) == (0.0, 80.0, 90.0)


@pytest.mark.parametrize(
    ("turns", "manner", "why"),
    [
        ((Turn((user("a"),)), Turn(Sized(3))), Manner(), "turn 1: the prompt is a length"),
        ((Turn((user("a"),)),), Manner(forced=True), "turn 0: the trace has no length"),
        ((Turn((user("a"),)), Turn((user("b"),))), AS_RECORDED, "turn 0: the trace has no answer"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_it_begins(turns: tuple[Turn, ...], manner: Manner, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        first(Program("p", turns), manner)


def test_settings_that_make_no_sense() -> None:
    prompt = (user("a"),)
    for why, make in (
        ("speed", lambda: Manner(speed=0)),
        ("needs an id", lambda: Program("", (Turn(prompt),))),
        ("no turn", lambda: Program("p", ())),
        ("first turn", lambda: Program("p", (Turn(prompt, whole=True),))),
        ("no sampling field", lambda: Turn(prompt, sampling={"tools": []})),
    ):
        with pytest.raises(ConfigError, match=why):
            make()
