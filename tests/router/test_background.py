import asyncio

from holdfast.router.background import Background


def test_what_has_begun_goes_on_to_its_end_though_who_waits_for_it_is_gone():
    async def scenario():
        background, begun, go, done = Background(), asyncio.Event(), asyncio.Event(), []

        async def work():
            begun.set()
            await go.wait()
            done.append(True)

        waiting = asyncio.create_task(background.finish(work()))
        await begun.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert not done
        go.set()
        await background.drain()
        assert done

    asyncio.run(scenario())


def test_of_what_nobody_waits_for_no_more_than_the_limit_is_under_way():
    async def scenario():
        background, done = Background(limit=1), []

        async def work():
            done.append(True)

        assert background.start(work())
        assert not background.start(work())
        await background.finish(work())
        await background.drain()
        assert len(done) == 2

    asyncio.run(scenario())
