"""Nothing is lost, nothing is late, and lists are no closer than the interval."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.bridge import Mailbox
from holdfast.replicas.events import Finished, Timing, Tokens, Usage

END = Finished("a", "stop", Usage(), Timing(0.0))


def token(i: int) -> Tokens:
    return Tokens("a", (i,))


def test_the_first_event_and_the_end_are_not_held_back():
    async def main():
        box = Mailbox(asyncio.get_running_loop(), 3600.0)
        box.put([token(1)])
        assert await box.take() == [token(1)]
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.put([token(2)])
        await asyncio.sleep(0)
        assert not reader.done()
        box.put([token(3), END])
        assert await reader == [token(2), token(3), END]
        box.put([token(4)])

    asyncio.run(main())


def test_what_came_while_the_reader_was_away_is_handed_over_when_due():
    async def main():
        box = Mailbox(asyncio.get_running_loop(), 0.01)
        box.put([token(1)])
        first = await box.take()
        box.put([token(2)])
        assert first + await box.take() == [token(1), token(2)]

    asyncio.run(main())


def test_a_cancelled_reader_loses_nothing():
    async def main():
        box = Mailbox(asyncio.get_running_loop(), 0.0)
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        box.put([END])
        assert await box.take() == [END]

    asyncio.run(main())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.sampled_from([0.0, 0.001]))
def test_every_event_comes_once_and_in_order(pauses, interval):
    async def main():
        box = Mailbox(asyncio.get_running_loop(), interval)

        async def write():
            for i, pause in enumerate(pauses):
                box.put([token(i)])
                for _ in range(pause):
                    await asyncio.sleep(0)
            box.put([END])

        writer = asyncio.create_task(write())
        got = []
        while not got or got[-1] is not END:
            taken = await box.take()
            assert taken
            got += taken
        await writer
        assert got == [*(token(i) for i in range(len(pauses))), END]

    asyncio.run(main())
