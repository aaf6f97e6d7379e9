"""The bench of what a layer costs besides its sums runs, and finds that more layers take longer."""

import torch

from holdfast.loadgen.bench import dispatch


def test_a_layer_costs_something_at_any_number_of_rows():
    threads = torch.get_num_threads()
    try:
        found = dispatch.measure([1, 3], repeat=5)
    finally:
        torch.set_num_threads(threads)
    assert [each.rows for each in found] == [1, 3]
    assert all(each.layer > 0 for each in found)
