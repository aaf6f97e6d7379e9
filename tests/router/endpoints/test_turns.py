"""What the cache keeps of a program's last turn, for programs that go on."""

import pytest
from fake_backend import DONE, Ends, FakeBackend, World

from holdfast.replicas.requests import Completed, TextDelta, ToolCallDelta
from holdfast.replicas.retention.latency import Called

TEXT = (TextDelta("Here you are."),)
CALL = (ToolCallDelta(0, "call_1", "ls", "{}"),)
BROKEN_CALL = (ToolCallDelta(0, "call_1", "ls", '{"a": '),)


@pytest.mark.parametrize(
    ("pieces", "reason", "tools", "over"),
    [
        (TEXT, "stop", (), True),
        (CALL, "tool_calls", ("ls",), False),
        (TEXT, "length", (), False),
        (BROKEN_CALL, "length", (), False),
        (BROKEN_CALL, "stop", (), False),
        ((*CALL, ToolCallDelta(1, "call_2", "ls", "{")), "tool_calls", ("ls",), False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_cached_answer_ends_a_program_only_where_it_is_whole_and_calls_nothing(pieces, reason, tools, over, stream):
    """The replica says of the program's last turn that it is the last, whatever the answer is."""
    last = Completed(reason, DONE.usage, DONE.timing, Called(tools, last=True))
    world = World(FakeBackend((pieces, (last,))))
    world.chat(program_id="ends", program_end=True, stream=stream)
    world.backend.script = (TEXT, (Completed("stop", DONE.usage, DONE.timing),))
    world.chat(program_id="another", seed=1)
    assert world.chat(program_id="another").headers["x-holdfast-cache"] == "hit"
    assert (dict(world.programs.latest())["default/another"].run_turns == 0) is over


def test_an_answer_that_cannot_be_written_is_a_failure_and_not_kept(monkeypatch):
    world = World(books=Ends())

    def broken(*_):
        raise TypeError("no JSON")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.router.endpoints.formats.chat_reply", broken)
        assert world.chat().status_code == 500
    assert world.outcomes() == {"failed": 1}
    assert [end.record.outcome for end in world.books.ends] == ["failed"]
    assert world.chat().headers["x-holdfast-cache"] == "miss"
