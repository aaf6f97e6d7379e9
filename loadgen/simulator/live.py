"""The programs of `holdfast simulate-placement`, sent to a server that runs; the same figures of it.

    python -m holdfast.loadgen.simulator.live URL --workload preambles --programs 120 --rate 1 --scale 0.1

Where the server is `tools/serve_placements.py`, `--placement` says how it is to place them; several take
turns, with texts of their own in every run, and the mean over runs is printed with the least and the most.

Texts are words, about as many as the simulated tokens times `scale`. Tools and sub-agents are waited for as in the
simulator. Replies are the server's own, of at most so many tokens, so programs get shorter where it ends them early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.loadgen.chat import ChatClient, streamed
from holdfast.loadgen.simulator.crowds import CROWDS, Crowd
from holdfast.loadgen.simulator.outcome import Served
from holdfast.loadgen.simulator.placement import figures
from holdfast.loadgen.simulator.programs import Program
from holdfast.loadgen.workloads.words import filler
from holdfast.replicas.errors import UnavailableError

Messages = list[dict[str, Any]]


class Live:
    """Sends programs to one server. Lengths are times `scale`, tools take times `tools`; `keys`: a tenant's name is its
    API key. A run's programs have names, and texts, that begin with `run`.
    """

    def __init__(self, client: ChatClient, model: str, scale: float, tools: float, run: str, *, keys: bool) -> None:
        self._client = client
        self._model = model
        self._scale = scale
        self._tools = tools
        self._run = run
        self._keys = keys
        self._began = time.perf_counter()
        self._replicas: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        self.moves = 0  # turns that went elsewhere than the one before
        self.served: list[Served] = []
        self.failed: list[str] = []

    @property
    def replicas(self) -> int:
        """How many have answered."""
        return len(self._replicas)

    async def program(self, program: Program, history: Messages | None = None) -> None:
        """From its arrival to its end; a sub-agent goes on from its parent's `history`."""
        await asyncio.sleep(max(0.0, self._began + program.arrived - time.perf_counter()) if history is None else 0.0)
        messages = history or [{"role": "system", "content": self._words(program.begins, program.shared)}]
        for at, turn in enumerate(program.turns):
            own = turn.prompt - (program.shared if at == 0 else 0)
            messages.append({"role": "user", "content": self._words(program.standing(at), own)})
            said = await self._turn(program, messages, turn.reply)
            if said is None:
                return
            messages.append({"role": "assistant", "content": said})
            if turn.children:
                await asyncio.gather(*(self._child(child, list(messages)) for child in turn.children))
            await asyncio.sleep(turn.tool_s * self._tools)

    async def _child(self, child: Program, history: Messages) -> None:
        await asyncio.sleep(child.arrived * self._tools)
        await self.program(child, history)

    async def _turn(self, program: Program, messages: Messages, reply: int) -> str | None:
        """What the server says; None where it failed."""
        headers = {"x-program-id": self._name(program), "cache-control": "no-cache"}
        if program.parent is not None:
            headers["x-parent-session-id"] = self._name(program.parent)
        if self._keys and program.tenant:
            headers["authorization"] = f"Bearer {program.tenant}"
        body = {"model": self._model, "messages": messages, "max_tokens": max(1, round(reply * self._scale))}
        exchange = await self._client.send(streamed(body), headers)
        if exchange.failure is not None:
            self.failed.append(f"{exchange.failure}: {exchange.detail}")
            return None
        answer = exchange.answer
        self.moves += self._homes.get(self._name(program), exchange.replica) != exchange.replica
        self._homes[self._name(program)] = exchange.replica
        self.served.append(
            Served(
                tenant=program.tenant,
                asked=exchange.started - self._began,
                first_s=(exchange.first_token or exchange.ended) - exchange.started,
                seconds=exchange.ended - exchange.started,
                prompt=answer.prompt_tokens,
                cached=answer.cached_tokens or 0,
                replica=self._replicas.setdefault(exchange.replica, len(self._replicas)),
            )
        )
        return "".join(answer.text) or "."

    def _name(self, program: Program) -> str:
        return f"{self._run}-{program.name}"

    def _words(self, about: str, tokens: int) -> str:
        return f"{self._run} {about} " + filler(f"{self._run}/{about}", max(1, round(tokens * self._scale)))


@dataclass(frozen=True, slots=True)
class Options:
    """How programs are sent."""

    scale: float
    tools: float
    keys: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What one run told."""

    placement: str
    seed: int
    told: dict[str, float | None]
    failed: list[str]


async def send(url: str, crowd: Crowd, seed: int, options: Options, placement: str) -> Run:
    """Send all programs and wait for their ends. Raises UnavailableError where the server tells of no model."""
    async with ChatClient(url, timeout_s=600.0) as client:
        models = (await client.get("/v1/models"))["data"]
        if not models:
            raise UnavailableError(f"{url} serves no model")
        run = f"{placement}.{seed}-{time.time_ns():x}" if placement else f"{seed}-{time.time_ns():x}"
        live = Live(client, models[0]["id"], options.scale, options.tools, run, keys=options.keys)
        await asyncio.gather(*(live.program(program) for program in crowd.draw(seed)))
    told: dict[str, float | None] = {}
    if live.served:
        seconds = max(turn.asked + turn.seconds for turn in live.served)
        told |= {"turns": len(live.served), "replicas": live.replicas, "moves": live.moves}
        told |= {"computed": sum(turn.prompt - turn.cached for turn in live.served)}
        told |= asdict(figures(live.served, seconds, live.replicas))
    return Run(placement, seed, told, live.failed)


SHOWN = ("hit", "computed", "moves", "most_in_hand", "p50_s", "p99_s", "first_p50_s", "first_p99_s")


def table(runs: Sequence[Run]) -> str:
    """A Markdown table: means over a placement's runs, and in brackets the least and the most."""
    lines = [f"| placement | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for placement in dict.fromkeys(run.placement for run in runs):
        cells = []
        for name in SHOWN:
            values = [run.told[name] or 0.0 for run in runs if run.placement == placement and run.told]
            mean = sum(values) / max(1, len(values))
            cells.append(f"{mean:.3g} ({min(values, default=0.0):.3g} to {max(values, default=0.0):.3g})")
        lines.append(f"| {placement} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 where a turn failed."""
    parser = argparse.ArgumentParser(prog="live", description="Programs of simulate-placement, sent to a server.")
    parser.add_argument("url")
    parser.add_argument("--workload", choices=tuple(CROWDS), default="agents")
    parser.add_argument("--placement", action="append", default=[], help="may come several times")
    parser.add_argument("--programs", type=int, default=60, help="in all (default: 60)")
    parser.add_argument("--rate", type=float, default=1.0, help="programs a second (default: 1)")
    parser.add_argument("--scale", type=float, default=0.1, help="of all lengths (default: 0.1)")
    parser.add_argument("--tools", type=float, default=1.0, help="times what tools take (default: 1)")
    parser.add_argument("--seed", type=int, default=100, help="of the first round (default: 100)")
    parser.add_argument("--rounds", type=int, default=1, help="of all placements by turns (default: 1)")
    parser.add_argument("--keys", action="store_true", help="tenants' names are their API keys")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    asked = parser.parse_args(argv)
    crowd = Crowd(asked.workload, asked.programs, asked.rate)
    options = Options(asked.scale, asked.tools, asked.keys)
    placements = asked.placement or [""]
    runs: list[Run] = []
    for number in range(asked.rounds):
        at = number % len(placements)
        for placement in placements[at:] + placements[:at]:
            runs.append(asyncio.run(send(asked.url, crowd, asked.seed + number, options, placement)))
            print(json.dumps({"placement": placement, "seed": asked.seed + number} | runs[-1].told), flush=True)
            for failed in runs[-1].failed[:5]:
                print(failed, file=sys.stderr)
            if asked.json is not None:
                told = {"workload": asked.workload, "runs": [asdict(run) for run in runs]}
                asked.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if len(runs) > 1:
        print(table(runs))
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
