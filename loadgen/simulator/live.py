"""The programs of `holdfast simulate-placement`, sent to a running server; the same figures of it.

    python -m holdfast.loadgen.simulator.live URL --workload preambles --programs 120 --rate 1 --scale 0.1

Where the server is `tools/serve_placements.py`, `--placement` names its way to place them; several take turns,
with texts of their own in every run, and the mean over runs is printed with the least and the most.

Texts are words, about as many as the simulated tokens times `scale`. Tools and sub-agents are waited for as in the
simulator. Replies are the server's own, of at most so many tokens, so programs get shorter where it ends them early.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.loadgen.chat import ChatClient, streamed
from holdfast.loadgen.program import Program
from holdfast.loadgen.simulator.scenarios import turn_figures
from holdfast.loadgen.simulator.simulation import Served
from holdfast.loadgen.simulator.workloads import CROWDS, Crowd
from holdfast.loadgen.table import print_table
from holdfast.loadgen.workloads.words import filler
from holdfast.replicas.errors import UnavailableError

Messages = list[dict[str, Any]]
SHOWN = ("hit", "computed", "moves", "most_in_hand", "p50_s", "p99_s", "first_p50_s", "first_p99_s")


class Live:
    """Sends programs to one server. `keys`: a tenant's name is its API key. Names and texts begin with `run`."""

    def __init__(self, client: ChatClient, model: str, scale: float, tools: float, run: str, *, keys: bool) -> None:
        self._client, self._model = client, model
        self._scale, self._tools = scale, tools
        self._run, self._keys = run, keys
        self._start = time.perf_counter()
        self._homes: dict[str, str] = {}
        self.replicas: dict[str, int] = {}  # numbers of those that have answered
        self.moves = 0  # turns that another replica served than the turn before
        self.served: list[Served] = []
        self.failed: list[str] = []

    async def play(self, program: Program, history: Messages | None = None) -> None:
        """From its arrival to its end; a sub-agent goes on from its parent's `history`."""
        if history is None:
            await asyncio.sleep(max(0.0, self._start + program.arrived - time.perf_counter()))
        shared = program.beginning.tokens
        messages = history or [{"role": "system", "content": self._words(program.begins, shared)}]
        for at, turn in enumerate(program.turns):
            own = turn.added - (shared if at == 0 else 0)
            messages.append({"role": "user", "content": self._words(program.standing(at), own)})
            answer = await self._turn(program, messages, turn.reply)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})
            await asyncio.gather(*(self._child(child, list(messages)) for child in turn.children))
            await asyncio.sleep(turn.pause_s * self._tools)

    async def _child(self, child: Program, history: Messages) -> None:
        await asyncio.sleep(child.arrived * self._tools)
        await self.play(child, history)

    async def _turn(self, program: Program, messages: Messages, reply: int) -> str | None:
        """The server's answer; None where it failed."""
        name, parent = f"{self._run}-{program.id}", program.beginning.parent
        headers = {"x-program-id": name, "cache-control": "no-cache"}
        headers |= {} if parent is None else {"x-parent-session-id": f"{self._run}-{parent.id}"}
        headers |= {"authorization": f"Bearer {program.tenant}"} if self._keys and program.tenant else {}
        body = {"model": self._model, "messages": messages, "max_tokens": max(1, round(reply * self._scale))}
        exchange = await self._client.send(streamed(body), headers)
        if exchange.failure is not None:
            self.failed.append(f"{exchange.failure}: {exchange.detail}")
            return None
        answer, replica = exchange.answer, exchange.replica
        self.moves += self._homes.get(name, replica) != replica
        self._homes[name] = replica
        turn = Served(
            tenant=program.tenant,
            asked=exchange.started - self._start,
            first_s=(exchange.first_token or exchange.ended) - exchange.started,
            seconds=exchange.ended - exchange.started,
            prompt=answer.prompt_tokens,
            cached=answer.cached_tokens or 0,
            replica=self.replicas.setdefault(replica, len(self.replicas)),
        )
        self.served.append(turn)
        return "".join(answer.text) or "."

    def _words(self, label: str, tokens: int) -> str:
        return f"{self._run} {label} " + filler(f"{self._run}/{label}", max(1, round(tokens * self._scale)))


async def send(options: argparse.Namespace, placement: str, seed: int) -> dict[str, Any]:
    """Send all programs and wait for their ends: the figures of the run, and the requests that failed.

    Raises UnavailableError where the server names no model.
    """
    async with ChatClient(options.url, timeout_s=600.0) as client:
        models = (await client.get("/v1/models"))["data"]
        if not models:
            raise UnavailableError(f"{options.url} serves no model")
        run = f"{placement}.{seed}-{time.time_ns():x}" if placement else f"{seed}-{time.time_ns():x}"
        live = Live(client, models[0]["id"], options.scale, options.tools, run, keys=options.keys)
        crowd = Crowd(options.workload, options.programs, options.rate)
        await asyncio.gather(*(live.play(program) for program in crowd.draw(seed)))
    figures: dict[str, float] = {}
    if live.served:
        seconds = max(turn.asked + turn.seconds for turn in live.served)
        figures |= {"turns": len(live.served), "replicas": len(live.replicas), "moves": live.moves}
        figures |= {"computed": sum(turn.prompt - turn.cached for turn in live.served)}
        figures |= turn_figures(live.served, seconds, len(live.replicas))
    return {"placement": placement, "seed": seed, "figures": figures, "failed": live.failed}


def _rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for placement in dict.fromkeys(run["placement"] for run in runs):
        mine = [run["figures"] for run in runs if run["placement"] == placement and run["figures"]]
        values = [[figures[name] for figures in mine] for name in SHOWN]
        cells = [f"{sum(v) / len(v):.3g} ({min(v):.3g} to {max(v):.3g})" if v else "-" for v in values]
        rows.append([placement, *cells])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 1 where a turn failed."""
    parser = argparse.ArgumentParser(prog="live", description="Send programs of simulate-placement to a server.")
    parser.add_argument("url")
    parser.add_argument("--workload", choices=tuple(CROWDS), default="agents")
    parser.add_argument("--placement", action="append", help="may come several times")
    parser.add_argument("--programs", type=int, default=60, help="in all (default: 60)")
    parser.add_argument("--rate", type=float, default=1.0, help="programs a second (default: 1)")
    parser.add_argument("--scale", type=float, default=0.1, help="multiply all lengths (default: 0.1)")
    parser.add_argument("--tools", type=float, default=1.0, help="multiply the tools' seconds (default: 1)")
    parser.add_argument("--seed", type=int, default=100, help="of the first round (default: 100)")
    parser.add_argument("--rounds", type=int, default=1, help="of all placements by turns (default: 1)")
    parser.add_argument("--keys", action="store_true", help="tenants' names are their API keys")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    options = parser.parse_args(argv)
    placements = options.placement or [""]
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        at = number % len(placements)
        for placement in placements[at:] + placements[:at]:
            run = asyncio.run(send(options, placement, options.seed + number))
            runs.append(run)
            print(json.dumps({"placement": placement, "seed": run["seed"]} | run["figures"]), flush=True)
            print(*run["failed"][:5], sep="\n", end="\n" if run["failed"] else "", file=sys.stderr)
            if options.json is not None:
                content = {"workload": options.workload, "runs": runs}
                options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if len(runs) > 1:
        print_table("", ["placement", *SHOWN], _rows(runs))
    return 1 if any(run["failed"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
