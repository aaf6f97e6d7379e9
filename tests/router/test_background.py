import asyncio

import pytest

from holdfast.router.background import Background, forever

pytestmark = pytest.mark.anyio


async def test_what_has_begun_goes_on_to_its_end_though_who_waits_for_it_is_gone():
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


async def test_of_what_nobody_waits_for_no_more_than_the_limit_is_under_way():
    background, done = Background(limit=1), []

    async def work():
        done.append(True)

    assert background.start(work())
    assert not background.start(work())
    await background.finish(work())
    await background.drain()
    assert len(done) == 2


async def test_what_runs_forever_goes_on_after_an_error_which_is_logged(caplog):
    runs, third = [], asyncio.Event()

    async def work():
        runs.append(True)
        if len(runs) == 2:
            raise RuntimeError("changed size during iteration")
        if len(runs) == 3:
            third.set()

    task = asyncio.create_task(forever(work, 0.0, "the report"))
    await third.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()

    assert "the report failed" in caplog.text
    assert "changed size during iteration" in caplog.text
