"""A process beside the router: results, errors, a caller that leaves, and its death."""

import asyncio
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import InvalidRequestError, UnavailableError
from holdfast.router.parser_process import ParserProcess, Turns
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
def test_who_leaves_leaves_no_file_open(leaves, bodies_open, gate):
    async def scenario(parser):
        await parser.call(os.getpid)
        before = asyncio.ensure_future(parser.call(_waits, gate.name)) if leaves == "in line" else None
        left = asyncio.ensure_future(parser.call(_reads_and_waits, gate.name, body=file_of(b"{}")))
        for _ in range(5):
            await asyncio.sleep(0)
        assert bodies_open() == (leaves == "in line")  # later it is the other process that has it
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        gate.write(b"12")
        assert await parser.call(os.getpid) != os.getpid()
        assert bodies_open() == 0
        if before is not None:
            await before

    run(scenario)


@pytest.fixture
def gate(tmp_path):
    """A call of `_waits` goes on for each byte that is written to it."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    with open(path, "r+b", buffering=0) as opened:
        yield opened


def _waits(path):
    with open(path, "rb", buffering=0) as gate:
        gate.read(1)


def _reads_and_waits(body, path):
    _waits(path)
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


def test_closing_ends_a_call_that_waits(bodies_open, gate):
    async def scenario(parser):
        await parser.call(os.getpid)
        waiting = asyncio.ensure_future(parser.call(_reads_and_waits, gate.name, body=file_of(b"{}")))
        for _ in range(5):
            await asyncio.sleep(0)
        await parser.close()
        with pytest.raises(UnavailableError):
            await waiting
        assert bodies_open() == 0

    run(scenario)


def _count(body):
    return len(decode(body)["a"])


def test_a_caller_that_leaves_spoils_nothing(gate):
    async def scenario(parser):
        await parser.call(os.getpid)
        left = asyncio.ensure_future(parser.call(_waits, gate.name))
        await asyncio.sleep(0)
        left.cancel()
        gate.write(b"1")
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


# ---- turns ----

lines = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 32), st.booleans()), min_size=1, max_size=30)


async def in_turn(line):
    """Who of `line` went on, in order: all come while one goes on, who leaves does so before that one ends."""
    turns, went = Turns(), []

    async def one(index, payer, work):
        await turns.take(payer, work)
        went.append(index)
        turns.give_back()

    await turns.take("first", 1)
    waiting = [asyncio.ensure_future(one(index, payer, work)) for index, (payer, work, _) in enumerate(line)]
    await asyncio.sleep(0)
    for task, (_, _, leaves) in zip(waiting, line, strict=True):
        if leaves:
            task.cancel()
    turns.give_back()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(turns.take("last", 1), 60.0)  # nothing is left over
    return went


@given(lines)
def test_each_goes_on_once_and_before_any_other_payer_has_had_more(line):
    went = asyncio.run(in_turn(line))
    assert sorted(went) == [index for index, (_, _, leaves) in enumerate(line) if not leaves]
    needs, had = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    ends = []
    for payer, work, _ in line:
        needs[payer] += work
        ends.append(needs[payer])
    assert [ends[index] for index in went] == sorted(ends[index] for index in went)
    for index in went:  # of one payer they stay in order
        assert had[line[index][0]] < ends[index]
        had[line[index][0]] = ends[index]


def test_a_payer_that_comes_once_waits_for_no_longer_ones_of_another_in_line():
    async def scenario(parser):
        done = []

        async def one(name, payer, work):
            await parser.call(os.getpid, payer=payer, work=work)
            done.append(name)

        await parser.call(os.getpid)
        many = [asyncio.ensure_future(one(n, "many", 32.0)) for n in range(4)]
        await asyncio.sleep(0)
        await one("once", "once", 1.2)
        await asyncio.gather(*many)
        return done

    assert run(scenario) == [0, "once", 1, 2, 3]


def test_who_leaves_as_its_turn_comes_passes_it_on():
    async def scenario():
        turns = Turns()
        await turns.take("a", 1)
        left, stays = (asyncio.ensure_future(turns.take(name, 1)) for name in "bc")
        await asyncio.sleep(0)
        turns.give_back()
        left.cancel()
        await asyncio.wait_for(stays, 60.0)
        assert left.cancelled()

    asyncio.run(scenario())
