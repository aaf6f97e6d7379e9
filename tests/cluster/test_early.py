"""The first pieces of a stream as a datagram: the same batch, and from nobody else."""

import asyncio
import socket
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.early import LOOPBACK, MOST, NAME, EarlyPieces, EarlySender, read, written
from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import (
    Completed,
    Errored,
    LogprobText,
    ReasoningDelta,
    ReplyTokens,
    Started,
    TextDelta,
    ToolCallDelta,
)
from holdfast.router.backend import Batch

TEXT = st.text(max_size=9)
PIECES = st.one_of(
    st.builds(Started, TEXT, st.integers(0, 2**31), st.integers(0, 2**31)),
    st.builds(TextDelta, TEXT),
    st.builds(ReasoningDelta, TEXT),
    st.builds(ToolCallDelta, st.integers(0, 9), st.none() | TEXT, st.none() | TEXT, TEXT, st.booleans()),
)
DRAWN = st.builds(
    ReplyTokens,
    st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    st.just(()),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 99),
    st.none() | st.integers(0, 99),
    st.booleans(),
)


@given(st.builds(Batch, TEXT, st.lists(PIECES, min_size=1, max_size=4).map(tuple), st.just(0), DRAWN))
def test_a_batch_is_read_as_it_was_written(batch):
    assert read(written(batch)) == batch


def test_what_is_more_than_a_beginning_comes_through_serve_alone():
    scored = LogprobText("a", b"a", -1.0)
    ended = Errored.__new__(Errored), Completed.__new__(Completed)
    for pieces in ((TextDelta("a", (scored,)),), *((TextDelta("a"), end) for end in ended), (TextDelta("a" * MOST),)):
        assert written(Batch("r", pieces)) is None
    assert written(Batch("r", (TextDelta("\ud800"),))) is None
    assert written(Batch("r", (TextDelta("a"),), drawn=ReplyTokens((1,), (TokenLogprobs(0, 0.0),)))) is None
    assert written(Batch("r", (TextDelta("a"),), choice=1)) is None


def test_words_of_strangers_are_not_taken():
    """What has no name that waits, or one whose batch has come, is nobody's."""

    async def scenario():
        pieces = await EarlyPieces.listen("here")
        early, other = pieces.expect(), pieces.expect()
        mine, forged = Batch("r", (TextDelta("mine"),)), Batch("r", (TextDelta("forged"),))
        asked = asyncio.Event()

        async def call() -> AsyncIterator[Batch]:
            await asked.wait()
            yield mine

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for name in (bytes(NAME), early.to.name[:-1] + bytes([early.to.name[-1] ^ 1]), b""):
                stranger.sendto(name + written(forged), (LOOPBACK, early.to.port))
        sender = EarlySender("here")
        sender.tell(other.to, mine)
        assert await other._told == mine, "what was sent before has come, too"
        asked.set()
        assert [batch async for batch in early.before(call())] == [mine]
        assert not pieces._waiting
        sender.close()
        pieces.close()

    asyncio.run(scenario())
