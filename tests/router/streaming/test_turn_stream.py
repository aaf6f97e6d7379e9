import asyncio
import json

import pytest
from fake_backend import CARD, DONE, FORMATS, HELLO, FakeBackend, World, begun

from holdfast.replicas.errors import ErrorInfo, ErrorKind, UnavailableError
from holdfast.replicas.requests import Errored, TextDelta
from holdfast.router.backend import Batch
from holdfast.router.entry.admission import Drain
from holdfast.router.protocol.chat import ChatEncoder
from holdfast.router.records.stored_responses import StoredResponses
from holdfast.router.streaming.turn_stream import TurnStream

pytestmark = pytest.mark.anyio


async def test_what_stands_before_the_first_piece_is_written_while_that_is_waited_for():
    written = asyncio.Event()

    class Noting(ChatEncoder):
        def opening(self):
            written.set()
            return super().opening()

    async def batches():
        await written.wait()
        yield Batch("r1", HELLO[0])
        yield Batch("r1", (DONE,))

    async def answered(replica_id, answer):
        return

    encoder = Noting("chatcmpl-1", 0, CARD.name, False)
    stream = TurnStream(batches(), [encoder], begun(), Drain(), answered)
    await asyncio.wait_for(stream.start(), 60.0)  # seconds a slow machine may take
    assert (await stream.next()).count(b'"role"') == 1
    await stream.close()


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
