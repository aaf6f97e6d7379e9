"""Drawing, verifying and filtering on a GPU against the maths of `sampling`."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast.kernels.sampling import Filters, filter_logits, gumbel_noise_reference, row_keys
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify, draw_and_verify_reference

VOCABULARIES = st.sampled_from([5, 300, 5000])
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes in the interpreter


@settings(max_examples=25, deadline=None, phases=PHASES)
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
    drawn, accepted = draw_and_verify(logits, first_rows, drafts, *noise)
    expected, right = draw_and_verify_reference(logits, first_rows, drafts, scores)
    assert drawn.tolist() == expected.tolist()
    assert accepted.tolist() == right.tolist()


def test_the_first_of_equals_is_drawn():
    logits = torch.zeros(2, 9000)
    logits[1, [4500, 8000]] = 1.0
    drawn, accepted = draw_and_verify(
        logits, torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    )
    assert drawn.tolist() == [0, 4500]
    assert accepted.tolist() == [1]


@settings(max_examples=8, deadline=None, phases=PHASES)
@given(
    rows=st.integers(1, 4),
    vocabulary=VOCABULARIES,
    flat=st.booleans(),
    settings_of=st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 40]), st.sampled_from([1.0, 0.1, 0.7, 0.95]), st.sampled_from([0.0, 0.05])),
        min_size=4,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_cutoffs_keep_what_sorting_keeps(rows, vocabulary, flat, settings_of, seed):
    torch.manual_seed(seed)
    scaled = torch.randn(rows, vocabulary) * (0.1 if flat else 3)
    scaled = scaled.round(decimals=1) if flat else scaled  # many equals
    top_k, top_p, min_p = (list(column)[:rows] for column in zip(*settings_of, strict=True))
    expected = filter_logits(
        scaled, Filters(torch.tensor(top_k)[:, None], torch.tensor(top_p)[:, None], torch.tensor(min_p)[:, None])
    )
    found = cutoffs(scaled, torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p))
    assert torch.equal(scaled.masked_fill(scaled < found[:, None], -torch.inf), expected)


def test_settings_of_another_number_of_rows_are_refused():
    logits, first = torch.zeros(2, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="2 rows"):
        draw_and_verify(logits, first, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="belong together"):
        draw_and_verify(logits, first, torch.zeros(2, dtype=torch.int32), torch.ones(2))
    with pytest.raises(ValueError, match="filters"):
        cutoffs(logits, torch.zeros(3, dtype=torch.int32), torch.ones(2), torch.zeros(2))
