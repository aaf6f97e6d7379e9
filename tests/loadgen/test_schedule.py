"""Moments that are kept: on a clock of the test's own."""

import asyncio
from functools import partial

import pytest

from holdfast.loadgen import runner as schedule


class Clock:
    """Time passes in sleeps only, and exactly as long as they were to last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        yielding = asyncio.sleep

        async def sleep(seconds: float) -> None:
            await yielding(0)
            self.now += seconds

        monkeypatch.setattr(schedule.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(schedule.asyncio, "sleep", sleep)


def test_each_begins_at_its_moment_whatever_the_order_and_however_long_others_take(monkeypatch) -> None:
    clock, began, released = Clock(monkeypatch), {}, asyncio.Event()

    async def begin(place: int) -> None:
        began[place] = clock.now
        if len(began) == 4:
            released.set()
        await released.wait()  # nobody ends before all have begun

    asyncio.run(
        schedule.start_each([103.0, 101.0, None, 102.0], [partial(begin, place) for place in range(4)], lead=0.5)
    )
    assert began == {2: 100.0, 1: 100.5, 3: 101.5, 0: 102.5}
    assert list(began) == [2, 1, 3, 0]


def test_an_error_is_raised_as_it_is_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    ended = []

    async def begin(place: int) -> None:
        if place == 1:
            raise LookupError("gone")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(place)

    with pytest.raises(LookupError, match="gone"):
        asyncio.run(schedule.start_each([100.0, 101.0, 102.0], [partial(begin, place) for place in range(3)]))
    assert 0 in ended
