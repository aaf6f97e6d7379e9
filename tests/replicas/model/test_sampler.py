"""Draws, drafts, penalties, masks and log probabilities, from logits made by hand."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.constraints.matcher import RowMasks
from holdfast.replicas.model.sampler import adjusted, group_rows, sample, unpacked_on_device
from holdfast.replicas.plan import Chunk, Draw, Sampling
from holdfast.replicas.types import TokenCounts

VOCABULARY = 70


def counts_of(sampling, history):
    """What a sequence that generated `history` gives with its draws."""
    if not sampling.presence_penalty and not sampling.frequency_penalty:
        return None
    counts = TokenCounts()
    counts.add(np.array(history, np.int32))
    return counts


def chunk_of(sampling=None, tokens=(1,), drafts=0, start=10, seed=5, history=()):
    sampling = sampling or Sampling()
    draw = Draw(sampling, seed, drafts, counts_of(sampling, history))
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
    ("drafts", "expected"), [((3, 4), (3, 4, 5)), ((3, 9), (3, 4)), ((9, 4), (3,)), ((9, 9), (3,)), ((), (3,))]
)
def test_accepted_drafts_are_the_longest_right_prefix(drafts, expected):
    logits = likely(*(3, 4, 5)[: len(drafts) + 1])
    (drawn,) = sample(logits, [chunk_of(Sampling(logprobs=1), tokens=(1, *drafts), drafts=len(drafts))])
    assert drawn.tokens == tuple(entry.token for entry in drawn.logprobs) == expected


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


amounts = st.one_of(st.just(0.0), st.floats(-2, 2, width=32))
asked = st.tuples(
    amounts,
    amounts,
    st.lists(st.integers(0, 9), max_size=30),
    st.lists(st.integers(0, 12), max_size=4),
    st.dictionaries(st.integers(-3, VOCABULARY + 3), st.floats(-9, 9), max_size=4),
)


@given(st.lists(asked, min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_bias_and_penalties_are_to_the_bit_those_of_counting_anew(requests, dtype):
    chunks, histories = [], []
    for presence, frequency, history, drafts, bias in requests:
        sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
        chunks.append(chunk_of(sampling, (1, *drafts), len(drafts), history=history))
        histories += [(sampling, history + drafts[:i]) for i in range(len(drafts) + 1)]
    logits = logits_of(len(histories)).to(dtype)
    before = logits.clone()
    expected = logits.float().numpy().copy()
    for row, (sampling, history) in zip(expected, histories, strict=True):
        for token, bias in sampling.logit_bias.items():
            if 0 <= token < VOCABULARY:
                row[token] += np.float32(bias)
        for token, times in Counter(history).items():
            row[token] += np.float32(-sampling.presence_penalty - sampling.frequency_penalty * times)
    assert np.array_equal(adjusted(logits, group_rows(chunks, VOCABULARY)).numpy(), expected)
    assert torch.equal(logits, before)


def test_the_repetition_penalty_is_of_prompt_reply_and_the_drafts_before_a_row():
    logits = torch.zeros(3, VOCABULARY)
    logits[:, :4] = torch.tensor([4.0, -2.0, 3.0, 2.5])
    seen = TokenCounts()
    seen.add(np.array([0, 1, 1], np.int32))
    draw = Draw(Sampling(repetition_penalty=2.0), 5, drafts=2, seen=seen)
    chunk = Chunk(0, 10, np.array([1, 2, 3], np.int32), draw)
    changed = adjusted(logits, group_rows([chunk], VOCABULARY))
    assert changed[:, :4].tolist() == [[2.0, -4.0, 3.0, 2.5], [2.0, -4.0, 1.5, 2.5], [2.0, -4.0, 1.5, 1.25]]
    assert sample(logits, [chunk])[0].tokens == (2, 3, 0)


@pytest.mark.parametrize("least", [0, 13, 15])
def test_a_reply_does_not_end_before_its_least_token(least):
    """Positions 13, 14 and 15 are drawn; end token 7 is the likeliest, with a bias besides."""
    sampling = Sampling(ends=frozenset({7, 8}), min_tokens=1, logit_bias={7: 1.0, 9: -1.0})
    draw = Draw(sampling, 5, drafts=2, least=least)
    logits = torch.zeros(3, VOCABULARY)
    logits[:, [7, 8, 9, 10]] = torch.tensor([9.0, 8.0, 7.0, 6.5])
    chunk = Chunk(0, 10, np.array([1, 10, 10], np.int32), draw)
    early = max(0, least - 11)
    changed = adjusted(logits, group_rows([chunk], VOCABULARY))
    assert changed.argmax(1).tolist() == [10] * min(early, 3) + [7] * (3 - early)


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


def constrained(sampling, allowed=None, drafts=(), position=10, words=3):
    masks = RowMasks(Listed(*allowed, words=words), tuple(drafts)) if allowed is not None else None
    tokens = np.array([1, *drafts], np.int32)
    return Chunk(0, position, tokens, Draw(sampling, 5, len(drafts), counts_of(sampling, [2]), masks))


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
        chunks = [constrained(sampling, [tokens], position=10 + row) for row, tokens in enumerate(allowed)]
        plain = [constrained(sampling, position=10 + row) for row in range(3)]
        got = sample(logits, chunks)
        assert [d.tokens for d in got] == [d.tokens for d in sample(masked, plain)]
        assert all(d.tokens[0] in tokens for d, tokens in zip(got, allowed, strict=True))
        assert torch.equal(logits, before)


def test_every_drafted_row_has_its_mask():
    logits = torch.zeros(3, VOCABULARY)
    chunk = constrained(Sampling(), [[4], [6, 60], [69]], drafts=(4, 60))
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
    (drawn,) = sample(logits, [constrained(Sampling(), [[3]], words=words)])
    assert drawn.tokens == (3,)


def test_bits_are_unpacked_on_a_device_as_on_the_host():
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 7)).astype(np.int32)
    expected = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little") == 0
    assert np.array_equal(unpacked_on_device(torch.from_numpy(packed)).numpy(), expected)
