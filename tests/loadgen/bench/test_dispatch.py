"""What a layer costs besides its sums, and how these can be shared: more layers take longer, no work is forgotten."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.loadgen.bench import dispatch
from holdfast.loadgen.bench.attention_cpu import CASES
from holdfast.loadgen.inflate.shapes import SHAPES


def test_a_layer_costs_something_at_any_number_of_rows():
    threads = torch.get_num_threads()
    try:
        found = list(dispatch.measure([1, 3], repeat=5))
    finally:
        torch.set_num_threads(threads)
    assert [each["rows"] for each in found] == [1, 3]
    assert all(each["layer_ms"] > 0 for each in found)


@given(tasks=st.lists(st.floats(1, 100), min_size=1, max_size=200), threads=st.integers(1, 64))
def test_threads_that_draw_tasks_end_together_but_for_the_longest(tasks, threads):
    share = dispatch.shared(tasks, threads)
    assert share == pytest.approx(1) if threads == 1 else 1 / threads - 1e-9 <= share <= 1 + 1e-9
    assert sum(tasks) / threads / share <= sum(tasks) / threads + max(tasks) + 1e-6


@pytest.mark.parametrize("threads", [1, 2, 16, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tasks_of_attention_are_all_of_its_work(case, threads):
    shape = SHAPES["llama-3.1-8b"]
    blocks = -(-case.tokens // (128 // shape.group))
    tasks = dispatch.attention_tasks(shape, case, threads)
    least = case.sequences * shape.kv_heads * case.cached * (16 * blocks + case.tokens * shape.group)
    assert least < sum(tasks) < 1.2 * least


def test_how_work_is_shared_is_printed_for_a_shape(capsys):
    assert dispatch.main(["--shape", "qwen3-0.6b", "--threads", "2,64"]) == 0
    assert "attention's output         1.00   0.25" in capsys.readouterr().out
