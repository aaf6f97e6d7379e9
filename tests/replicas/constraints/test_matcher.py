"""A matcher of one text, against what it has to say at each place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.constraints.matcher import ForcedTokens

VOCABULARY = 70
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)


def allowed(row):
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@given(TOKENS, st.integers(0, 8), st.lists(st.integers(0, VOCABULARY - 1), max_size=3), st.booleans())
def test_each_row_allows_the_next_token_and_no_other(tokens, at, drafts, right):
    at = min(at, len(tokens) - 1)
    rest = tokens[at:]
    drafts = rest[: len(drafts)] if right else drafts
    matcher = ForcedTokens(np.array(tokens, np.int32), VOCABULARY)
    assert matcher.advance(tokens[:at]) == at
    copy = matcher.copy()
    assert (matcher.forced(), matcher.finished) == (rest, False)
    accepted = next((i for i, draft in enumerate(drafts) if i >= len(rest) or draft != rest[i]), len(drafts))
    assert matcher.accepts(drafts) == accepted
    rows = np.zeros((len(drafts) + 1, matcher.words), np.int32)
    matcher.fill(drafts, rows)
    for i in range(accepted + 1):
        if i < len(rest):
            assert allowed(rows[i]) == {rest[i]}
    assert matcher.advance([*rest, 0]) == len(rest), "it ends there"
    assert matcher.finished
    assert not copy.finished
