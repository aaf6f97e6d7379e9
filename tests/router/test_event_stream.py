import asyncio

import pytest

from holdfast.router.protocol.errors import ClientGoneError
from holdfast.router.streaming import Connection, EventStream, until_disconnect

pytestmark = pytest.mark.anyio


class Client:
    """Both ends of an ASGI connection. `leave` is what a closed socket looks like to the application."""

    def __init__(self, fail_send=False):
        self._gone = asyncio.Event()
        self.sent = []
        self.fail_send = fail_send

    def leave(self):
        self._gone.set()

    async def receive(self):
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.fail_send and message["type"] == "http.response.body":
            raise OSError("connection reset")
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


class Source:
    """Gives its chunks, then ends. An event among them is waited for, and is a late chunk."""

    def __init__(self, *chunks):
        self.chunks = list(chunks)
        self.closed = 0

    async def next(self):
        chunk = self.chunks.pop(0) if self.chunks else None
        if isinstance(chunk, asyncio.Event):
            await chunk.wait()
            return b"late"
        return chunk

    def silence(self):
        return b":\n\n"

    async def close(self):
        self.closed += 1


async def run(source, client, **settings):
    stream = EventStream(source, Connection(client.receive), **settings)
    await stream({"type": "http"}, client.receive, client.send)


async def test_a_socket_that_breaks_closes_the_source():
    client, source = Client(fail_send=True), Source(b"a", b"b")
    await run(source, client)
    assert source.closed == 1


async def test_a_source_may_be_slow():
    client, late = Client(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, late.set)
    await run(Source(b"a", late), client, stall_s=0.01)
    assert client.body == b"alate"


async def test_a_server_that_stops_closes_the_source():
    client, source = Client(), Source(asyncio.Event())
    task = asyncio.create_task(run(source, client))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed == 1


async def test_work_goes_on_until_the_client_goes():
    client, cancelled = Client(), []

    async def forever():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def quick():
        return 5

    async def fails():
        raise ZeroDivisionError

    assert await until_disconnect(client.receive, quick()) == 5
    with pytest.raises(ZeroDivisionError):
        await until_disconnect(client.receive, fails())
    asyncio.get_running_loop().call_soon(client.leave)
    with pytest.raises(ClientGoneError):
        await until_disconnect(client.receive, forever())
    assert cancelled == [True]


async def test_what_a_client_waits_for_is_done_in_its_task():
    """A task more would cost turns of the event loop before the first event."""
    client = Client()
    connection = Connection(client.receive)

    async def task():
        return asyncio.current_task()

    async def late():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    assert await connection.during(task()) is asyncio.current_task()
    with pytest.raises(TimeoutError):  # the work's own
        await connection.during(late())
    client.leave()
    with pytest.raises(ClientGoneError):
        await connection.during(asyncio.Event().wait())
    with pytest.raises(ClientGoneError):
        await connection.during(asyncio.Event().wait())
    connection.close()
    assert not asyncio.current_task().cancelling()
