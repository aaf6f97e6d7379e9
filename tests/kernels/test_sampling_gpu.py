"""Drawing, verifying and filtering on a GPU against the maths of `sampling`."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from on_device import DEVICE, tensor, zeros

from holdfast.kernels import sampling_gpu
from holdfast.kernels.sampling import Filters, filter_logits, gumbel_noise_reference, row_keys
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify, draw_and_verify_reference

VOCABULARIES = st.sampled_from([5, 300, 2500])
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes in the interpreter


@settings(max_examples=12, deadline=None, phases=PHASES)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    vocabulary=VOCABULARIES,
    sampled=st.booleans(),
    filtered=st.booleans(),
    seed=st.integers(0, 999),
)
def test_tokens_and_accepted_drafts(lengths, vocabulary, sampled, filtered, seed):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    logits = 3 * torch.randn(rows, vocabulary)
    first_rows = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    temperatures = torch.tensor(rng.choice([0.0, 0.5, 1.3], rows), dtype=torch.float32)
    keys = torch.from_numpy(row_keys(rng.integers(0, 2**63, rows).tolist(), rng.integers(0, 9999, rows).tolist()))
    cutoff = logits.topk(3).values[:, -1].contiguous() if filtered and sampled else None
    scores = logits.double()
    if sampled:
        hot = (temperatures > 0)[:, None]
        scaled = logits / torch.where(hot, temperatures[:, None], 1.0)
        kept = scaled if cutoff is None else scaled.masked_fill(scaled < cutoff[:, None], -torch.inf)
        scores = torch.where(hot, kept + torch.from_numpy(gumbel_noise_reference(keys.numpy(), vocabulary)), scores)
    drafts = scores.argmax(-1).int()
    drafts[rng.random(rows) < 0.3] += 1
    noise = (temperatures, keys, cutoff) if sampled else ()
    given = (None if each is None else each.to(DEVICE) for each in (logits, first_rows, drafts, *noise))
    drawn, accepted = draw_and_verify(*given)
    expected, right = draw_and_verify_reference(logits, first_rows, drafts, scores)
    assert drawn.tolist() == expected.tolist()
    assert accepted.tolist() == right.tolist()


def test_the_first_of_equals_is_drawn():
    logits = zeros(2, 9000)
    logits[1, [4500, 8000]] = 1.0
    drawn, accepted = draw_and_verify(logits, tensor([0, 2], dtype=torch.int32), zeros(2, dtype=torch.int32))
    assert drawn.tolist() == [0, 4500]
    assert accepted.tolist() == [1]


ROWS = {
    "wide": lambda values: 3 * values,
    "flat, many equals": lambda values: (0.1 * values).round(decimals=1),
    "one far above": lambda values: values.index_fill(1, torch.tensor([0]), 500.0),
    "nearly all masked": lambda values: values.where(values > 2, -torch.inf).index_fill(1, torch.tensor([1]), 0.0),
}
# top_k, top_p and min_p: one row for each.
FILTERS = [(0, 0.1, 0.0), (0, 0.7, 0.05), (0, 1.0, 0.0), (8, 1.0, 0.0), (400, 0.95, 0.0), (6000, 0.7, 0.0)]


@settings(max_examples=2 if DEVICE == "cuda" else 1, deadline=None, phases=PHASES)
@given(kind=st.sampled_from(sorted(ROWS)), vocabulary=VOCABULARIES, seed=st.integers(0, 99))
@example("flat, many equals", 2500, 0)
def test_cutoffs_keep_what_sorting_keeps(kind, vocabulary, seed):
    """And are the same in any order of the values, however these are shared out, and if few can be set apart."""
    torch.manual_seed(seed)
    scaled = ROWS[kind](torch.randn(len(FILTERS), vocabulary))
    top_k, top_p, min_p = map(torch.tensor, zip(*FILTERS, strict=True))
    expected = filter_logits(scaled, Filters(top_k[:, None], top_p[:, None], min_p[:, None]))
    filters = (top_k.int().to(DEVICE), top_p.to(DEVICE), min_p.to(DEVICE))
    found = cutoffs(scaled.to(DEVICE), *filters).cpu()
    assert torch.equal(scaled.masked_fill(scaled < found[:, None], -torch.inf), expected)
    with mock.patch.multiple(sampling_gpu, _PART=1024, _CANDIDATES=20):
        moved = scaled[:, torch.randperm(vocabulary)].to(DEVICE)
        assert torch.equal(cutoffs(moved, *filters).cpu(), found)


def test_settings_of_another_number_of_rows_are_refused():
    logits, first = torch.zeros(2, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="2 rows"):
        draw_and_verify(logits, first, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="belong together"):
        draw_and_verify(logits, first, torch.zeros(2, dtype=torch.int32), torch.ones(2))
    with pytest.raises(ValueError, match="filters"):
        cutoffs(logits, torch.zeros(3, dtype=torch.int32), torch.ones(2), torch.zeros(2))
