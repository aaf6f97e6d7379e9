import asyncio
import json

import pytest
from fake_backend import CARD, DONE, FORMATS, HELLO, FakeBackend, World, begun
from prometheus_client import CollectorRegistry

from holdfast.replicas.errors import EngineError, ErrorInfo, ErrorKind, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Errored, GenerateRequest, RawPrompt, Started, TextDelta
from holdfast.router.backend import Batch
from holdfast.router.entry.admission import Drain
from holdfast.router.entry.metrics import RouterMetrics
from holdfast.router.protocol.chat import ChatEncoder
from holdfast.router.protocol.errors import ReplyError
from holdfast.router.records.stored_responses import StoredResponses
from holdfast.router.streaming.turn_stream import TurnStream

PATIENT = 60.0  # seconds a slow machine may take
REQUEST = GenerateRequest("q", RawPrompt("hi"), Sampling())


class Opened:
    """A turn stream over a fake backend, and everything that it should give back."""

    def __init__(self, script):
        self.backend = FakeBackend(script)
        self.registry = CollectorRegistry()
        self.answers = []
        self.given_back = 0
        # Kept here so that only an explicit close can end it, not the collection of garbage.
        self.batches = self.backend.stream(REQUEST)
        encoder = ChatEncoder("chatcmpl-1", 0, CARD.name, False)
        self.stream = TurnStream(self.batches, [encoder], begun(RouterMetrics(self.registry)), Drain(), self.answered)
        self.stream.held.callback(self.give_back)

    async def answered(self, replica_id, answer):
        self.answers.append((replica_id, answer.text))

    def give_back(self):
        self.given_back += 1

    async def rest(self):
        return [data async for data in self]

    async def __aiter__(self):
        while (data := await self.stream.next()) is not None:
            yield data

    def outcome(self):
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        [outcome] = [s.labels["outcome"] for s in samples if s.name == "holdfast_requests_total" and s.value == 1]
        return outcome


def test_a_whole_reply():
    async def scenario():
        opened = Opened(HELLO)
        await opened.stream.start()
        assert opened.stream.replica_id == "r1"
        data = await opened.rest()
        assert len(data) == len(HELLO), "batches that came together are sent together"
        await opened.stream.close()
        assert (opened.answers, opened.outcome(), opened.given_back) == ([("r1", "Hello!")], "completed", 1)

    asyncio.run(scenario())


def test_what_stands_before_the_first_piece_is_written_while_that_is_waited_for():
    async def scenario():
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
        await asyncio.wait_for(stream.start(), PATIENT)
        assert (await stream.next()).count(b'"role"') == 1
        await stream.close()

    asyncio.run(scenario())


def test_the_first_token_counts_and_not_the_beginning_of_work():
    async def scenario():
        opened = Opened([(Started("q", 10, 4),), *HELLO])
        await opened.stream.start()
        assert opened.stream._call.first is None
        assert b'"role"' in await opened.stream.next()
        assert b"Hel" in await opened.stream.next()
        assert opened.stream._call.first is not None
        await opened.stream.close()

    asyncio.run(scenario())


def test_closing_between_batches_aborts_the_request():
    async def scenario():
        opened = Opened(HELLO)
        await opened.stream.start()
        assert await opened.stream.next()
        await opened.stream.close()
        assert (opened.backend.open_streams, opened.backend.aborted.is_set()) == (0, True)
        assert (opened.answers, opened.outcome(), opened.given_back) == ([], "aborted", 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([], EngineError),
        ([(Errored(ErrorInfo(ErrorKind.TIMEOUT, "slow")),)], ReplyError),
        ([UnavailableError("x")], UnavailableError),
    ],
)
def test_an_error_from_the_first_piece_on_is_raised(script, error):
    async def scenario():
        with pytest.raises(error):
            await Opened(script).stream.start()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "last", [(Errored(ErrorInfo(ErrorKind.INTERNAL, "x")),), UnavailableError("x"), ValueError("x"), None]
)
def test_a_later_error_is_the_last_event(last):
    async def scenario():
        opened = Opened([(TextDelta("a"),), *([] if last is None else [last])])
        await opened.stream.start()
        data = await opened.rest()
        assert data[-1].startswith(b'data: {"error"')
        await opened.stream.close()
        assert (opened.answers, opened.outcome(), opened.given_back) == ([], "failed", 1)

    asyncio.run(scenario())


def test_batches_without_text_send_nothing():
    async def scenario():
        opened = Opened([(TextDelta("a"),), (TextDelta(""),), (TextDelta("b"), DONE)])
        await opened.stream.start()
        assert len(await opened.rest()) == 2

    asyncio.run(scenario())


UNWRITABLE = TextDelta("\ud800")  # no encoder can make JSON of half a character


@pytest.mark.parametrize("format_", FORMATS, ids=str)
@pytest.mark.parametrize(
    "rest",
    [
        [(UNWRITABLE,), (DONE,)],
        [(TextDelta("more"), UNWRITABLE), (DONE,)],
        [(UNWRITABLE, DONE)],
        [(Errored(ErrorInfo(ErrorKind.INTERNAL, "\ud800")),)],
    ],
)
def test_a_piece_that_cannot_be_written_ends_the_stream_once(format_, rest):
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


def test_what_the_stream_itself_does_at_the_end_may_fail_too():
    async def scenario():
        opened = Opened(HELLO)

        async def answered(replica_id, answer):
            raise RuntimeError("not today")

        opened.stream._finish = answered
        await opened.stream.start()
        data = await opened.rest()
        assert data[-1].startswith(b'data: {"error"')
        await opened.stream.close()
        assert opened.given_back == 1

    asyncio.run(scenario())
