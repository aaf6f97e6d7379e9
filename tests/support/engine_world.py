"""An engine over the fake runner, driven by hand, and what came out of it."""

import numpy as np
from fake_runner import EOS, VOCABULARY, FakeRunner, complete

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.events import Event, Finished, Sampling, Submit, Terminal, Tokens


class World:
    """An engine, its fake runner, and what came out of it."""

    def __init__(self, **settings) -> None:
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
        self.runner = FakeRunner(pages, self.config.page_size, self.config.max_sequences)
        self.engine = Engine(self.config, self.runner, frozenset({EOS}), VOCABULARY)
        self.now = 0.0
        self.out: dict[str, list[int]] = {}
        self.ends: dict[str, list[Event]] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int = 8, scope: str = "", began: float = 0.0) -> None:
        self.prompts[name] = (prompt, max_tokens)
        self.out[name], self.ends[name] = [], []
        tokens = np.asarray(prompt, np.int32)
        self.take(
            self.engine.handle(
                Submit(name, tokens, Sampling(max_tokens), scope, program_arrival=began or self.now), self.now
            )
        )

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                assert not self.ends[event.request_id], "tokens after the end"
                self.out[event.request_id] += event.tokens
            else:
                self.ends[event.request_id].append(event)

    def step(self) -> None:
        self.now += 1.0
        self.take(self.engine.step(self.now))
        self.engine.cache.check()

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


def words(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCABULARY, n).tolist()
