"""Whatever is called in a request's life may raise: one request fails at most, nothing leaks, and the engine goes on.

The calls are found by wrapping every public method of the pieces below, and counting what one busy scene calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.errors import EngineError
from holdfast.replicas.plan import StepOutput
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import Abort, Aborted, Failed, Finished, Stop
from holdfast.replicas.speculation.ngrams import DraftTable

INSIDE = {DraftTable: ("add", "draft", "learn", "remove")}  # what the drafter supervises


class Faults:
    """Counts the calls of the wrapped pieces while the engine runs, and raises at call number `at`."""

    def __init__(self, pieces: list[object], at: int | None) -> None:
        self.at = at
        self.calls: list[str] = []
        self.inside = False
        for piece in pieces:
            for name in INSIDE.get(type(piece), dir(type(piece))):
                method = getattr(type(piece), name)
                public = not name.startswith("_") and name != "read"  # the runner reads for itself
                if callable(method) and (public or type(piece) in INSIDE):
                    setattr(piece, name, self._wrapped(f"{type(piece).__name__}.{name}", getattr(piece, name)))

    def _wrapped(self, name, method):
        def call(*args, **kwargs):
            if self.inside:
                self.calls.append(name)
                if len(self.calls) - 1 == self.at:
                    raise self.error
            return method(*args, **kwargs)

        return call

    @property
    def error(self) -> Exception:
        kinds = (EngineError("injected"), MemoryError("injected"), RuntimeError("CUDA out of memory. injected"))
        return kinds[(self.at or 0) % len(kinds)]

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


class FaultyWorld(World):
    def __init__(self, which, at: int | None, overlap: str = "off") -> None:
        room = {"cells": 96, "context_length": 64, "max_sequences": 5, "session_rows": 2, "step_tokens": 64}
        short = {"admission_ceiling": 1.0, "completion_reserve": 2, "without": ("chunk_deferral",)}  # of cells
        super().__init__(**room, **short, overlap_steps=overlap, order="fair")
        engine = self.engine
        self.faults = Faults(which(engine), at)
        for name in ("handle", "step"):
            setattr(engine, name, self._counted(getattr(engine, name)))

    def _counted(self, method):
        def call(*args):
            with self.faults.counted():
                return method(*args)

        return call

    def check(self) -> None:
        """Once, at the end: it costs more than a step."""

    def play(self) -> None:
        """A busy scene: programs that come back, a session, too few cells and rows, drafts, aborts and stops."""
        self.open("s")
        self.append("a0", "s", words(0, 9))
        for i in range(3):
            self.submit(f"p{i}", words(7, 12) + words(i, 9), max_tokens=14, program=f"p{i}")
        self.step()
        self.query("q0", "s", words(3, 3), max_tokens=4, keep=False)
        self.fork("s", "t")
        self.submit("aborted", words(8, 10), max_tokens=20)
        self.step()
        self.step()
        self.give(Abort("aborted"))
        self.submit("stopped", words(9, 10), max_tokens=20)
        self.run(60)
        self.give(Stop("stopped"))
        for i in range(3):
            self.submit(f"r{i}", self.prompts[f"p{i}"][0] + self.out[f"p{i}"] + words(20 + i, 5), program=f"p{i}")
        self.query("q1", "t", words(4, 3), max_tokens=4)
        self.run(300)
        self.close("s")
        self.submit("after", words(11, 12), max_tokens=8)
        self.run(100)
        self.close("t")


def boundaries(engine) -> list[object]:
    return [engine.cache, engine._pool, engine._pipeline._runner, engine._drafter._table]


def inside_the_books(engine) -> list[object]:
    return [engine.cache.tree, engine.cache.pool, engine.cache.tree.queue]


def calls_of(which, overlap: str = "off") -> list[str]:
    world = FaultyWorld(which, None, overlap)
    world.play()
    assert all(isinstance(world.end(name), Finished | Aborted) for name in world.ends)
    assert world.engine.stats.preemptions > 0
    assert world.engine.stats.drafted > 0
    return world.faults.calls


def judge(world: World, most_failed: int) -> None:
    """Right outputs but for so many, one end for each request, and every cell and row back."""
    failed = [name for name in world.ends if isinstance(world.end(name), Failed)]
    assert len(failed) <= most_failed
    for name in world.prompts:
        if isinstance(world.end(name), Finished) and name != "stopped":
            world.assert_right(name)
    if "after" not in failed:
        world.assert_right("after")
    World.check(world)
    world.assert_idle()
    assert world.engine.cache.cells.in_use == 0
    assert sum(world.engine.stats.ended.values()) == len(world.ends)


@pytest.mark.parametrize(("part", "overlap"), [*((part, "off") for part in range(4)), (1, "on")])
def test_a_fault_at_any_call_fails_one_request_at_most_and_leaves_nothing_behind(part, overlap):
    calls = calls_of(boundaries, overlap)
    assert len({name.partition(".")[0] for name in calls}) == 4
    for at in range(part, len(calls), 4):
        world = FaultyWorld(boundaries, at, overlap)
        world.play()
        assert world.faults.calls[at] == calls[at]
        of_a_step = calls[at] in ("FakeRunner.compute", "FakeRunner.begin")
        judge(world, most_failed=5 if of_a_step else 1)
        assert of_a_step or not calls[at].startswith("DraftTable") or world.engine.stats.ended["failed"] == 0


@pytest.mark.parametrize("part", range(2))
def test_a_fault_inside_the_books_costs_what_runs_and_the_engine_goes_on_with_new_ones(part):
    calls = calls_of(inside_the_books)
    anew = 0
    for at in range(part, len(calls), 6):
        world = FaultyWorld(inside_the_books, at)
        before = world.engine.cache
        world.play()
        judge(world, most_failed=world.config.max_sequences)
        anew += world.engine.cache is not before
    assert anew > 0


def test_a_request_that_finds_no_memory_fails_and_the_next_is_served(monkeypatch):
    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "of", lambda *_: np.empty(2**62))
        world.submit("a", words(1, 8))
    world.serve("b", words(1, 8))
    assert isinstance(world.end("a"), Failed)
    world.assert_right("b")
    world.assert_idle()


def test_a_runner_that_answers_for_too_few_fails_the_step():
    world = World()
    world.submit("a", words(1, 8))
    compute = world.runner.compute
    world.runner.compute = lambda plan: StepOutput(compute(plan).drawn[1:])
    world.step()
    world.runner.compute = compute
    world.serve("b", words(1, 8))
    assert isinstance(world.end("a"), Failed)
    world.assert_right("b")
    world.assert_idle()


def test_rows_that_a_failed_step_did_not_write_are_written_again():
    """`b` gets pages but no chunk in the step that fails before the runner has done anything."""
    world = World(cells=64, step_tokens=8)
    world.engine.scheduler._high_water = 0
    world.begin("a", words(1, 8), max_tokens=20)
    world.serve("c", words(2, 13), max_tokens=0)
    world.begin("a2", words(1, 8), max_tokens=20)
    compute = world.runner.compute
    world.runner.compute = lambda plan: 1 / 0
    world.begin("b", words(2, 13) + words(3, 4))
    world.runner.compute = compute
    world.run()
    assert isinstance(world.end("a2"), Failed)
    world.assert_right("b")
    world.assert_idle()
