"""What replicas tell, and what routers tell them, through a real Redis that is lost and comes back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis_server import RedisServer
from waiting import until_async

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.replicas.stats import LoadReport
from holdfast.replicas.types import Priority
from holdfast.router.fleet import Fleet, Listener, Reporter, decode, encode
from holdfast.router.records import Records, RedisAddress

PATIENT = 60.0
OFTEN = 0.01
SILENT = 10 * OFTEN


class Watcher:
    """A router's view of replicas. Its time goes on as "b" is heard, so "b" is never silent, however busy a machine."""

    def __init__(self) -> None:
        self.heard: dict[str, LoadReport] = {}
        self.changes = 0
        self.now = 0.0
        self.asked = 0  # how often somebody looked what time it is

    def clock(self) -> float:
        self.asked += 1
        return self.now

    def told(self, replica_id: str, report: LoadReport) -> None:
        self.heard[replica_id] = report
        if replica_id == "b":
            self.now += OFTEN / 4

    def replicas_changed(self) -> None:
        self.changes += 1


def store_at(server: RedisServer) -> Records:
    return Records(RedisAddress(server.url), PATIENT, OFTEN)


def test_reports_and_waiting_programs_cross_redis_and_its_loss(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()

    async def scenario() -> None:
        watcher = Watcher()
        fleet = Fleet(watcher.clock)
        fleet.watch(watcher)
        stores = [store_at(server) for _ in range(3)]
        how: dict[str, LoadReport | None] = {
            "a": LoadReport(running=1),
            "b": LoadReport(prefixes={"d": 7}, seconds_per_token=0.5),
        }
        expected: asyncio.Queue[tuple[str, str, str, float]] = asyncio.Queue()

        def reporter(name: str, store: Records) -> Reporter:
            return Reporter(store, name, OFTEN, lambda: how[name], lambda *what: expected.put_nowait((name, *what)))

        listener = Listener(stores[0], fleet, OFTEN, SILENT)
        reporters = {name: reporter(name, store) for name, store in zip("ab", stores[1:], strict=True)}
        try:
            await until_async(lambda: watcher.heard == how)
            how["a"] = LoadReport(running=2, tokens_waiting=9)
            await until_async(lambda: watcher.heard == how)

            async def reaches(name: str) -> None:
                """A replica may not listen yet: it is told again, as by the next turn that waits."""

                def heard() -> bool:
                    fleet.expect(name, "tenant", "tenant/p", 2.5)
                    return not expected.empty()

                await until_async(heard)
                assert await expected.get() == (name, "tenant", "tenant/p", 2.5)

            await reaches("b")
            server.kill()
            server.socket.unlink(missing_ok=True)
            await until_async(lambda: all(store.degraded for store in stores[1:]))
            for _ in range(100):  # too slowly for a process that stood still
                watcher.now += SILENT / 50
                looked = watcher.asked
                await until_async(lambda looked=looked: watcher.asked > looked + 2)
            assert not fleet.silent("a"), "nobody can be heard while Redis is away"
            server.start()
            how["a"] = LoadReport(running=3)
            await until_async(lambda: watcher.heard == how)
            await reporters.pop("a").close()
            await until_async(lambda: fleet.silent("a"))
            assert not fleet.silent("b")
            assert watcher.changes == 1
            reporters["a"] = reporter("a", stores[1])
            await until_async(lambda: not fleet.silent("a"))
            assert watcher.changes == 2
            how["a"] = None  # a step of it hangs
            await until_async(lambda: fleet.silent("a"))
            how["a"] = LoadReport(running=4)
            await until_async(lambda: not fleet.silent("a"))
        finally:
            for each in (listener, *reporters.values(), *stores):
                await each.close()

    try:
        asyncio.run(scenario())
    finally:
        server.kill()


def test_a_report_of_a_newer_release_is_read_as_far_as_it_is_known() -> None:
    report = LoadReport(running=1, prefixes={"d": 3})
    message = encode("a", report)
    assert decode(message) == ("a", report)
    assert decode(message.replace(b'"running"', b'"unknown":5,"running"')) == ("a", report)


def test_what_has_gone_is_forgotten() -> None:
    fleet = Fleet(lambda: 0.0)
    fleet.tell("a", LoadReport(running=1))
    assert fleet.latest("a") == LoadReport(running=1)
    fleet.keep(set())
    assert fleet.latest("a") is None


@given(
    st.floats(0, 50),
    st.floats(0, 50),
    st.floats(0, 2),
    st.integers(-1, 9),
    st.integers(-1, 9),
    st.sampled_from(Priority),
)
def test_what_is_expected_shrinks_as_time_goes_on_and_holds_for_as_long_answers(
    within_s: float, more_s: float, since: float, first: int, second: int, priority: Priority
) -> None:
    now = [0.0]
    fleet = Fleet(lambda: now[0])

    def asked(tokens: int, **more: Any) -> GenerateRequest:
        return GenerateRequest("r", RawPrompt("x"), Sampling(tokens), within_s=within_s, **more)

    fleet.refused("a", asked(first), ErrorInfo(ErrorKind.DEADLINE, "late", "timeout", more_s))
    fleet.refused("a", asked(first), ErrorInfo(ErrorKind.DEADLINE, "over"))  # it says nothing of the others
    fleet.refused("a", asked(first), ErrorInfo(ErrorKind.OVERLOADED, "full", retry_after_s=99.0))
    now[0] = since
    found = fleet.expected_s("a", asked(second, priority=priority), 1.0)
    most, asked_for = (each if each >= 0 else 99 for each in (first, second))  # -1: as many as there is room for
    known = since <= 1.0 and priority is Priority.INTERACTIVE and asked_for >= most
    assert found == (pytest.approx(max(within_s + more_s - since, 0)) if known else 0.0)
    assert fleet.expected_s("b", asked(second), 1.0) == 0.0


class Channel:
    """A store's channels, without a store: what is published comes to `published`, and nothing is heard."""

    def __init__(self) -> None:
        self.published: asyncio.Queue[bytes] = asyncio.Queue()

    async def publish(self, channel: str, message: bytes) -> None:
        await self.published.put(message)

    async def listen(self, channel: str, quiet_s: float) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""


def test_a_replica_whose_load_cannot_be_read_once_reports_it_the_next_time() -> None:
    async def scenario() -> None:
        asked = 0

        def how() -> LoadReport:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise RuntimeError("dictionary changed size during iteration")
            return LoadReport(running=asked)

        channel = Channel()
        reporter = Reporter(channel, "a", OFTEN, how, lambda *what: None)  # type: ignore[arg-type]
        assert decode(await channel.published.get()) == ("a", LoadReport(running=2))
        await reporter.close()

    asyncio.run(scenario())
