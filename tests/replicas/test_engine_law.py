"""The law of the engine under any traffic: cells and rows are conserved after every step, outputs are right, and every
request ends once. Programs come back, sessions are opened, fed, asked, forked and closed, steps fail, cells are short.
"""

from engine_world import World, words
from fake_runner import complete
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.loadgen.simulator.policies import ORDERS as COMPARED
from holdfast.replicas.config import ORDERS, DraftConfig, least_window_cells
from holdfast.replicas.kv.radix import Pin
from holdfast.replicas.programs import Kind, Sequence
from holdfast.replicas.requests import Abort, Finished, HandleReleased, ProgramEnded, Stop, TurnEnded
from holdfast.replicas.types import CellLimits, Priority

sessions = st.sampled_from("stu")
programs = st.sampled_from(["", "p", "q", "r", "r"])
lengths = st.integers(1, 24)
shares = [st.sampled_from(each) for each in ([0.0, 0.2, 0.4], [0.4, 0.6, 1.0], [0.0, 0.3, 1.0])]
limits = st.builds(CellLimits, *shares)  # floor, ceiling, pinned
priorities = st.sampled_from([Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH])


def history_pages(pins: list[Pin], going: list[Sequence], size: int) -> set[object]:
    """The pages that hold sessions' histories, looked up one by one, with those that are to be computed again."""
    pages: set[object] = set()
    held = [(pin.node, pin.length) for pin in pins]
    for sequence in going:
        holding, end = sequence.the_holding, sequence.n_history
        held.append((holding.node, end))
        if end > holding.n_shared:
            pages.update(holding.pages[holding.n_shared // size : -(-end // size)].tolist())
            pages.update((sequence.number, slot) for slot in range(holding.n_pages, -(-end // size)))
    for node, end in held:
        while node is not None:
            if node.start < end:
                pages.update(node.pages[: -(-min(end, node.end) // size) - node.start // size].tolist())
            node = node.parent
    return pages


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        settings=st.fixed_dictionaries(
            {
                "page_size": st.sampled_from([1, 4, 16]),
                "cells": st.sampled_from([128, 192, 512]),
                "step_tokens": st.sampled_from([1, 9, 64]),
                "speculation": st.builds(DraftConfig, enabled=st.booleans()),
                "order": st.sampled_from([*ORDERS, *COMPARED.values()]),
                "overlap_steps": st.sampled_from(["off", "on"]),
                "step_ms": st.sampled_from([0.0, 1e-3, 1e3]),
            }
        ),
        rows=st.sampled_from([(4, 0), (4, 2), (6, 3)]),
        keeps=st.booleans(),
        shares=st.sampled_from([True, True, True, False]),
        host_cells=st.sampled_from([0, 64, 512]),
        state_slots=st.sampled_from([0, 4, 7, 30]),
        window=st.sampled_from([0, 0, 5, 16, 40]),
        room=st.sampled_from([1, 3, 10]),
    )
    def start(self, settings, rows, keeps, shares, host_cells, state_slots, window, room) -> None:
        self.world = World(
            **settings,
            window=window,
            window_cells=room * least_window_cells(window, settings["page_size"]) if window else 0,
            max_sequences=rows[0],
            session_rows=rows[1],
            context_length=96,
            admission_ceiling=0.9,
            completion_reserve=2,
            without=(*(() if keeps else ("sessions",)), *(() if shares else ("prefix_cache",))),
            session_idle_s=40.0,
            host_cells=host_cells if shares else 0,
            state_slots=0 if window else state_slots,
        )
        self.world.runner.eager = lambda n: n % 3 == 0
        self.world.step_s = 0.9
        self.failing = 0
        self.world.runner.fail = lambda plan: self.failing == 1
        self.failing_moves = False
        self.world.runner.fail_moves = lambda plan: self.failing_moves
        self.limits: dict[str, CellLimits] = {}
        self.texts: dict[str, list[int]] = {}  # of programs, as far as their last turn went
        self.stopped: set[str] = set()

    def _name(self) -> str:
        return f"r{len(self.world.ends)}"

    @rule(program=programs, new=lengths, most=st.integers(0, 12), rewrites=st.booleans(), priority=priorities)
    def submit(self, program: str, new: int, most: int, rewrites: bool, priority=Priority.INTERACTIVE) -> None:
        name = self._name()
        known = self.texts.get(program, words(1, 14))
        text = (known[: len(known) // 2] if rewrites else known) + words(len(self.world.ends), new)
        if len(text) + most > 64:
            text = text[:40]
        scope, weight = ("other", 3.0) if program == "r" else ("", 1.0)
        cells = self.limits.get(scope)
        self.world.submit(name, text, most, scope=scope, program=program, weight=weight, priority=priority, cells=cells)
        if program:
            self.texts[program] = text

    @rule(scope=st.sampled_from(["", "other"]), limits=limits)
    def limit(self, scope: str, limits: CellLimits) -> None:
        """From a tenant's next request on it may have no more cells, and is sure of these."""
        self.limits[scope] = limits

    @rule(program=st.sampled_from(["p", "q"]), new=lengths, handle=st.sampled_from(["", "h", "i"]))
    def work_ahead(self, program: str, new: int, handle: str) -> None:
        """What a program's next prompt begins with comes before it."""
        self.world.ahead(self._name(), (self.texts.get(program, words(1, 14)) + words(new, new))[:64], program, handle)

    @rule(handle=st.sampled_from(["h", "i"]))
    def release(self, handle: str) -> None:
        self.world.give(HandleReleased("", handle))

    @rule(program=st.sampled_from(["p", "q", "r"]), last=st.booleans())
    def end_program(self, program: str, last: bool) -> None:
        scope = "other" if program == "r" else ""
        self.world.give(TurnEnded("", scope, program, last=True) if last else ProgramEnded(scope, program))

    @rule(program=st.sampled_from(["p", "q"]), others=st.integers(1, 5), new=lengths)
    def there_and_back(self, program: str, others: int, new: int) -> None:
        """A program pauses while texts like no other take the place of what nobody holds, and comes back."""
        self.submit(program, new, 2, False)
        self.steps(4)
        for _ in range(others):
            self.world.submit(self._name(), words(len(self.world.ends), 50), 2)
            self.steps(4)
        self.submit(program, new, 2, False)

    @rule(session=sessions)
    def open(self, session: str) -> None:
        if ("", session) not in self.world.histories:
            self.world.open(session)

    @rule(session=sessions, new=lengths)
    def append(self, session: str, new: int) -> None:
        self.world.append(self._name(), session, words(len(self.world.ends), new))

    @rule(session=sessions, new=lengths, most=st.integers(1, 9), keep=st.booleans())
    def query(self, session: str, new: int, most: int, keep: bool) -> None:
        self.world.query(self._name(), session, words(len(self.world.ends), new), most, keep)

    @rule(session=sessions, child=sessions)
    def fork(self, session: str, child: str) -> None:
        if ("", child) not in self.world.histories:
            self.world.fork(session, child)

    @rule(session=sessions)
    def close(self, session: str) -> None:
        self.world.close(session)
        self.world.histories.pop(("", session), None)

    @rule(aborts=st.booleans(), kept=st.none() | st.integers(0, 6), back=st.integers(1, 6))
    def cut(self, aborts: bool, kept: int | None, back: int) -> None:
        names = list(self.world.ends)
        if back <= len(names):
            name = names[-back]
            self.stopped.add(name)
            self.world.give(Abort(name) if aborts else Stop(name, kept))

    @rule(after=st.integers(1, 3))
    def fail(self, after: int) -> None:
        """One of the next steps fails."""
        self.failing = after

    @rule(on=st.booleans())
    def fail_moves(self, on: bool) -> None:
        """From here on copies between device and host fail, or not."""
        self.failing_moves = on

    @rule(n=st.integers(1, 12))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.world.step()
            self.failing -= 1

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.check()

    @invariant()
    def work_ahead_is_told_once(self) -> None:
        """A token computed ahead was of use, was not, or waits for its turn."""
        programs, stats = self.world.engine.programs, self.world.engine.stats
        assert stats.ahead_used + stats.ahead_wasted <= stats.ahead_computed
        assert programs.ahead == sum(each.background for each in self.world.engine.scheduler.everything())
        by_target = [each for each in programs if each.key.kind is not Kind.HANDLE]
        assert programs.ahead == sum(len(each.ahead) for each in by_target)

    @invariant()
    def histories_are_counted_as_they_are(self) -> None:
        rows, size = self.world.engine.scheduler.rows, self.world.config.page_size
        sessions = self.world.engine.programs.sessions
        idle = [each.row.pin for each in sessions if each.row is not None and each.row.pin is not None]
        going = [each.session.running for each in sessions if each.session.running is not None]
        going = [each for each in going if each.holding is not None and each.n_history]
        assert rows.idle_session_cells == size * len(history_pages(idle, [], size))
        assert rows.session_cells == size * len(history_pages(idle, going, size))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, self.failing = self.world, 0
        world.run()
        for name in world.prompts:
            end = world.end(name)
            if not isinstance(end, Finished) or name in self.stopped:
                continue
            drawn, expected = world.out[name], complete(*world.prompts[name])
            assert drawn == expected[: len(drawn)]
            # A reply is as long as its tenant's cells leave room for.
            assert len(drawn) == len(expected) or (self.limits and drawn and end.reason == "length")
        for session in "stu":
            world.close(session)
        world.now += 1000.0
        world.step()  # what was kept for programs that did not come back
        world.assert_idle()
        assert world.engine.cache.cells.in_use == 0
        assert world.engine.programs.ahead == len(world.engine.scheduler.retention.pins) == 0
        assert sum(world.engine.stats.ended.values()) == len(world.ends)


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestEngineLaw = EngineMachine.TestCase
