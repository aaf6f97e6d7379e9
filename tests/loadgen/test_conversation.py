"""A scripted program's side of a conversation: what follows an answer, and what two servers have in common."""

import json
from dataclasses import replace

import pytest

from holdfast.loadgen.conversation import Manner, Request, Said, WrittenCall, assistant, digest, first, fits
from holdfast.loadgen.conversation import following as _following
from holdfast.loadgen.program import Json
from holdfast.loadgen.workloads import tools
from holdfast.loadgen.workloads.drawing import Draw, agent_script

SCRIPT = agent_script(Draw(0, "bugfix", 0), "bugfix", "a coding agent", tools.CODING, 6, 3)
PROGRAM = SCRIPT.program("session", tools.result)
BEGUN = first(PROGRAM, Manner())


def called(name: str = "read_file", call_id: str = "id-1", arguments: str = '{"path": "a.py"}') -> Said:
    return Said("", (WrittenCall(call_id, name, arguments),))


def following(request: Request, said: Said | None) -> Request:
    found = _following(request, None if said is None else assistant(said))
    assert found is not None
    return found


def roles(request: Request) -> str:
    return "".join(message["role"][0] for message in request.messages)


def scripted(request: Request) -> Json:
    assert request.turn.output.answer is not None
    return request.turn.output.answer


def obeyed(request: Request) -> Request:
    found = _following(request, scripted(request))
    assert found is not None
    return found


def test_a_call_is_answered_by_its_result_and_a_text_by_the_user() -> None:
    result = following(BEGUN, called())
    assert result.messages[-1]["tool_call_id"] == "id-1"
    talk = following(result, Said("Done."))
    assert roles(talk) == "su" + "at" + "au"
    assert talk.messages[-1]["content"] == SCRIPT.steps[1].user


def test_calls_at_once_count_as_many_calls_and_after_all_of_them_a_text_is_due() -> None:
    talk = following(BEGUN, Said("", tuple(WrittenCall(f"c{n}", "read_file", '{"path": "a.py"}') for n in range(3))))
    assert roles(talk) == "su" + "attt"
    assert scripted(talk).get("tool_calls") is None
    assert roles(following(talk, Said("Done."))) == "suattt" + "au"


def test_a_model_that_keeps_calling_is_interrupted_after_one_call_more_than_asked_for() -> None:
    talk = BEGUN
    for _ in range(len(SCRIPT.steps[0].calls) + 1):
        talk = following(talk, called())
    assert roles(talk) == "su" + "at" * 4 + "u"


def test_results_depend_on_the_arguments_alone() -> None:
    paths = ("a.py", "a.py", "b.py")
    talks = [following(BEGUN, called(arguments=json.dumps({"path": path}))) for path in paths]
    one, same, other = (talk.messages[-1]["content"] for talk in talks)
    assert one == same != other
    assert json.loads(one).keys() == {"content", "lines"}


def test_the_script_is_what_an_answer_is_compared_to() -> None:
    function = scripted(BEGUN)["tool_calls"][0]["function"]
    assert BEGUN.is_answered_by(called(function["name"], "other-id", function["arguments"]))
    assert not BEGUN.is_answered_by(called("write_file"))
    assert not BEGUN.is_answered_by(Said("I cannot."))
    assert not BEGUN.is_answered_by(None)
    text = obeyed(obeyed(obeyed(BEGUN)))
    assert text.is_answered_by(Said("whatever"))


UNSENDABLE = (
    '{"path": 123456789012345678901234567890}',
    '{"path": "\\ud83d"}',
    '{"path":' * 250 + "1" + "}" * 250,
    '{"path":' * 9000 + "1" + "}" * 9000,
    '{"path": "a',
)


@pytest.mark.parametrize("said", [None, Said(), *(called(arguments=text) for text in UNSENDABLE)])
def test_a_failed_or_broken_answer_is_replaced_by_the_scripts(said: Said | None) -> None:
    talk = following(BEGUN, said)
    assert talk.messages[2] == scripted(BEGUN)
    assert roles(talk) == "suat"
    assert digest(talk.messages, talk.turn.tools)


def test_a_program_has_a_step_for_every_turn_of_a_model_that_never_calls() -> None:
    talk = BEGUN
    for step in SCRIPT.steps[1:]:
        talk = following(talk, Said("no"))
        assert talk.messages[-1]["content"] == step.user
    assert _following(talk, assistant(Said("no"))) is None


def test_the_system_prompt_changes_with_the_turn_and_stays_one_message() -> None:
    program = replace(SCRIPT, systems=("one", "two", "three")).program("session", tools.result)
    talk = first(program, Manner())
    for system in ("two", "three"):
        talk = following(talk, called())
        assert [m["content"] for m in talk.messages if m["role"] == "system"] == [system]


def test_the_digest_does_not_see_the_ids_of_calls() -> None:
    answers = (("x", '{"path": "a.py"}'), ("y", '{ "path":"a.py"}'), ("z", '{"path": "c.py"}'))
    talks = [following(BEGUN, called("read_file", *answer)) for answer in answers]
    one, same, other = (digest(talk.messages, SCRIPT.tools) for talk in talks)
    assert one == same != other


def test_a_call_fits_with_a_declared_name_and_its_required_arguments() -> None:
    assert fits(called(), SCRIPT.tools)
    assert fits(Said("text"), SCRIPT.tools)
    assert not fits(called("book_flight"), SCRIPT.tools)
    assert not fits(called(arguments="{}"), SCRIPT.tools)
    assert not fits(called(arguments="["), SCRIPT.tools)
    assert not fits(called(), ({"type": "web_search"},))
