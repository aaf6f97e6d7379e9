"""An engine over the fake runner, driven by hand, and what came out of it."""

from itertools import count

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
        **more,
    ) -> None:
        """`more`: fields of `Submit`, by its names."""
        self.prompts[name] = (prompt, max_tokens)
        submit = Submit(
            name,
            tokens=np.asarray(prompt, np.int32),
            labels=labels_of(("system", "user"), (0, len(prompt) // 2), len(prompt)),
            sampling=Sampling(max_tokens),
            scope=scope,
            program_id=program,
            program_arrival=began or self.now,
            program_turns=turns,
            answered_turns=answered,
            program_end=ends,
            **more,
        )
        self.give(submit)

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

    def assert_right(self, name: str) -> None:
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


def words(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCABULARY, n).tolist()


def talkative(n_prompt: int, n: int, begun: tuple[int, ...] | list[int] = (), first: int = 0) -> list[int]:
    """A prompt that is answered with `n` tokens: `begun` and `n_prompt` more, found by trying seeds from `first` on."""
    found = ([*begun, *words(seed, n_prompt)] for seed in range(first, first + 5000))
    return next(prompt for prompt in found if len(complete(prompt, n)) == n)
