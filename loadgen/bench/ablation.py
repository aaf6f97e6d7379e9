"""The value of each mechanism: turn latencies with everything on, and with one mechanism off.

`holdfast bench ablation [--model DIR] [--off NAMES] [--scenarios NAMES] [--json FILE]`. One service with everything on
stays loaded. Each variant is loaded, measured by turns with it, and dropped, so at most two models are in memory. A
variant that cannot act here is named and left out. There is no Ray and no HTTP; `workload` has the requests.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from holdfast.loadgen import measure
from holdfast.loadgen.bench.harness import Row
from holdfast.loadgen.bench.workload import SCENARIOS, Round, Scenario, request, rounds
from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.requests import Answer, ChatPrompt
from holdfast.replicas.service import Service

CELLS = 32768
COLUMNS = {"off": "<15", "scenario": "<19", "turns": ">5", "on_median_ms": ">12.1f", "on_p99_ms": ">9.1f"}
COLUMNS |= {"off_median_ms": ">13.1f", "off_p99_ms": ">10.1f", "ratio": ">5.2f", "low": ">5.2f", "high": ">5.2f"}
COLUMNS |= {"p99_ratio": ">9.2f", "wall_ratio": ">10.2f", "equal": ">5.2f", "tokens": ">6.2f"}
COLUMNS |= {"on_cached": ">9.2f", "off_cached": ">10.2f"}


# ---- mechanisms to turn off ----


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration with one mechanism off: other fields of `EngineConfig` and of its `speculation`.

    `same_output`: turning it off changes no token of any request. `sampled`, `gpu`: it acts only on sampled turns, or
    only on a GPU.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    same_output: bool = True
    sampled: bool = False
    gpu: bool = False

    def of(self, config: EngineConfig) -> EngineConfig:
        """`config` with this mechanism off."""
        drafts = replace(config.speculation, **self.speculation) if self.speculation else config.speculation
        return replace(config, **self.engine, speculation=drafts)

    def idle(self, resolved: EngineConfig) -> str:
        """The reason why it cannot act on greedy turns of this engine; empty if it can."""
        if self.sampled:
            return "it acts on sampled turns, and these are greedy"
        if self.gpu and resolved.device == "cpu":
            return "it acts on a GPU, and this is a CPU"
        return ""


VARIANTS = (
    Variant("sessions", {"without": ("sessions",)}),  # cells of earlier turns are found in the shared tree alone
    Variant("session_rows", {"session_rows": 0}),
    Variant("prefix_cache", {"without": ("prefix_cache",)}),  # a program keeps its own cells, and finds nobody else's
    Variant("kept_cells", {"without": ("sessions", "prefix_cache")}),  # every turn computes its whole prompt
    Variant("grouped_prefill", {"without": ("grouped_prefill",)}),
    Variant("step_ms", {"step_ms": 1e9}),  # prompts fill steps
    Variant("chunk_deferral", {"without": ("chunk_deferral",)}),
    Variant("admission", {"admission_ceiling": 1.0}),
    Variant("retention", {"retention": RetentionConfig(policy="none")}),
    Variant("tokenize_cache", {"without": ("tokenize_cache",)}),
    Variant("prompt_seed", {"prompt_seed": False}, same_output=False, sampled=True),
    Variant("speculation", speculation={"enabled": False}),
    Variant("memory", speculation={"memory_bytes": 1}),  # drafts are made of the sequence itself alone
    Variant("early_stop", {"early_stop": False}, same_output=False),
    Variant("kv_tags", {"without": ("kv_tags",)}),  # cells are evicted by their age alone
    Variant("own_decoder", {"decoder": "transformers"}),
    Variant("device_sampling", {"without": ("device_sampling",)}, gpu=True),
    Variant("overlap_steps", {"overlap_steps": "off"}, gpu=True),
    Variant("cuda_graphs", {"without": ("cuda_graphs",)}, gpu=True),
    Variant("batch_invariant", {"batch_invariant": True}, gpu=True),
)
"""Every mechanism that can be turned off; `docs/architecture.md` describes each. One list for benchmark and tests."""


Entry = TypeVar("Entry", Variant, Scenario)


def chosen(names: str, table: Sequence[Entry], option: str) -> Sequence[Entry]:
    """The entries of a comma-separated list, all of them for an empty one. Raises ConfigError for an unknown name."""
    by_name = {entry.name: entry for entry in table}
    for name in names.split(",") if names else ():
        if name not in by_name:
            raise ConfigError(f"there is no {name}; there are {', '.join(by_name)}", option)
    return [by_name[name] for name in names.split(",")] if names else table


# ---- two services on the same rounds, by turns ----


@dataclass(slots=True)
class Samples:
    """One service in one scenario: seconds of each turn and of each round, and the answers in order."""

    turns: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: list[Answer] = field(default_factory=list)

    @property
    def cached(self) -> float:
        """The share of prompt tokens that were found in the cache."""
        return sum(a.usage.cached for a in self.answers) / max(1, sum(a.usage.prompt for a in self.answers))


async def alternate(on: Service, off: Service, rounds: Sequence[Round], scope: str) -> tuple[Samples, Samples]:
    """Run every round on both services in turn; they take turns in beginning.

    A round of one lane alternates with each turn; with more lanes whole rounds alternate.
    """
    samples = Samples(), Samples()
    services = on, off
    for number, round_scripts in enumerate(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        name = f"{scope}/{number}"
        if len(round_scripts.lanes) == 1:
            for turn, prompt in enumerate(round_scripts.lanes[0]):
                for side in order if turn % 2 == 0 else order[::-1]:
                    await _lanes(services[side], name, ((prompt,),), scope, samples[side], first=turn)
        else:
            for side in order:
                await _lanes(services[side], name, round_scripts.lanes, scope, samples[side], round_scripts.interleaved)
    return samples


async def _lanes(
    service: Service,
    name: str,
    lanes: Sequence[Sequence[ChatPrompt]],
    scope: str,
    samples: Samples,
    interleaved: bool = False,
    first: int = 0,
) -> None:
    """All turns of `lanes`; `interleaved` as in `Round`, and `first` is the number of a lane's first turn."""

    async def turn(lane: int, number: int, prompt: ChatPrompt) -> tuple[float, Answer]:
        begin = time.perf_counter()
        answer = await service.generate(request(f"{name}.{lane}/{number}", prompt, scope))
        if not isinstance(answer, Answer):
            raise EngineError(f"a turn failed: {answer.error.message}")
        return time.perf_counter() - begin, answer

    async def whole(lane: int, prompts: Sequence[ChatPrompt]) -> list[tuple[float, Answer]]:
        return [await turn(lane, number, prompt) for number, prompt in enumerate(prompts, first)]

    begin = time.perf_counter()
    if interleaved:
        numbered = sorted((number, lane) for lane, prompts in enumerate(lanes) for number in range(len(prompts)))
        results = [[await turn(lane, number, lanes[lane][number])] for number, lane in numbered]
    else:
        results = await asyncio.gather(*(whole(lane, prompts) for lane, prompts in enumerate(lanes)))
    samples.rounds.append(time.perf_counter() - begin)
    for seconds, answer in (one for done in results for one in done):
        samples.turns.append(seconds)
        samples.answers.append(answer)
        samples.tokens += answer.usage.completion


def compared(name: str, scenario: str, on: Samples, off: Samples) -> Row:
    """The figures of one mechanism in one scenario. Ratios are off / on, above 1 where the mechanism pays.

    `low` and `high` bound `ratio`, that of the medians of turns, with 95 % (bootstrap over turns, paired). `equal` is
    the share of turns with the same text and calls, `tokens` the ratio of the tokens drawn, and `on_cached` and
    `off_cached` are shares of prompt tokens.
    """
    a, b = np.array(on.turns) * 1e3, np.array(off.turns) * 1e3
    ratio = measure.ratio(off.turns, on.turns, measure.median, seed=0)
    assert ratio is not None  # a scenario has turns, and each takes time
    same = [_said(x) == _said(y) for x, y in zip(on.answers, off.answers, strict=True)]
    figures = {
        "on_median_ms": np.median(a),
        "on_p99_ms": np.percentile(a, 99),
        "off_median_ms": np.median(b),
        "off_p99_ms": np.percentile(b, 99),
        "ratio": ratio.value,
        "low": ratio.ends[0],
        "high": ratio.ends[1],
        "p99_ratio": np.percentile(b, 99) / np.percentile(a, 99),
        "wall_ratio": sum(off.rounds) / sum(on.rounds),
        "equal": sum(same) / len(same),
        "tokens": off.tokens / max(on.tokens, 1),
        "on_cached": on.cached,
        "off_cached": off.cached,
    }
    row: Row = {"off": name, "scenario": scenario, "turns": len(a)}
    return row | {key: round(float(value), 3) for key, value in figures.items()}


def _said(answer: Answer) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    return answer.text, tuple((call.name, call.arguments) for call in answer.tool_calls)


# ---- the command ----


def ablation(options: Namespace) -> Iterator[Row]:
    """A row for each variant and scenario. Each variant takes turns with the service that stays, then is dropped."""
    variants, scenarios = chosen(options.off, VARIANTS, "off"), chosen(options.scenarios, SCENARIOS, "scenarios")
    config = EngineConfig(model=options.model, threads=options.threads, dtype=options.dtype, cells=CELLS)
    with asyncio.Runner() as runner:

        async def started(config: EngineConfig) -> Service:
            """A service after a few turns that do not count."""
            service = Service.load(config)
            warm = list(rounds(Scenario("warm", lanes=2, turns=2, rounds=1), options.seed))
            await alternate(service, service, warm, "warm")
            return service

        on = runner.run(started(config))
        try:
            for variant in variants:
                if reason := variant.idle(on.engine.config):
                    print(f"{variant.name:<15} left out: {reason}", flush=True)
                    continue
                off = runner.run(started(variant.of(config)))
                try:
                    for scenario in scenarios:
                        # A scope of its own, so that nothing is cached from other variants.
                        scope = f"{variant.name}/{scenario.name}"
                        pair = runner.run(
                            alternate(on, off, list(rounds(scenario, options.seed, options.scale)), scope)
                        )
                        yield compared(variant.name, scenario.name, *pair)
                finally:
                    runner.run(off.close())
        finally:
            runner.run(on.close())
