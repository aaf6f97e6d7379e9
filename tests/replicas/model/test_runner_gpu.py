"""Steps as on a GPU, begun one ahead and in graphs that are none, answer what plain steps on a CPU answer.

What a failed step leaves behind, and the order of effects, are the same for both runners.
"""

import numpy as np
import pytest
from tiny_decoder import TinyEngine, prompt

from holdfast.replicas.errors import EngineError
from holdfast.replicas.kv.pages import PageCopy, PageMoves
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan
from holdfast.replicas.requests import Submit

SAMPLINGS = [
    Sampling(max_tokens=4),
    Sampling(max_tokens=4, temperature=0.9),
    Sampling(max_tokens=1, temperature=1.1, top_k=7, top_p=0.9),
    Sampling(max_tokens=3, presence_penalty=1.0, logprobs=2),
    Sampling(max_tokens=0),
    Sampling(max_tokens=3, logit_bias={3: 4.0}),
]


def requests() -> list[Submit]:
    lengths = [5, 21, 1, 8, 9, 2]
    return [Submit(f"r{i}", tokens=prompt(lengths[i], i), sampling=SAMPLINGS[i]) for i in range(6)]


def repeating() -> list[Submit]:
    return [Submit(f"r{i}", tokens=np.tile(prompt(5, i), 4), sampling=Sampling(max_tokens=14)) for i in range(2)]


@pytest.mark.parametrize(("way", "window"), [("plain", None), ("device", None), ("graphs", 6)])
def test_answers_are_those_of_plain_steps(way, window):
    plain = TinyEngine("plain", window=window, step_tokens=16)
    other = TinyEngine(way, "on", window=window, step_tokens=16)
    assert other.answers(requests()) == plain.answers(requests())
    if way == "graphs":
        assert other.runner.replayed > 0


def test_drafts_are_verified_in_graphs_too():
    window = 6
    plain = TinyEngine("plain", window=window, drafts=True)
    expected = plain.answers(repeating())
    assert plain.engine.stats.drafted > 3
    other = TinyEngine("graphs", "on", window=window, drafts=True)
    assert other.answers(repeating()) == expected
    assert other.engine.stats.accepted == plain.engine.stats.accepted
    assert other.runner.replayed > 1


@pytest.mark.parametrize("window", [None, 6])
def test_kv_in_fp8_gives_the_same_tokens_whatever_the_mechanism(window):
    """Whole prompts one by one by torch, against chunks, cache hits, drafts, graphs and pages from the host."""
    beginning = np.tile(prompt(4, 9), 2)
    texts = [np.concatenate((beginning, prompt(20, 50 + i), beginning[:5])) for i in range(2)]
    rounds = [
        [Submit(f"{turn}{i}", tokens=text, sampling=Sampling(4)) for i, text in enumerate(texts)] for turn in "ab"
    ]
    plain = TinyEngine("plain", window=window, kv_dtype="fp8", without=("prefix_cache", "sessions"))
    other = TinyEngine(
        "graphs", "on", window=window, kv_dtype="fp8", drafts=True, step_tokens=20, cells=48, host_cells=512
    )
    for requests in rounds:
        expected = {name: answer for each in requests for name, answer in plain.answers([each]).items()}
        assert other.answers(requests) == expected
    stats = other.engine.stats
    assert min(stats.prompt_cached, stats.accepted, stats.tokens_reloaded, other.runner.replayed) > 0
    assert plain.engine.stats.prompt_cached == plain.engine.stats.drafted == 0


@pytest.mark.parametrize("way", ["plain", "device"])
def test_effects_come_in_order_and_a_step_that_fails_leaves_the_rest_in_use(way):
    tiny = TinyEngine(way)
    runner, kv, table = tiny.runner, tiny.runner.kv, tiny.runner.table
    write = RowWrite(0, 0, np.array([3, 1], np.int32))
    runner.begin(StepPlan((Chunk(0, 0, prompt(6, 1)),), (write,))).land()
    assert table.tensor[0, :2].tolist() == [3, 1]
    long = RowWrite(1, 0, np.arange(20, dtype=np.int32))
    copied = runner.begin(StepPlan((), (long,), (PageCopy(3, 9, 2),))).land()
    assert copied.drawn == ()
    assert (kv.data[:, :, 9, :2] == kv.data[:, :, 3, :2]).all()
    outside = StepPlan((Chunk(0, 500, prompt(1, 1)),))
    foreign = StepPlan((), (RowWrite(3, 0, np.array([10**6], np.int32)),))
    unknown = StepPlan((Chunk(0, 6, np.array([10**6], np.int32)),)) if way == "plain" else outside
    moves = StepPlan((), saves=PageMoves(np.array([1], np.int32), np.array([0], np.int32)))
    for plan, why in ((outside, "failed"), (foreign, "failed"), (unknown, "failed"), (moves, "host tier")):
        with pytest.raises(EngineError, match=why):
            runner.begin(plan).land()
    (drawn,) = runner.begin(StepPlan((Chunk(0, 6, prompt(1, 2), Draw(Sampling(), 0)),))).land().drawn
    assert drawn is not None


@pytest.mark.parametrize("way", ["plain", "device"])
def test_a_model_that_fails_half_way_fails_its_step_alone(way, monkeypatch):
    """On a GPU by a kernel that does not fit the device."""
    from triton.runtime.errors import OutOfResources

    tiny = TinyEngine(way)
    plan = StepPlan((Chunk(0, 0, prompt(3, 5), Draw(Sampling(), 0)),), (RowWrite(0, 0, np.array([0], np.int32)),))

    def forward(model, batch):
        raise OutOfResources(1, 0, "shared memory") if way == "device" else RuntimeError("shared memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(tiny.runner.model), "forward", forward)
        with pytest.raises(EngineError, match="shared memory"):
            tiny.runner.begin(plan).land()
    assert tiny.runner.begin(plan).land().drawn[0] is not None


def test_what_follows_a_step_that_failed_is_computed_from_nothing():
    """Nobody wants it: those it is for have failed. Others in the step are not affected."""
    tiny = TinyEngine("device")
    runner = tiny.runner
    rows = tuple(RowWrite(row, 0, np.array([row], np.int32)) for row in range(2))
    alone = runner.begin(StepPlan((Chunk(1, 0, prompt(3, 5), Draw(Sampling(), 0)),), rows)).land().drawn[0]
    with pytest.raises(EngineError):
        runner.begin(StepPlan((Chunk(0, 500, prompt(1, 1), Draw(Sampling(), 0)),)))
    after = (Chunk(0, 0, np.zeros(1, np.int32), Draw(Sampling(), 0), 0), Chunk(1, 0, prompt(3, 5), Draw(Sampling(), 0)))
    lost, kept = runner.begin(StepPlan(after)).land().drawn
    assert kept == alone
    assert lost is not None
