"""Tokens chosen without waiting are those chosen with waiting, whatever rows ask for.

On a GPU if there is one, else interpreted.
"""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from on_device import DEVICE

from holdfast.kernels.kv import Sender
from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.model import sampler
from holdfast.replicas.model.decoder import STEP_ERRORS
from holdfast.replicas.plan import Chunk, Draw, Sampling
from holdfast.replicas.types import TokenCounts

VOCABULARY = 70
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.7, 1.4]),
    top_k=st.sampled_from([0, 0, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    logit_bias=st.sampled_from([{}, {}, {3: 9.0, 40: -4.0}]),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


class Only:
    """A matcher that allows every third token of its own, and has one word too few for the vocabulary."""

    words = 2

    def __init__(self, first: int) -> None:
        self._first = first

    def fill(self, drafts, out):
        bits = np.zeros((len(drafts) + 1, 64), np.uint8)
        bits[:, self._first :: 3] = 1
        out[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def on_gpu(logits, chunks):
    drawn = [chunk.tokens[-chunk.draw.drafts - 1 :] for chunk in chunks if chunk.draw is not None]
    asked = sampler.settings(chunks, logits.shape[1], np.concatenate(drawn))
    views = Sender(logits.device).send(asked.arrays)
    draws = sampler.begin(logits, asked, views)
    if logits.is_cuda:
        torch.cuda.synchronize()  # as the end of a step does
    return draws.finish(chunks)


@settings(max_examples=15, deadline=None, phases=PHASES)
@given(
    rows=st.lists(st.tuples(samplings, st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=4),
    half=st.booleans(),
    seed=st.integers(0, 999),
)
def test_tokens_are_those_of_the_cpu(rows, half, seed):
    rng = np.random.default_rng(seed)
    count = sum(drafts + 1 for _, drafts, _, _ in rows)
    logits = 3 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    logits = logits.to(torch.bfloat16) if half else logits
    best, at, chunks = logits.argmax(-1).numpy(), 0, [Chunk(0, 0, np.array([1, 2], np.int32))]
    for sampling, drafts, masked, right in rows:
        guesses = best[at : at + drafts] if right else rng.integers(0, VOCABULARY, drafts)
        tokens = np.array([5, *guesses], np.int32)
        masks = RowMasks(Only(seed % 3), tuple(tokens[1:].tolist())) if masked else None
        counts = TokenCounts() if sampling.presence_penalty else None
        if counts is not None:
            counts.add(rng.integers(0, VOCABULARY, 9).astype(np.int32))
        chunks.append(Chunk(0, int(rng.integers(0, 99)), tokens, Draw(sampling, seed, drafts, counts, masks)))
        at += drafts + 1
    logits = logits.to(DEVICE)
    got, expected = on_gpu(logits, chunks), sampler.sample(logits, chunks)
    assert got == expected


def test_a_cutoff_is_compared_with_what_it_was_found_in():
    """With a top_k of 1 only the first is left, whatever dividing by the temperature rounds to."""
    logits = torch.linspace(0.1, 7.3, 5 * VOCABULARY, device=DEVICE).view(5, VOCABULARY)
    sampling = Sampling(temperature=0.37, top_k=1)
    chunks = [Chunk(0, i, np.array([1], np.int32), Draw(sampling, i)) for i in range(5)]
    assert [drawn.tokens for drawn in on_gpu(logits, chunks)] == [(VOCABULARY - 1,)] * 5


def test_a_setting_that_no_array_holds_is_an_error_of_the_step():
    tokens, draw = np.array([5], np.int32), Draw(Sampling(temperature=1.0, top_k=2**40), 0)
    with pytest.raises(STEP_ERRORS):
        sampler.settings([Chunk(0, 0, tokens, draw)], VOCABULARY, tokens)
