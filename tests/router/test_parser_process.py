"""A process beside the router: results, errors, a caller that leaves, and its death."""

import asyncio
import os
import signal
import time

import pytest

from holdfast.replicas.errors import InvalidRequestError, UnavailableError
from holdfast.router.parser_process import ParserProcess
from holdfast.router.protocol.body import decode


@pytest.fixture(params=["asyncio", "uvloop"], autouse=True)
def event_loop_of_a_router(request, monkeypatch):
    """Serve runs routers on uvloop, which takes less than asyncio does."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        monkeypatch.setattr(asyncio, "run", uvloop.run)


def run(scenario):
    async def around():
        parser = ParserProcess()
        try:
            return await scenario(parser)
        finally:
            await parser.close()

    return asyncio.run(around())


def file_of(body):
    file = os.fdopen(os.memfd_create("body"), "wb")
    file.write(body)
    file.flush()
    return file


def test_results_and_errors_come_back():
    async def scenario(parser):
        assert await parser.call(decode, b'{"a": [1]}') == {"a": [1]}
        with pytest.raises(InvalidRequestError, match="not valid JSON"):
            await parser.call(decode, b"{")
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await parser.call(divmod, 1, 0)
        assert await parser.call(os.getpid) != os.getpid()

    run(scenario)


def test_the_loop_goes_on_meanwhile():
    """Here the same call would keep the interpreter lock until it is through."""

    async def scenario(parser):
        await parser.call(os.getpid)
        body = b'{"a": [' + b"[]," * 200_000 + b"[]]}"
        working = asyncio.ensure_future(parser.call(_count, body=file_of(body)))
        seen = 0
        while not working.done():
            seen += 1
            await asyncio.sleep(0)
        assert await working == 200_001
        return seen

    assert run(scenario) > 100


def test_a_body_is_read_from_its_file_which_is_closed(bodies_open):
    async def scenario(parser):
        before = await parser.call(os.listdir, "/proc/self/fd")
        assert await parser.call(decode, body=file_of(b'{"a": 1}')) == {"a": 1}
        with pytest.raises(InvalidRequestError, match="not valid JSON"):
            await parser.call(decode, body=file_of(b"{" * 2**21))
        large = {"a": "x" * 2**23}  # many times what stands in a socket
        assert await parser.call(decode, body=file_of(b'{"a": "%s"}' % (b"x" * 2**23))) == large
        assert bodies_open() == 0
        assert await parser.call(os.listdir, "/proc/self/fd") == before

    run(scenario)


@pytest.mark.parametrize("leaves", ["in line", "while it is parsed"])
def test_who_leaves_leaves_no_file_open(leaves, bodies_open):
    async def scenario(parser):
        await parser.call(os.getpid)
        before = asyncio.ensure_future(parser.call(time.sleep, 0.2)) if leaves == "in line" else None
        left = asyncio.ensure_future(parser.call(_slowly, 0.2, body=file_of(b"{}")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert bodies_open() == (leaves == "in line")  # later it is the other process that has it
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert await parser.call(os.getpid) != os.getpid()
        assert bodies_open() == 0
        if before is not None:
            await before

    run(scenario)


def _slowly(body, seconds):
    time.sleep(seconds)
    return body


def test_a_process_that_dies_over_a_body_is_a_typed_error_and_leaves_no_file(bodies_open):
    async def scenario(parser):
        with pytest.raises(UnavailableError):
            await parser.call(_dies, body=file_of(b"{}"))
        assert bodies_open() == 0
        assert await parser.call(decode, body=file_of(b"{}")) == {}

    run(scenario)


def _dies(body):
    os.kill(os.getpid(), signal.SIGKILL)


def test_closing_ends_a_call_that_waits(bodies_open):
    async def scenario(parser):
        await parser.call(os.getpid)
        waiting = asyncio.ensure_future(parser.call(_slowly, 600.0, body=file_of(b"{}")))
        for _ in range(5):
            await asyncio.sleep(0)
        await parser.close()
        with pytest.raises(UnavailableError):
            await waiting
        assert bodies_open() == 0

    run(scenario)


def _count(body):
    return len(decode(body)["a"])


def test_a_caller_that_leaves_spoils_nothing():
    async def scenario(parser):
        await parser.call(os.getpid)
        left = asyncio.ensure_future(parser.call(time.sleep, 0.05))
        await asyncio.sleep(0)
        left.cancel()
        return await asyncio.gather(*(parser.call(decode, b'{"n": %d}' % i) for i in range(5)))

    assert run(scenario) == [{"n": i} for i in range(5)]


def test_after_its_death_the_next_call_finds_another():
    async def scenario(parser):
        first = await parser.call(os.getpid)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await parser.call(os.getpid)
        assert await parser.call(os.getpid) != first

    run(scenario)
