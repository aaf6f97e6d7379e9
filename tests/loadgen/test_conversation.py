"""What goes into a program's history, and what the next request holds."""

import json

from holdfast.loadgen.conversation import Conversation, Said, WrittenCall, fits
from holdfast.loadgen.workloads.drawing import Draw, bugfix
from holdfast.loadgen.workloads.script import Sizes

SCRIPT = bugfix(Draw(0, "bugfix", 0), Sizes()).scripts[0]


def called(name: str = "read_file", call_id: str = "id-1", arguments: str = '{"path": "a.py"}') -> Said:
    return Said("", (WrittenCall(call_id, name, arguments),))


def roles(talk: Conversation) -> str:
    return "".join(message["role"][0] for message in talk.messages)


def test_a_call_is_answered_by_its_result_and_a_text_by_the_user() -> None:
    talk = Conversation(SCRIPT)
    talk.take(called())
    assert talk.messages[-1]["tool_call_id"] == "id-1"
    talk.take(Said("Done."))
    assert roles(talk) == "su" + "at" + "au"
    assert talk.messages[-1]["content"] == SCRIPT.steps[1].user


def test_a_model_that_keeps_calling_is_interrupted_after_one_call_more_than_asked_for() -> None:
    talk = Conversation(SCRIPT)
    for _ in range(len(SCRIPT.steps[0].calls) + 1):
        talk.take(called())
    assert roles(talk) == "su" + "at" * 4 + "u"


def test_results_depend_on_the_arguments_alone() -> None:
    talks = [Conversation(SCRIPT) for _ in range(3)]
    for talk, path in zip(talks, ("a.py", "a.py", "b.py"), strict=True):
        talk.take(called(arguments=json.dumps({"path": path})))
    first, second, other = (talk.messages[-1]["content"] for talk in talks)
    assert first == second != other
    assert json.loads(first).keys() == {"content", "lines"}


def test_the_script_is_followed_where_the_model_does_and_told_where_not() -> None:
    talk = Conversation(SCRIPT)
    assert talk.take(talk.scripted)
    assert not talk.take(called("write_file"))
    assert not Conversation(SCRIPT).take(Said("I cannot."))
    assert not Conversation(SCRIPT).take(None)


def test_a_failed_or_broken_answer_is_replaced_by_the_scripts() -> None:
    unsendable = (
        '{"path": 123456789012345678901234567890}',
        '{"path": "\\ud83d"}',
        '{"path":' * 250 + "1" + "}" * 250,
        '{"path":' * 9000 + "1" + "}" * 9000,
    )
    for said in (None, Said(), called(arguments='{"path": "a'), *(called(arguments=told) for told in unsendable)):
        talk = Conversation(SCRIPT)
        wanted = talk.scripted.calls[0]
        talk.take(said)
        assert talk.messages[2]["tool_calls"][0]["function"] == {"name": wanted.name, "arguments": wanted.arguments}
        assert roles(talk) == "suat"
        assert talk.digest


def test_forced_histories_are_the_same_whatever_was_said() -> None:
    obedient, stubborn = Conversation(SCRIPT, forced=True), Conversation(SCRIPT, forced=True)
    for _ in range(9):
        obedient.take(obedient.scripted)
        stubborn.take(Said("no"))
    assert obedient.request == stubborn.request
    assert roles(obedient) == "su" + "atatat" + "au" + "atatat" + "au" + "a" + "t"


def test_the_digest_does_not_see_the_ids_of_calls() -> None:
    one, same, other = (Conversation(SCRIPT) for _ in range(3))
    one.take(called(call_id="x"))
    same.take(called(call_id="y", arguments='{ "path":"a.py"}'))
    other.take(called(arguments='{"path": "c.py"}'))
    assert one.digest == same.digest != other.digest


def test_a_call_fits_with_a_declared_name_and_its_required_arguments() -> None:
    assert fits(called(), SCRIPT.tools)
    assert fits(Said("text"), SCRIPT.tools)
    assert not fits(called("book_flight"), SCRIPT.tools)
    assert not fits(called(arguments="{}"), SCRIPT.tools)
    assert not fits(called(arguments="["), SCRIPT.tools)
    assert not fits(called(), ({"type": "web_search"},))
