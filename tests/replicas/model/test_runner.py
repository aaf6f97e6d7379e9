"""The runner's own behaviour: order of effects, timing, and what a failed step leaves behind."""

import numpy as np
import pytest

from holdfast.replicas.errors import EngineError
from holdfast.replicas.events import Sampling
from holdfast.replicas.kv.pages import PageCopy
from holdfast.replicas.scheduling.plan import Chunk, RowWrite, StepPlan


def test_a_failed_step_leaves_the_runner_usable(tiny):
    prompt = tiny.prompt(20)
    loop = tiny.Loop("llama")
    stream = loop.stream(prompt)
    loop.step([stream])
    outside = Chunk(stream.row, 600, np.array([1], dtype=np.int32))
    foreign = RowWrite(3, 0, np.array([10**6], dtype=np.int32))
    unknown = Chunk(stream.row, 20, np.array([10**6], dtype=np.int32))
    for plan in (StepPlan((outside,)), StepPlan((), (foreign,)), StepPlan((unknown,))):
        with pytest.raises(EngineError, match="failed"):
            loop.runner.run(plan)
    for _ in range(11):
        loop.step([stream])
    assert tuple(stream.tokens[20:]) == tiny.reference("llama", prompt, 12)


def test_a_model_that_fails_half_way_leaves_the_runner_usable(tiny, monkeypatch):
    prompt = tiny.prompt(20)
    loop = tiny.Loop("llama")
    stream = loop.stream(prompt)
    loop.step([stream])
    computed, tokens = stream.computed, list(stream.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(type(tiny.model("llama").lm_head), "forward", _fail)
        with pytest.raises(EngineError, match="no memory"):
            loop.step([stream])
    assert (stream.computed, stream.tokens) == (computed, tokens)
    for _ in range(11):
        loop.step([stream])
    assert tuple(stream.tokens[20:]) == tiny.reference("llama", prompt, 12)


def _fail(*_):
    raise RuntimeError("no memory")


def test_copies_come_before_the_forward_and_work_alone(tiny):
    loop = tiny.Loop("llama")
    donor = loop.stream(tiny.prompt(16))
    loop.step([donor])
    page, target = donor.pages[0], loop.free[0]
    output = loop.runner.run(StepPlan((), copies=(PageCopy(page, target, 16),)))
    assert output.drawn == ()
    assert (loop.kv.data[:, :, target] == loop.kv.data[:, :, page]).all()


def test_seconds_are_measured_and_chunks_that_draw_nothing_say_so(tiny):
    loop = tiny.Loop("llama")
    row = RowWrite(0, 0, np.array(loop.free[:1], dtype=np.int32))
    output = loop.runner.run(StepPlan((Chunk(0, 0, np.array([1, 2], dtype=np.int32)),), (row,)))
    assert output.drawn == (None,)
    assert output.forward_s > 0
    assert output.sample_s >= 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sampled_tokens_do_not_depend_on_batch_chunks_or_drafts(tiny, family):
    sampling = Sampling(temperature=0.9, top_p=0.95)
    prompt = tiny.prompt(33)
    settings = {"sampling": sampling, "seed": 77}
    alone = tiny.Loop(family).generate(prompt, 16, **settings)
    assert len(set(alone)) > 4
    loop = tiny.Loop(family, page_size=1)
    stream = loop.stream(prompt, chunk=5, **settings)
    other = loop.stream(tiny.prompt(4, seed=9), sampling=Sampling(temperature=2.0))
    while (done := len(stream.tokens) - len(prompt)) < 16:
        drafts = alone[done : done + 2] if stream.computed >= len(prompt) else ()
        loop.step([other, stream], {stream.row: drafts})
    assert tuple(stream.tokens[len(prompt) :][:16]) == alone
