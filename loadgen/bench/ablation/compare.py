"""Two services side by side on the same rounds, turn about, and what their latencies compare to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.loadgen.bench.ablation.workload import Round, request
from holdfast.replicas.errors import EngineError
from holdfast.replicas.requests import Answer, ChatPrompt
from holdfast.replicas.service import Service

_RESAMPLES = 1000


@dataclass(slots=True)
class Samples:
    """What one service did in one scenario: seconds of each turn, seconds of each round, the answers in order."""

    turns: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One mechanism in one scenario. Times in milliseconds; ratios are off / on, above 1 where the mechanism pays.

    `low` and `high` bound `ratio`, that of the medians of turns, with 95 % (bootstrap over turns, paired).
    """

    off: str
    scenario: str
    turns: int
    on_median_ms: float
    on_p99_ms: float
    off_median_ms: float
    off_p99_ms: float
    ratio: float
    low: float
    high: float
    p99_ratio: float
    wall_ratio: float
    equal: float  # share of turns with the same text and calls


async def alternate(on: Service, off: Service, rounds: Sequence[Round], scope: str) -> tuple[Samples, Samples]:
    """Run every round on both services, first on one, then on the other, changing who begins.

    A round of one lane alternates with each turn; more lanes run a whole round at a time.
    """
    samples = Samples(), Samples()
    services = on, off
    for number, each in enumerate(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        name = f"{scope}/{number}"
        if len(each.lanes) == 1:
            for turn, prompt in enumerate(each.lanes[0]):
                for side in order if turn % 2 == 0 else order[::-1]:
                    await _lanes(services[side], name, ((prompt,),), scope, samples[side], turn)
        else:
            for side in order:
                await _lanes(services[side], name, each.lanes, scope, samples[side])
    return samples


async def _lanes(
    service: Service, name: str, lanes: Sequence[Sequence[ChatPrompt]], scope: str, samples: Samples, first: int = 0
) -> None:
    async def lane(number: int, prompts: Sequence[ChatPrompt]) -> list[tuple[float, Answer]]:
        done = []
        for turn, prompt in enumerate(prompts, first):
            begin = time.perf_counter()
            answer = await service.generate(request(f"{name}.{number}/{turn}", prompt, scope))
            if not isinstance(answer, Answer):
                raise EngineError(f"a turn failed: {answer.error.message}")
            done.append((time.perf_counter() - begin, answer))
        return done

    begin = time.perf_counter()
    results = await asyncio.gather(*(lane(number, prompts) for number, prompts in enumerate(lanes)))
    samples.rounds.append(time.perf_counter() - begin)
    for seconds, answer in (one for done in results for one in done):
        samples.turns.append(seconds)
        samples.answers.append(answer)
        samples.tokens += answer.usage.completion


def compared(name: str, scenario: str, on: Samples, off: Samples) -> Comparison:
    """The figures of one pair."""
    a, b = np.array(on.turns) * 1e3, np.array(off.turns) * 1e3
    low, high = interval(a, b)
    same = [_said(x) == _said(y) for x, y in zip(on.answers, off.answers, strict=True)]
    return Comparison(
        off=name,
        scenario=scenario,
        turns=len(a),
        on_median_ms=_round(np.median(a)),
        on_p99_ms=_round(np.percentile(a, 99)),
        off_median_ms=_round(np.median(b)),
        off_p99_ms=_round(np.percentile(b, 99)),
        ratio=_round(np.median(b) / np.median(a)),
        low=_round(low),
        high=_round(high),
        p99_ratio=_round(np.percentile(b, 99) / np.percentile(a, 99)),
        wall_ratio=_round(sum(off.rounds) / sum(on.rounds)),
        equal=_round(sum(same) / len(same)),
    )


def interval(
    on: np.ndarray[tuple[int], np.dtype[np.float64]], off: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> tuple[float, float]:
    """95 % of the ratio of medians, off / on, over resampled pairs."""
    picks = np.random.default_rng(0).integers(0, len(on), (_RESAMPLES, len(on)))
    ratios = np.median(off[picks], axis=1) / np.median(on[picks], axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def _said(answer: Answer) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    return answer.text, tuple((call.name, call.arguments) for call in answer.tool_calls)


def _round(value: float) -> float:
    return round(float(value), 3)
