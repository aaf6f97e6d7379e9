"""The law of programs that pause, under any order of arrivals, tool latencies and limits: every turn is served, with
the right tokens; pins never keep more than they may; what expires or gives way frees no page in use; and in the end
nothing is kept.
"""

from engine_world import World, words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pinning import KEEP, QUICK_CONTINUUM

from holdfast.loadgen.simulator import policies
from holdfast.replicas.config import ORDERS, POLICIES, DraftConfig, RetentionConfig
from holdfast.replicas.programs import ProgramKey
from holdfast.replicas.requests import Abort, Finished, ProgramEnded, ToolLatencies, TurnEnded
from holdfast.replicas.retention.latency import LatencyBook

programs = st.sampled_from([(scope, program) for scope in ("", "other") for program in "pqrs"])
NEVER = 1e9


class RetentionMachine(RuleBasedStateMachine):
    @initialize(
        settings=st.fixed_dictionaries(
            {
                "page_size": st.sampled_from([1, 4, 16]),
                "cells": st.sampled_from([128, 192, 320]),
                "speculation": st.builds(DraftConfig, enabled=st.booleans()),
                "host_cells": st.sampled_from([0, 256]),
                "order": st.sampled_from([*ORDERS, *policies.ORDERS.values()]),
            }
        ),
        policy=st.sampled_from([*POLICIES, *policies.RETENTION.values(), KEEP, QUICK_CONTINUUM]),
        shares=st.sampled_from([(1.0, 1.0), (1.0, 0.3), (0.6, 0.6), (0.2, 0.1)]),
        rows=st.sampled_from([(3, 0), (4, 2)]),
        most_s=st.sampled_from([2.0, 15.0, 1000.0, NEVER]),
    )
    def start(self, settings, policy, shares, rows, most_s) -> None:
        self.world = World(
            **settings,
            max_sequences=rows[0],
            session_rows=rows[1],
            context_length=112,
            admission_ceiling=0.9,
            completion_reserve=4,
            queue_timeout_s=NEVER,
            retention=RetentionConfig(policy, most_s, share=shares[0], tenant_share=shares[1]),
        )
        self.world.step_s = 0.5
        self.book = LatencyBook()
        self.texts: dict[tuple[str, str], list[int]] = {}
        self.began: dict[tuple[str, str], float] = {}
        self.turns: dict[tuple[str, str], int] = {}
        self.answered: dict[tuple[str, str], int] = {}
        self.numbers: dict[str, tuple[int, int]] = {}  # by request: its turn, and the turns up to the answer before
        self.asked: dict[str, tuple[str, str]] = {}  # by request, its program
        self.told: set[str] = set()
        self.aborted: set[str] = set()

    @rule(program=programs, new=st.integers(1, 20), most=st.integers(1, 8), ends=st.booleans())
    def submit(self, program: tuple[str, str], new: int, most: int, ends: bool) -> None:
        """The program's next turn, or one that runs beside another."""
        name = f"r{len(self.world.ends)}"
        text = self.texts.get(program, words(1, 18)) + words(len(self.world.ends), new)
        if len(text) > 80:
            text = text[:30]  # it begins anew: most of what was kept is of no use
        began = self.began.setdefault(program, self.world.now + 1.0)
        turns = self.turns.get(program, 0)
        answered = self.answered.get(program, 0)
        self.turns[program], self.numbers[name] = turns + 1, (turns + 1, answered)
        self.world.submit(name, text, most, program[0], began, program[1], turns, ends, answered=answered)
        self.texts[program], self.asked[name] = text, program

    @rule(tools=st.sampled_from([(), ("ls",), ("ls", "pytest")]), last=st.booleans(), back=st.integers(1, 5))
    def tell(self, tools, last, back) -> None:
        """What a finished turn called: soon, late, or never."""
        ended = [name for name in self.asked if self.world.ends[name] and name not in self.told]
        if back <= len(ended):
            name = ended[-back]
            scope, program = self.asked[name]
            self.told.add(name)
            turn, answered = self.numbers[name]
            self.world.give(TurnEnded(name, scope, program, tools, last, turn, answered))
            if last:
                self.answered[scope, program] = self.turns[scope, program]
                known = self.world.engine.programs.find(ProgramKey(scope, program))
                assert known is None or known.pin is None or known.pin.turn > turn

    @rule(tool=st.sampled_from(["", "ls", "ls,pytest"]), seconds=st.floats(0.0, 30.0), times=st.integers(1, 4))
    def learn(self, tool: str, seconds: float, times: int) -> None:
        for _ in range(times):
            self.book.record("", tool, seconds)
        self.world.give(ToolLatencies(self.book.snapshot()))

    @rule(program=programs)
    def end(self, program: tuple[str, str]) -> None:
        self.world.give(ProgramEnded(*program))

    @rule(back=st.integers(1, 4))
    def abort(self, back: int) -> None:
        names = list(self.asked)
        if back <= len(names):
            self.aborted.add(names[-back])
            self.world.give(Abort(names[-back]))

    @rule(n=st.integers(1, 10))
    def steps(self, n: int) -> None:
        self.world.steps(n)

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(n=st.integers(30, 100))
    def flood(self, n: int) -> None:
        """A request that belongs to nobody and needs many cells."""
        name = f"r{len(self.world.ends)}"
        self.world.submit(name, words(len(self.world.ends), n), 4)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run(limit=3000)
        for name in world.prompts:
            if name not in self.aborted:
                assert isinstance(world.end(name), Finished), "a turn was not served"
                world.assert_right(name)
        world.now += 2 * NEVER
        world.step()
        world.assert_idle()
        assert world.engine.cache.cells.in_use == 0
        assert world.engine.occupancy().pins == 0


RetentionMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestRetentionLaw = RetentionMachine.TestCase
