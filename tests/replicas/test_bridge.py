"""The border between asyncio and the engine thread.

Every request has one terminal event, whatever happens. Commands that need no step wait for at most one. A mailbox loses
no event, is never late, and delivers lists no closer than its interval.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_runner import EOS, VOCABULARY, FakeRunner, complete
from hypothesis import given, settings
from hypothesis import strategies as st
from pinning import KEEP
from waiting import until

from holdfast.replicas.bridge import Bridge, EngineThread, Mailbox
from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import ErrorKind, InvalidRequestError, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Abort,
    Aborted,
    Command,
    Event,
    Failed,
    Finished,
    Rejected,
    Submit,
    Timing,
    Tokens,
    Usage,
)

CONFIG = EngineConfig(cells=2048, page_size=4, max_sequences=32, session_rows=0, context_length=512)


class GatedRunner(FakeRunner):
    """Computes only while the gate is open, and closes the gate after `closes_after` steps."""

    closes_after = -1

    def __init__(self) -> None:
        super().__init__(CONFIG.cells // CONFIG.page_size, CONFIG.page_size, CONFIG.max_sequences)
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()  # set by the first step
        self.begun = 0  # steps

    def compute(self, plan):
        self.begun += 1
        self.stepping.set()
        assert self.gate.wait(60)
        output = super().compute(plan)
        if len(self.plans) == self.closes_after:
            self.gate.clear()
        return output


def make(config: EngineConfig = CONFIG, kind: type[GatedRunner] = GatedRunner) -> tuple[Engine, GatedRunner]:
    runner = kind()
    return Engine(config, runner, frozenset({EOS}), VOCABULARY), runner


@asynccontextmanager
async def bridged(kind: type[GatedRunner] = GatedRunner) -> AsyncIterator[tuple[Bridge, Any]]:
    engine, runner = make(kind=kind)
    bridge = Bridge(engine)
    yield bridge, runner
    await bridge.close()


@contextmanager
def running(
    engine: Engine,
    deliver: Callable[[list[Event]], None] = lambda events: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[EngineThread]:
    """The engine on its thread, stopped at the end."""
    thread = EngineThread(engine, deliver, lambda: None, clock)
    thread.start()
    try:
        yield thread
    finally:
        engine._pipeline._runner.gate.set()
        thread.stop()
        thread.join(60)


def submit(name: str, seed: int = 1, max_tokens: int = 8) -> Submit:
    prompt = np.random.default_rng(seed).integers(1, VOCABULARY, 12).astype(np.int32)
    return Submit(name, tokens=prompt, sampling=Sampling(max_tokens))


async def collect(bridge: Bridge, command: Submit):
    return [event async for events in bridge.run(command) for event in events]


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


async def begun(bridge: Bridge, runner: GatedRunner):
    """The stream of request "a" after its first tokens. The gate is closed then, so the request cannot finish."""
    runner.closes_after = 1
    stream = bridge.run(submit("a", max_tokens=400))
    await anext(stream)
    return stream


async def test_many_requests_at_once_each_get_their_own_tokens():
    commands = [submit(f"r{i}", i, 20) for i in range(100)]
    async with bridged() as (bridge, _):
        answers = await asyncio.gather(*(collect(bridge, command) for command in commands))
    for command, events in zip(commands, answers, strict=True):
        assert tokens_of(events) == complete(command.tokens.tolist(), 20)
        assert [type(e) for e in events if not isinstance(e, Tokens)] == [Finished]


class WatchedRunner(GatedRunner):
    """Notes at the start of each step how many lists of events a reader has received."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[Event]] = []
        self.had: list[int] = []
        self.second, self.third = threading.Event(), threading.Event()

    def compute(self, plan):
        self.had.append(len(self.told))
        for number, reached in ((2, self.second), (3, self.third)):
            if len(self.had) == number:
                reached.set()
        return super().compute(plan)


class Handed(threading.Event):
    """Tells when the engine's thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


async def test_reader_gets_the_first_token_before_the_next_step_begins(monkeypatch):
    monkeypatch.setattr("holdfast.replicas.bridge.HANDING_S", 30.0)
    async with bridged(WatchedRunner) as (bridge, runner):
        bridge._handed = Handed()

        async def read():
            async for events in bridge.run(submit("a")):
                runner.told.append(events)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert bridge._handed.waited_for.wait(60)
        assert not runner.second.is_set(), "a step began though the loop, held up here, has passed nothing on"
        await reading
        assert runner.had[:2] == [0, 1]


async def test_steps_go_on_while_the_event_loop_is_busy():
    async with bridged(WatchedRunner) as (bridge, runner):
        reading = asyncio.create_task(collect(bridge, submit("a")))
        await asyncio.sleep(0)
        assert runner.third.wait(60), "the engine waits for its reader"
        assert isinstance((await reading)[-1], Finished)


async def test_usage_of_an_abandoned_request_is_known():
    async with bridged() as (bridge, runner):
        await (await begun(bridge, runner)).aclose()
        known = asyncio.create_task(bridge.used("a"))
        await asyncio.sleep(0)
        assert not known.done()
        runner.gate.set()
        used = await known
        assert used.prompt == 12
        assert 1 <= used.completion < 400
        assert await bridge.used("a") == used
        assert await bridge.used("nobody") is None
        await collect(bridge, submit("b"))
        assert (await bridge.used("b")).prompt == 12  # it may not have got as far as who asks


@pytest.mark.parametrize(("steps", "may_take"), [(0, CONFIG.hung_s), (1, 20 * 100.0)])  # the first one takes 100 s
def test_a_step_hangs_that_takes_many_times_as_long_as_the_longest_one(steps, may_take):
    now = [0.0]
    engine, runner = make()
    runner.closes_after, compute = steps, runner.compute
    if not steps:
        runner.gate.clear()

    def slow(plan):
        output = compute(plan)
        now[0] += 100.0
        return output

    runner.compute = slow
    with running(engine, clock=lambda: now[0]) as thread:
        thread.send(submit("a"))
        until(lambda: runner.begun == steps + 1)
        now[0] = 100.0 * steps + may_take
        assert not thread.hung
        now[0] += 1.0
        assert thread.hung
    assert not thread.hung


async def test_close_fails_running_requests_and_refuses_new_ones():
    async with bridged() as (bridge, runner):
        runner.gate.clear()
        task = asyncio.create_task(collect(bridge, submit("a", max_tokens=400)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(bridge.close())
        await asyncio.sleep(0)
        runner.gate.set()
        await closing
        events = await task
        assert isinstance(events[-1], Failed)
        assert events[-1].error.kind is ErrorKind.UNAVAILABLE
        with pytest.raises(UnavailableError):
            await collect(bridge, submit("b"))


def test_a_request_arrives_when_it_is_sent_even_during_a_step():
    engine, runner = make()
    times, delivered = [1.0], Deliveries(runner)
    runner.gate.clear()
    with running(engine, delivered, lambda: times[-1]) as thread:
        thread.send(submit("a"))
        assert runner.stepping.wait(60)
        times.append(5.0)
        thread.send(submit("b", 2))
        times.append(9.0)
        runner.gate.set()
        delivered.wait_for({"a", "b"})
    timings = [delivered.ends[name].timing for name in "ab"]
    assert [(each.arrived, each.scheduled) for each in timings] == [(1.0, 1.0), (5.0, 9.0)]


def test_an_idle_engine_drops_expired_pins():
    engine, _ = make(replace(CONFIG, session_rows=4, retention=RetentionConfig(KEEP)))
    step, pinned, gone, idle = engine.step, threading.Event(), threading.Event(), []

    def stepped(*args):
        idle.append(not engine.busy)
        told = step(*args)
        if engine.occupancy().pins:
            pinned.set()
        elif pinned.is_set():
            gone.set()
        return told

    engine.step = stepped
    with running(engine) as thread:
        thread.send(replace(submit("a"), program_id="p"))
        assert gone.wait(60)
    assert idle[-1]
    assert sum(idle) < 20  # it did not look all the time


async def test_an_abandoned_request_keeps_its_id_until_the_engine_has_ended_it():
    async with bridged() as (bridge, runner):
        await (await begun(bridge, runner)).aclose()
        with pytest.raises(InvalidRequestError):
            await asyncio.wait_for(collect(bridge, submit("a", 2)), 60)
        runner.gate.set()
        await collect(bridge, submit("b"))  # comes behind what ended the first
        command = submit("a", 2, 20)
        events = await collect(bridge, command)
        assert tokens_of(events) == complete(command.tokens.tolist(), 20)
        assert isinstance(events[-1], Finished)


class Deliveries:
    """Terminal events that an engine thread delivered, each with the number of steps begun by then."""

    def __init__(self, runner: GatedRunner) -> None:
        self._runner = runner
        self._changed = threading.Condition()
        self.steps: dict[str, int] = {}
        self.ends: dict[str, Event] = {}

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                if not isinstance(event, Tokens):
                    assert event.request_id not in self.ends, "a second terminal event"
                    self.steps[event.request_id] = self._runner.begun
                    self.ends[event.request_id] = event
            self._changed.notify_all()

    def wait_for(self, names: set[str]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: names <= self.ends.keys(), 60)

    @property
    def kinds(self) -> dict[str, type]:
        return {name: type(event) for name, event in self.ends.items()}


def refused(name: str) -> Command:
    return Submit(f"new {name}", tokens=np.zeros(0, np.int32))


@pytest.mark.parametrize(("command", "kind"), [(Abort, Aborted), (refused, Rejected)])
def test_aborts_and_rejections_wait_for_one_step_at_most(command, kind):
    engine, runner = make()
    delivered = Deliveries(runner)
    runner.gate.clear()
    with running(engine, delivered) as thread:
        for name in range(65):
            thread.send(submit(str(name), name, 400))
        assert runner.stepping.wait(60)
        burst = [command(str(name)) for name in range(1, 65)]  # the first goes on: there are steps to run
        for each in burst:
            thread.send(each)
        begun = runner.begun
        runner.gate.set()
        delivered.wait_for({each.request_id for each in burst})
    assert {delivered.kinds[each.request_id] for each in burst} == {kind}
    assert max(delivered.steps[each.request_id] for each in burst) <= begun + 1


def test_a_flood_of_commands_does_not_block_steps():
    engine, runner = make()
    delivered, handle = Deliveries(runner), engine.handle
    with running(engine, delivered) as thread:

        def flooded(command, now, sent):
            thread.send(Abort("nobody"))
            return handle(command, now, sent)

        engine.handle = flooded
        thread.send(submit("a"))
        delivered.wait_for({"a"})
    assert delivered.kinds == {"a": Finished}


@pytest.mark.parametrize("dies", [False, True])
def test_every_request_gets_its_terminal_event_when_the_engine_stops(dies):
    engine, runner = make()
    delivered, ended = Deliveries(runner), threading.Event()
    thread = EngineThread(engine, delivered, ended.set)
    handle = engine.handle

    def dying(command, now, sent):
        if command.request_id == "last":
            raise RuntimeError("bug")
        return handle(command, now, sent)

    engine.handle = dying
    runner.gate.clear()
    thread.start()
    thread.send(submit("running", max_tokens=400))
    assert runner.stepping.wait(60)
    thread.send(refused("one"))
    if dies:
        thread.send(Abort("last"))
    else:
        thread.stop()
    thread.send(submit("late"))
    runner.gate.set()
    assert ended.wait(60)
    assert delivered.kinds == {"running": Failed, "new one": Rejected, "late": Rejected}


END = Finished("a", "stop", Usage(), Timing(0.0))


def token(i: int) -> Tokens:
    return Tokens("a", (i,))


@pytest.mark.parametrize("away", [False, True])
async def test_first_urgent_and_terminal_events_are_not_delayed_and_bring_earlier_ones(away):
    box = Mailbox(asyncio.get_running_loop(), 3600.0, lambda tokens: 3 in tokens)
    box.put([token(1)])
    assert await box.take() == [token(1)]
    reader = None if away else asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put([token(2)])
    await asyncio.sleep(0)
    assert reader is None or not reader.done()
    box.put([token(3)])
    assert await (reader or box.take()) == [token(2), token(3)]
    reader = asyncio.create_task(box.take())
    box.put([token(4)])
    await asyncio.sleep(0)
    assert not reader.done()
    box.put([END])
    assert await reader == [token(4), END]
    box.put([token(5)])  # nobody takes it


async def test_a_cancelled_reader_loses_nothing():
    box = Mailbox(asyncio.get_running_loop(), 0.0)
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    box.put([END])
    assert await box.take() == [END]


@settings(max_examples=50)
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
