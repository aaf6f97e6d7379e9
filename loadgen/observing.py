"""What a trace keeps of a measured request."""

from __future__ import annotations

from holdfast.loadgen.chat import Exchange
from holdfast.loadgen.conversation import assistant
from holdfast.loadgen.traces.model import Output
from holdfast.loadgen.traces.recording import Observed
from holdfast.loadgen.workloads.script import Json


def observed(program: str, turn: int, body: Json, exchange: Exchange, began: float, tenant: str = "") -> Observed:
    """The request and what came of it; ``began`` is the start of the run, a moment of `time.perf_counter`."""
    return Observed(program, turn, _ms(exchange.started - began), body, _output(exchange), tenant or None)


def _output(exchange: Exchange) -> Output:
    answer, timing = exchange.answer, exchange.answer.timing
    first = exchange.first_token
    said = exchange.said
    return Output(
        answer=assistant(said) if said is not None and said.usable else None,
        prompt_tokens=answer.prompt_tokens or None,
        cached_tokens=answer.cached_tokens,
        tokens=answer.output_tokens or None,
        reason=answer.reason or None,
        failure=exchange.failure,
        first_token_ms=None if first is None else _ms(first - exchange.started),
        latency_ms=_ms(exchange.ended - exchange.started),
        queue_ms=None if timing.queue is None else _ms(timing.queue),
        prefill_ms=None if timing.prefill is None else _ms(timing.prefill),
        decode_ms=None if timing.decode is None else _ms(timing.decode),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
