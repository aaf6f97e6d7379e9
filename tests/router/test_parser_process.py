"""A process beside the router: results, errors, a caller that leaves, and its death."""

import asyncio
import os
import signal
import time

import pytest

from holdfast.replicas.errors import InvalidRequestError, UnavailableError
from holdfast.router.parser_process import ParserProcess
from holdfast.router.protocol.body import decode


def run(scenario):
    async def around():
        parser = ParserProcess()
        try:
            return await scenario(parser)
        finally:
            await parser.close()

    return asyncio.run(around())


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
        body = b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"
        working = asyncio.ensure_future(parser.call(_count, body))
        seen = 0
        while not working.done():
            seen += 1
            await asyncio.sleep(0)
        assert await working == 1_000_001
        return seen

    assert run(scenario) > 100


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
