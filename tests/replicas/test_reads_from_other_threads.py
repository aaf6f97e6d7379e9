"""What other threads read of an engine while it works: the event loop places turns, answers status and is scraped.

The interpreter may switch threads between any two instructions of a reader. Here the engine works at such places, drawn
at random: a reader neither raises nor sees a count out of bounds.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine_world import World, service_of, words
from instructions import at_each_instruction
from pinning import KEEP

from holdfast.replicas.config import RetentionConfig
from holdfast.replicas.errors import DeadlineError
from holdfast.replicas.kv.tags import Hint, Label, labels_of
from holdfast.replicas.reports import EngineCollector, activity, told_activity
from holdfast.replicas.requests import Abort, Submit, TurnEnded
from holdfast.replicas.stats import Occupancy
from holdfast.replicas.types import NO_TOKENS, CellLimits

ROUNDS = 12
PART = 0.02  # of the places where the engine works
TENANTS = [f"t{i}" for i in range(6)]


class Busy(World):
    """An engine that is always busy: many tenants, pins, sessions, limits, evictions to the host."""

    def __init__(self, seed: int) -> None:
        room = {"cells": 320, "host_cells": 64, "max_sequences": 6, "session_rows": 3, "step_tokens": 24}
        how = {"order": "fair", "admission_ceiling": 1.0, "completion_reserve": 1}
        times = {"session_idle_s": 200.0, "queue_timeout_s": 30.0}
        super().__init__(**room, **how, **times, retention=RetentionConfig(KEEP, most_s=8.0, share=0.5))
        self.random = random.Random(seed)
        self.given = 0

    def check(self) -> None:
        """The books themselves are the subject of other laws."""

    def work(self) -> None:
        rng, scope = self.random, self.random.choice(TENANTS)
        self.given += 1
        name = f"r{self.given}"
        match rng.choices(["turn", "ahead", "session", "limit", "abort", "ended", "step"], [4, 1, 1, 1, 1, 2, 8])[0]:
            case "turn" if len(self.engine.live) < 12:
                prompt = words(rng.randrange(4), 12) + words(self.given, rng.randrange(1, 40))
                program = f"{scope}/{rng.randrange(4)}"
                self.submit(name, prompt, rng.randrange(12), scope, program=program, turns=1)
            case "ahead" if len(self.engine.live) < 12:
                self.ahead(name, words(self.given, 20), f"{scope}/0", rng.choice(["", "h"]), scope=scope)
            case "session":
                session = rng.choice("uvw")
                if self.engine.session(scope, session) is None:
                    self.open(session, scope)
                elif rng.random() < 0.3:
                    self.close(session, scope)
                else:
                    self.query(name, session, words(self.given, 5), 2, scope=scope)
            case "limit":
                limits = rng.choice([CellLimits(), CellLimits(0.1, 0.9), CellLimits(0.0, 0.8, 0.2)])
                self.submit(name, words(self.given, 8), 1, scope, cells=limits)
            case "abort" if self.engine.live:
                self.give(Abort(rng.choice(list(self.engine.live))))
            case "ended" if self.engine.live:
                sequence = self.engine.live[rng.choice(list(self.engine.live))]
                submit = sequence.submit
                self.give(TurnEnded(sequence.request_id, submit.scope, submit.program_id, ("tool",)))
            case _:
                self.step()

    def sometimes(self) -> None:
        if self.random.random() < PART:
            self.work()

    def give(self, command: Any) -> str:
        if isinstance(command, Submit) and command.session is None:
            label = Label("system_prompt", self.random.choice([0, 20, 80]), 5.0)
            hint = Hint("tokens", label, 0, self.random.choice([4, 12]))
            command = replace(command, labels=labels_of(("user",), (0,), len(command.tokens), [hint]))
        return super().give(command)

    def _finished(self, name: str) -> None:
        pass


def read_all(world: Busy, collector: EngineCollector) -> list[Callable[[], object]]:
    engine, service = world.engine, collector._service

    def foreseen() -> None:
        asked = Submit("", tokens=NO_TOKENS, within_s=1.0)
        with suppress(DeadlineError):
            engine.scheduler.admission.check_deadline_early(asked, 8, 1)

    return [
        lambda: in_bounds(engine.occupancy()),
        lambda: counts(engine.load().prefixes),
        lambda: [counts([each]) for each in (engine.load().running, engine.load().waiting, engine.load().cells_free)],
        lambda: counts(engine.contended),
        lambda: [counts([len(e.past.tokens), e.past.appends]) for tenant in TENANTS for e in engine.sessions(tenant)],
        lambda: [engine.session(tenant, "u") for tenant in TENANTS],
        lambda: activity(engine, None, world.now),
        lambda: activity(engine, "t1", world.now),
        lambda: told_activity(service, "r", None),
        lambda: scraped(collector),
        lambda: [counts([engine.cache.tree.tenants.most(tenant)]) for tenant in TENANTS],
        foreseen,
    ]


def counts(found: Any) -> None:
    assert all(each >= 0 for each in (found.values() if isinstance(found, Mapping) else found)), found


def in_bounds(now: Occupancy) -> None:
    counts([getattr(now, name) for name in Occupancy.__slots__])
    assert now.cells_free + now.cells_tree + now.cells_held == now.cells_total
    assert max(now.cells_pinned, now.cells_raised) <= now.cells_total
    assert now.cells_host <= now.cells_host_total


def scraped(collector: EngineCollector) -> None:
    for family in collector.collect():
        counts([sample.value for sample in family.samples])


def test_concurrent_reads_are_consistent_and_within_bounds() -> None:
    world = Busy(0)
    collector = EngineCollector(service_of(world.engine), "r")
    reads = read_all(world, collector)
    for _ in range(300):
        world.work()
    seen: dict[str, int] = {}
    for _ in range(ROUNDS):
        for read in reads:
            world.work()
            at_each_instruction(read, world.sometimes)
        now = world.engine.occupancy()
        for name in ("pins", "cells_raised", "sessions", "cells_host", "ahead_running", "waiting"):
            seen[name] = seen.get(name, 0) + (getattr(now, name) > 0)
    assert all(seen.values()), f"nothing of these was ever there: {seen}"
