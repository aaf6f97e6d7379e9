"""The benchmark of a session's questions, on contexts that are soon there."""

import pytest

from holdfast.loadgen.bench.sessions import questions
from holdfast.replicas.model import decoder


def test_what_a_question_costs_is_split_and_compared() -> None:
    attend = vars(decoder)["paged_attention"]
    figures = {figure.name.strip(): figure for figure in questions((64, 512), rounds=1)}
    short, long = (figures[f"a question at {n} tokens, reading KV apart"].value for n in (64, 512))
    assert figures["512 over 64, reading KV apart"].value == pytest.approx(long / short)
    assert figures["reading KV"].value > 0
    assert figures["512 over 64, all"].bar is None  # reading takes as long as there is to read
    assert vars(decoder)["paged_attention"] is attend
