"""A router that stops: nothing new comes in, and what outlives its time is told so."""

import asyncio

import pytest
from fake_backend import FORMATS, FakeBackend, World, chat_body
from waiting import PATIENCE_S

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import TextDelta
from holdfast.router.entry.admission import Drain

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health")]
)
async def test_a_call_that_comes_is_refused(method, path):
    world = World(drain=Drain())
    world.drain.begin(100.0)
    async with world.client() as http:
        answer = await http.request(method, path, json=chat_body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) > 0


def half():
    """A router whose replica gives half an answer, and no more."""
    backend = FakeBackend([(TextDelta("half"),), (TextDelta("never"),)])
    backend.stall = 1
    return World(backend, drain=Drain())


async def test_an_answer_that_runs_goes_on_and_ends_with_an_error_when_its_time_is_over():
    world = half()
    async with world.client() as http:
        running = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await asyncio.to_thread(world.backend.started.wait, PATIENCE_S)
        world.drain.begin(100.0)
        await asyncio.sleep(0)
        assert not world.backend.aborted.is_set()
        world.drain.begin(0.0)
        answer = await running
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert world.backend.aborted.is_set()
    assert world.backend.open_streams == 0
    assert world.outcomes() == {"failed": 1}


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_stream_of_any_format_that_outlives_its_time_ends_once(format_):
    world = half()
    async with world.client() as http:
        running = asyncio.create_task(http.post(format_.path, json=format_.streamed()))
        await asyncio.to_thread(world.backend.started.wait, PATIENCE_S)
        world.drain.begin(0.0)
        answer = await running
    assert answer.status_code == 200
    assert "half" in answer.text
    assert format_.ends(answer.text) == [format_.failed]
    assert world.outcomes() == {"failed": 1}


async def test_a_time_limit_of_the_work_itself_stays_what_it_is():
    with pytest.raises(TimeoutError, match="its own"):
        async with Drain().bounded():
            raise TimeoutError("its own")


@pytest.mark.parametrize(
    "times",
    [[("begin", 0.0)], [("bound", 0.0)], [("begin", 100.0), ("bound", 0.0)], [("bound", 0.0), ("begin", 100.0)]],
)
async def test_a_router_that_serve_stops_serves_what_comes_and_ends_what_outlives_the_earliest_time(times):
    drain = Drain()
    for how, seconds in times:
        getattr(drain, how)(seconds)
    with pytest.raises(UnavailableError, match="before the answer was complete"):
        async with drain.bounded():
            await asyncio.Event().wait()
    if any(how == "begin" for how, _ in times):
        with pytest.raises(UnavailableError, match="shutting down"):
            drain.check()
    else:
        drain.check()
