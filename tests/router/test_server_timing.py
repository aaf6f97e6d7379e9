"""What clients are told of a request's stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.requests import Timing
from holdfast.router.tracing import server_timing, stages

SECONDS = st.floats(0, 1e5).map(lambda seconds: round(seconds, 6))


@given(SECONDS, st.lists(SECONDS, min_size=3, max_size=3))
def test_the_stages_add_up_to_the_whole(arrived: float, lengths: list[float]) -> None:
    scheduled = arrived + lengths[0]
    first_token = scheduled + lengths[1]
    told = stages(Timing(arrived, scheduled, first_token, first_token + lengths[2]))
    assert list(told) == ["queue", "prefill", "decode"]
    assert sum(told.values()) == pytest.approx(sum(lengths) * 1e3, abs=0.01)


def test_only_what_the_request_came_to_is_told() -> None:
    assert stages(Timing(5.0)) == {}
    assert server_timing(Timing(5.0)) == ""
    assert server_timing(Timing(5.0, 5.0025)) == "queue;dur=2.5"
    assert stages(Timing(5.0, finished=6.0)) == {}
