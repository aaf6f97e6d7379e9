"""A runner may do several steps at once where all that is to be done is to decode: nobody can tell the difference."""

from dataclasses import replace

import numpy as np
from engine_world import World, words
from fake_runner import EOS, VOCABULARY, complete
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.simulator.replica import more_cells
from holdfast.replicas.config import DraftConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.plan import Drawn, Landed, Sampling, StepPlan
from holdfast.replicas.requests import Submit


class BulkWorld(World):
    """Its engine's runner does up to `most` steps at once, as the simulator's does, over cells that remember."""

    def __init__(self, **settings) -> None:
        super().__init__(speculation=DraftConfig(enabled=False), **settings)
        self.engine = Engine(self.config, self, frozenset({EOS}), VOCABULARY)
        self.most = self.steps = 1

    def begin(self, plan: StepPlan) -> Landed:
        writes = more_cells(self.engine, plan, self.most) if self.most > 1 else None
        self.steps = 1 if writes is None else self.most
        output = self.runner.begin(replace(plan, writes=(*plan.writes, *(writes or ())))).land()
        chunks, drawn = plan.chunks, [each.tokens if each else () for each in output.drawn]
        for _ in range(self.steps - 1):
            chunks = tuple(
                replace(chunk, start=chunk.start + 1, tokens=np.array(each[-1:], np.int32))
                for chunk, each in zip(chunks, drawn, strict=True)
            )
            more = self.runner.begin(StepPlan(chunks)).land().drawn
            drawn = [before + each.tokens for before, each in zip(drawn, more, strict=True) if each is not None]
        return Landed(replace(output, drawn=tuple(Drawn(each) if each else None for each in drawn)))

    def steps_at_once(self, most: int) -> int:
        """One call for `most` steps; how many the runner did."""
        self.most = most
        self.step()
        return self.steps


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_what_comes_out_is_what_comes_of_single_steps(requests: list[tuple[int, int]], times: list[int]) -> None:
    world = BulkWorld()
    for i, (prompt, _) in enumerate(requests[::2]):
        world.submit(f"early {i}", words(i, prompt), requests[2 * i][1])
    late = [(f"late {i}", words(50 + i, prompt), most) for i, (prompt, most) in enumerate(requests[1::2])]
    calls = 0
    while world.engine.busy or late:
        world.steps_at_once(times[calls % len(times)])
        calls += 1
        if late and calls % 2:
            world.submit(*late.pop())
    for name, (prompt, most) in world.prompts.items():
        assert world.out[name] == complete(prompt, most)


def test_a_prompt_beside_those_that_decode_makes_it_one_step() -> None:
    world = BulkWorld(max_sequences=2)
    world.submit("a", words(1, 10), 30)
    assert world.steps_at_once(5) == 1, "the prompt"
    assert world.steps_at_once(5) == 5
    world.submit("b", words(2, 10), 30)
    assert world.steps_at_once(5) == 1, "another one's"
    world.submit("c", words(3, 10), 30)
    assert world.steps_at_once(3) == 3, "no row is free for it"


def test_without_cells_for_all_of_them_it_is_one_step() -> None:
    world = BulkWorld(cells=64, context_length=56, admission_ceiling=1.0)
    world.submit("a", words(1, 12), 40)
    world.submit("b", words(2, 12), 40)
    world.steps_at_once(1)
    assert world.steps_at_once(28) == 1
    assert world.steps_at_once(4) == 4


def test_whoever_needs_each_token_before_the_next_gets_single_steps() -> None:
    world = BulkWorld()
    tokens = np.asarray(words(1, 10), np.int32)
    world.give(Submit("a", tokens=tokens, sampling=Sampling(20, presence_penalty=0.5)))
    world.steps_at_once(1)
    assert world.steps_at_once(5) == 1
