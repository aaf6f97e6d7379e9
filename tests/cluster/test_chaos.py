"""Each failure of docs/reliability.md against a real server under load. About four minutes:

HOLDFAST_TEST_FAILURES=1 .venv/bin/pytest -s tests/cluster/test_chaos.py
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chaos
import pytest


@pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_FAILURES"), reason="set HOLDFAST_TEST_FAILURES=1")
def test_every_failure_costs_what_it_may_and_the_books_are_even(start: Callable[..., Any], tmp_path: Path) -> None:
    assert chaos.run(start, tmp_path, iter(chaos.FAILURES))


def test_a_stream_that_goes_on_with_other_words_is_seen() -> None:
    """The clients of that run would not take it for an answer."""
    chunk = 'data: {{"choices":[{{"delta":{{"content":"{}"}},"finish_reason":{}}}]}}'
    whole = [chunk.format("a", "null"), chunk.format("b", '"length"'), "data: [DONE]"]
    assert chaos.told(200, True, whole) == ("answered", "ab")
    assert chaos.told(200, True, [whole[0], 'data: {"error":{"code":"unavailable"}}']) == ("error", "a")
    for cut in (whole[:1], [*whole, 'data: {"error":{"code":"unavailable"}}']):
        with pytest.raises(AssertionError):
            chaos.told(200, True, cut)
