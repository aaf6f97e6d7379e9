"""An engine over the fake runner, driven by hand, and what came out of it."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_runner import EOS, VOCABULARY, FakeRunner, complete
from kv_audit import check_cache, pinned_pages

from holdfast.loadgen.simulator.policies import Plas
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.tags import labels_of
from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Region
from holdfast.replicas.requests import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    ForkSession,
    Notice,
    OpenSession,
    PartialPrefill,
    SessionTurn,
    Started,
    Stop,
    Submit,
    Terminal,
    Tokens,
)
from holdfast.replicas.scheduling.queue import FairOrder
from holdfast.replicas.stats import QuestionStats, TextStats


class World:
    """An engine, its fake runner, and what came out of it."""

    def __init__(self, window: int = 0, **settings) -> None:
        """`window`: tokens that layers with window pages see, of which there are `window_cells` cells."""
        defaults = {
            "cells": 256,
            "page_size": 4,
            "max_sequences": 4,
            "session_rows": 0,
            "context_length": 128,
            "completion_reserve": 16,
        }
        self.config = EngineConfig(**(defaults | settings))
        pages = self.config.cells // self.config.page_size
        host_pages = self.config.host_cells // self.config.page_size
        windows = (self.config.window_cells, self.config.host_window_cells)
        of_window = (window, *(cells // self.config.page_size for cells in windows))
        self.runner = FakeRunner(pages, self.config.page_size, self.config.max_sequences, host_pages, of_window)
        self.engine = Engine(self.config, self.runner, frozenset({EOS}), VOCABULARY, window=window)
        self.now = 0.0
        self.step_s = 0.0  # how long a step takes
        self.out: dict[str, list[int]] = {}
        self.ends: dict[str, list[Event]] = {}
        self.started: dict[str, Started] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.commands: dict[str, Command] = {}
        self.serial = count()
        self.histories: dict[tuple[str, str], list[int]] = {}  # of sessions, by scope and id

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 8,
        scope: str = "",
        began: float = 0.0,
        program: str = "",
        turns: int = 0,
        ends: bool = False,
        answered: int = 0,
        **fields,
    ) -> None:
        """`fields`: further ones of `Submit`."""
        self.prompts[name] = (prompt, max_tokens)
        of_program = {"program_id": program, "program_arrival": began or self.now, "program_end": ends}
        turn = {"program_turns": turns, "answered_turns": answered}
        labels = labels_of(("system", "user"), (0, len(prompt) // 2), len(prompt))
        tokens, sampling = np.asarray(prompt, np.int32), Sampling(max_tokens)
        submit = Submit(name, tokens=tokens, sampling=sampling, scope=scope, labels=labels, **of_program, **turn)
        self.give(replace(submit, **fields))

    def ahead(self, name: str, prompt: list[int], program: str, handle: str = "", keep_s: float = 60.0, **more) -> None:
        """Let a prompt be computed ahead; without a handle it is kept no longer than it is computed."""
        background = PartialPrefill(handle or name, keep_s if handle else 0.0)
        self.submit(name, prompt, 0, program=program, background=background, **more)

    def open(self, session: str, scope: str = "") -> str:
        self.histories[scope, session] = []
        return self.give(OpenSession(scope, session, request_id=f"open {session} {next(self.serial)}"))

    def append(self, name: str, session: str, tokens: list[int], scope: str = "") -> None:
        self.query(name, session, tokens, 0, scope=scope)

    def query(
        self, name: str, session: str, tokens: list[int], max_tokens: int = 8, keep: bool = True, scope: str = ""
    ) -> None:
        ids = np.asarray(tokens, np.int32)
        self.give(
            Submit(
                name, tokens=ids, sampling=Sampling(max_tokens), scope=scope, session=SessionTurn(session, keep=keep)
            )
        )

    def ask(self, name: str, session: str, tokens: list[int], max_tokens: int = 8, **more) -> None:
        """Query a session and run until it has its reply, which is checked."""
        self.query(name, session, tokens, max_tokens, **more)
        self.run()
        self.assert_right(name)

    def fork(self, session: str, child: str, scope: str = "") -> str:
        return self.give(ForkSession(scope, session, child, request_id=f"fork {child} {next(self.serial)}"))

    def close(self, session: str, scope: str = "") -> str:
        return self.give(CloseSession(scope, session, request_id=f"close {session} {next(self.serial)}"))

    def give(self, command: Command) -> str:
        """Hand a command to the engine; returns its request id."""
        if isinstance(command, Notice):
            self.take(self.engine.handle(command, self.now))
            self.check()
            return ""
        name = command.request_id
        if not isinstance(command, Abort | Stop):
            self.commands[name] = command
            self.out[name], self.ends[name] = [], []
        self.take(self.engine.handle(command, self.now))
        return name

    def take(self, events: list[Event]) -> None:
        for event in events:
            name = event.request_id
            assert not self.ends[name], "an event after the end"
            if isinstance(event, Tokens):
                self.out[name] += event.tokens
            elif isinstance(event, Started):
                assert name not in self.started, "it starts once"
                assert not self.out[name], "tokens before the start"
                self.started[name] = event
            else:
                self.ends[name].append(event)
                if isinstance(event, Finished):
                    self._finished(name)

    def _finished(self, name: str) -> None:
        """Operations of a session end in order; what each has to do with its history is checked here."""
        command = self.commands[name]
        if isinstance(command, ForkSession):
            self.histories[command.scope, command.child_id] = self.histories[command.scope, command.session_id]
        if not isinstance(command, Submit) or command.session is None:
            return
        key = (command.scope, command.session.session_id)
        prompt = [*self.histories[key], *command.tokens.tolist()]
        self.prompts[name] = (prompt, command.sampling.max_tokens)
        assert self.end(name).usage.prompt == len(prompt)
        if command.session.keep:
            self.histories[key] = prompt + self.out[name][: self.end(name).usage.completion]

    def step(self) -> None:
        self.now += 1.0
        self.take(self.engine.step(self.now, lambda: self.now + self.step_s))
        self.now += self.step_s
        self.check()

    def idle(self) -> None:
        """A step at the present moment, with nothing to run."""
        assert self.engine.step(self.now) == []
        self.check()

    def check(self) -> None:
        """Nothing is lost: cells and rows are free, or with somebody."""
        assert not self.runner.wrong, self.runner.wrong[0]
        check_cache(self.engine.cache)
        now, pool = self.engine.occupancy(), self.engine._pool
        assert now.cells_free + now.cells_tree + now.cells_held == now.cells_total
        assert pool.free() + pool.free(Region.SESSION) + now.rows_taken + now.rows_parked == pool.rows
        assert now.running <= now.rows_taken <= now.running + now.sessions
        self._check_pins()

    def _check_pins(self) -> None:
        """Pinned cells are counted as they are, and no more than they may be."""
        kept, size = self.engine.scheduler.retention.pins, self.config.page_size
        assert kept.cells == pinned_pages(held.pin for held in kept) * size
        assert kept.cells <= self.config.cells * self.config.retention.share
        for tenant in {held.scope for held in kept}:
            own = [held.pin for held in kept if held.scope == tenant]
            assert (
                kept.cells_of(tenant)
                == pinned_pages(own) * size
                <= self.config.cells * self.config.retention.tenant_share
            )

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def run_until(self, *names: str) -> None:
        """Run until these have ended."""
        while not all(self.ends[name] for name in names):
            assert self.engine.busy, "they never end"
            self.step()

    def begin(self, name: str, prompt: list[int], max_tokens: int = 8, **more) -> None:
        """Submit a request and take a step."""
        self.submit(name, prompt, max_tokens, **more)
        self.step()

    def serve(self, name: str, prompt: list[int], max_tokens: int = 8, **more) -> int:
        """Submit a request and run until it has its reply, which is checked. Returns how much of it was cached."""
        self.submit(name, prompt, max_tokens, **more)
        self.run()
        self.assert_right(name)
        return self.end(name).usage.cached

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.engine.busy:
                break
            self.step()
        assert not self.engine.busy, "the engine makes no progress"

    def end(self, name: str) -> Event:
        (event,) = self.ends[name]
        assert isinstance(event, Terminal)
        return event

    def assert_right(self, *names: str) -> None:
        for name in names:
            assert self.out[name] == complete(*self.prompts[name])
            assert isinstance(self.end(name), Finished)

    def assert_idle(self) -> None:
        now = self.engine.occupancy()
        assert (now.running, now.waiting, now.rows_taken, now.cells_held) == (0, 0, 0, 0)
        assert now.cells_free + now.cells_tree == now.cells_total
        order = self.engine._order
        if isinstance(order, FairOrder):
            roots = [root for roots in order._fair.roots.values() for root in roots._roots.values()]
            assert not any(root.requests for root in roots), "the order still counts a request that has ended"
        elif isinstance(order, Plas):
            assert not order.attained, "the order still counts a request that has ended"


def service_of(engine: object) -> Any:
    """What metrics are made of: a service with this engine."""
    text, questions = SimpleNamespace(stats=TextStats()), SimpleNamespace(stats=QuestionStats())
    return SimpleNamespace(engine=engine, card=SimpleNamespace(name="m"), text=text, questions=questions)


def play(world: World, script: list[int | tuple[int, int, int, int]], cuts: bool = True) -> None:
    """Requests (text, its length, most tokens, steps after) and numbers: a step each, which may also end a request."""
    for each in script:
        if isinstance(each, int):
            if cuts and world.ends:
                name = list(world.ends)[-min(each, len(world.ends))]
                world.give(Stop(name) if each % 2 else Abort(name))
            world.step()
        else:
            text, length, most, steps = each
            world.submit(f"r{len(world.ends)}", words(text, length), most, program=f"p{text}")
            world.steps(steps)
    world.run()
    world.assert_idle()


def words(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCABULARY, n).tolist()


def talkative(n_prompt: int, n: int, begun: tuple[int, ...] | list[int] = (), first: int = 0) -> list[int]:
    """A prompt that is answered with `n` tokens: `begun` and `n_prompt` more, found by trying seeds from `first` on."""
    found = ([*begun, *words(seed, n_prompt)] for seed in range(first, first + 5000))
    return next(prompt for prompt in found if len(complete(prompt, n)) == n)
