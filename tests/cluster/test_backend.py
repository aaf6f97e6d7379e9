"""Calls to replicas that die, answer late or are given up, through a handle made up for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from holdfast.cluster import backend as backend_module
from holdfast.cluster.backend import ATTEMPTS, ServeBackend
from holdfast.replicas.errors import ErrorInfo, ErrorKind, UnavailableError, UnknownSessionError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Answer,
    Completed,
    DescribeSession,
    Errored,
    GenerateRequest,
    ModelCard,
    RawPrompt,
    ReplyTokens,
    SessionState,
    SessionTurn,
    TextDelta,
    Timing,
    Usage,
)
from holdfast.router.backend import Batch, Routed, RoutingHint
from holdfast.router.dispatch.affinity import HINT
from holdfast.router.dispatch.replica_health import ReplicaHealth

REQUEST = GenerateRequest("r", RawPrompt("x"), Sampling(), scope="t", program_id="t/p")
TIMING = Timing(0.0)
ANSWER = Routed("b", Answer("hello", (), (), "stop", Usage(1, 0, 1), TIMING))
FIRST = Batch("b", (TextDelta("hel"),))
LAST = Batch("b", (TextDelta("lo"), Completed("stop", Usage(1, 0, 2), TIMING)))
DIED = ActorDiedError()
UNAVAILABLE = ActorUnavailableError("gone", None)


class Call:
    """What a handle's `remote` returns: to be awaited, or to be iterated."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        outcome = self.script[0]
        if outcome is Ellipsis:
            await asyncio.Event().wait()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def __aiter__(self) -> AsyncIterator[Any]:
        for outcome in self.script:
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome


class Handle:
    """Answers the calls made on it, in turn, by `scripts`."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.options_given: list[dict[str, Any]] = []
        self.args: list[tuple[Any, ...]] = []
        self.kwargs: list[dict[str, Any]] = []

    def options(self, **options: Any) -> "Handle":
        self.options_given.append(options)
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Call:
        self.args.append(args)
        self.kwargs.append(kwargs)
        self.calls.append(Call(self.scripts.pop(0)))
        return self.calls[-1]


def backend_of(handle: Handle, health: ReplicaHealth | None = None) -> ServeBackend:
    return ServeBackend(handle, health or ReplicaHealth())  # type: ignore[arg-type]


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


def collect(handle: Handle) -> list[Batch]:
    async def work() -> list[Batch]:
        return [batch async for batch in backend_of(handle).stream(REQUEST, RoutingHint("a"))]

    return asyncio.run(work())


def test_a_call_carries_its_program_and_where_that_was_last() -> None:
    handle = Handle([ANSWER])
    assert run(lambda: backend_of(handle).generate(REQUEST, RoutingHint("a"))) == ANSWER
    assert {"session_id": "t/p"} in handle.options_given
    assert handle.kwargs == [{HINT: RoutingHint("a")}]


def test_what_is_asked_of_a_session_is_sent_once() -> None:
    """Who moves the session sends it again."""
    for turn, sent in ((SessionTurn("s"), 1), (SessionTurn("s", keep=False), 1), (SessionTurn("s", opens=True), 2)):
        handle = Handle([DIED], [ANSWER])
        request = replace(REQUEST, session=turn)
        routed = run(lambda handle=handle, request=request: backend_of(handle).generate(request))
        assert (len(handle.calls), isinstance(routed.reply, Errored)) == (sent, sent == 1)
    handle = Handle([DIED], [LAST])
    ask = replace(REQUEST, session=SessionTurn("s"))

    async def streamed() -> list[Batch]:
        return [batch async for batch in backend_of(handle).stream(ask)]

    (told,) = asyncio.run(streamed())
    assert isinstance(told.pieces[0], Errored)


def test_a_session_is_asked_at_its_replica_and_says_no_as_itself() -> None:
    state, call = SessionState("s", 5, 1, 0.0, 9.0), DescribeSession("t", "s")
    no = Errored(UnknownSessionError("not open", "session_id").info)
    handle = Handle([state], [no], [DIED])
    backend = backend_of(handle)
    assert run(lambda: backend.session(call, "t/~session/s", "a")) == state
    assert handle.kwargs == [{HINT: RoutingHint("a", bound=True)}]
    assert handle.options_given[-1]["session_id"] == "t/~session/s"
    with pytest.raises(UnknownSessionError):
        run(lambda: backend.session(call, "t/~session/s", "a"))
    with pytest.raises(UnavailableError):
        run(lambda: backend.session(call, "t/~session/s", "a"))


@pytest.mark.parametrize("lost", [DIED, UNAVAILABLE])
def test_a_call_whose_replica_died_is_sent_again(lost: Exception) -> None:
    handle = Handle([lost], [ANSWER])
    assert run(lambda: backend_of(handle).generate(REQUEST)) == ANSWER


def test_a_call_is_not_sent_again_for_ever() -> None:
    handle = Handle(*[[DIED]] * ATTEMPTS, [ANSWER])
    routed = run(lambda: backend_of(handle).generate(REQUEST))
    assert isinstance(routed.reply, Errored)
    assert routed.reply.error.kind is ErrorKind.UNAVAILABLE
    assert len(handle.calls) == ATTEMPTS


def test_a_bug_in_a_replica_is_not_tried_again() -> None:
    handle = Handle([ValueError("bug")], [ANSWER])
    with pytest.raises(ValueError, match="bug"):
        run(lambda: backend_of(handle).generate(REQUEST))


def test_a_call_that_is_given_up_is_cancelled_on_its_replica() -> None:
    handle = Handle([...])

    async def work() -> None:
        task = asyncio.ensure_future(backend_of(handle).generate(REQUEST))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)
    assert handle.calls[0].cancelled


def test_a_stream_is_passed_on_and_left_alone_at_its_end() -> None:
    handle = Handle([FIRST, LAST])
    assert collect(handle) == [FIRST, LAST]
    assert not handle.calls[0].cancelled


def test_a_stream_whose_replica_died_before_its_first_piece_is_sent_again() -> None:
    handle = Handle([DIED], [FIRST, LAST])
    assert collect(handle) == [FIRST, LAST]


def test_a_stream_whose_replica_died_in_the_middle_goes_on_with_another() -> None:
    seeded = replace(FIRST, drawn=ReplyTokens((1, 2, 3), seed=7))
    withdrawn = replace(FIRST, drawn=ReplyTokens((8, 9), seed=7, start=2))
    handle = Handle([seeded, DIED], [withdrawn, DIED], [LAST])
    assert collect(handle) == [seeded, withdrawn, LAST]
    asked = [args[0].drawn for args in handle.args]
    assert asked == [None, ReplyTokens((1, 2, 3), seed=7), ReplyTokens((1, 2, 8, 9), seed=7)]


def test_a_replica_that_stops_hands_its_requests_on() -> None:
    stops = Errored(ErrorInfo(ErrorKind.UNAVAILABLE, "the engine is shutting down"))
    handle = Handle([FIRST, Batch("a", (stops,))], [LAST])
    assert collect(handle) == [FIRST, LAST]
    handle = Handle([Routed("a", stops)], [ANSWER])
    assert run(lambda: backend_of(handle).generate(REQUEST)) == ANSWER


def test_a_stream_whose_replicas_die_ends_with_an_error() -> None:
    handle = Handle(*[[FIRST, DIED]] * ATTEMPTS, [LAST])
    *_, last = collect(handle)
    assert last.replica_id == "b"
    assert isinstance(last.pieces[-1], Errored)
    assert len(handle.calls) == ATTEMPTS


def test_a_stream_that_is_closed_early_is_cancelled_on_its_replica() -> None:
    handle = Handle([FIRST, LAST])

    async def work() -> None:
        stream = backend_of(handle).stream(REQUEST)
        assert await anext(stream) == FIRST
        await stream.aclose()

    run(work)
    assert handle.calls[0].cancelled


def test_the_card_is_learnt_once() -> None:
    card = ModelCard("m", 100, 10)
    backend = backend_of(Handle([DIED], [card]))

    async def work() -> None:
        assert await backend.models() == ()
        await backend.start(5.0)
        assert await backend.models() == (card,)

    run(work)


def test_a_model_may_take_longer_to_load_than_a_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "RETRY_S", 0.0)
    card = ModelCard("m", 100, 10)
    nobody = UnavailableError("no replica came up within 60 s")
    backend = backend_of(Handle([nobody], [nobody], [card]))
    run(lambda: backend.start(5.0))
    assert list(run(backend.models)) == [card]


def test_a_start_without_any_replica_ends_in_time() -> None:
    backend = backend_of(Handle([...]))
    with pytest.raises(TimeoutError):
        run(lambda: backend.start(0.01))


@pytest.mark.parametrize("silent", [DIED, ...])
def test_health_is_that_of_now(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "HEALTHY_S", 0.01)
    backend = backend_of(Handle([ModelCard("m", 100, 10)], *[[silent]] * ATTEMPTS))

    async def work() -> None:
        assert await backend.healthy()
        assert not await backend.healthy()

    run(work)


def broadcasting(monkeypatch: pytest.MonkeyPatch, *told: Any) -> ServeBackend:
    """A backend whose replicas answer a call on all of them so; nothing is known of them with an ellipsis."""

    async def answers_of_each(broadcast: Any, timeout_s: float) -> list[Any]:
        if told == (...,):
            raise TimeoutError
        return list(told)

    monkeypatch.setattr(backend_module, "answers_of_each", answers_of_each)
    handle = Handle()
    monkeypatch.setattr(handle, "broadcast", lambda *args: None, raising=False)
    return backend_of(handle)


def test_metrics_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = broadcasting(monkeypatch, ("a", "x 1"), TimeoutError(), DIED, ("b", "x 2"))
    assert run(backend.metrics) == {"a": "x 1", "b": "x 2"}
    assert run(backend.status) == []


def test_what_was_done_is_asked_of_the_replica_that_has_the_request_and_many_at_once() -> None:
    class Counting(Handle):
        """A replica that answers with the number of each request once it is told to."""

        go_on = asyncio.Event()

        def remote(self, *args: Any, **kwargs: Any) -> Any:
            self.args.append(args)
            self.kwargs.append(kwargs)
            return self.answer(args[0])

        async def answer(self, request_ids: list[str]) -> list[Usage]:
            await self.go_on.wait()
            return [Usage(completion=int(each)) for each in request_ids]

    async def work() -> None:
        handle, health = Counting(), ReplicaHealth()
        backend = backend_of(handle, health)
        for n in range(3000):
            health.on_send(str(n), "a")
        asked = [asyncio.create_task(backend.drawn(str(n))) for n in range(3000)]
        while not handle.args:  # noqa: ASYNC110 (the first call)
            await asyncio.sleep(0)
        handle.go_on.set()
        async with asyncio.timeout(60):
            told = await asyncio.gather(*asked)
        assert told == [Usage(completion=n) for n in range(3000)]
        assert all(each == {HINT: RoutingHint("a", bound=True)} for each in handle.kwargs)
        assert len(handle.args) <= 3000 // 256 + 2
        assert await backend.drawn("sent to none") == Usage()

    run(work)


@pytest.mark.parametrize("lost", [DIED, UNAVAILABLE, UnavailableError("silent"), TimeoutError(), None])
def test_what_a_replica_that_does_not_answer_has_done_is_not_known(lost: Exception | None) -> None:
    """None: another replica has its port by now."""
    health = ReplicaHealth()
    health.on_send("r", "a")
    assert run(lambda: backend_of(Handle([lost]), health).drawn("r")) is None


@pytest.mark.parametrize("way", ["whole", "stream"])
def test_a_replica_whose_port_another_one_has_is_ejected_and_the_request_goes_on(way: str) -> None:
    no = Errored(ErrorInfo(ErrorKind.UNAVAILABLE, "this is not replica a"))

    async def work() -> None:
        health = ReplicaHealth()
        health.on_send("r", "a")
        if way == "whole":
            backend = backend_of(Handle([Routed("b", no)], [ANSWER]), health)
            assert await backend.generate(REQUEST) == ANSWER
        else:
            backend = backend_of(Handle([Batch("b", (no,))], [FIRST, LAST]), health)
            assert [batch async for batch in backend.stream(REQUEST)] == [FIRST, LAST]
        assert health.unresponsive("a")

    run(work)


@pytest.mark.parametrize(
    ("told", "ended"),
    [
        ([None, DIED], True),
        ([], True),
        ([None, TimeoutError()], False),
        ([None, UNAVAILABLE], False),
        ([...], False),
    ],
)
def test_a_program_has_not_ended_where_a_replica_does_not_answer(
    told: list[Any], ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = broadcasting(monkeypatch, *told)
    with nullcontext() if ended else pytest.raises(UnavailableError):
        run(lambda: backend.end_program("t", "t/p"))


def test_without_any_replica_a_plain_call_fails() -> None:
    with pytest.raises(UnavailableError):
        run(lambda: backend_of(Handle(*[[DIED]] * ATTEMPTS)).detokenize([1]))
