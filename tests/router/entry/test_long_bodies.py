"""The process that parses long bodies: results, errors, a caller that leaves, and its death."""

import asyncio
import os
import signal
from importlib.util import find_spec

import pytest

from holdfast.replicas.errors import InvalidRequestError, UnavailableError
from holdfast.router.entry.long_bodies import LongBodies
from holdfast.router.protocol.body import decode
from holdfast.router.protocol.errors import Refusal, RefusedError

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    """Serve runs routers on uvloop, where that is installed."""
    return "asyncio", {"use_uvloop": find_spec("uvloop") is not None}


@pytest.fixture(scope="module")
async def bodies():
    bodies = LongBodies()
    yield bodies
    await bodies.close()


def _count(body):
    return len(decode(body)["a"])


def _refuses():
    raise RefusedError(Refusal.TOO_LARGE, "The request body is longer than 8 bytes")


async def test_results_and_errors_come_back(bodies):
    assert await bodies.call(decode, b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        await bodies.call(decode, b"{")
    with pytest.raises(RefusedError, match="longer than 8 bytes") as refused:
        await bodies.call(_refuses)
    assert refused.value.refusal is Refusal.TOO_LARGE
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        await bodies.call(divmod, 1, 0)
    assert await bodies.call(os.getpid) != os.getpid()


async def test_the_loop_goes_on_meanwhile(bodies):
    await bodies.call(os.getpid)
    working = asyncio.ensure_future(bodies.call(_count, b'{"a": [' + b"[]," * 50_000 + b"[]]}"))
    turns_of_the_loop = 0
    while not working.done():
        turns_of_the_loop += 1
        await asyncio.sleep(0)
    assert await working == 50_001
    assert turns_of_the_loop > 20


async def test_a_caller_that_leaves_spoils_nothing(bodies):
    await bodies.call(os.getpid)
    left = asyncio.ensure_future(bodies.call(decode, b'{"n": 9}'))
    await asyncio.sleep(0)
    left.cancel()
    results = await asyncio.gather(*(bodies.call(decode, b'{"n": %d}' % i) for i in range(5)))
    assert results == [{"n": i} for i in range(5)]


async def test_after_its_death_the_next_call_finds_another(bodies):
    first = await bodies.call(os.getpid)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(UnavailableError):
        await bodies.call(os.getpid)
    assert await bodies.call(os.getpid) != first
