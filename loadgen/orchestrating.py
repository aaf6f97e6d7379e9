"""The gain of the orchestrator: tools that run as their calls close, and prompts sent ahead.

The same agent runs in four ways, with neither, each of them and both, in turn, on a new server of one replica. A run is
a question with a few calls in its answer, and the answer to their results; tools only wait, each for a random time.
Runs share only the tools' declarations. Drafts are off: the questions are alike, so drafts would make answers too fast.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.measure import Estimate, estimate, median, ratio
from holdfast.loadgen.options import Orchestrated
from holdfast.loadgen.orchestrator import Orchestrator, Run
from holdfast.loadgen.progress import bar
from holdfast.loadgen.serving import serving
from holdfast.loadgen.toolbox import Toolbox
from holdfast.loadgen.workloads.words import KINDS, filler

ENGINE: Mapping[str, Any] = {"threads": 1, "kv_memory": 0.1, "speculation": {"enabled": False}}
SHORTEST_S, LONGEST_S = 0.05, 0.3  # that a tool takes
_WARM = 2  # rounds before the measured ones


class Way(Enum):
    """Dispatch, split."""

    NEITHER = (False, False)
    DISPATCH = (True, False)
    SPLIT = (False, True)
    BOTH = (True, True)


@dataclass(slots=True)
class Rounds:
    """Seconds of each way's runs, to their end and to the first token of their last answer, by round."""

    calls: list[int] = field(default_factory=list)
    whole: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in Way})
    first: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in Way})
    ahead: int = 0  # prefills that the server took

    def add(self, runs: Mapping[Way, Run]) -> None:
        """Count a round, unless its runs differ in their turns or calls, or made no call."""
        firsts = {way: run.first_token_s for way, run in runs.items()}
        ((_, calls), *others) = {(len(run.turns), len(run.outcomes)) for run in runs.values()}
        if others or not calls or None in firsts.values():
            return
        self.calls.append(calls)
        for way, run in runs.items():
            self.whole[way].append(run.seconds)
            self.first[way].append(firsts[way] or 0.0)
            self.ahead += run.ahead


def main(options: Orchestrated) -> int:
    """Measure and print; the exit status."""
    with serving(options.model, ENGINE) as url:
        result = asyncio.run(measure(url, options))
    print("\n".join(report(result)))
    return 0 if result.calls else 1


def report(result: Rounds) -> list[str]:
    """A line for each way: medians with their intervals, and ratios to neither, below one where it pays."""
    if not result.calls:
        return ["in no round did all runs make the same calls"]
    lines = [f"{len(result.calls)} rounds, {sum(result.calls) / len(result.calls):.1f} calls a run"]
    if not result.ahead:
        lines.append("the server takes no prefills: nothing was sent ahead")
    for name, seconds in (("the whole run", result.whole), ("to the last answer's first token", result.first)):
        lines.append(f"{name:<34}{'ms':>24}{'ratio':>26}")
        base = seconds[Way.NEITHER]
        for way, times_s in seconds.items():
            times = _format(estimate(times_s, median, 0), 1e3, 0)
            over = _format(ratio(times_s, base, median, 0), 1.0, 3)
            lines.append(f"  {way.name.lower():<32}{times:>24}{over:>26}")
    return lines


async def measure(url: str, options: Orchestrated) -> Rounds:
    """Rounds of runs on the server at `url`."""
    result, rng, ways = Rounds(), random.Random(0), list(Way)
    fields, uncached = {"temperature": 0, "max_tokens": 256}, {"cache-control": "no-cache"}
    async with ChatClient(url, 120.0) as client:
        model = await client.model()
        with bar("rounds", _WARM + options.rounds) as progress:
            for number in range(-_WARM, options.rounds):
                tools, question = _draw_question(rng, options)
                runs = {}
                for way in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
                    dispatch, split = way.value
                    agent = Orchestrator(client, model, tools, fields, uncached, dispatch=dispatch, split=split)
                    name = f"Run {number} {way.name}. You are a travel agent. Call tools when they help; then answer."
                    messages = [{"role": "system", "content": name}, {"role": "user", "content": question}]
                    runs[way] = await agent.run(messages)
                if number >= 0:
                    result.add(runs)
                progress.advance()
    return result


def _draw_question(rng: random.Random, options: Orchestrated) -> tuple[Toolbox, str]:
    """A tool that takes its own time for each city, and a question that asks for several."""
    cities = [str(KINDS["city"](rng)) for _ in range(options.calls)]
    seconds = {city: rng.uniform(SHORTEST_S, LONGEST_S) for city in cities}
    tools = Toolbox()

    @tools.tool
    async def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        await asyncio.sleep(seconds.get(city, LONGEST_S))
        return f'{{"temperature": {len(city)}}}\n{filler(city, options.words)}'

    text = " and ".join(f"check the weather in {city}" for city in cities)
    return tools, f"{text[0].upper()}{text[1:]}."


def _format(value: Estimate | None, scale: float, digits: int) -> str:
    if value is None:
        return "-"
    low, high = value.ends
    return f"{value.value * scale:.{digits}f} ({low * scale:.{digits}f} to {high * scale:.{digits}f})"
