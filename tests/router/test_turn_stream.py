import json

import pytest
from fake_backend import DONE, FORMATS, FakeBackend, World

from holdfast.replicas.errors import ErrorInfo, ErrorKind, UnavailableError
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.records.stored_responses import StoredResponses

pytestmark = pytest.mark.anyio


UNWRITABLE = TextDelta("\ud800")  # no encoder can make JSON of half a character


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize(
    "rest",
    [
        [(UNWRITABLE,), (DONE,)],
        [(TextDelta("more"), UNWRITABLE), (DONE,)],
        [(UNWRITABLE, DONE)],
        [(Errored(ErrorInfo(ErrorKind.INTERNAL, "\ud800")),)],
        [(Errored(ErrorInfo(ErrorKind.INTERNAL, "broke")),)],
        [UnavailableError("broke")],
        [],
    ],
)
def test_a_stream_that_fails_or_cannot_be_written_ends_once_in_an_error(format_, rest):
    world = World(FakeBackend([(TextDelta("half"),), *rest]))
    answer = world.call("POST", format_.path, json=format_.streamed())
    assert answer.status_code == 200
    assert "half" in answer.text
    assert "more" not in answer.text
    assert format_.ends(answer.text) == [format_.failed]
    assert (world.outcomes(), world.in_flight(), world.backend.open_streams) == ({"failed": 1}, 0, 0)
    numbers = [json.loads(line[6:]).get("sequence_number") for line in answer.text.split("\n") if line[:7] == "data: {"]
    assert format_.path != "/v1/responses" or numbers == list(range(len(numbers)))


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize("fault", ["programs", "responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_fails_after_the_last_piece_takes_no_answer_away(format_, fault, stream, monkeypatch):
    async def fail(*_arguments, **_named):
        raise RuntimeError("not today")

    world = World()
    at, name = {"programs": (world.programs, "end"), "responses": (StoredResponses, "keep")}[fault]
    monkeypatch.setattr(at, name, fail)
    answer = world.call("POST", format_.path, json={**format_.streamed(), "stream": stream})
    assert answer.status_code == 200
    if stream:
        assert format_.ends(answer.text) == [format_.whole]
    else:
        assert "Hello!" in answer.text
    assert (world.outcomes(), world.in_flight()) == ({"completed": 1}, 0)
