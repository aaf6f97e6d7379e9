"""Constrained rows draw what they would draw from logits in which the forbidden tokens are at minus infinity."""

import numpy as np
import pytest
import torch

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.events import Draw, Sampling
from holdfast.replicas.model.sampler import sample, unpacked_on_device
from holdfast.replicas.scheduling.plan import Chunk

VOCABULARY = 70


class Listed:
    """A matcher that allows listed tokens: those of place i after i drafts."""

    def __init__(self, *allowed, words=3):
        self.allowed, self.words, self.asked = allowed, words, []

    def fill(self, drafts, out):
        self.asked.append(tuple(drafts))
        bits = np.zeros((len(drafts) + 1, self.words * 32), np.uint8)
        for row in range(len(drafts) + 1):
            bits[row, list(self.allowed[row])] = 1
        out[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def chunk_of(sampling, allowed=None, drafts=(), position=10, words=3):
    masks = RowMasks(Listed(*allowed, words=words), tuple(drafts)) if allowed is not None else None
    tokens = np.array([1, *drafts], np.int32)
    return Chunk(0, position, tokens, Draw(sampling, 5, len(drafts), np.array([2], np.int32), masks))


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=1.5, top_k=5, top_p=0.9, min_p=0.01),
    Sampling(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 50.0, 40: 2.0}),
    Sampling(logit_bias={3: 50.0}, logprobs=2),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_mask_is_the_same_as_masked_logits(sampling):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        allowed = [rng.choice(VOCABULARY, 1 + seed % 7, replace=False).tolist() for _ in range(3)]
        logits = logits_of(3, seed)
        before = logits.clone()
        masked = torch.full_like(logits, -torch.inf)
        for row, tokens in enumerate(allowed):
            masked[row, tokens] = logits[row, tokens]
        chunks = [chunk_of(sampling, [tokens], position=10 + row) for row, tokens in enumerate(allowed)]
        plain = [chunk_of(sampling, position=10 + row) for row in range(3)]
        got = sample(logits, chunks)
        assert [d.tokens for d in got] == [d.tokens for d in sample(masked, plain)]
        assert all(d.tokens[0] in tokens for d, tokens in zip(got, allowed, strict=True))
        assert torch.equal(logits, before)


def test_log_probabilities_are_of_the_raw_logits():
    logits = logits_of(1)
    (drawn,) = sample(logits, [chunk_of(Sampling(logprobs=3), [[7]])])
    assert drawn.tokens == (7,)
    raw = logits.log_softmax(-1)[0]
    assert drawn.logprobs[0].logprob == pytest.approx(raw[7].item(), abs=1e-5)
    assert [token for token, _ in drawn.logprobs[0].top] == raw.topk(3).indices.tolist()


def test_rows_beside_a_constrained_one_are_as_they_were():
    logits = logits_of(4)
    settings = [Sampling(), Sampling(temperature=1.0), Sampling(), Sampling(temperature=0.5, top_p=0.8)]
    plain = [chunk_of(s, position=10 + i) for i, s in enumerate(settings)]
    mixed = [*plain[:2], chunk_of(settings[2], [[9]], position=12), plain[3]]
    alone, together = sample(logits, plain), sample(logits, mixed)
    assert together[2].tokens == (9,)
    assert [*together[:2], together[3]] == [*alone[:2], alone[3]]


def test_every_drafted_row_has_its_mask():
    logits = torch.zeros(3, VOCABULARY)
    chunk = chunk_of(Sampling(), [[4], [6, 60], [69]], drafts=(4, 60))
    logits[1, 60] = 1.0
    (drawn,) = sample(logits, [chunk])
    assert drawn.tokens == (4, 60, 69)
    assert chunk.draw.masks.matcher.asked == [(4, 60)]
    logits[1, 6] = 2.0
    assert sample(logits, [chunk])[0].tokens == (4, 6)


@pytest.mark.parametrize("words", [2, 3, 5])
def test_a_mask_may_be_narrower_or_wider_than_the_output_layer(words):
    """Models pad their output layer, and tokenizers may know more tokens than it has."""
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 66:] = 5.0
    (drawn,) = sample(logits, [chunk_of(Sampling(), [[3]], words=words)])
    assert drawn.tokens == (3,)


def test_bits_are_unpacked_on_a_device_as_on_the_host():
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 7)).astype(np.int32)
    expected = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little") == 0
    assert np.array_equal(unpacked_on_device(torch.from_numpy(packed)).numpy(), expected)
