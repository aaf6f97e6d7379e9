"""Noise against its numpy reference, the filters against a plain one, and the drawn distribution against softmax."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.sampling import (
    Filters,
    filter_logits,
    gumbel_argmax,
    gumbel_argmax_reference,
    gumbel_noise,
    gumbel_noise_reference,
    log_probabilities,
    row_keys,
)


def filters_of(rows):
    k, p, m = zip(*rows, strict=True)
    return Filters(torch.tensor(k)[:, None], torch.tensor(p)[:, None], torch.tensor(m)[:, None])


def keys_of(seeds, positions):
    return torch.from_numpy(row_keys(seeds, positions))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_noise_is_its_reference(seed, position):
    keys = row_keys([seed, seed + 1], [position, position])
    noise, exact = gumbel_noise(torch.from_numpy(keys), 300).numpy(), gumbel_noise_reference(keys, 300)
    # Near v = 1 float32 knows v to 2^-25; what that does to g = -log(-log(1 - v)) there is below 0.05.
    low = exact < -2.2
    np.testing.assert_allclose(noise[~low], exact[~low], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(noise[low], exact[low], rtol=0, atol=0.05)


def test_noise_is_standard_gumbel_and_never_infinite():
    noise = gumbel_noise(keys_of(list(range(64)), [9] * 64), 32768)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.57722) < 5e-3
    assert abs(noise.var().item() - 1.64493) < 1e-2
    # Large values decide draws of rare tokens: their share must be right as well. P(g > 10) = 4.54e-5.
    assert 60 < (noise > 10).sum().item() < 135


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_chi_squared_of_draws_against_softmax(vary):
    draws, vocabulary = 20_000, 12
    logits = torch.linspace(-2, 2, vocabulary).repeat(draws, 1)
    counter = list(range(draws))
    keys = keys_of(counter, [5] * draws) if vary == "seed" else keys_of([5] * draws, counter)
    tokens = gumbel_argmax(logits, torch.full((draws, 1), 0.8), keys)
    expected = (logits[0] / 0.8).softmax(-1) * draws
    seen = torch.bincount(tokens, minlength=vocabulary)
    chi_squared = ((seen - expected) ** 2 / expected).sum().item()
    assert chi_squared < 31.3  # 11 degrees of freedom, 0.1 %


def test_neighbouring_positions_and_seeds_are_independent():
    draws = 20_000
    keys = keys_of([3] * draws, list(range(draws)))
    tokens = gumbel_argmax(torch.zeros(draws, 4), torch.ones(draws, 1), keys)
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    expected = (draws - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum().item() < 37.7  # 15 degrees of freedom, 0.1 %


setting = st.tuples(
    st.sampled_from([0, 1, 3, 40, 5000]), st.sampled_from([1.0, 0.9, 0.3, 1e-6]), st.sampled_from([0.0, 0.05, 1.0])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(setting, min_size=1, max_size=5), st.sampled_from([5, 90, 3000]), st.integers(0, 10**6))
def test_filtered_draws_are_the_reference(rows, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocabulary, generator=generator) * 2
    temperature = torch.rand(len(rows), 1, generator=generator) + 0.5
    keys = keys_of([seed] * len(rows), list(range(len(rows))))
    drawn = gumbel_argmax(logits, temperature, keys, filters_of(rows))
    assert torch.equal(drawn, gumbel_argmax_reference(logits, temperature, keys, filters_of(rows)))


@settings(max_examples=40, deadline=None)
@given(st.lists(setting, min_size=2, max_size=6), st.integers(0, 10**6))
def test_a_rows_filter_does_not_depend_on_the_other_rows(rows, seed):
    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(seed))
    together = filter_logits(logits, filters_of(rows))
    for i, row in enumerate(rows):
        alone = filter_logits(logits[i : i + 1], filters_of([row]))
        assert torch.equal(alone[0], together[i])


def test_equals_of_the_last_token_kept_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = filter_logits(logits, filters_of([(2, 1.0, 0.0)])).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]


def test_log_probabilities_are_log_softmax():
    logits = torch.randn(3, 20)
    tokens = torch.tensor([4, 0, 19])
    chosen, values, ids = log_probabilities(logits, tokens, 2)
    expected = logits.log_softmax(-1)
    assert torch.allclose(chosen, expected[range(3), tokens])
    assert torch.equal(ids[:, 0], logits.argmax(-1))
    assert torch.allclose(values, expected.gather(1, ids))


def test_settings_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="2 rows"):
        gumbel_argmax(torch.zeros(2, 5), torch.ones(1, 1), keys_of([1, 2], [1, 2]))
