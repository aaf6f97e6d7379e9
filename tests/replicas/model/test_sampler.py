"""Draws, drafts, penalties and log probabilities, from logits made by hand."""

import numpy as np
import pytest
import torch

from holdfast.replicas.events import Draw, Sampling
from holdfast.replicas.model.sampler import sample
from holdfast.replicas.scheduling.plan import Chunk

VOCABULARY = 40


def chunk_of(sampling=None, tokens=(1,), drafts=0, start=10, seed=5, history=None):
    history = None if history is None else np.array(history, dtype=np.int32)
    draw = Draw(sampling or Sampling(), seed, drafts, history)
    return Chunk(0, start, np.array(tokens, dtype=np.int32), draw)


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def likely(*tokens):
    """Logits whose greedy tokens are these."""
    logits = torch.zeros(len(tokens), VOCABULARY)
    logits[range(len(tokens)), list(tokens)] = 5.0
    return logits


def test_chunks_without_a_draw_give_nothing():
    silent = Chunk(0, 0, np.array([1, 2], dtype=np.int32))
    assert sample(logits_of(0), [silent]) == (None,)
    first, second = sample(likely(7), [silent, chunk_of()])
    assert first is None
    assert second is not None
    assert second.tokens == (7,)


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [((3, 4), (3, 4, 5)), ((3, 9), (3, 4)), ((9, 4), (3,)), ((9, 9), (3,)), ((), (3,))],
)
def test_accepted_drafts_are_the_longest_right_prefix(drafts, expected):
    logits = likely(*(3, 4, 5)[: len(drafts) + 1])
    (drawn,) = sample(logits, [chunk_of(tokens=(1, *drafts), drafts=len(drafts))])
    assert drawn.tokens == expected


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=1.5, top_k=20, top_p=0.9)])
def test_a_draw_depends_on_nothing_else_in_the_batch(sampling):
    logits = logits_of(6)
    others = [Sampling(), Sampling(temperature=0.3, min_p=0.2), Sampling(temperature=2.0, logit_bias={3: 9.0})]
    chunks = [chunk_of(s, start=20 + i, seed=i) for i, s in enumerate([sampling, *others, sampling, sampling])]
    together = sample(logits, chunks)
    backwards = sample(logits.flip(0), chunks[::-1])[::-1]
    alone = tuple(sample(logits[i : i + 1], chunks[i : i + 1])[0] for i in range(6))
    assert together == alone == backwards


def test_a_drafted_position_draws_what_it_would_have_drawn_alone():
    sampling = Sampling(temperature=1.3)
    logits = logits_of(4)
    one_by_one = []
    for i in range(4):
        (drawn,) = sample(logits[i : i + 1], [chunk_of(sampling, start=10 + i)])
        one_by_one += drawn.tokens
    (right,) = sample(logits, [chunk_of(sampling, tokens=(1, *one_by_one[:3]), drafts=3)])
    assert right.tokens == tuple(one_by_one)
    (wrong,) = sample(logits, [chunk_of(sampling, tokens=(1, one_by_one[0], 39, 39), drafts=3)])
    assert wrong.tokens == tuple(one_by_one[:2])


def test_seed_and_position_change_the_draw():
    sampling = Sampling(temperature=1.0)
    flat = torch.zeros(50, VOCABULARY)
    by_seed = {d.tokens for d in sample(flat, [chunk_of(sampling, seed=i) for i in range(50)])}
    by_position = {d.tokens for d in sample(flat, [chunk_of(sampling, start=i) for i in range(50)])}
    assert len(by_seed) > 15
    assert len(by_position) > 15


def test_penalties_count_history_and_the_drafts_before_a_row():
    sampling = Sampling(frequency_penalty=2.0, presence_penalty=1.0)
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 6], logits[:, 7], logits[:, 8] = 6.0, 3.5, 3.0
    # Row 0: token 6 was seen once: 6 - 3 = 3 < 3.5. Row 1: the draft 7 was seen as well: 3.5 - 3 < 3.
    (drawn,) = sample(logits, [chunk_of(sampling, tokens=(6, 7), drafts=1, history=[6])])
    assert drawn.tokens == (7, 6)
    (drawn,) = sample(logits, [chunk_of(sampling, tokens=(6, 7), drafts=1, history=[6, 6])])
    assert drawn.tokens == (7, 8)


def test_bias_moves_and_foreign_ids_are_ignored():
    (drawn,) = sample(likely(3), [chunk_of(Sampling(logit_bias={9: 100.0, 3: -100.0, 4000: 100.0}))])
    assert drawn.tokens == (9,)


def test_a_temperature_near_zero_is_greedy():
    chunks = [chunk_of(Sampling(temperature=t), seed=i) for i, t in enumerate((1e-9, 1e-4))]
    assert [d.tokens for d in sample(likely(3, 4), chunks)] == [(3,), (4,)]


def test_logprobs_are_of_the_raw_logits_and_as_many_as_asked_for():
    logits = logits_of(3)
    chunks = [
        chunk_of(Sampling(logprobs=0)),
        chunk_of(Sampling()),
        chunk_of(Sampling(temperature=1.0, top_k=1, logprobs=3, logit_bias={11: 100.0})),
    ]
    none, silent, three = sample(logits, chunks)
    raw = logits.log_softmax(-1)
    assert silent.logprobs == ()
    assert none.logprobs[0].top == ()
    assert none.logprobs[0].logprob == pytest.approx(raw[0].max().item(), abs=1e-5)
    assert three.tokens == (11,)
    assert three.logprobs[0].logprob == pytest.approx(raw[2, 11].item(), abs=1e-5)
    expected = raw[2].topk(3)
    assert [token for token, _ in three.logprobs[0].top] == expected.indices.tolist()
    assert [value for _, value in three.logprobs[0].top] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_logprobs_are_as_many_as_the_tokens_of_a_verified_draft():
    (drawn,) = sample(likely(3, 4, 5), [chunk_of(Sampling(logprobs=1), tokens=(1, 3, 9), drafts=2)])
    assert drawn.tokens == (3, 4)
    assert [entry.token for entry in drawn.logprobs] == [3, 4]
