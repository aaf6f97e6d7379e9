"""Counts that grow by what is drawn are those of counting anew, and cost nothing for what was counted before."""

from collections import Counter

import numpy as np
import torch
from fake_runner import VOCABULARY, FakeRunner
from hypothesis import given
from hypothesis import strategies as st
from instructions import at_each_instruction

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.sampler import sample
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Submit
from holdfast.replicas.types import TokenCounts

tokens = st.lists(st.integers(0, 200), max_size=100)


@given(st.lists(tokens, max_size=6), st.lists(st.integers(0, 200), max_size=6))
def test_counts_are_those_of_all_that_was_added_and_of_the_drafts_so_far(pieces, drafts):
    counts = TokenCounts()
    for piece in pieces:
        counts.add(np.array(piece, np.int32))
    known = [token for piece in pieces for token in piece]
    assert counts.seen == len(known)
    for _ in range(2):  # drafts leave nothing behind
        rows = [dict(zip(ids.tolist(), times.tolist(), strict=True)) for ids, times in counts.after(drafts)]
        assert rows == [Counter(known + drafts[:i]) for i in range(len(drafts) + 1)]


class Counting(FakeRunner):
    """Compares the counts of every draw with the tokens in the cells; a request's seed says where its reply begins."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.begins: dict[int, int] = {}
        self.compared = 0

    def _draw(self, chunk):
        if chunk.draw is not None:
            end = chunk.start + len(chunk.tokens)
            said = self.read(chunk.row, end)[self.begins[chunk.draw.seed] :]
            rows = list(chunk.draw.counts.after(chunk.tokens[len(chunk.tokens) - chunk.draw.drafts :].tolist()))
            assert len(rows) == chunk.draw.drafts + 1
            for i, (ids, times) in enumerate(rows):
                known = said[: len(said) - chunk.draw.drafts + i]
                assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(known)
                self.compared += 1
        return super()._draw(chunk)


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6),
    cells=st.sampled_from([64, 96, 1024]),
    drafts=st.booleans(),
    overlap=st.sampled_from(["off", "on"]),
)
def test_a_draw_counts_what_its_sequence_said_whatever_became_of_it(requests, cells, drafts, overlap):
    """Preempted for others, verified in windows, or going on from an earlier request."""
    config = EngineConfig(
        cells=cells, page_size=4, max_sequences=4, session_rows=0, context_length=128, completion_reserve=4,
        admission_ceiling=1.0, overlap_steps=overlap, speculation=DraftConfig(enabled=drafts),
    )  # fmt: skip
    runner = Counting(cells // 4, 4, 4)
    engine = Engine(config, runner, frozenset(), VOCABULARY)
    for i, (length, generated, most) in enumerate(requests):
        generated = min(generated, length)
        if length + most > cells - 4:
            continue
        prompt = np.random.default_rng(length).integers(1, VOCABULARY, length).astype(np.int32)
        sampling = Sampling(most, seed=i, presence_penalty=0.5, frequency_penalty=0.25)
        runner.begins[i] = length - generated
        assert not engine.handle(Submit(f"{i}", tokens=prompt, sampling=sampling, n_generated=generated), 0.0)
    for step in range(2000):
        if not engine.busy:
            break
        engine.step(float(step))
    assert not engine.busy
    assert not runner.begins or runner.compared > 0


class Drawing(FakeRunner):
    """Draws by the sampler, from logits that have every token follow the one before."""

    def compute(self, plan):
        rows = [chunk.tokens[-1] for chunk in plan.chunks if chunk.draw is not None]
        logits = torch.zeros(len(rows), 4096)
        for row, token in enumerate(rows):
            logits[row, (int(token) + 1) % 4096] = 9.0
        output = super().compute(plan)
        output.drawn = sample(logits, plan.chunks)
        return output


def work_of(call) -> int:
    """How many instructions of the interpreter a call takes in our own code, whatever the machine does."""
    done = []
    at_each_instruction(call, lambda: done.append(1))
    return len(done)


def test_a_step_with_penalties_does_no_more_work_after_many_tokens():
    config = EngineConfig(
        cells=4096, page_size=16, max_sequences=2, session_rows=0, context_length=2048,
        speculation=DraftConfig(enabled=False),
    )  # fmt: skip
    engine = Engine(config, Drawing(256, 16, 2), frozenset(), 4096)
    sampling = Sampling(600, presence_penalty=0.5, frequency_penalty=0.1)
    engine.handle(Submit("r", tokens=np.arange(1, 9, dtype=np.int32), sampling=sampling), 0.0)
    work = []
    for step in range(500):
        if step in range(40, 60) or step >= 480:
            work.append(work_of(lambda: engine.step(1.0)))
        else:
            engine.step(1.0)
    assert engine.stats.completion > 400
    early, late = min(work[:20]), min(work[20:])
    assert late <= 1.1 * early
