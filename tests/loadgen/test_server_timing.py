"""Stages of a request as servers tell them: ours as it writes them, and anything else without an error."""

import asyncio

from fake_backend import World, chat_body
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.chat import ChatClient, streamed
from holdfast.loadgen.sse import ServerTiming, from_header, from_object
from holdfast.replicas.requests import Timing
from holdfast.router.tracing import server_timing, stages

SECONDS = st.integers(0, 10**9).map(lambda microseconds: microseconds / 1e6)
JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner))


@given(SECONDS, SECONDS, SECONDS)
def test_what_our_server_writes_is_read_back(queue: float, prefill: float, decode: float) -> None:
    timing = Timing(0.0, queue, queue + prefill, queue + prefill + decode)
    told = ServerTiming(queue, prefill, decode)
    for read in (
        from_header(server_timing(timing)),
        from_object({f"{name}_ms": milliseconds for name, milliseconds in stages(timing).items()}),
    ):
        for name in ("queue", "prefill", "decode"):
            assert abs(getattr(read, name) - getattr(told, name)) <= 2e-6


def test_our_server_tells_the_generator() -> None:
    async def ask(url: str) -> ServerTiming:
        async with ChatClient(url, 20.0) as client:
            exchange = await client.send(streamed(chat_body()), {})
            assert exchange.failure is None
            return exchange.answer.timing

    with World().served() as url:
        assert asyncio.run(ask(url)) == ServerTiming(0.125, 0.125, 0.25)
        assert asyncio.run(ask(url)) == ServerTiming()  # from the response cache: no engine worked for it


def test_other_metrics_and_orders_are_passed_over() -> None:
    read = from_header('cdn;desc="a", decode;desc=x;dur="300", db;dur=53, queue ; dur = 1.5')
    assert read == ServerTiming(queue=0.0015, decode=0.3)
    assert from_header("queue;dur=nan, prefill;dur=-1, decode;dur=soon") == ServerTiming()


@settings(max_examples=30, deadline=None)
@given(st.text(), JSON, st.dictionaries(st.sampled_from(["queue_ms", "prefill_ms"]), JSON))
def test_nothing_that_a_server_may_send_raises(text: str, anything: object, fields: dict[str, object]) -> None:
    from_header(text)
    from_object(anything)
    assert from_object(fields).decode is None
