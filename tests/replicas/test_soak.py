"""Long use: random arrivals, aborts, sessions, preemption and failing steps in a cache that is far too small.

A few thousand steps here; with HOLDFAST_SOAK_MINUTES set, as many as fit. At the end every cell and row is back, memory
is where it was after warming up, and every request has had its one terminal event.
"""

import asyncio
import gc
import logging
import os
import random
import time
from contextlib import aclosing
from pathlib import Path

from engine_world import World, words
from fake_runner import complete
from kv_audit import check_cache
from serving import serving

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, Completed, Errored, Finished, GenerateRequest, RawPrompt, Stop, Submit
from holdfast.replicas.service import Service

MINUTES = float(os.environ.get("HOLDFAST_SOAK_MINUTES", "0"))
STEPS = 1200
MOST_LIVE = 40
GROWTH = 8 * 2**20  # bytes that memory may be above what it was


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak(World):
    """Clients that come and go; what has ended is checked and forgotten."""

    def __init__(self, seed: int) -> None:
        room = {"cells": 240, "max_sequences": 10, "session_rows": 4, "admission_ceiling": 1.0, "completion_reserve": 1}
        times = {"session_idle_s": 60.0, "queue_timeout_s": 120.0}
        super().__init__(**room, **times, step_tokens=24, speculation=DraftConfig(memory_bytes=1 << 20))
        self.random = random.Random(seed)
        self.texts: dict[str, list[int]] = {}
        self.given = self.ended = 0
        self.cut_short: set[str] = set()
        self.outcomes: dict[str, int] = {}
        self.runner.fail = lambda plan: self.random.random() < 0.01
        self._compute, self.runner.compute = self.runner.compute, self._compute_or_fail

    def _compute_or_fail(self, plan):
        self.runner.plans.clear()
        self.runner.begun_plans.clear()
        if self.random.random() < 0.005:
            raise RuntimeError("out of memory, before anything was done")
        return self._compute(plan)

    def act(self) -> None:
        """One client does something."""
        rng, name = self.random, f"r{self.given}"
        kind = rng.choices(
            ["turn", "single", "append", "query", "open", "fork", "close", "cut"], [6, 3, 3, 3, 1, 1, 1, 2]
        )
        session, scope = rng.choice("stuvw"), rng.choice(["", "tenant"])
        more = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 40))]
        match kind[0]:
            case "turn" | "single" if len(self.ends) < MOST_LIVE:
                program = rng.choice("abcdefgh") if kind[0] == "turn" else ""
                known = self.texts.get(program, words(1, 24))
                text = known + more if len(known) < 60 else words(rng.randrange(3), 24) + more
                if program:
                    self.texts[program] = text
                self.submit(name, text, rng.choice([0, 3, 8, 30]), scope, program=program)
            case "append" | "query" if len(self.ends) < MOST_LIVE:
                most = rng.randrange(1, 12) if kind[0] == "query" else 0
                self.query(name, session, more, most, rng.random() < 0.6, scope)
            case "open" if (scope, session) not in self.histories:
                self.open(session, scope)
            case "fork":
                child = rng.choice("stuvw")
                if (scope, child) not in self.histories:
                    self.fork(session, child, scope)
            case "close":
                self.close(session, scope)
            case "cut" if self.ends:
                victim = rng.choice(list(self.ends))
                if isinstance(self.commands[victim], Submit):
                    self.cut_short.add(victim)
                    self.give(rng.choice([Abort, Stop])(victim))

    def give(self, command) -> str:
        self.given += not isinstance(command, Abort | Stop)
        return super().give(command)

    def _compare(self, name: str) -> None:
        if name not in self.cut_short:
            self.assert_right(name)
        else:
            assert self.out[name] == complete(*self.prompts[name])[: len(self.out[name])]

    def check(self) -> None:
        """Recounting everything costs more than a step."""
        if self.random.random() < 0.05:
            super().check()

    def sweep(self) -> None:
        """Forget what has ended, and sessions that are no more."""
        for name in [name for name, ends in self.ends.items() if ends]:
            end = self.end(name)
            if isinstance(end, Finished) and name in self.prompts and self.random.random() < 0.3:
                self._compare(name)
            self.outcomes[type(end).__name__] = self.outcomes.get(type(end).__name__, 0) + 1
            self.ended += 1
            for book in (self.ends, self.out, self.prompts, self.commands):
                book.pop(name, None)
            self.cut_short.discard(name)
        open_now = {(each.key.scope, each.key.name) for each in self.engine.programs.sessions}
        self.histories = {key: history for key, history in self.histories.items() if key in open_now}


def test_a_soak_ends_with_everything_free_memory_flat_and_one_end_for_each_request(caplog):
    # pytest keeps every log record, and a failed step makes one with a traceback: that would be what grows.
    caplog.set_level(logging.CRITICAL, logger="holdfast.replicas")
    soak, begun, warm = Soak(5), time.monotonic(), 0
    steps = 0
    while steps < STEPS or time.monotonic() - begun < 60 * MINUTES:
        for _ in range(soak.random.choice([0, 0, 1, 2])):
            soak.act()
        soak.step()
        soak.sweep()
        steps += 1
        if steps == STEPS // 2 or (steps % 20_000 == 0 and time.monotonic() - begun < 20 * MINUTES):
            warm = resident()
    soak.runner.fail = lambda plan: False
    soak.random = random.Random(1)
    soak.run()
    soak.sweep()
    for scope, session in list(soak.histories):
        soak.close(session, scope)
    soak.sweep()
    soak.now += 1000.0
    soak.step()  # what was kept for programs that did not come back
    grown = resident() - warm
    stats = soak.engine.stats
    assert not soak.ends
    assert soak.given == soak.ended == sum(stats.ended.values())
    World.check(soak)
    soak.assert_idle()
    assert soak.engine.cache.cells.in_use == 0
    assert grown < GROWTH
    assert min(stats.preemptions, stats.failed_steps, stats.turns_continued, soak.engine.cache.stats.evicted) > 0
    assert set(soak.outcomes) >= {"Finished", "Aborted", "Failed", "Rejected"}
    print(f"{steps} steps, {soak.given} requests {soak.outcomes}, {grown / 2**20:+.1f} MiB", stats)


async def test_the_service_under_clients_that_leave_gives_everything_back():
    config = EngineConfig(cells=640, threads=1, max_sequences=6, session_rows=3, context_length=256)
    rng = random.Random(3)

    async def client(service: Service, number: int) -> str:
        prompt = RawPrompt([rng.randrange(5, 500) for _ in range(rng.randrange(4, 60))])
        request = GenerateRequest(
            f"r{number}", prompt, Sampling(max_tokens=rng.randrange(1, 30)), program_id=rng.choice(["", "p", "q"])
        )
        leaves_after = rng.choice([1, 2, 1000, 1000])
        async with aclosing(service.stream(request)) as stream:
            async for pieces in stream:
                leaves_after -= 1
                if isinstance(pieces[-1], Completed | Errored):
                    return type(pieces[-1]).__name__
                if not leaves_after:
                    return "left"
        return "nothing"

    async with serving(config) as service:
        outcomes = await asyncio.gather(*(client(service, i) for i in range(40)))
        assert set(outcomes) <= {"Completed", "Errored", "left"}
        assert outcomes.count("Completed") > 0
        await service.generate(GenerateRequest("last", RawPrompt([5, 6, 7]), Sampling(max_tokens=1)))
        now = service.engine.occupancy()
        assert (now.running, now.waiting, now.rows_taken, now.cells_held, len(service.bridge._live)) == (0, 0, 0, 0, 0)
        check_cache(service.engine.cache)
