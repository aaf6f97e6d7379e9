"""A router that stops: nothing new comes in, and what outlives its time is told so."""

import asyncio

import httpx
import pytest
from fake_backend import FORMATS, FakeBackend, World, chat_body
from prometheus_client import CollectorRegistry

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import TextDelta
from holdfast.router.app import create_app
from holdfast.router.entry.admission import Drain
from holdfast.router.entry.metrics import RouterMetrics


class Draining(World):
    """A router whose drain the test begins."""

    def __post_init__(self):
        super().__post_init__()
        self.drain = Drain()
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        parts = (self.backend, self.tenants, self.programs, self.cache, metrics, self.config)
        self.app = create_app(*parts, drain=self.drain)


def client(world):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(world.app, client=("127.0.0.1", 1)), base_url="http://localhost"
    )


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/health")]
)
def test_what_comes_is_sent_away(method, path):
    async def scenario():
        world = Draining()
        world.drain.begin(100.0)
        async with client(world) as http:
            return await http.request(method, path, json=chat_body())

    answer = asyncio.run(scenario())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_what_runs_goes_on_and_ends_with_an_error_when_its_time_is_over(streamed):
    async def scenario():
        backend = FakeBackend([(TextDelta("half"),), (TextDelta("never"),)])
        backend.stall = 1
        world = Draining(backend)
        async with client(world) as http:
            asked = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=streamed)))
            await asyncio.to_thread(backend.started.wait, 10.0)
            world.drain.begin(100.0)
            await asyncio.sleep(0)
            assert not backend.aborted.is_set()
            world.drain.begin(0.0)
            return world, await asked

    world, answer = asyncio.run(scenario())
    if streamed:
        assert answer.status_code == 200
        assert '"half"' in answer.text
        assert answer.text.split("\n\n")[-2].startswith('data: {"error":{"message":"The server stopped')
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert world.backend.aborted.is_set()
    assert world.backend.open_streams == 0
    assert world.outcomes() == {"failed": 1}


@pytest.mark.parametrize("format_", FORMATS)
def test_a_stream_of_any_format_that_outlives_its_time_ends_once(format_):
    async def scenario():
        backend = FakeBackend([(TextDelta("half"),), (TextDelta("never"),)])
        backend.stall = 1
        world = Draining(backend)
        async with client(world) as http:
            asked = asyncio.create_task(http.post(format_.path, json=format_.streamed()))
            await asyncio.to_thread(backend.started.wait, 10.0)
            world.drain.begin(0.0)
            return world, await asked

    world, answer = asyncio.run(scenario())
    assert "half" in answer.text
    assert format_.ends(answer.text) == [format_.failed]
    assert world.outcomes() == {"failed": 1}


def test_a_time_limit_of_the_work_itself_stays_what_it_is():
    async def scenario():
        async with Drain().bounded():
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(scenario())


def test_work_that_begins_late_is_bounded_too():
    async def scenario():
        drain = Drain()
        drain.begin(0.0)
        async with drain.bounded():
            await asyncio.Event().wait()

    with pytest.raises(UnavailableError):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    "times", [[("bound", 0.0)], [("begin", 100.0), ("bound", 0.0)], [("bound", 0.0), ("begin", 100.0)]]
)
def test_a_router_that_serve_stops_serves_what_comes_and_ends_what_outlives_the_earliest_time(times):
    async def scenario():
        drain = Drain()
        for how, seconds in times:
            getattr(drain, how)(seconds)
        with pytest.raises(UnavailableError, match="before the answer was complete"):
            async with drain.bounded():
                await asyncio.Event().wait()
        if ("begin", 100.0) in times:
            with pytest.raises(UnavailableError, match="shutting down"):
                drain.check()
        else:
            drain.check()

    asyncio.run(scenario())
