"""What of a program's last turn its next prompt drops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.scheduling.running import Histories
from holdfast.replicas.sequences import Owner


def program(name: str) -> Owner:
    return Owner("", name, session=False)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.asarray(ids, np.int32))


@given(tokens, tokens, st.integers(0, 12))
def test_rewritten_is_what_lies_behind_the_first_changed_token(before, prompt, n_cached):
    histories = Histories(100)
    histories.remember(program("p"), "", before)
    common = next(
        (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt))
    )
    lost = histories.rewritten(program("p"), prompt, n_cached)
    changed = common < len(before) and common < len(prompt)
    assert lost == (len(before) - common if changed and n_cached <= common else 0)
    assert histories.rewritten(program("q"), prompt, 0) == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=30))
def test_histories_are_bounded_and_forget_the_oldest(turns):
    histories, model = Histories(50), {}
    for name, n in turns:
        histories.remember(program(name), "", np.zeros(n, np.int32))
        model.pop(name, None)
        model[name] = n
        while sum(model.values()) > 50:
            del model[next(iter(model))]
        assert histories.remembered == sum(model.values())
