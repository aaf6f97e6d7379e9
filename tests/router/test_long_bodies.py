"""The process that parses long bodies: results, errors, a caller that leaves, and its death."""

import asyncio
import os
import signal

import pytest

from holdfast.replicas.errors import InvalidRequestError, UnavailableError
from holdfast.router.entry.long_bodies import LongBodies
from holdfast.router.protocol.body import decode
from holdfast.router.protocol.errors import Refusal, RefusedError


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_of_a_router(request, monkeypatch):
    """Serve runs routers on uvloop."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        monkeypatch.setattr(asyncio, "run", uvloop.run)


def run(scenario):
    async def around():
        bodies = LongBodies()
        try:
            return await scenario(bodies)
        finally:
            await bodies.close()

    return asyncio.run(around())


def _count(body):
    return len(decode(body)["a"])


def _refuses():
    raise RefusedError(Refusal.TOO_LARGE, "The request body is longer than 8 bytes")


def test_results_and_errors_come_back():
    async def scenario(bodies):
        assert await bodies.call(decode, b'{"a": [1]}') == {"a": [1]}
        with pytest.raises(InvalidRequestError, match="not valid JSON"):
            await bodies.call(decode, b"{")
        with pytest.raises(RefusedError, match="longer than 8 bytes") as refused:
            await bodies.call(_refuses)
        assert refused.value.refusal is Refusal.TOO_LARGE
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await bodies.call(divmod, 1, 0)
        assert await bodies.call(os.getpid) != os.getpid()

    run(scenario)


def test_the_loop_goes_on_meanwhile():
    async def scenario(bodies):
        await bodies.call(os.getpid)
        working = asyncio.ensure_future(bodies.call(_count, b'{"a": [' + b"[]," * 200_000 + b"[]]}"))
        turns_of_the_loop = 0
        while not working.done():
            turns_of_the_loop += 1
            await asyncio.sleep(0)
        assert await working == 200_001
        return turns_of_the_loop

    assert run(scenario) > 100


def test_a_caller_that_leaves_spoils_nothing():
    async def scenario(bodies):
        await bodies.call(os.getpid)
        left = asyncio.ensure_future(bodies.call(decode, b'{"n": 9}'))
        await asyncio.sleep(0)
        left.cancel()
        return await asyncio.gather(*(bodies.call(decode, b'{"n": %d}' % i) for i in range(5)))

    assert run(scenario) == [{"n": i} for i in range(5)]


def test_after_its_death_the_next_call_finds_another():
    async def scenario(bodies):
        first = await bodies.call(os.getpid)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await bodies.call(os.getpid)
        assert await bodies.call(os.getpid) != first

    run(scenario)
